"""experiments/planner.py and experiments/surface.py: their statistics, their tables, and the command of cifar10."""

import csv
import math
import runpy
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from commands import ROOT, run
from messages import mentions
from PIL import Image

from leanformer import config


@pytest.fixture(scope="module")
def planner():
    return runpy.run_path(str(ROOT / "experiments" / "planner.py"))


def test_tau_counts_pairs_near_in_parameters(planner):
    params = np.array([100.0, 105.0, 109.0, 200.0, 205.0])
    errors = np.array([5.0, 4.0, 3.0, 1.0, 2.0])
    right = np.array([1.0, 2.0, 2.0, 9.0, 8.0])  # one tie among three pairs, and the last pair in order
    middle, low, high = planner["tau"](right, errors, params)
    assert middle == pytest.approx((1 + 1 + 0 + 1) / 4) and low <= middle <= high
    assert planner["tau"](-right, errors, params)[0] == pytest.approx(-3 / 4)
    assert math.isnan(planner["tau"](right[::2], errors[::2], np.array([1.0, 2.0, 4.0]))[0])


def test_regret_is_what_the_recommended_shape_loses(planner):
    params, errors = np.array([100.0, 98.0, 95.0]), np.array([2.0, 1.0, 1.5])
    assert planner["regret"](-errors, errors, params) == 0
    # at budget 100 it takes the worst of three (2 for 1), at 98 the better of two
    assert planner["regret"](np.array([3.0, 2.0, 1.0]), errors, params) == pytest.approx(50)


def test_tables_have_the_models_they_had(planner):
    tables = planner["language"](planner["EVIDENCE"] / "language_models.csv") | planner["bert"](
        planner["EVIDENCE"] / "bert.csv"
    )
    sizes = {name: len(models.shapes) for name, models in tables.items()}
    assert sum(sizes.values()) == 1381 and sizes["GPT2_lm1b"] == 200 and sizes["BERT GLUE"] == 500
    shapes, errors, scale = tables["BERT GLUE"]
    assert (shapes[0].heads, shapes[0].head_dim, shapes[0].mlp) == (
        (4, 2, 4, 4),
        (64, 128, 64, 64),
        (3072, 1536, 1536, 1024),
    )
    assert scale.limit == 1 and 0 < min(errors)[0] <= max(errors)[0] < 1
    assert tables["GPT2_lm1b"].scale.limit == math.inf


COLUMNS = "budget,seed,epochs,depth,width,num_heads,head_dim,mlp_dim,params,forward_flops,top1,loss"
RUNS = [
    "1000,0,5,2,96,4,16,72,997,88000,0.75,0.7",
    "1000,1,5,2,96,4,16,72,997,88000,0.5,0.9",
    "1000,0,5,1,96,2,8,80,990,70000,0.25,1",
]


def test_the_table_of_the_surface_is_read_back(planner, tmp_path):
    path = tmp_path / "quickstart.csv"
    path.write_text("\n".join([COLUMNS, *RUNS]) + "\n")
    [(shapes, errors, scale)] = planner["quickstart"](path).values()
    assert errors == [[0.25, 0.5], [0.75]] and scale.limit == 1
    assert [shape.heads for shape in shapes] == [(4, 4), (2,)] and shapes[0].params == 997
    surface = runpy.run_path(str(ROOT / "experiments" / "surface.py"))
    rows = surface["read_known"](path, 5.0)
    surface["write"](tmp_path / "again.csv", rows)
    assert (tmp_path / "again.csv").read_text().replace("1.0\n", "1\n") == path.read_text()
    assert surface["joined"](rows[:2], rows[1:]) == rows
    timed = [row | {"step_s": 0.1} for row in rows]  # as measured by an earlier command
    assert surface["timed"](timed, tmp_path, None, 0) == timed
    assert surface["timed"]([*timed[:1], *rows[1:]], tmp_path, None, 0) == rows
    with pytest.raises(SystemExit) as refused:
        surface["read_known"](path, 4.0)
    assert mentions(str(refused.value), 5, "--epochs=4")


def test_the_surface_of_small_vits_held_out(planner):
    """The figures in README.md, of 40 shapes in five folds."""
    (models,) = planner["quickstart"](planner["EVIDENCE"] / "quickstart.csv").values()
    figures = planner["scored"](models)["surface"]
    assert round(figures["tau"][0], 2) == 0.83 and round(figures["held"], 2) == 0.89 and figures["regret"] == 0


def test_runs_of_another_budget_are_no_rows(tmp_path, monkeypatch):
    surface = runpy.run_path(str(ROOT / "experiments" / "surface.py"))
    (tmp_path / "runs").mkdir()
    probe = {"kind": "probe"} | {name: {"median": [2.0]} for name in surface["PROBED"]}
    keys = {"total_epochs": 5.0} | {f"model.{axis}": 2 for axis in surface["AXES"]}

    def run(params):
        summary = {"params": params, "final": {"top1": 0.5, "loss": 1.0}}
        return SimpleNamespace(keys=keys, seed=0, summary=summary, cost=lambda _: params, records=[probe, probe])

    found = SimpleNamespace(runs=[run(params) for params in (940, 950, 1000, 1001, 2690)])
    monkeypatch.setattr(surface["read"].__globals__["runs"], "read", lambda _: found)
    assert [(row["budget"], row["params"]) for row in surface["read"](tmp_path, [1000])] == [(1000, 950), (1000, 1000)]
    assert [row["budget"] for row in surface["read"](tmp_path, [1000, 2700])] == [1000, 1000, 2700]


@pytest.fixture
def surface(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "experiments"))
    found = runpy.run_path(str(ROOT / "experiments" / "surface.py"))
    return SimpleNamespace(
        **found, changed=lambda name, value: monkeypatch.setitem(found["main"].__globals__, name, value)
    )


def test_seconds_without_what_a_round_was_slower(surface):
    """Three shapes of 1, 2 and 4 s, in rounds up to nine times as slow, one step of one shape disturbed."""
    slower = [1.0, 9.0, 1.5, 3.0, 1.0, 2.0, 1.0, 1.2]
    turns = {1.0: 0, 2.0: 0, 4.0: 0}

    class Made:
        def __init__(self, own):
            self.own = own

        def seconds(self):
            turn = turns[self.own]
            turns[self.own] += 1
            return self.own * slower[turn] * (30 if (self.own, turn) == (2.0, 4) else 1)

    surface.changed("Stepper", Made)
    surface.changed("shapes", SimpleNamespace(built=lambda c, shape, examples: float(shape[0])))
    found = surface.measure(SimpleNamespace(batch_size=8), [(1,), (2,), (4,)], 8)
    assert set(turns.values()) == {8}
    for even, odd in found.values():
        assert even == pytest.approx(odd)
    values = [even for even, _ in found.values()]
    assert values[1] / values[0] == pytest.approx(2) and values[2] / values[1] == pytest.approx(2)


def test_equal_seconds_are_a_row_where_they_were_measured(surface, tmp_path, capsys):
    """Errors made of heads and depth alone, and seconds that depth costs and heads do not."""
    surface.changed("DRAWS", 100)
    rng, rows = np.random.default_rng(0), []
    for depth, heads, width in [(d, n, h) for d in (1, 2, 4) for n in (2, 4, 8) for h in (4, 8)]:
        params = int(1e5 * (1 + 0.04 * rng.random()))
        error = 0.3 * 0.9 ** np.log2(heads) * 0.95 ** np.log2(depth)
        row = {
            "budget": 1e5,
            "seed": 0,
            "epochs": 5.0,
            "depth": depth,
            "width": 96,
            "num_heads": heads,
            "head_dim": width,
        }
        row |= {"mlp_dim": 64, "params": params, "forward_flops": 30 * params, "top1": 1 - error, "loss": error}
        rows += [row, row | {"seed": 1}]
    assert all("step_s" not in row for row in surface.timed(rows, tmp_path, None, 0))
    surface.changed("measure", lambda c, chosen, rounds: {s: (0.01 * s[0], 0.0102 * s[0]) for s in chosen})
    found = surface.timed(rows, tmp_path, None, 4)
    assert found[0]["step_s"] == pytest.approx(0.01 * 1.02**0.5) and surface.timed(found, tmp_path, None, 0) == found
    surface.report(found)
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    told = {line[2]: line for line in lines if line[:2] == ["100,000", "top1"]}
    assert told.keys() == {"params", "forward_flops", "step_s"}
    assert told["params"][3] == "-5.0" and told["params"][6] == "-10.0"
    lean = surface.effects(found, "params", "top1")["heads for layers"]
    assert lean == pytest.approx([100 * (0.9 / 0.95 - 1)] * 3, abs=0.01)
    # At equal seconds depth is what they buy: the two cannot be told apart, heads can.
    assert surface.effects(found, "step_s", "top1")["num_heads"][0] == pytest.approx(-10, abs=0.1)
    assert mentions(surface.agreement(tmp_path / "seconds.csv"), 2.0)


@pytest.mark.slow
def test_seconds_of_real_steps(surface):
    c = config.load("quickstart")
    c.batch_size = 16
    found = surface.measure(c, [(1, 16, 2, 4, 16), (4, 64, 4, 16, 128)], 4)
    small, large = (sum(pair) for pair in found.values())
    assert 0 < small < large


SMALL = """from leanformer import config


def get_config():
    c = config.load("cifar10")
    c.update(batch_size=8, dtype="float32")
    c.model.update(width=32, depth=2, mlp_dim=64)
    c.eval.batch_size = 8
    c.data.workers = 0
    return c
"""


@pytest.mark.slow
def test_the_surface_of_cifar10_by_its_command(tmp_path):
    """The words of the docstring, on a folder of pictures of CIFAR's kind; sizes that a CPU has in a minute."""
    rng = np.random.default_rng(0)
    for split, number in (("train", 4), ("test", 2)):
        for label in ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"):
            (tmp_path / "cifar" / split / label).mkdir(parents=True)
            for i in range(number):
                pixels = rng.integers(0, 256, (32, 32, 3), np.uint8)
                Image.fromarray(pixels).save(tmp_path / "cifar" / split / label / f"{i}.png")
    (tmp_path / "small.py").write_text(SMALL)
    said = (ROOT / "configs" / "cifar10.py").read_text()
    command = next(line.split() for line in said.splitlines() if "experiments/surface.py" in line)
    folder = next(word for word in said.split() if word.startswith("--set=data.name=folder:"))
    given = {
        "--config": tmp_path / "small.py",
        "--budgets": "3e4",
        "--epochs": 1,
        "--seconds": 2,
        "--out": tmp_path / "out",
    }
    words = [f"{name}={given.pop(name)}" for name, _, _ in (word.partition("=") for word in command[2:])]
    assert command[:2] == ["python", "experiments/surface.py"] and not given
    words += [folder.replace("FOLDER", str(tmp_path / "cifar")), "--shapes=3", "--seeds=1"]
    status, out, err = run([sys.executable, *command[1:2], *words], timeout=500)
    assert status == 0, err
    assert mentions(out, "params", "forward_flops", "step_s")
    with (tmp_path / "out" / "surface.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 3 and all(float(row["step_s"]) > 0 and 28_500 <= int(row["params"]) <= 30_000 for row in rows)
