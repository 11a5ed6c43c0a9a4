"""Part 3 of the study: dose and response on invented runs of known slopes, and the rule's verdicts."""

import numpy as np
import pytest
from messages import refuses

from study.heads import causes


DOSES = {"4 heads": -1.0, "8 heads": -2.0} | {
    name: -0.5 * (i % 5) for i, name in enumerate(causes.INTERVENTIONS)
}  # changes of log10 κ


def make_rows(heads, interventions, noise=1e-3):
    """Return rows whose top-1 changes by `heads` or `interventions` points per unit of log10 κ."""
    rng = np.random.default_rng(0)
    rows = []
    for name in causes.CONDITIONS:
        dose = DOSES.get(name, 0.0)
        gain = dose * (heads if name in causes.HEADS else interventions)
        for lr in causes.RATES:
            for seed in causes.SEEDS:
                top1 = 0.5 + 10 * lr + 0.001 * (seed - 100) + 0.01 * gain + noise * rng.normal()
                about = {"block": name, "lr": lr, "seed": seed, "bounds": 0.0}
                rows.append(about | {"top1": top1, "log10_condition": 5.0 + dose + 0.01 * rng.normal()})
    return rows


@pytest.mark.parametrize(
    ("heads", "interventions", "noise", "word"),
    [
        (-1.0, -0.9, 1e-3, "holds"),
        (-1.0, -2.5, 1e-3, "undecided"),  # steeper than twice the line of heads
        (-1.0, 0.0, 1e-3, "refuted"),
        (-1.0, 0.8, 1e-3, "refuted"),
        (1.0, 0.0, 1e-3, "refuted"),
        (0.0, -0.9, 1e-3, "undecided"),  # nothing to explain
        (-5.0, -2.3, 2e-2, "undecided"),  # as far as the scatter tells
    ],
)
def test_interventions_lie_on_the_line_of_heads(heads, interventions, noise, word):
    rows = make_rows(heads, interventions, noise)
    slopes = causes.find_slopes(causes.compare(rows))
    assert slopes.heads.value == pytest.approx(heads, abs=50 * noise)
    assert slopes.interventions.value == pytest.approx(interventions, abs=50 * noise)
    assert causes.decide(slopes) == word and word in [*causes.report(rows)][-1]


def test_a_slope_that_rests_on_one_condition_shows():
    rows = make_rows(-1.0, 0.0)
    for row in rows:
        if row["block"] == "graying 0.25":  # a dose of -1
            row["top1"] -= 0.2
    slopes = causes.without_each(causes.compare(rows))
    assert slopes["graying 0.25"] == pytest.approx(0, abs=0.05) and slopes["QK-norm"] > 1


def test_an_incomplete_condition_is_in_no_slope():
    rows = make_rows(-1.0, -1.0)[:-1]
    effects = causes.compare(rows)
    assert len(effects) == len(causes.CONDITIONS) - 2
    assert causes.find_slopes(effects) is None and causes.decide(None) == "not run"
    assert any("29 of 30 runs" in line for line in causes.report(rows))
    assert not causes.compare(rows[1:])  # the base


def test_conditions_differ_from_the_base_in_the_model_only():
    base = causes.get_config(causes.BASE, 1e-3, 100)
    for name, keys in causes.CONDITIONS.items():
        c = causes.get_config(name, 1e-3, 100)
        expected = base.to_dict()
        expected["model"].update(keys)
        assert c.to_dict() == expected
    assert causes.get_config(causes.BASE, 3e-3, 101).optim.lr == 3e-3 and base.model.num_heads == 2


@pytest.mark.slow  # trains
def test_runs_of_a_condition_resume(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(causes, "RATES", (1e-3, 3e-3))
    monkeypatch.setattr(causes, "SEEDS", (100,))
    original = causes.get_config

    def shorten(*about):
        c = original(*about).unlock()
        c.update(total_steps=2, batch_size=8)
        c.optim.warmup_steps = 1
        c.eval.update(examples=8, batch_size=8)
        return c.lock()

    monkeypatch.setattr(causes, "get_config", shorten)
    rows = causes.run("QK-norm", tmp_path)
    capfd.readouterr()
    assert [(row["block"], row["lr"], row["seed"]) for row in rows] == [("QK-norm", 1e-3, 100), ("QK-norm", 3e-3, 100)]
    assert set(rows[0]) == set(causes.FIELDS) and 0 <= float(rows[0]["bounds"]) <= 1
    again = causes.run("QK-norm", tmp_path)
    assert not capfd.readouterr().err
    assert [row["top1"] for row in again] == [row["top1"] for row in rows]
    monkeypatch.setitem(causes.CONDITIONS, "QK-norm", {"qk_norm": "layernorm"})
    with refuses("finished run with model.qk_norm=rmsnorm, now layernorm"):
        causes.run("QK-norm", tmp_path)
