"""Planner: exact counts, budgets, configs that build, and rankings by a response surface."""

import itertools
import json
import math
import types
from pathlib import Path

import fake_runs
import pytest
from commands import ROOT, run_in_process
from messages import mentions, refuses

from leanformer import config, plan
from leanformer.analysis import proxies, shapes
from leanformer.costs import count
from leanformer.training.train_setup import set_up_training


QUICK = str(ROOT / "configs" / "quickstart.py")
OVER = [
    "--over=model.depth=1,2,3,5",
    "--over=model.width=64,96",
    "--over=model.head_dim=8,16",
    "--over=model.mlp_dim=64,192",
]


@pytest.fixture(scope="module")
def costs():
    return shapes.Costs.fit(config.load(QUICK), ["params"])


def run_plan(*words):
    return run_in_process(["", "", "leanformer.plan", f"--config={QUICK}", *words])


@pytest.fixture
def cached_costs(costs, monkeypatch):
    monkeypatch.setattr(plan.Costs, "fit", lambda c, names: costs)


@pytest.mark.parametrize("shape", [(3, 96, 8, 16, 192), (7, 40, 5, 12, 88)])
def test_parameter_counts_match_the_model(costs, shape):
    c = config.load(QUICK)
    c.model.update(dict(zip(shapes.AXES, shape, strict=True)))
    assert costs.of("params", shape) == count.parameters(set_up_training(c, examples=1000, mesh=None).state.params)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["quickstart", "nystromformer_listops"])
def test_flops_match_the_model(name, no_shape_checks):
    c = config.load(str(ROOT / "configs" / f"{name}.py"))
    fitted, shape = shapes.Costs.fit(c, ["flops"]), (3, 24, 5, 12, 40)
    assert fitted.of("flops", shape) == shapes.build_shape(c, shape).flops_per_example[1]


def test_non_polynomial_counts_are_refused(monkeypatch):
    monkeypatch.setattr(shapes, "build_shape", lambda c, shape: shape)
    monkeypatch.setitem(shapes.COUNTS, "params", lambda shape: shape[1] ** 3)
    with refuses("params", "vit"):
        shapes.Costs.fit(config.load(QUICK), ["params"])


def test_shapes_use_the_budget_without_exceeding_it(costs):
    axes = shapes.axis_values(config.load(QUICK), {"depth": [1, 2, 3], "num_heads": [3, 7]})
    within_budget = shapes.enumerate_within(axes, lambda s: costs.of("params", s), 2e5, 0.02)
    assert within_budget and all(196_000 <= costs.of("params", s) <= 200_000 for s in within_budget)
    assert axes["head_dim"] == [8, 16, 32, 64, 128] and all(w % 8 == 0 for w in axes["width"] + axes["mlp_dim"])
    c = config.load(QUICK)
    c.mesh.tensor = 4
    assert all(n % 4 == 0 for n in shapes.axis_values(c, {})["num_heads"])
    with refuses("depth=3", "--budget=params:1e9", "--slack", "--over"):
        shapes.enumerate_within(axes, lambda s: costs.of("params", s), 1e9, 0.02, "--budget=params:1e9")


def test_shapes_are_compiled_until_enough_fit(monkeypatch):
    c, ranked = config.load(QUICK), [(depth, 8, 1, 8, 8) for depth in (9, 4, 8, 3, 2, 1)]
    monkeypatch.setattr(shapes, "peak_bytes", lambda c: 10 * c.model.depth)
    fit, notes = plan.select_fitting(c, plan.Budget.parse(["params:1", "memory:45"]), ranked, 2)
    assert fit == {ranked[1]: 40, ranked[3]: 30} and len(notes) == 2 and mentions(notes[1], "depth=8", 80)
    with refuses("--budget=memory:39", "2 architectures", "depth=9", 90):
        plan.select_fitting(c, plan.Budget.parse(["params:1", "memory:3.9e1"]), ranked, 1)


@pytest.mark.slow  # compiles a step to check one number of the report
def test_reported_memory_equals_the_compiled_step(cached_costs, tmp_path):
    words = ["--budget=params:2e5", "--budget=memory:1e9", "--slack=0.1", "--best=1", f"--out={tmp_path}", *OVER]
    status, out, err = run_plan(*words)
    ((*_, peak),) = parse_tables(out)[0]
    (file,) = tmp_path.glob("*.py")
    assert (status, err) == (0, "") and int(peak.replace(",", "")) == shapes.peak_bytes(config.load(str(file)))


def test_planned_configs_have_the_reported_counts(cached_costs, tmp_path):
    sizes = ["--config.model.depth=6", "--config.model.num_heads=5"]  # do not replace the planned ones
    status, out, err = run_plan("--budget=params:2e5", "--slack=0.1", "--best=2", f"--out={tmp_path}", *sizes, *OVER)
    assert (status, err) == (0, "") and mentions(out, "--proxies=20", "--set=total_epochs=") and "%" not in out
    files = sorted(tmp_path.iterdir())
    assert len(files) == 2
    for file in files:
        c = config.load(str(file))
        number = count.parameters(set_up_training(c, examples=1000, mesh=None).state.params)
        assert 180_000 <= number <= 200_000 and f"{number:,} parameters" in file.read_text() and f"{number:,}" in out
        assert (c.data.name, c.optim.lr) == ("bundled:fashion_mnist", 2e-3)
        assert file.stem.endswith("_" + "x".join(str(c.model[axis]) for axis in shapes.AXES))


def parse_tables(out):
    """Return the tables of a page: lists of rows, each a list of cells separated by two spaces or more."""
    tables = [[]]
    for line in out.splitlines():
        if line.startswith("  depth  "):
            tables.append([])
        elif line.split()[:1] and line.split()[0].isdigit() and line.startswith("  "):
            tables[-1].append([cell.strip() for cell in line.split("  ") if cell.strip()])
    return tables[1:]


@pytest.fixture(scope="module")
def finished_runs(costs, tmp_path_factory):
    """Return a folder of runs of 2, 3 and 4 layers x 2 to 16 heads, whose error falls with both."""
    folder = tmp_path_factory.mktemp("made") / "s"
    for depth, heads in itertools.product((2, 3, 4), (2, 4, 8, 16)):
        sizes = dict(zip(shapes.AXES, (depth, 96, heads, 16, 192), strict=True))
        params = costs.of("params", tuple(sizes.values()))
        for seed in range(2):
            noise = 0.01 * math.sin(100 * depth + 10 * heads + seed)
            error = 0.18 * (params / 4e5) ** -0.25 * (heads / 8) ** -0.1 * math.exp(noise)
            changes = {f"model.{axis}": size for axis, size in sizes.items()}
            workdir = fake_runs.write_run(
                folder / f"d{depth}n{heads}s{seed}", 1 - error, seed=seed, changes=changes, steps=(1,)
            )
            summary = workdir / "summary.json"
            summary.write_text(json.dumps(json.loads(summary.read_text()) | {"params": params}))
    return folder


BUDGET = ["--budget=params:4e5", "--slack=0.1"]


def test_only_shapes_within_the_range_of_runs_are_ranked(cached_costs, finished_runs, tmp_path):
    status, out, err = run_plan(*BUDGET, f"--runs={finished_runs}", f"--out={tmp_path}")
    assert (status, err) == (0, "") and mentions(out, "top1", "--extrapolate")
    (table,) = parse_tables(out)
    for cells in table:
        depth, width, heads, head_dim, mlp = map(int, cells[:5])
        assert depth in (2, 3, 4) and 2 <= heads <= 16 and (width, head_dim, mlp) == (96, 16, 192)
    expected = [float(cells[6]) for cells in table]
    intervals = [[float(end) for end in cells[7].split(" to ")] for cells in table]
    assert expected == sorted(expected) and all(a < e < b for e, (a, b) in zip(expected, intervals, strict=True))
    assert len(list(tmp_path.iterdir())) == len(table) >= 2
    assert any(mentions(line, "head dimension") for line in out.splitlines()[-8:])  # it never varied


def test_extrapolated_shapes_are_listed_with_the_sizes_outside(cached_costs, finished_runs, tmp_path):
    status, out, _ = run_plan(*BUDGET, f"--runs={finished_runs}", "--extrapolate", "--best=2", f"--out={tmp_path}")
    inside_runs, outside = parse_tables(out)
    assert status == 0 and len(inside_runs) == len(outside) == 2 and len(inside_runs[0]) == 9
    for cells in outside:
        sizes = {"depth": (2, 4), "width": (96, 96), "heads": (2, 16), "head dimension": (16, 16), "MLP": (192, 192)}
        sizes_outside = [name for (name, (a, b)), x in zip(sizes.items(), cells, strict=False) if not a <= int(x) <= b]
        assert sizes_outside and cells[-1] == ", ".join(sizes_outside)
        low, high = map(float, cells[7].split(" to "))
        assert high / low > 1.2 and high < 1
    assert len(list(tmp_path.glob("*extrapolated*"))) == 2 and len(list(tmp_path.iterdir())) == 4


def test_budget_outside_the_range_of_runs_is_refused(cached_costs, finished_runs):
    words = ["--budget=params:2e5", "--slack=0.1", f"--runs={finished_runs}", "--over=model.width=64"]
    status, out, err = run_plan(*words)
    assert (status, out.count("  depth  ")) == (2, 0) and mentions(err, "width 96", "--proxies=20", "--extrapolate")
    status, out, _ = run_plan(*words, "--extrapolate", "--best=1")
    assert status == 0 and len(parse_tables(out)) == 1


@pytest.fixture
def fake_sweep(monkeypatch, tmp_path):
    """Replace the sweep command: record its arguments, and write runs of the proxies if `ends`."""
    state = types.SimpleNamespace(words=[], status=0, ends=True)

    def sweep(words, check):
        state.words = words
        files = words[3].removeprefix("--config=").split(",")
        for i, file in enumerate(files if state.ends else ()):
            changes = {f"model.{axis}": config.load(file).model[axis] for axis in shapes.AXES}
            fake_runs.write_run(tmp_path / "proxies" / "runs" / Path(file).stem, 0.7 + 0.001 * i, changes=changes)
        return types.SimpleNamespace(returncode=state.status)

    monkeypatch.setattr(proxies.subprocess, "run", sweep)
    return state


PROXIES = ["--budget=params:2e5", "--slack=0.1", "--proxies=12", "--set=total_epochs=3.0", "--config.optim.lr=0.004"]


def test_proxies_are_trained_and_a_surface_fitted_to_them(cached_costs, fake_sweep, costs, tmp_path):
    status, out, err = run_plan(*PROXIES, f"--out={tmp_path}", *OVER)
    assert (status, err) == (0, "") and mentions(out, tmp_path / "proxies" / "runs") and parse_tables(out)
    words = " ".join(fake_sweep.words)
    assert "leanformer.sweep" in words and "--seeds=2" in words and "--set=total_epochs=3.0" in words
    trained = sorted((tmp_path / "proxies" / "shapes").iterdir())
    sizes = [tuple(config.load(str(file)).model[axis] for axis in shapes.AXES) for file in trained]
    assert len(set(sizes)) == 12 and all(2e5 / 3 <= costs.of("params", size) <= 2e5 for size in sizes)
    assert all(len({size[axis] for size in sizes}) > 1 for axis in range(5))  # every size has several values
    for file in [*trained, *tmp_path.glob("*.py")]:  # all have the config changes of the command line
        assert config.load(str(file)).optim.lr == 0.004


def test_proxies_of_other_settings_are_not_reused(cached_costs, fake_sweep, tmp_path):
    assert run_plan(*PROXIES, f"--out={tmp_path}", *OVER)[0] == 0
    for word in ("--set=total_epochs=5.0", "--config.optim.lr=0.002"):
        status, _, err = run_plan(*PROXIES, word, f"--out={tmp_path}", *OVER)
        assert status == 2 and mentions(err, tmp_path / "proxies" / "proxies.json")


def test_shapes_are_spread_over_every_axis():
    grid = [(d, 96, n, h, f) for d in (1, 2, 4, 8) for n in (1, 2, 4, 8) for h in (4, 8, 16, 32) for f in (64, 512)]
    chosen = shapes.select_spread(grid, 16)
    assert (
        len(set(chosen)) == 16
        and shapes.select_spread(grid[:3], 16) != []
        and len(shapes.select_spread(grid[:3], 16)) == 3
    )
    for axis in (0, 2, 3):  # both ends of every axis, often
        assert sum(shape[axis] == grid[0][axis] for shape in chosen) >= 4
        assert sum(shape[axis] == grid[-1][axis] for shape in chosen) >= 4


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["--budget=seconds:3"], ("--budget=seconds:3", "params", "flops", "memory")),
        (["--budget=params:3", "--budget=flops:3"], ("params", "flops")),
        (["--budget=params:1e12", *OVER], ("--budget=params:1e+12", "depth=5")),
        (["--over=model.patch_size=7"], ("patch_size", "model.depth", "model.mlp_dim")),
        (["--proxies=3", "--out=x"], ("--proxies=3", 10)),
        (["--config=davit_b_lean"], ("davit", "depth")),
        (["--config=rank_nn_small"], ("model.inputs",)),
    ],
)
def test_invalid_arguments_are_refused(words, parts, cached_costs):
    given = [f"--config={QUICK}", *([] if "--budget" in words[0] else ["--budget=params:2e5"]), *words]
    status, out, err = run_in_process(["", "", "leanformer.plan", *given])
    assert (status, out) == (2, "") and mentions(err, *parts), err
