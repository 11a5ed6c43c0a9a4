"""Attributes of leanformer that benchmarks and experiments use exist; running these scripts takes minutes."""

import ast
import importlib
import inspect

import pytest
from commands import ROOT


def used_attributes(path):
    """Return (module, attribute name) for each use of an attribute of a leanformer module in a file."""
    tree, modules = ast.parse(path.read_text()), {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "leanformer":
            for alias in node.names:
                try:
                    result = importlib.import_module(f"{node.module}.{alias.name}")
                except ModuleNotFoundError:
                    result = getattr(importlib.import_module(node.module), alias.name)
                modules[alias.asname or alias.name] = result
    modules = {name: result for name, result in modules.items() if inspect.ismodule(result)}
    nodes = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)]
    return [(modules[node.value.id], node.attr) for node in nodes if node.value.id in modules]


@pytest.mark.parametrize(
    "path",
    sorted([*(ROOT / "benchmarks").glob("*.py"), *(ROOT / "experiments").glob("*.py")]),
    ids=lambda path: path.stem,
)
def test_used_attributes_exist(path):
    assert [f"{module.__name__}.{name}" for module, name in used_attributes(path) if not hasattr(module, name)] == []
