"""The regime experiment: alternatives of equal parameters, diagnostic tasks, and the printed table and sentences."""

import numpy as np
import pytest
from messages import mentions

from study.paper import regime
from study.paper.regime import Shape, TaskErrors


SHAPES = [Shape(3, 8, 8), Shape(6, 4, 4), Shape(12, 2, 2)]


def test_alternatives_have_the_same_total_widths():
    assert [str(s) for s in regime.make_alternatives(Shape(12, 64, 64))] == [
        "3x256",
        "6x128",
        "12x64",
        "24x32",
        "48x16",
    ]
    assert [str(s) for s in regime.make_alternatives(Shape(6, 4, 10))] == ["2x12/30", "3x8/20", "6x4/10", "12x2/5"]
    assert [str(s) for s in regime.make_alternatives(Shape(16, 16, 16), 48 / 1024)] == [
        "8x32",
        "16x16",
    ]  # 32x8 would be 32x1


def test_table_sentences_and_plot():
    noise = 10 ** (0.01 * np.array([-1.0, 0.1, 0.9]))
    result = TaskErrors("rank", SHAPES, np.array([0.1 * noise**2, noise, 0.9 * noise[::-1] ** 9]))
    start = [{"attention_output": 9.0 - i, "relative_attention_entropy": 0.5, "gaussian": 5.0} for i in range(3)]
    start = [row | {"largest_logit": 2.0, "bound": False, "capacity": 3.0} for row in start]
    head, rows = regime.cells(SHAPES, [result], start)
    assert len(rows) == 3 and len(head) == len(rows[0]) and mentions(" ".join(rows[0]), "3x8", 0.1, 9, 5, 3)
    first, *orders = regime.sentences(SHAPES, 1, [result], start).splitlines()
    assert "less error: 3x8 (-9" in first and "inconclusive: 12x2" in first and len(orders) == 3
    assert len(regime.draw(SHAPES, 1, [result], start).axes) == 2


def test_measures_before_training():
    measures = regime.at_start(Shape(3, 4, 4), tokens=17, width=12, seeds=2)
    assert 0 < measures["relative_attention_entropy"] <= 1 and measures["bound"] is False
    assert 1 < measures["gaussian"] < measures["attention_output"]  # averaged tokens are similar


@pytest.mark.slow
@pytest.mark.parametrize("task", ["rank", "count", "control"])
def test_every_task_can_be_trained(task, monkeypatch, tmp_path):
    monkeypatch.setattr(regime, "WIDTH", 8)
    sizes = {"width": 16, "steps": 20, "seeds": 2}
    errors = regime.trained(task, [Shape(2, 8, 8)], Shape(4, 4, 4), tmp_path, **sizes).errors
    assert np.isfinite(errors).all() and errors[0, 0] != errors[0, 1]
    monkeypatch.setattr(regime.common, "training", None)  # finished runs are not trained again
    assert (regime.trained(task, [Shape(2, 8, 8)], Shape(4, 4, 4), tmp_path, **sizes).errors == errors).all()
