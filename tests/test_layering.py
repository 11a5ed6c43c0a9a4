"""Layers: packages in the order of their imports, and limits of size."""

import ast
import functools
import graphlib
import re
from pathlib import Path

import pytest


ROOT = Path(__file__).parents[1]
LAYERS = [  # a module imports from its own package and from packages above this one in the list
    ["errors"],
    ["config", "costs"],
    ["runtime"],
    ["data", "layers"],
    ["models", "pretrained", "tasks"],
    ["conditioning"],
    ["training"],
    ["cli"],
    ["sweeps", "analysis", "exports"],
    ["reports"],
]
# All other modules at the top of the package, which never import each other; `__main__` starts the process of each.
COMMANDS = len(LAYERS)
LONGEST_FILE, LONGEST_FUNCTION = 300, 80  # lines
LOOP, LONGEST_LOOP = "training.loop.train", 120  # the order of all events in a run, which may not be spread


def layer(module: str) -> int:
    package = module.split(".")[0]
    return next((i for i, packages in enumerate(LAYERS) if package in packages), COMMANDS)


@functools.cache
def modules() -> dict[str, Path]:
    result = {}
    for path in sorted((ROOT / "leanformer").rglob("*.py")):
        name = ".".join(path.relative_to(ROOT / "leanformer").with_suffix("").parts).removesuffix(".__init__")
        if name != "__init__" and "bundled" not in path.parts:
            result[name] = path
    return result


@functools.cache
def imports(path: Path) -> set[str]:
    result = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "leanformer":
            base = node.module.removeprefix("leanformer").lstrip(".")
            for alias in node.names:
                name = f"{base}.{alias.name}".lstrip(".")
                result.add(name if name in modules() else base)
        elif isinstance(node, ast.Import):
            result |= {a.name.removeprefix("leanformer.") for a in node.names if a.name.startswith("leanformer.")}
    return result - {""}


def upwards(graph: dict[str, set[str]]) -> list[str]:
    return [
        f"{name} imports {other}"
        for name, others in graph.items()
        for other in others
        if name.split(".")[0] != other.split(".")[0] and layer(other) >= layer(name) and other != "__main__"
    ]


def test_imports_point_down():
    graph = {name: imports(path) for name, path in modules().items()}
    assert upwards(graph) == []
    assert upwards({"data.loader": {"layers.norms"}, "train": {"evaluate"}, "tasks.task": {"data"}}) == [
        "data.loader imports layers.norms",
        "train imports evaluate",
    ]


def test_every_layer_is_there():
    present = {name.split(".")[0] for name in modules()}
    assert {package for packages in LAYERS for package in packages} <= present


def test_the_check_sees_imports():
    assert {"data", "tasks", "training.run_files"} <= imports(ROOT / "leanformer" / "training" / "run.py")


def test_no_module_is_in_a_circle():
    """Modules, also within one package."""
    graph = {name: imports(path) & modules().keys() - {name} for name, path in modules().items()}
    graphlib.TopologicalSorter(graph).prepare()
    with pytest.raises(graphlib.CycleError):
        graphlib.TopologicalSorter(graph | {"errors": {"train"}}).prepare()


def test_data_are_read_without_jax():
    words = re.compile(r"^\s*(import|from) (jax|flax|optax)\b", re.MULTILINE)
    assert [n for n, path in modules().items() if n.split(".")[0] == "data" and words.search(path.read_text())] == []
    assert words.search((ROOT / "leanformer" / "train.py").read_text())


def test_private_parts_of_jax_are_imported_in_one_place():
    words = re.compile(r"^\s*(import|from) jax\._src\b", re.MULTILINE)
    assert [n for n, path in modules().items() if words.search(path.read_text())] == ["runtime.jax_internals"]


@pytest.mark.parametrize("folder", ["leanformer", "benchmarks", "configs"])
def test_files_are_short(folder):
    longest = 40 if folder == "configs" else LONGEST_FILE
    lengths = {str(p.relative_to(ROOT)): len(p.read_text().splitlines()) for p in (ROOT / folder).rglob("*.py")}
    assert {name: lines for name, lines in lengths.items() if lines > longest} == {}


def test_functions_are_short():
    lengths = {
        f"{name}.{node.name}": node.end_lineno - node.lineno + 1
        for name, path in modules().items()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef)
    }
    assert {
        name: lines for name, lines in lengths.items() if lines > (LONGEST_LOOP if name == LOOP else LONGEST_FUNCTION)
    } == {}
