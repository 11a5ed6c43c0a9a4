"""Exceptions from the type check of `make lint`: few, each for one rule and with its reason."""

import re

import pytest
from commands import ROOT


MOST = 30  # exceptions


def find_exceptions(source: str) -> list[str]:
    """Return the comments of a source text that exempt a line from the type check."""
    return re.findall(r"#.*?\b(?:ty|type|pyright|mypy): *ignore.*", source)


def has_reason(comment: str) -> bool:
    """Return whether an exception names one rule and a reason."""
    return re.fullmatch(r"# ty: ignore\[[a-z-]+\] - \w.*", comment) is not None


def test_exceptions_from_types_are_few_and_have_reasons():
    found = [x for path in sorted((ROOT / "leanformer").rglob("*.py")) for x in find_exceptions(path.read_text())]
    assert [comment for comment in found if not has_reason(comment)] == []
    assert 0 < len(found) <= MOST


@pytest.mark.parametrize("comment", ["# type: ignore", "# ty: ignore", "# ty: ignore[rule]", "# ty: ignore[a, b] - c"])
def test_exceptions_without_rule_or_reason_are_detected(comment):
    assert find_exceptions(f"x = 1  {comment}\n") == [comment] and not has_reason(comment)
