"""From a budget to shapes: counts that are exact, budgets that are kept, and configs that train."""

import made_runs
import pytest
from commands import ROOT, inside

from leanformer import config, plan
from leanformer.costs import count
from leanformer.errors import ConfigError
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
    monkeypatch.setattr(shapes, "settle", lambda c, names: costs)


@pytest.mark.parametrize("shape", [(3, 96, 8, 16, 192), (7, 40, 5, 12, 88)])
def test_counts_are_those_of_the_model(costs, shape):
    c = config.load(QUICK)
    c.model.update(dict(zip(shapes.AXES, shape, strict=True)))
    assert costs.of("params", shape) == count.parameters(build(c, examples=1000, mesh=None).like.params)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["quickstart", "nystromformer_listops_1x4"])
def test_flops_are_those_of_the_model(name):
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
    kind, flops, unit = plan.parse("seconds:0.5@h100", c, 0.4)
    assert kind == "seconds" and flops == pytest.approx(0.5 * 989e12 * 0.4 / c.batch_size)
    assert flops / unit == pytest.approx(0.5) and plan.parse("params:4e7", c, 0.4) == ("params", 4e7, 1.0)


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


def test_stages_are_refused():
    words = [f"--config={ROOT / 'configs' / 'davit_b_lean.py'}", "--budget=params:5e7"]
    status, out, err = inside(["", "", "leanformer.plan", *words])
    assert (status, out) == (2, "") and "The model davit has depth=(" in err and "of one size for all layers" in err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--budget=params:-3"], "give params:40e6, flops:1e9 or seconds:0.25@h100"),
        (["--budget=seconds:3"], "give params:40e6"),
        (["--budget=seconds:3@abacus"], "no peak is known of abacus"),
        (["--budget=params:1e12", *OVER], "The nearest: depth=5,"),
        (["--budget=params:2e5", "--over=model.patch_size=7"], "the axes of a shape are model.depth, model.width"),
        (["--budget=params:2e5", "--over=model.depth=two"], "is not model.KEY=NUMBER"),
        (["--budget=params:2e5", "--runs=EMPTY"], "neither a run nor a sweep"),
    ],
)
def test_bad_words(words, message, settled, tmp_path):
    status, out, err = run(*(word.replace("EMPTY", str(tmp_path)) for word in words))
    assert (status, out) == (2, "") and message in err, err
