"""Import order of the packages."""

import ast
import functools
import graphlib
import re
from pathlib import Path

from commands import ROOT, run_python


LAYERS = [  # a module imports only from its own package and from packages above it in this list
    ["errors", "text"],
    ["stored"],
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
def find_imports(path: Path) -> set[str]:
    result = set()
    for node in ast.walk(ast.parse(path.read_text())):
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


def test_no_circular_imports():
    """No circular imports between modules, including modules of one package."""
    graph = {name: find_imports(path) & find_modules().keys() - {name} for name, path in find_modules().items()}
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError


def test_data_package_does_not_import_jax():
    pattern = re.compile(r"^\s*(import|from) (jax|flax|optax)\b", re.MULTILINE)
    paths = [path for name, path in find_modules().items() if name.split(".")[0] == "data"]
    assert paths and [path for path in paths if pattern.search(path.read_text())] == []
    assert pattern.search((ROOT / "leanformer" / "training" / "step.py").read_text())


def test_command_lines_do_not_wait_for_jax():
    program = "import sys, leanformer.cli, leanformer.config; leanformer.config.base(); print(*sys.modules)"
    imported = {*run_python("-c", program).split()}
    assert "leanformer.config.declare" in imported and not {"jax", "flax", "optax"} & imported


def test_watching_needs_nothing_of_training():
    """Whoever watches a model has NumPy, array-api-compat, safetensors and the library of the model."""
    program = "import sys, leanformer.watching.flax, leanformer.watching.weights; print(*sys.modules)"
    imported = {name.split(".")[1] for name in run_python("-c", program).split() if name.startswith("leanformer.")}
    assert imported == {"conditioning", "errors", "stored", "text", "watching"}
