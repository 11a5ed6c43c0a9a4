"""Small experiments: their core functions on made-up or small inputs."""

import csv

import fake_runs
import numpy as np
import pytest
from commands import ROOT
from PIL import Image

from study.figures import front_picture
from study.heads import heads, levers, listops
from study.paper import theorem
from study.shapes import coverage
from study.trained import pretraining


@pytest.mark.slow
def test_interventions_at_initialisation():
    """Values of an independent calculation: κ of the attention output, relative entropy, self-weight."""
    assert levers.measure(0)[0] == pytest.approx(150, rel=0.2)
    kappa, entropy, *_ = levers.measure(0, qk_norm="rmsnorm")
    assert kappa == pytest.approx(28, rel=0.2) and entropy == pytest.approx(0.91, abs=0.01)
    kappa, entropy, self_weight, _ = levers.measure(0, spectral=2.0)
    assert kappa == pytest.approx(3.2, rel=0.1) and entropy < 1e-3 and self_weight > 0.999


def test_heads_are_read_by_shape(tmp_path):
    fake_runs.write_sweep(tmp_path, depths=(2,), heads=(2, 4), seeds=3)
    result = heads.read(tmp_path)
    assert [*result] == [(2, 16), (4, 16)] and len(result[2, 16]["top1"]) == 3
    assert result[2, 16]["end"] == pytest.approx([np.log10(5e3)] * 3)
    heads.write(tmp_path / "heads.csv", {"fixed head dimension": [*result]}, result)
    rows = [*csv.DictReader((tmp_path / "heads.csv").read_text().splitlines())]
    assert len(rows) == 6 and {float(row["condition_end"]) for row in rows if row["num_heads"] == "2"} == {5e3}


@pytest.mark.slow  # draws every picture of the pages
def test_front_picture_is_drawn_from_committed_data(tmp_path, monkeypatch):
    monkeypatch.setattr(front_picture, "DOCS", tmp_path)
    front_picture.main()
    for path in (tmp_path / "front.png", tmp_path / "front_dark.png", ROOT / "docs" / "front.png"):
        with Image.open(path) as image:
            assert image.size == (1600, 600)


def test_heads_config_by_argument():
    c = heads.get_config("heads=2,head_dim=48,epochs=8")
    assert (c.model.num_heads, c.model.head_dim, c.total_epochs, c.optim.warmup_epochs) == (2, 48, 8, 1)


def test_differences_are_reported():
    rows = [{"size": "short", "depth": 2, "num_heads": 2, "top1": x} for x in (0.375, 0.376, 0.377)]
    rows += [{"size": "short", "depth": 1, "num_heads": 4, "top1": x} for x in (0.41, 0.42, 0.43)]
    text = "\n".join(listops.report(rows))
    assert "2x2: 37.60 %, 3 seeds" in text and "1x4 - 2x2: +4.40 (+1.95 to +6.85)" in text
    assert "Heads carry it" not in text  # without the control
    for control, carry, needless in (
        ((0.375, 0.376, 0.377), "undecided", "holds"),
        ((0.30, 0.31, 0.32), "holds", "refuted"),
        ((0.43, 0.431, 0.432), "refuted", "undecided"),
    ):
        more = [{"size": "short", "depth": 1, "num_heads": 2, "top1": x} for x in control]
        text = "\n".join(listops.report(rows + more))
        assert f"Heads carry it: {carry}" in text and f"Layers are not needed: {needless}" in text
    text = pretraining.report({"a": np.array([0.5, 0.6, 0.7]), "b": np.array([0.6, 0.6, 0.6])})
    assert "+0.00 ± 24.84" in text


@pytest.mark.slow
def test_run_of_listops_makes_its_expressions_and_a_row(tmp_path, one_device):
    row = listops.run(listops.TINY, 1, 2, 0, tmp_path)
    assert row.keys() == set(listops.FIELDS) and 0 <= float(row["top1"]) <= 1


def test_coverage_of_a_few_draws(no_shape_checks):
    rng = np.random.default_rng(0)
    assert (
        min(coverage.interval_coverage(rng, 20, 3).values()) > 0.7
        and max(coverage.wrong_answers(rng, 10, 3).values()) < 0.5
    )
    for law in (coverage.regression_law, coverage.floor_law):
        assert 0 < law(rng)(coverage.draw_shape(rng)) < 10


@pytest.mark.slow
def test_theorem_and_equation_state_their_assumption():
    near, ample = theorem.check_theorem(49, 16, heads=(3, 64))
    assert "not met" in near.assumption and "not met" not in ample.assumption
    assert abs(near.error) > 0.2 > 0.02 > abs(ample.error) and 1 < ample.measured < 1.6
    assert all(abs(check.error) < 0.02 for check in theorem.check_equation(31, 1024))
