"""The mistakes in mutants.toml, and the runner on a package of two functions."""

import ast
import builtins

import pytest
from stress import mutants


def test_every_mistake_applies_and_compiles():
    table = mutants.read()
    names = [mutant.name for mutant in table]
    assert len(names) == len(set(names))
    for mutant in table:
        source = (mutants.ROOT / mutants.PACKAGE / mutant.file).read_text()
        changed = mutant.apply(source)
        assert ast.dump(ast.parse(changed)) != ast.dump(ast.parse(source)), mutant.name
        assert mutant.lines(source), mutant.name


def test_mistakes_use_only_names_of_their_files():
    """An undefined name would be caught by any test that executes the line."""
    for mutant in mutants.read():
        source = (mutants.ROOT / mutants.PACKAGE / mutant.file).read_text()
        before, after = (
            {x.id for x in ast.walk(ast.parse(s)) if isinstance(x, ast.Name)} for s in (source, mutant.apply(source))
        )
        arguments = {x.arg for x in ast.walk(ast.parse(source)) if isinstance(x, ast.arg)}
        assert after <= before | arguments | {*dir(builtins)}, mutant.name


def test_old_text_must_occur_exactly_once():
    for source in ("", "a = 1\na = 1\n"):
        with pytest.raises(ValueError, match="a = 1"):
            mutants.Mutant("name", "file.py", "a = 1", "a = 2").apply(source)


def test_changed_lines_are_those_of_the_innermost_statement():
    source = "def f(x):\n    if x:\n        return (\n            x\n            + 1\n        )\n    return 0\n"
    assert mutants.Mutant("sign", "f.py", "+ 1", "- 1").lines(source) == {3, 4, 5, 6}
    assert mutants.Mutant("test", "f.py", "if x:", "if not x:").lines(source) == {2}


def test_lines_of_constants_and_of_default_arguments():
    source = "A = 1\n\n\ndef f(x=2):\n    'Docstring.'\n    y = x\n    return y + A\n"
    assert mutants.Mutant("constant", "f.py", "A = 1", "A = 2").lines(source) == {1, 7}
    assert mutants.Mutant("default", "f.py", "x=2", "x=3").lines(source) == {4, 6}


def test_quick_tests_run_first_grouped_by_file():
    times = {"tests/b.py::slow": 100.0, "tests/b.py::quick": 0.1, "tests/a.py::quick": 0.2, "tests/a/c.py::quick": 0.1}
    ordered = mutants.sort_tests([*times], times, ["tests/a"])
    assert ordered == ["tests/a/c.py::quick", "tests/a.py::quick", "tests/b.py::quick", "tests/b.py::slow"]
    assert mutants.split(ordered, times | {"tests/b.py::quick": 70.0}) == (ordered[:3], ordered[3:])


@pytest.fixture
def tree(tmp_path):
    """Return a checkout with one package of two functions, of which only the first is tested."""
    files = {
        "pyproject.toml": "[tool.pytest.ini_options]\n",
        "leanformer/__init__.py": "",
        "leanformer/layers/__init__.py": "",
        "leanformer/layers/sums.py": "def add(a, b):\n    return a + b\n\n\ndef subtract(a, b):\n    return a - b\n",
        "tests/layers/test_sums.py": "from leanformer.layers.sums import add\n\n\n"
        "def test_flaky():\n    assert add(1, 0) == 1\n\n\ndef test_add():\n    assert add(2, 2) == 4\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def test_runner_distinguishes_caught_and_uncaught_mistakes(tree):
    runner = mutants.Runner(tree, ["-p", "no:jaxtyping", "-q"], 60)
    wrong = {"add": "a + b", "subtract": "a - b"}
    table = {
        name: mutants.Mutant(name, "layers/sums.py", old, old.replace("b", "b + 1")) for name, old in wrong.items()
    }
    stages = mutants.make_stages(table["add"], tree, None, {})
    assert [stage.places for stage in stages] == [["tests/layers"], ["tests"]]

    flaky, add = (f"tests/layers/test_sums.py::test_{name}" for name in ("flaky", "add"))
    results = {name: runner.judge(mutant, stages) for name, mutant in table.items()}
    assert results["add"]["result"] == mutants.CAUGHT and results["add"]["test"] == flaky
    assert results["subtract"]["result"] == mutants.NOT_CAUGHT
    assert runner.judge(table["add"], stages, [flaky])["test"] == add
    assert runner.judge(table["add"], [mutants.Stage(["tests/layers"], only=[add, flaky])])["test"] == add
    assert runner.judge(mutants.Mutant("none", "layers/sums.py", "a * b", ""), stages)["result"] == mutants.BROKEN

    sound, unsound = set(), set()
    mutants.verify(runner, results, sound, unsound)
    assert (sound, unsound) == ({flaky}, set())
