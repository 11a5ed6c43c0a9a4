"""Mediation verdicts on simulated conditions of known effect, the committed record, and the conditions' configs."""

import fake_runs
import numpy as np
import pytest
from messages import refuses

from study import tables
from study.heads import mediation
from study.heads.mediation import Condition
from study.paper.paper_tables import params


MATCHED, SEEDS = {"lever": "matched"}, 6


def make_conditions(
    rng, *, heads=3.0, heads_kappa=-1.0, lever=0.0, lever_kappa=-0.9, control=0.0, control_kappa=0.0, spread=0.1
):
    """Return conditions around a score of 80 and log10 κ of 4, whose seeds share most of their noise."""
    seeds = rng.normal(0, 1, SEEDS)

    def make(score, kappa):
        return Condition(
            80 + seeds + score + rng.normal(0, spread, SEEDS), 4 + kappa + rng.normal(0, spread / 5, SEEDS)
        )

    return {
        ("base", "few"): make(0, 0),
        ("base", "many"): make(heads, heads_kappa),
        ("orthogonal", "few"): make(control, control_kappa),
        ("matched", "few"): make(1.0, -0.5),
        ("lever", "few"): make(1.0 + lever, -0.5 + lever_kappa),
    }


CASES = {  # effects, by the expected word of the verdict
    "carries": {"lever": 2.8},
    "does not carry": {"lever": 0.2},
    "undecided": {"lever": 1.5, "spread": 0.6},
    "withdrawn": {"lever": 2.8, "control": 1.0},
    "nothing to carry": {"heads": 0.0},
    "not moved by heads": {"heads_kappa": 0.5},  # data
    "untestable": {"lever": 2.8, "lever_kappa": -0.1},
}


@pytest.mark.parametrize("word", CASES)
def test_verdict_on_simulated_effects(word, rng):
    words = [mediation.verdict(make_conditions(rng, **CASES[word]), MATCHED).word for _ in range(40)]
    assert words.count(word) >= (24 if word == "undecided" else 34), words  # 5 % of controls fail by chance
    assert set(CASES) == set(mediation.WORDS)


def test_conditions_need_the_same_seeds(rng):
    with refuses("[4, 6]"):
        mediation.verdict(make_conditions(rng) | {("lever", "few"): Condition(np.ones(4), np.ones(4))}, MATCHED)


def test_learning_rate_is_selected_by_the_other_seeds():
    scores = {0.1: [0.5, 0.5, 0.9], 0.2: [0.6, 0.6, 0.6]}
    runs = [{"seed": s, "rate": r, "top1": v} for r, row in scores.items() for s, v in enumerate(row)]
    assert [run["rate"] for run in mediation.select_by_other_seeds(runs)] == [0.1, 0.1, 0.2]
    assert [run["rate"] for run in mediation.select_at_one_rate(runs)] == [0.1, 0.1, 0.1]


def test_verdict_of_the_committed_record_is_reproduced():
    records = mediation.read_table(tables.EVIDENCE / "mediation.csv")
    result = mediation.report(records)
    other = mediation.judge(records, mediation.TESTED, mediation.select_at_one_rate)
    assert (result.word, other.word) == ("nothing to carry", "does not carry")
    heads = [verdict.effects["heads, score"].value for verdict in (result, other)]
    assert heads == pytest.approx([1.955, 3.07], abs=1e-3)
    assert mediation.table(records, result).count("| base, few | ") == 1
    assert len(mediation.chart(records, result).axes[0].texts) == len(records)


def test_gains_at_each_learning_rate_and_of_the_first_seeds(tmp_path):
    records = mediation.read_table(tables.EVIDENCE / "mediation.csv")
    gains = mediation.gains_by_rate(records)
    assert gains["mean"].value == pytest.approx(np.mean([gain.value for rate, gain in gains.items() if rate != "mean"]))
    mediation.write_table(tmp_path / "mediation.csv", records)
    assert mediation.read_table(tmp_path / "mediation.csv") == records


def test_configs_and_records(tmp_path):
    keys = (("base", "few"), ("base", "many"), mediation.MLP)
    few, many, mlp = (mediation.get_config(f"lever={lever},heads={n}") for lever, n in keys)
    assert params(few) < params(many) == pytest.approx(params(mlp), rel=2e-3)
    assert mediation.get_config("lever=svd,scale=2").model.logit_scale == 0.5
    folder = tmp_path / "mediation,lever=svd,heads=few,scale=2.0,lr=1e-3,seed=1"
    fake_runs.write_run(folder, 0.7, seed=1)
    more = '"largest_logit": {"median": [3]}, "self_weight": {"median": [1]}, "relative_attention_entropy": '
    text = (folder / "metrics.jsonl").read_text()
    text = text.replace('"attention_output":', more + '{"median": [0.5, 0.7]}, "attention_output":')
    (folder / "metrics.jsonl").write_text(text)
    ((name, record),) = mediation.read(tmp_path).items()
    (run,) = record["runs"]
    assert name == "as svd, few" and (run["seed"], run["rate"], run["top1"]) == (1, 1e-3, 0.7)
    assert run["after"][mediation.KAPPA] == 2 and run["before"][mediation.ENTROPY] == pytest.approx(0.6)


def test_entropy_falls_with_the_scale_of_the_logits():
    low, high = (mediation.entropy_at_start(f"scale={scale}", 1) for scale in (1, 30))
    assert 0 < high < low <= 1
