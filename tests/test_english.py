"""Check of docstrings: the arguments and attributes that they list exist."""

import ast
import re

from commands import ROOT


FOLDERS = ("leanformer", "configs", "launch", "tests", "stress", "benchmarks", "experiments", "notebooks")
FILES = sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))


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
    sections = re.findall(r"^(?:Args|Attributes):\n((?:    .*\n?|\n)*)", text, re.MULTILINE)
    lines = [line for section in sections for line in section.splitlines()]
    entries = [match.group(1) for line in lines if (match := re.match(r"    (\*{0,2}\w+(?:, \*{0,2}\w+)*): ", line))]
    return [name.strip().lstrip("*") for head in entries for name in head.split(",")]


def find_unknown_arguments(source):
    """Return one line for each argument or attribute that a docstring lists and the code does not have."""
    lines = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and (text := ast.get_docstring(node)):
            known = find_argument_names(node)
            lines += [f"{node.name} has no argument {name}" for name in parse_listed_names(text) if name not in known]
    return lines


def test_docstrings_list_arguments_that_exist():
    result = {path: find_unknown_arguments(path.read_text(encoding="utf-8")) for path in FILES}
    assert {str(path.relative_to(ROOT)): lines for path, lines in result.items() if lines} == {}


def test_unknown_arguments_are_detected():
    source = 'def load(x):\n    """Return it.\n\n    Args:\n        x: a.\n        y: z.\n    """\n'
    (line,) = find_unknown_arguments(source)
    assert line.startswith("load ") and line.endswith(" y")


def find_undocumented_fields(source):
    """Return (class, field) for public fields of public classes that the class's docstring does not list."""
    result = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            fields = [part.target.id for part in node.body if isinstance(part, ast.AnnAssign)]
            listed = parse_listed_names(ast.get_docstring(node) or "")
            result += [(node.name, field) for field in fields if field[0] != "_" and field not in listed]
    return result


def test_docstrings_of_classes_list_their_fields():
    """`help` shows them; comments in the code it does not."""
    missing = {
        str(path.relative_to(ROOT)): fields
        for path in sorted((ROOT / "leanformer").rglob("*.py"))
        if (fields := find_undocumented_fields(path.read_text()))
    }
    assert not missing


def test_undocumented_fields_are_detected():
    text = '"""A.\n\n    Attributes:\n        x, y: a.\n    """'
    source = f"class A:\n    {text}\n    x: int\n    y: int\n    z: int\n    _w: int\n"
    assert find_undocumented_fields(source) == [("A", "z")]
