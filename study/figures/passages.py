"""Passage of a page, whose figures are computed."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple


README, FINDINGS, RESULTS, GPUS = "README.md", "docs/findings.md", "docs/results.md", "docs/gpus.md"
PUBLISHED = "docs/published_models.md"
WORDS = ("none", "one", "two", "three", "four", "five", "six")


class Passage(NamedTuple):
    """Passages about one result.

    Attributes:
        values: function that computes the fields of the templates from a table in study/data.
        pages: templates by page, in the syntax of `str.format`.
    """

    values: Callable[[], Mapping[str, Any]]
    pages: Mapping[str, Sequence[str]]
