"""The rooms and their ranks: a file imports only from lower ranks, entry points are imported by nobody."""

import ast
from pathlib import Path


ROOT = Path(__file__).parents[1]
RANKS = [
    {"errors", "scores", "malloc", "rows", "hardware", "hlo", "remedies", "squeue"},
    {"rules", "masks", "data.classes", "data.order", "target", "files", "config_files"},
    {"config", "peers", "cluster", "backends", "context", "data.decoding", "integrity"},
    {"attention", "dropping", "distributed", "determinism", "key_docs", "labels", "watch", "data.cache", "data.folder"},
    {
        *("mesh", "multihead", "outlook", "optim", "count", "interrupt"),
        *("goodput", "schedules", "confusion"),
        *("communication", "plugin", "conditioning", "data.source", "data.image"),
    },
    {"loggers", "plots", "remat", "convolution", "nystrom", "data.loader", "launches"},
    {"blocks", "kinds", "report"},
    {"layouts", "optimizers", "rates", "arguments", "families"},
    {"models", "data", "pretrained"},
    {"tasks"},
    {"state", "checkpoint"},
    {"step"},
    {"experiment", "checks"},
    {"feeding", "streams"},
    {"probing", "pages", "health", "compiled", "cli"},
    {"trained"},
    {"train", "evaluate", "cost", "prepare", "probe", "convert", "packaged", "audit", "sweep", "predict"},
]
LONGEST = 300  # lines of a file: one that wants more is two rooms


def modules() -> dict[str, Path]:
    found = {}
    for path in sorted((ROOT / "leanformer").rglob("*.py")):
        name = ".".join(path.relative_to(ROOT / "leanformer").with_suffix("").parts).removesuffix(".__init__")
        if name != "__init__" and "bundled" not in path.parts:
            found[name] = path
    return found


def room(name: str) -> str | None:
    """The entry of RANKS a module belongs to: itself, or the nearest package above it."""
    known = set().union(*RANKS)
    while name and name not in known:
        name = name.rpartition(".")[0]
    return name or None


def rank(name: str) -> int:
    return next(i for i, rooms in enumerate(RANKS) if room(name) in rooms)


def imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "leanformer":
            base = node.module.removeprefix("leanformer").lstrip(".")
            for alias in node.names:
                name = f"{base}.{alias.name}".lstrip(".")
                found.add(name if name in modules() else base)
        elif isinstance(node, ast.Import):
            found |= {a.name.removeprefix("leanformer.") for a in node.names if a.name.startswith("leanformer.")}
    return found - {""}


def test_every_module_has_a_rank():
    assert [name for name in modules() if room(name) is None] == []


def test_imports_point_down():
    wrong = [
        f"{name} (rank {rank(name)}) imports {other} (rank {rank(other)})"
        for name, path in modules().items()
        for other in imports(path)
        if room(other) != room(name) and rank(other) >= rank(name)
    ]
    assert wrong == []


def test_the_check_sees_imports():
    assert {"experiment", "data", "step"} <= imports(ROOT / "leanformer" / "train.py")


def test_files_are_short():
    long = {name: n for name, path in modules().items() if (n := len(path.read_text().splitlines())) > LONGEST}
    assert long == {}


def test_configs_are_differences():
    long = {p.name: n for p in (ROOT / "configs").glob("*.py") if (n := len(p.read_text().splitlines())) > 60}
    assert long == {}
