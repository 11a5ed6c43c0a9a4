"""The figures that predictors are judged by, against what they say."""

import math
import runpy
from types import SimpleNamespace

import numpy as np
import pytest
from commands import ROOT


@pytest.fixture(scope="module")
def planner():
    return runpy.run_path(str(ROOT / "benchmarks" / "planner.py"))


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
    sizes = {name: len(shapes) for name, (shapes, _) in tables.items()}
    assert sum(sizes.values()) == 1381 and sizes["GPT2_lm1b"] == 200 and sizes["BERT GLUE"] == 500
    shape = tables["BERT GLUE"][0][0]
    assert (shape.depth, shape.heads, shape.head_dim, shape.mlp) == (
        4,
        (4, 2, 4, 4),
        (64, 128, 64, 64),
        (3072, 1536, 1536, 1024),
    )


def test_a_table_that_is_not_made_yet_is_left_out_and_told(planner, tmp_path, capsys):
    for name in ("language_models.csv", "bert.csv"):
        (tmp_path / name).symlink_to(planner["EVIDENCE"] / name)
    known = planner["committed"](tmp_path)
    assert known and "ViT quickstart" not in known and "No " in (said := capsys.readouterr().err) and "left out" in said
    (tmp_path / "quickstart.csv").write_text("\n".join([COLUMNS, *RUNS]) + "\n")
    assert planner["committed"](tmp_path).keys() - known.keys() == {"ViT quickstart"} and not capsys.readouterr().err


COLUMNS = "budget,seed,epochs,depth,width,num_heads,head_dim,mlp_dim,params,forward_flops,top1,loss"
RUNS = [
    "1000,0,5,2,96,4,16,72,997,88000,0.75,0.7",
    "1000,1,5,2,96,4,16,72,997,88000,0.5,0.9",
    "1000,0,5,1,96,2,8,80,990,70000,0.25,1",
]


def test_the_table_of_the_surface_is_read_back(planner, tmp_path):
    path = tmp_path / "quickstart.csv"
    path.write_text("\n".join([COLUMNS, *RUNS]) + "\n")
    [(shapes, errors)] = planner["quickstart"](path).values()
    assert errors == [[0.25, 0.5], [0.75]] and [s.heads for s in shapes] == [(4, 4), (2,)] and shapes[0].params == 997
    surface = runpy.run_path(str(ROOT / "benchmarks" / "surface.py"))
    rows = surface["read_known"](path, 5.0)
    surface["write"](tmp_path / "again.csv", rows)
    assert (tmp_path / "again.csv").read_text().replace("1.0\n", "1\n") == path.read_text()
    assert surface["joined"](rows[:2], rows[1:]) == rows
    with pytest.raises(SystemExit, match="has runs of 5 epochs, and --epochs=4. Take the same."):
        surface["read_known"](path, 4.0)


def test_runs_of_another_budget_are_no_rows(tmp_path, monkeypatch):
    surface = runpy.run_path(str(ROOT / "benchmarks" / "surface.py"))
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
