"""The rooms and their ranks: a file imports only from lower ranks, entry points are imported by nobody."""

import ast
import functools
import graphlib
import re
from pathlib import Path

import pytest


ROOT = Path(__file__).parents[1]
RANKS = [
    {"layers", "training", "runtime", "costs", "reports"},  # rooms without anything at their door
    {
        "errors",
        "training.scores",
        "runtime.malloc",
        "costs.hardware",
        "costs.hlo",
        *("sweeps.member_process", "sweeps"),
    },
    {
        "config.rules",
        "layers.masks",
        "data.classes",
        "data.order",
        *("data.source", "data.points"),
        "runtime.target",
        "runtime.files",
        "config.loading",
    },
    {
        "config",
        "costs.remedies",
        "runtime.peers",
        "runtime.cluster",
        "layers.backends",
        "layers.context",
        "layers.dropping",
        "layers.norms",
        "data.images.decoding",
        "data.made",
        "runtime.integrity",
    },
    {
        *("layers.attention", "layers.rotary", "layers.positions", "layers.levers"),
        "runtime.distributed",
        "runtime.determinism",
        "config.key_docs",
        "tasks.labels",
        "runtime.watch",
        "runtime.signals",
        "data.images.cache",
        "data.images.folder",
        *("data.images.idx", "data.images.synthetic", "data.images.tfds"),
    },
    {
        *("runtime.mesh", "layers.multihead", "layers.outlook", "training.optim", "costs.count", "runtime.interrupt"),
        *("training.goodput", "training.schedules", "reports.confusion", "layers.mlp"),
        *("costs.communication", "costs.plugin", "conditioning", "data.images.transforms"),
    },
    {
        *("training.loggers", "training.progress"),
        "reports.plots",
        "layers.remat",
        "layers.convolution",
        "layers.nystrom",
        "layers.latent",
        "data.loader",
        *("data.images", "data.text"),
        "costs.launches",
    },
    {"layers.blocks", "layers.kinds", "training.report", "data.sequences", "data.sentences"},
    {
        "pretrained.layouts",
        "pretrained.finite",
        "training.optimizers",
        "training.rates",
        "layers.arguments",
        "layers.families",
    },
    {"models", "data", "pretrained"},
    {"tasks", "training.restoring"},
    {"training.state", "training.checkpoint"},
    {"training.step"},
    {"training.experiment", "training.checks"},
    {"training.feeding", "training.streams"},
    {"training.together"},
    {"training.probing", "training.health", "cli"},
    {
        *("training.trained", "sweeps.grid", "training.session"),
        "analysis",
    },
    {"reports.comparison", "reports.compiled", "reports.pages", "sweeps.executor", "training.loop"},
    {
        "train",
        "evaluate",
        "cost",
        "prepare",
        "probe",
        "convert",
        "sweep",
        "predict",
        "compare",
        "together",
        "plan",
        *("generate", "embed"),
    },
]
LONGEST = 300  # lines of a file: one that wants more is two rooms


@functools.cache
def modules() -> dict[str, Path]:
    found = {}
    for path in sorted((ROOT / "leanformer").rglob("*.py")):
        name = ".".join(path.relative_to(ROOT / "leanformer").with_suffix("").parts).removesuffix(".__init__")
        if name != "__init__" and "bundled" not in path.parts:
            found[name] = path
    return found


@functools.cache
def room(name: str) -> str | None:
    """The entry of RANKS a module belongs to: itself, or the nearest package above it."""
    known = set().union(*RANKS)
    while name and name not in known:
        name = name.rpartition(".")[0]
    return name or None


def rank(name: str) -> int:
    return next(i for i, rooms in enumerate(RANKS) if room(name) in rooms)


@functools.cache
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
    assert {"training.experiment", "data", "training.step"} <= imports(ROOT / "leanformer" / "training" / "session.py")


def test_no_module_is_in_a_circle():
    """Modules, not packages, which ranks leave out."""
    graph = {name: imports(path) & modules().keys() - {name} for name, path in modules().items()}
    graphlib.TopologicalSorter(graph).prepare()
    with pytest.raises(graphlib.CycleError):
        graphlib.TopologicalSorter(graph | {"errors": {"train"}}).prepare()


def test_data_are_read_without_jax():
    words = re.compile(r"^\s*(import|from) (jax|flax|optax)\b", re.MULTILINE)
    assert [
        name for name, path in modules().items() if room(name).startswith("data") and words.search(path.read_text())
    ] == []
    assert words.search((ROOT / "leanformer" / "train.py").read_text())


def test_reports_are_for_commands():
    wrong = [
        f"{name} imports {other}"
        for name, path in modules().items()
        for other in imports(path)
        if other.startswith("reports") and not name.startswith("reports") and name not in RANKS[-1]
    ]
    assert wrong == []


def test_files_are_short():
    long = {name: n for name, path in modules().items() if (n := len(path.read_text().splitlines())) > LONGEST}
    assert long == {}


def test_scripts_are_short():
    paths = [path for folder in ("benchmarks", "experiments") for path in (ROOT / folder).glob("*.py")]
    assert {p.name: n for p in paths if (n := len(p.read_text().splitlines())) > LONGEST} == {}


def test_the_package_imports_no_experiment():
    words = re.compile(r"^\s*(import|from) (experiments|benchmarks)\b", re.MULTILINE)
    assert [name for name, path in modules().items() if words.search(path.read_text())] == []


def test_functions_are_short():
    """But for one that is a table."""
    found = {
        f"{name}.{node.name}": node.end_lineno - node.lineno + 1
        for name, path in modules().items()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef)
    }
    assert {name for name, lines in found.items() if lines > 80} == {"config.images.base"}


def test_configs_are_differences():
    long = {p.name: n for p in (ROOT / "configs").glob("*.py") if (n := len(p.read_text().splitlines())) > 60}
    assert long == {}
