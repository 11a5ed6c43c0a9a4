"""From a budget to shapes: counts that are exact, budgets that are kept, and configs that train."""

import types
from pathlib import Path

import made_runs
import pytest
from commands import ROOT, inside

from leanformer import config
from leanformer.costs import count
from leanformer.errors import ConfigError
from leanformer.studies import budgets, proxies
from leanformer.training import shapes
from leanformer.training.experiment import build


QUICK = str(ROOT / "configs" / "quickstart.py")
OVER = [
    "--over=model.depth=1,2,3,5",
    "--over=model.width=64,96",
    "--over=model.head_dim=8,16",
    "--over=model.mlp_dim=64,192",
]


@pytest.fixture(scope="module")
def costs():
    return shapes.settle(config.load(QUICK), ["params"])


def run(*words):
    return inside(["", "", "leanformer.plan", f"--config={QUICK}", *words])


@pytest.fixture
def settled(costs, monkeypatch):
    monkeypatch.setattr(shapes, "settle", lambda c, names, *more: costs)


@pytest.mark.parametrize("shape", [(3, 96, 8, 16, 192), (7, 40, 5, 12, 88)])
def test_counts_are_those_of_the_model(costs, shape):
    c = config.load(QUICK)
    c.model.update(dict(zip(shapes.AXES, shape, strict=True)))
    assert costs.of("params", shape) == count.parameters(build(c, examples=1000, mesh=None).like.params)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["quickstart", "nystromformer_listops_1x4"])
def test_flops_are_those_of_the_model(name, unchecked):
    c = config.load(str(ROOT / "configs" / f"{name}.py"))
    found = shapes.settle(c, ["params", "forward_flops", "train_flops"])
    one = shapes.built(c, (3, 24, 5, 12, 40))
    flops = found.of("forward_flops", (3, 24, 5, 12, 40)), found.of("train_flops", (3, 24, 5, 12, 40))
    assert flops == one.flops_per_example


def test_what_is_no_polynomial_is_refused(monkeypatch):
    monkeypatch.setattr(shapes, "built", lambda c, shape: shape)
    monkeypatch.setitem(shapes.COUNTS, "params", lambda shape: shape[1] ** 3)
    with pytest.raises(ConfigError, match="The params of vit are no polynomial"):
        shapes.settle(config.load(QUICK), ["params"])


def test_a_budget_is_kept_and_spent(costs):
    axes = shapes.ranges(config.load(QUICK), {"depth": [1, 2, 3], "num_heads": [3, 7]})
    inside_it = shapes.enumerate_within(axes, lambda s: costs.of("params", s), 2e5, 0.02)
    assert inside_it and all(196_000 <= costs.of("params", s) <= 200_000 for s in inside_it)
    assert axes["head_dim"] == [8, 16, 32, 64, 128] and all(w % 8 == 0 for w in axes["width"] + axes["mlp_dim"])
    c = config.load(QUICK)
    c.mesh.tensor = 4
    assert all(n % 4 == 0 for n in shapes.ranges(c, {})["num_heads"])
    with pytest.raises(ConfigError, match=r"None of \d+,?\d+ shapes costs .* The nearest: depth=3,.* at "):
        shapes.enumerate_within(axes, lambda s: costs.of("params", s), 1e9, 0.02)


def test_a_budget_in_seconds_is_flops_at_a_share_of_the_peak():
    c = config.load(QUICK)
    budget = budgets.parse("seconds:0.5@H100", c, 0.4)
    flops = 0.5 * 989e12 * 0.4 / c.batch_size
    assert budget.kind == "seconds" and budget.amount == pytest.approx(flops) and budget.counted == "train_flops"
    first, *rest = budgets.told(budget, c, 0.4, flops / 5)
    assert "Seconds are not measured" in first and f"budget of {flops:.4g} training FLOPs" in first
    assert first.endswith("The first: 0.1 s a step.") and (c.dtype, len(rest)) == ("float32", 1)
    assert rest[0].startswith("*** The config trains in float32")
    plain = budgets.parse("params:4e7", c, 0.4)
    assert (plain.amount, plain.counted) == (4e7, "params") and budgets.told(plain, c, 0.4, 1.0) == []


def test_planned_configs_have_the_counts_they_say(settled, tmp_path):
    status, out, err = run("--budget=params:2e5", "--slack=0.1", "--best=2", f"--out={tmp_path}", *OVER)
    assert (status, err) == (0, "") and "Ranked by nsc" in out and "No interval: nothing was fitted" in out
    files = sorted(tmp_path.iterdir())
    assert len(files) == 2
    for file in files:
        c = config.load(str(file))
        number = count.parameters(build(c, examples=1000, mesh=None).like.params)
        assert 180_000 <= number <= 200_000 and f"{number:,} parameters" in file.read_text() and f"{number:,}" in out
        assert (c.data.name, c.optim.lr) == ("bundled:fashion_mnist", 2e-3)


def test_a_surface_of_own_runs_ranks_with_an_interval(settled, tmp_path):
    made_runs.sweep(tmp_path / "s", depths=(1, 2, 3), heads=(2, 4, 8, 16), seeds=2, spread=0.003)
    status, out, _ = run("--budget=params:2e5", "--slack=0.1", f"--runs={tmp_path / 's'}", *OVER)
    assert status == 0 and "a surface fitted to" in out and "expected error" in out and " yes" in out
    rows = [line.split() for line in out.splitlines() if " to " in line and line.split()[0].isdigit()]
    expected, low, high = ([float(row[i]) for row in rows] for i in (8, 9, 11))
    assert len(rows) == 5 and expected == sorted(expected) and rows[0][-1] == "yes"
    assert all(a < e < b for a, e, b in zip(low, expected, high, strict=True))


@pytest.fixture
def swept(monkeypatch, tmp_path):
    """The sweep's command is not run; its words are kept, and runs of the proxies are made up where `ends`."""
    told = types.SimpleNamespace(words=[], status=0, ends=True)

    def sweep(words, check):
        told.words = words
        files = words[3].removeprefix("--config=").split(",")
        for i, file in enumerate(files if told.ends else ()):
            changes = {f"model.{axis}": config.load(file).model[axis] for axis in shapes.AXES}
            made_runs.write(tmp_path / "proxies" / "runs" / Path(file).stem, 0.7 + 0.001 * i, changes=changes)
        return types.SimpleNamespace(returncode=told.status)

    monkeypatch.setattr(proxies.subprocess, "run", sweep)
    return told


PROXIES = ["--budget=params:2e5", "--slack=0.1", "--proxies=12", "--set=total_epochs=3.0", "--config.optim.lr=0.004"]


def test_proxies_are_trained_and_a_surface_fitted_to_them(settled, swept, costs, tmp_path):
    status, out, err = run(*PROXIES, f"--out={tmp_path}", *OVER)
    assert (status, err) == (0, "") and "Ranked by a surface fitted to" in out and "expected error" in out
    assert "Learning rates were not tuned by shape" in out
    said = " ".join(swept.words)
    assert "leanformer.sweep" in said and "--seeds=2" in said and "--set=total_epochs=3.0" in said
    trained = sorted((tmp_path / "proxies" / "shapes").iterdir())
    sizes = [tuple(config.load(str(file)).model[axis] for axis in shapes.AXES) for file in trained]
    assert len(set(sizes)) == 12 and all(2e5 / 3 <= costs.of("params", size) <= 2e5 for size in sizes)
    assert all(len({size[axis] for size in sizes}) > 1 for axis in range(5))  # none of them is left at one value
    for file in [*trained, *tmp_path.glob("*.py")]:  # what was said of the config on the command line is in all of them
        assert config.load(str(file)).optim.lr == 0.004


def test_proxies_of_other_settings_are_not_taken_for_these(settled, swept, tmp_path):
    assert run(*PROXIES, f"--out={tmp_path}", *OVER)[0] == 0
    settings = ["--set=total_epochs=3.0"]
    asked = {
        "--set=total_epochs=5.0": f"settings={settings}, asked is {[*settings, '--set=total_epochs=5.0']}. Take",
        "--config.optim.lr=0.002": "changes={'optim.lr': '0.004'}, asked is {}. Take another folder",
    }
    for word, said in asked.items():
        status, _, err = run(*PROXIES, word, f"--out={tmp_path}", *OVER)
        assert status == 2 and f"proxies.json is of another command: {said}" in err


@pytest.mark.parametrize(
    ("status", "message"), [(1, "None of 12 proxies ended"), (2, "The sweep of the proxies was refused")]
)
def test_proxies_that_all_fail_are_told(settled, swept, tmp_path, status, message):
    swept.ends, swept.status = False, status
    found, _, err = run(*PROXIES, f"--out={tmp_path}", *OVER)
    assert found == 2 and message in err and not list(tmp_path.glob("*.py"))


def test_a_stop_of_the_proxies_is_a_stop_of_the_plan(settled, swept, tmp_path):
    swept.ends, swept.status = False, 130
    with pytest.raises(SystemExit) as stopped:
        run(*PROXIES, f"--out={tmp_path}", *OVER)
    assert stopped.value.code == 130


def test_shapes_are_spread_over_every_axis():
    grid = [(d, 96, n, h, f) for d in (1, 2, 4, 8) for n in (1, 2, 4, 8) for h in (4, 8, 16, 32) for f in (64, 512)]
    chosen = shapes.spread(grid, 16)
    assert len(set(chosen)) == 16 and shapes.spread(grid[:3], 16) != [] and len(shapes.spread(grid[:3], 16)) == 3
    for axis in (0, 2, 3):  # both ends of every axis, often
        assert sum(shape[axis] == grid[0][axis] for shape in chosen) >= 4
        assert sum(shape[axis] == grid[-1][axis] for shape in chosen) >= 4


def test_stages_are_refused():
    words = [f"--config={ROOT / 'configs' / 'davit_b_lean.py'}", "--budget=params:5e7"]
    status, out, err = inside(["", "", "leanformer.plan", *words])
    assert (status, out) == (2, "") and "The model davit has depth=(" in err and "of one size for all layers" in err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--budget=params:-3"], "give params:40e6, flops:1e9, seconds:0.25@h100, memory:60e9@h100 or memory:8e9."),
        (["--budget=seconds:3"], "give params:40e6"),
        (["--budget=params:3@h100"], "give params:40e6"),
        (["--budget=memory:1e9@"], "give params:40e6"),
        (["--budget=memory:1e9@abacus"], "nothing is known of abacus's memory. Known: b200,"),
        (
            ["--budget=memory:1e9", "--config.mesh.tensor=2"],
            "mesh.tensor=2: memory is planned of devices that work on whole layers",
        ),
        (["--budget=params:2e5", "--best=0"], "--best=0: take 1 at least."),
        (["--budget=seconds:3@abacus"], "no peak is known of abacus"),
        (["--budget=params:1e12", *OVER], "The nearest: depth=5,"),
        (["--budget=params:2e5", "--over=model.patch_size=7"], "the axes of a shape are model.depth, model.width"),
        (["--budget=params:2e5", "--over=model.depth=two"], "is not model.KEY=NUMBER"),
        (["--budget=params:2e5", "--over=model.depth=2", "--over=depth=3"], "depth is told twice"),
        (["--budget=params:2e5", "--runs=EMPTY"], "neither a run nor a sweep"),
        (["--budget=params:2e5", "--proxies=20"], "--proxies=20 need a folder: give --out."),
        (["--budget=params:2e5", "--proxies=3", "--out=EMPTY"], "--proxies=3: take 10 at least."),
    ],
)
def test_bad_words(words, message, settled, tmp_path):
    status, out, err = run(*(word.replace("EMPTY", str(tmp_path)) for word in words))
    assert (status, out) == (2, "") and message in err, err
