"""Import order of the packages."""

import ast
import functools
import graphlib
import re
from pathlib import Path

import pytest


ROOT = Path(__file__).parents[1]
LAYERS = [  # a module imports only from its own package and from packages above it in this list
    ["errors", "quantities"],
    ["config", "costs"],
    ["runtime"],
    ["data", "layers"],
    ["models", "pretrained", "tasks"],
    ["conditioning"],
    ["watching"],
    ["training"],
    ["cli"],
    ["sweeps", "analysis", "exports"],
    ["reports"],
    ["train"],
]
# All other top-level modules are commands. They never import each other; `__main__` starts each of them.
COMMANDS = len(LAYERS)


def layer_index(module: str) -> int:
    package = module.split(".")[0]
    return next((i for i, packages in enumerate(LAYERS) if package in packages), COMMANDS)


@functools.cache
def find_modules() -> dict[str, Path]:
    result = {}
    for path in sorted((ROOT / "leanformer").rglob("*.py")):
        name = ".".join(path.relative_to(ROOT / "leanformer").with_suffix("").parts).removesuffix(".__init__")
        if name != "__init__" and "bundled" not in path.parts:
            result[name] = path
    return result


@functools.cache
def find_imports(path: Path, *, inside_functions: bool = True) -> set[str]:
    result, tree = set(), ast.parse(path.read_text())
    for node in ast.walk(tree) if inside_functions else tree.body:
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "leanformer":
            base = node.module.removeprefix("leanformer").lstrip(".")
            for alias in node.names:
                name = f"{base}.{alias.name}".lstrip(".")
                result.add(name if name in find_modules() else base)
        elif isinstance(node, ast.Import):
            result |= {a.name.removeprefix("leanformer.") for a in node.names if a.name.startswith("leanformer.")}
    return result - {""}


def find_upward_imports(graph: dict[str, set[str]]) -> list[str]:
    return [
        f"{name} imports {other}"
        for name, others in graph.items()
        for other in others
        if name.split(".")[0] != other.split(".")[0] and layer_index(other) >= layer_index(name) and other != "__main__"
    ]


def test_imports_point_down():
    graph = {name: find_imports(path) for name, path in find_modules().items()}
    assert find_upward_imports(graph) == []
    assert find_upward_imports({"data.loader": {"layers.norms"}, "train": {"evaluate"}, "tasks.task": {"data"}}) == [
        "data.loader imports layers.norms",
        "train imports evaluate",
    ]


def test_reports_describe_and_decide_nothing():
    """Errors are raised and translated where the decision is."""
    statements = ast.Raise, ast.ExceptHandler
    paths = {name: path for name, path in find_modules().items() if name.startswith("reports")}
    nodes = [(name, node) for name, path in paths.items() for node in ast.walk(ast.parse(path.read_text()))]
    assert [f"{name}:{node.lineno}" for name, node in nodes if isinstance(node, statements)] == []


def test_plain_run_does_not_import_what_it_does_not_need():
    """Modules of other tasks, of weight files, and of several processes are imported where they are used."""
    todo, needed = {"train"}, set()
    while todo:
        needed |= todo
        paths = [find_modules()[name] for name in todo if name in find_modules()]
        todo = set().union(*(find_imports(path, inside_functions=False) for path in paths)) - needed
    others = ("pretrained", "data.text", "data.sequences", "data.sentences", "tasks.language", "runtime.cluster")
    assert "training.loop" in needed and not [name for name in needed if name.startswith(others)]


def test_every_layer_exists():
    present = {name.split(".")[0] for name in find_modules()}
    assert {package for packages in LAYERS for package in packages} <= present


def test_imports_are_detected():
    assert {"data", "tasks", "training.run_files"} <= find_imports(ROOT / "leanformer" / "training" / "run.py")


def test_no_circular_imports():
    """No circular imports between modules, including modules of one package."""
    graph = {name: find_imports(path) & find_modules().keys() - {name} for name, path in find_modules().items()}
    graphlib.TopologicalSorter(graph).prepare()
    with pytest.raises(graphlib.CycleError):
        graphlib.TopologicalSorter(graph | {"errors": {"train"}}).prepare()


def test_data_package_does_not_import_jax():
    pattern = re.compile(r"^\s*(import|from) (jax|flax|optax)\b", re.MULTILINE)
    assert [
        n for n, path in find_modules().items() if n.split(".")[0] == "data" and pattern.search(path.read_text())
    ] == []
    assert pattern.search((ROOT / "leanformer" / "train.py").read_text())


def test_private_jax_is_imported_in_one_module():
    pattern = re.compile(r"^\s*(import|from) jax\._src\b|import_module\(f?.jax\._src\b", re.MULTILINE)
    assert [n for n, path in find_modules().items() if pattern.search(path.read_text())] == ["runtime.jax_internals"]
