"""Mediation verdicts on simulated conditions of known effect, and the committed record."""

import json
import runpy

import numpy as np
import pytest
from commands import ROOT
from messages import refuses

from experiments import mediation_report as reports
from experiments import mediation_verdict as mediation
from experiments.mediation_verdict import Arm


MATCHED = {"lever": "matched"}
SEEDS = 6


def arms(rng, *, heads=3.0, heads_kappa=-1.0, lever=0.0, lever_kappa=-0.9, control=0.0, control_kappa=0.0, spread=0.1):
    """Return conditions around a score of 80 and log10 κ of 4, whose seeds share most of their noise."""
    seeds = rng.normal(0, 1, SEEDS)

    def arm(score, kappa):
        return Arm(80 + seeds + score + rng.normal(0, spread, SEEDS), 4 + kappa + rng.normal(0, spread / 5, SEEDS))

    return {
        ("base", "few"): arm(0, 0),
        ("base", "many"): arm(heads, heads_kappa),
        ("orthogonal", "few"): arm(control, control_kappa),
        ("matched", "few"): arm(1.0, -0.5),
        ("lever", "few"): arm(1.0 + lever, -0.5 + lever_kappa),
    }


CASES = {  # by the word of the verdict, a value of the program
    "carries": {"lever": 2.8},
    "does not carry": {"lever": 0.2},
    "undecided": {"lever": 1.5, "spread": 0.6},
    "withdrawn": {"lever": 2.8, "control": 1.0},
    "nothing to carry": {"heads": 0.0},
    "not moved by heads": {"heads_kappa": 0.5},  # data
    "untestable": {"lever": 2.8, "lever_kappa": -0.1},
}


@pytest.mark.parametrize("word", CASES)
def test_the_verdict_on_known_effects(word, rng):
    found = [mediation.verdict(arms(rng, **CASES[word]), MATCHED) for _ in range(40)]
    right = sum(v.word == word for v in found)
    assert right >= (24 if word == "undecided" else 34), [v.word for v in found]  # the control fails by chance in 5 %
    shown = next(v for v in found if v.word == word)
    assert shown.sentence and shown.effects
    assert set(CASES) == set(mediation.WORDS)


def test_a_control_that_moves_conditioning_withdraws_it(rng):
    assert mediation.verdict(arms(rng, lever=2.8, control_kappa=-0.5), MATCHED).word == "withdrawn"


def test_untestable_names_the_levers_with_their_effects(rng):
    found = [mediation.verdict(arms(rng, lever_kappa=-0.1), MATCHED) for _ in range(5)]
    sentence = next(v.sentence for v in found if v.word == "untestable")
    assert "lever: +" in sentence


def test_arms_need_the_same_seeds(rng):
    found = arms(rng)
    found["lever", "few"] = Arm(np.ones(4), np.ones(4))
    with refuses("[4, 6]"):
        mediation.verdict(found, MATCHED)


@pytest.fixture(scope="module")
def benchmark():
    return runpy.run_path(str(ROOT / "experiments" / "mediation.py"))


def test_rates_are_chosen_by_the_other_seeds():
    """The seed that a rate suits by luck does not choose it for itself."""
    scores = {0.1: [0.5, 0.5, 0.9], 0.2: [0.6, 0.6, 0.6]}
    runs = [{"seed": s, "rate": r, "top1": v} for r, row in scores.items() for s, v in enumerate(row)]
    assert [run["rate"] for run in mediation.chosen(runs)] == [0.1, 0.1, 0.2]
    assert [run["rate"] for run in mediation.at_one_rate(runs)] == [0.1, 0.1, 0.1]


def test_only_pairs_of_one_entropy_are_tested(benchmark):
    def arm(entropy):
        return {"runs": [{"before": {"relative_attention_entropy": entropy}}]}

    names = {name for pair in benchmark["TESTED"].items() for name in pair}
    arms = {f"{name}, few": arm(0.9) for name in names} | {"sigma, few": arm(0.8)}
    assert mediation.alike(arms, benchmark["TESTED"]).keys() == benchmark["TESTED"].keys() - {"sigma"}


def test_equal_parameters(benchmark):
    """The MLP that stands for more heads: as many parameters, to half a hidden unit a layer."""
    counts = {arm: benchmark["parameters"](*arm) for arm in (("base", "few"), ("base", "many"), ("mlp", "few"))}
    assert counts["base", "few"] < counts["base", "many"]
    assert counts["mlp", "few"] == pytest.approx(counts["base", "many"], rel=2e-3)


def test_the_committed_record_has_the_verdict_that_follows_from_it(benchmark):
    path = ROOT / "experiments" / "mediation.json"
    if not path.is_file():
        pytest.skip("not run yet")
    record = json.loads(path.read_text())
    again = mediation.judge(record["arms"], benchmark["TESTED"])
    assert reports.as_numbers(again) == record["verdict"]
    shown = reports.table(record["arms"], again, benchmark["MEASURES"][2:])
    assert f"**{record['verdict']['sentence']}**" in shown and shown.count("| base, few | ") == 1
    (axes,) = reports.chart(record["arms"], again, benchmark["HEADS"]).axes
    assert [text.get_text() for text in axes.texts] == [name.partition(",")[0] for name in record["arms"]]
    assert min(len(arm["runs"]) for arm in record["arms"].values()) >= 15


@pytest.mark.slow
def test_levers_at_the_start():
    """The figures of an independent calculation: κ of attention's output, relative entropy, self-weight."""
    benchmark = runpy.run_path(str(ROOT / "experiments" / "levers.py"))
    (base, *_), (normed, entropy, *_) = benchmark["at_start"](0), benchmark["at_start"](0, qk_norm="rmsnorm")
    assert base == pytest.approx(150, rel=0.2) and normed == pytest.approx(28, rel=0.2)
    assert entropy == pytest.approx(0.91, abs=0.01)
    kappa, entropy, own, _ = benchmark["at_start"](0, spectral=2.0)
    assert kappa == pytest.approx(3.2, rel=0.1) and entropy < 1e-3 and own > 0.999
