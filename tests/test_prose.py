"""Style check of assertions: error classes, keys and values. Only golden files (tests/golden/) contain sentences."""

import ast
import re
from pathlib import Path

import pytest
from commands import ROOT
from messages import mentions, missing, refuses


MIN_WORDS = 4  # this many plain words in a row count as a sentence, whose wording may change
SENTENCE = re.compile(rf"(?:(?<![\w.=/-])[A-Za-z][a-z']*[,:;]? ){{{MIN_WORDS - 1},}}[A-Za-z][a-z']*(?![\w=/.]*\w)")
EXPECTATIONS = ("refuses", "mentions", "missing", "parametrize")


def iter_expectations(tree):
    """Yield the parts of a test file that state expected results: asserts, match=, and tables of cases."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Assert):
            yield node.test
        elif isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if name in EXPECTATIONS:
                yield from node.args
            yield from (keyword.value for keyword in node.keywords if keyword.arg == "match")
        elif isinstance(node, ast.Assign) and all(getattr(target, "id", "").isupper() for target in node.targets):
            yield from [node.value] if isinstance(node.value, ast.List | ast.Tuple | ast.Dict) else []


def find_sentences(source):
    """Return (line, text) of every expected sentence. Lines that end with `# data` are inputs, not messages."""
    lines, result = source.splitlines(), set()
    for part in iter_expectations(ast.parse(source)):
        for node in ast.walk(part):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and SENTENCE.search(node.value):
                rows = lines[node.lineno - 1 : node.end_lineno]
                if not any(row.rstrip().endswith("# data") for row in rows):
                    result.add((node.lineno, node.value))
    return sorted(result)


FILES = sorted(
    set((ROOT / "tests").rglob("*.py")) - set((ROOT / "tests" / "fixtures").rglob("*.py")) - {Path(__file__)}
)


def test_no_test_asserts_a_sentence():
    result = [
        f"{path.relative_to(ROOT)}:{line}: {text!r}"
        for path in FILES
        for line, text in find_sentences(path.read_text())
    ]
    assert result == []


def test_sentences_are_detected():
    source = 'def test():\n    assert "the run is at work there" in err\n    assert "model.width=0" in err\n'
    assert find_sentences(source) == [(2, "the run is at work there")]
    assert find_sentences('with pytest.raises(E, match="must hold one file of weights"): pass\n')
    assert not find_sentences('assert run("the cat sat on it")  # data\n')


def test_mentions_match_whole_words_and_numbers():
    text = "model.head_dim=15: must be at most 1,234,567 (model.width=5.5)"
    assert mentions(text, "model.head_dim", 15, 1234567, 5.5, "model.width=5.5")
    assert missing(text, 5, 1, 234, "head", "model.wid", 567) == [5, 1, 234, "head", "model.wid", 567]
    with pytest.raises(AssertionError), refuses("seed", error=ValueError):
        raise ValueError("model.seed=3")
