"""The mistakes in mutants.toml, and the runner on a package of two functions."""

import ast
import builtins

import pytest

from tools import mutants


def test_every_mistake_applies_and_uses_only_names_of_its_file():
    """An undefined name would be caught by any test that executes the line."""
    table = mutants.read()
    assert len(table) == len({mutant.name for mutant in table})
    for mutant in table:
        source = (mutants.ROOT / mutants.PACKAGE / mutant.file).read_text()
        before, after = ast.parse(source), ast.parse(mutant.apply(source))
        known, used = ({x.id for x in ast.walk(tree) if isinstance(x, ast.Name)} for tree in (before, after))
        arguments = {x.arg for x in ast.walk(before) if isinstance(x, ast.arg)}
        assert ast.dump(before) != ast.dump(after) and used <= known | arguments | {*dir(builtins)}, mutant.name
        assert (mutants.ROOT / mutant.mirrored).is_dir(), mutant.name


@pytest.fixture
def tree(tmp_path):
    """Return a checkout with one package of two functions, of which only the first is tested."""
    files = {
        "pyproject.toml": "[tool.pytest.ini_options]\n",
        "leanformer/__init__.py": "",
        "leanformer/layers/__init__.py": "",
        "leanformer/layers/sums.py": "def add(a, b):\n    return a + b\n\n\ndef subtract(a, b):\n    return a - b\n",
        "tests/layers/test_sums.py": "from leanformer.layers.sums import add\n\n\n"
        "def test_add():\n    assert add(2, 2) == 4\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def test_runner_distinguishes_caught_and_uncaught_mistakes(tree):
    results = {}
    for name, old in {"add": "a + b", "subtract": "a - b", "none": "a * b"}.items():
        mutant = mutants.Mutant(name, "layers/sums.py", old, old.replace("b", "b + 1"))
        results[name] = mutants.judge(mutant, tree, ["-p", "no:jaxtyping", "-q"], 60)
    assert results["add"] == mutants.Result(mutants.CAUGHT, "tests/layers/test_sums.py::test_add")
    assert results["subtract"].kind == mutants.NOT_CAUGHT and results["none"].kind == mutants.BROKEN
