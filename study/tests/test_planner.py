"""Statistics and tables of study/shapes/planner.py and study/shapes/surface.py."""

import csv
import math
import sys

import numpy as np
import pytest
from commands import ROOT, run

from study import tables
from study.shapes import planner, surface


def test_tau_counts_pairs_near_in_parameters():
    params = np.array([100.0, 105.0, 109.0, 200.0, 205.0])
    errors = np.array([5.0, 4.0, 3.0, 1.0, 2.0])
    predicted = np.array([1.0, 2.0, 2.0, 9.0, 8.0])  # one tie among three pairs, and the last pair in order
    middle, low, high = planner.tau(predicted, errors, params)
    assert middle == pytest.approx((1 + 1 + 0 + 1) / 4) and low <= middle <= high
    assert math.isnan(planner.tau(predicted[::2], errors[::2], np.array([1.0, 2.0, 4.0]))[0])


def test_regret_is_the_excess_error_of_the_recommended_shape():
    params, errors = np.array([100.0, 98.0, 95.0]), np.array([2.0, 1.0, 1.5])
    assert planner.regret(-errors, errors, params) == 0
    # at budget 100 it selects the worst of three (2 instead of 1), at 98 the better of two
    assert planner.regret(np.array([3.0, 2.0, 1.0]), errors, params) == pytest.approx(50)


def test_numbers_of_models_in_the_tables():
    published = planner.read_published()
    sizes = {name: len(models.shapes) for name, models in published.items()}
    assert sum(sizes.values()) == 1381 and sizes["GPT2_lm1b"] == 200 and sizes["BERT GLUE"] == 500
    first, scale = published["BERT GLUE"].shapes[0], published["BERT GLUE"].scale
    assert (first.heads, first.head_dim) == ((4, 2, 4, 4), (64, 128, 64, 64)) and scale.limit == 1


def test_response_surface_on_held_out_vits():
    """40 shapes in five folds."""
    (models,) = planner.read_quickstart(tables.EVIDENCE / "quickstart.csv").values()
    metrics = planner.score_predictors(models)["surface"]
    assert round(metrics["tau"][0], 2) == 0.77 and round(metrics["covered"], 2) == 0.84 and metrics["regret"] < 0.2


def make_rows(interaction=0.0):
    """Return runs whose error depends on heads and depth only, and whose step time depends on depth only."""
    rng, rows = np.random.default_rng(0), []
    for depth, heads, width in [(d, n, h) for d in (1, 2, 4) for n in (2, 4, 8) for h in (4, 8)]:
        error = 0.3 * 0.9 ** np.log2(heads) * 0.95 ** np.log2(depth) * math.exp(interaction * math.log2(depth * heads))
        error *= math.exp(interaction * np.log2(depth) * np.log2(heads) + 1e-3 * rng.normal())
        row = {"depth": depth, "width": 96, "num_heads": heads, "head_dim": width, "mlp_dim": int(rng.choice([32, 64]))}
        row |= {"params": int(1e5 * (1 + 0.04 * rng.random())), "step_s": 0.01 * depth, "budget": 1e5}
        rows += [row | {"seed": seed, "top1": 1 - error, "loss": error} for seed in (0, 1)]
    return rows


def test_effects_at_equal_cost(monkeypatch):
    monkeypatch.setattr(surface, "DRAWS", 50)
    rows = make_rows()
    result = surface.effects(rows, "params", "top1")
    assert result["num_heads"].value == pytest.approx(-10, abs=0.1)
    assert result["depth"].value == pytest.approx(-5, abs=0.1)
    assert result[surface.LEAN] == pytest.approx([100 * (0.9 / 0.95 - 1)] * 3, abs=0.2)
    assert result[surface.NARROW].value == pytest.approx(-10, abs=0.2)
    assert surface.effects(rows, "step_s", "top1")["num_heads"].value == pytest.approx(-10, abs=0.1)


def test_effects_with_other_sizes_held_and_the_form(monkeypatch, capsys):
    monkeypatch.setattr(surface, "DRAWS", 50)
    rows = make_rows()
    sizes = surface.effects_at_equal_sizes(rows)
    assert sizes["num_heads"].value == pytest.approx(-10, abs=0.2) and sizes["mlp_dim"].low < 0 < sizes["mlp_dim"].high
    fixed = "2 to 16 heads of fixed dimension"
    assert sizes[fixed].value == pytest.approx(100 * (0.9**3 - 1), abs=0.3)
    assert surface.explained(rows, None) > 0.99 and surface.test_form(rows) > 0.05
    assert surface.test_form(make_rows(interaction=0.05), [("depth", "num_heads")]) < 1e-6
    lean, margin, verdict = surface.equivalence(rows)
    assert lean.high < -margin and verdict == "inconclusive"
    surface.report(rows)
    few = [row for row in rows if row["depth"] < 4 and row["num_heads"] < 8]  # fewer shapes than terms
    surface.report(few)
    assert "too few" in capsys.readouterr().out and math.isnan(surface.test_form(few))


SMALL = """from leanformer import config


def get_config():
    c = config.load("quickstart")
    c.update(batch_size=100, total_epochs=0.0, total_steps=2)
    c.model.update(width=32, depth=2, mlp_dim=64)
    c.optim.warmup_epochs = 0.0
    c.eval.examples = 100
    return c
"""


@pytest.mark.slow
def test_surface_command(tmp_path):
    (tmp_path / "small.py").write_text(SMALL)
    words = [f"--config={tmp_path / 'small.py'}", f"--out={tmp_path}", "--budgets=3e4", "--shapes=3", "--seeds=1"]
    words += ["--set=total_epochs=0.0", "--set=optim.warmup_epochs=0.0"]
    status, _, err = run([sys.executable, "-m", "study.shapes.surface", *words], timeout=500)
    assert status == 0, err
    with (tmp_path / "surface.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 3 and all(28_500 <= int(row["params"]) <= 30_000 for row in rows)
    assert (ROOT / "configs" / "cifar10.py").read_text().count("python -m study.shapes.surface") == 1
