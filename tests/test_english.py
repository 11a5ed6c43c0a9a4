"""Style check of names and docstrings: banned words, first lines, and argument names that exist."""

import ast
import re

from commands import ROOT


CLAUSE = re.compile(r"(What|Which|Where|Whether|Whose|How|Of|From|Are)\b")
BANNED = {  # in names; CONTRIBUTING.md has a glossary
    *("told", "said", "tell", "say", "asked", "wanted", "kept", "held", "born", "found", "known", "own", "each"),
    *("ink", "room", "house", "books", "mend", "alike", "nobody", "whoever", "beside"),
}
TERMS = ("held_out",)  # established terms that contain a banned word
PROSE = re.compile(
    r"\b(told|said|born|mend|nobody|whoever|alike|goes on|as it is|without a word|in silence)\b", re.IGNORECASE
)
FOLDERS = ("leanformer", "configs", "launch", "tests", "benchmarks", "experiments", "notebooks")
FILES = sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))


def iter_docstrings(tree):
    """Yield (node, docstring) of a module and of its functions and classes."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and (text := ast.get_docstring(node)):
            yield node, text


def find_defined_names(tree):
    """Return the names that a module defines: functions, classes, arguments, variables and fields."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.arg):
            names.add(node.arg)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
    return names


def find_banned_names(names):
    """Return the names that contain a banned word."""
    stripped = {name: name.lower().strip("_") for name in names}
    for name in stripped:
        for term in TERMS:
            stripped[name] = stripped[name].replace(term, "")
    return sorted(name for name, text in stripped.items() if BANNED & set(text.split("_")))


def find_argument_names(node):
    """Return the names that `Args:` or `Attributes:` in the docstring of a node may list."""
    functions = (
        [node] if isinstance(node, ast.FunctionDef) else [x for x in node.body if isinstance(x, ast.FunctionDef)]
    )
    names = {x.arg for function in functions for x in ast.walk(function.args) if isinstance(x, ast.arg)}
    if isinstance(node, ast.ClassDef):
        names |= {x.target.id for x in node.body if isinstance(x, ast.AnnAssign)} | {x.name for x in functions}
        names |= {x.attr for x in ast.walk(node) if isinstance(x, ast.Attribute)}
    return names


def parse_listed_names(text):
    """Return the names that a docstring lists under `Args:` or `Attributes:`."""
    section = re.search(r"^(?:Args|Attributes):\n((?:    .*\n?|\n)*)", text, re.MULTILINE)
    lines = section.group(1).splitlines() if section else []
    entries = [match.group(1) for line in lines if (match := re.match(r"    (\*{0,2}\w+(?:, \*{0,2}\w+)*): ", line))]
    return [name.strip().lstrip("*") for head in entries for name in head.split(",")]


def problems(source):
    """Return the style problems of a source text, one line each."""
    tree = ast.parse(source)
    lines = [f"name {name}" for name in find_banned_names(find_defined_names(tree))]
    for node, text in iter_docstrings(tree):
        first = text.split("\n")[0]
        if CLAUSE.match(first) or PROSE.search(first):
            lines.append(f"first line: {first}")
        if not isinstance(node, ast.Module):
            lines += [
                f"{node.name} has no argument {name}"
                for name in parse_listed_names(text)
                if name not in find_argument_names(node)
            ]
    return lines


def test_names_and_docstrings_are_plain():
    result = {path: problems(path.read_text(encoding="utf-8")) for path in FILES}
    assert {str(path.relative_to(ROOT)): lines for path, lines in result.items() if lines} == {}


def test_problems_are_detected():
    source = '"""What it is."""\ndef load(x):\n    """Return it.\n\n    Args:\n        y: z.\n    """\n    told = x\n'
    name, first, argument = problems(source)
    assert name.endswith("told") and first.endswith("What it is.") and argument.endswith(" y")
    assert problems("held_out, fold = 1, 2\n") == []
