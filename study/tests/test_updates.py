"""Updates in public tables, reruns by strangers, and readings after the fact: against independent calculations."""

import csv
import statistics as plain

import numpy as np
import pytest
from commands import ROOT
from scipy import stats

from study.heads import afterwards, verdicts
from study.published import reruns, updates


EVIDENCE = ROOT / "study" / "data"


def read(name):
    with (EVIDENCE / f"{name}.csv").open() as file:
        return [*csv.DictReader(file)]


def test_updates_are_tokens_over_tokens_of_a_batch():
    """A model file of the source has these tokens and a batch of 64 sequences, the grid 8: per GPU, on 8 GPUs."""
    (row,) = {
        (r["tokens"], r["batch"], r["updates"]) for r in read("openlm_grid") if (r["width"], r["depth"]) == ("96", "8")
    }
    assert row == ("211386240", "8", str(round(211_386_240 / (64 * 2048))))
    for row in read("openlm_grid"):
        assert int(row["updates"]) == round(int(row["tokens"]) / (8 * int(row["batch"]) * 2048))
    found = {row["set"]: row["updates"] for row in read("language_models")}
    assert found["random_TransXL_lm1b"] == "100000" and found["random_GPT2_wt103"] == ""


def test_effect_of_updates():
    """By least squares with an intercept per step of the head dimension, and without each cell."""
    pairs, cells = updates.narrow_pairs(), updates.read_cells()
    steps = sorted({(pair.before, pair.after) for pair in pairs})
    where = [(pair.width, pair.depth) for pair in pairs]
    counts = np.log2([cells[cell].updates for cell in where])
    design = np.column_stack([counts, np.log2([pair.depth for pair in pairs])])
    design = np.column_stack([design, [[(p.before, p.after) == s for s in steps] for p in pairs]]).astype(float)
    change = np.array([pair.change for pair in pairs])
    found = updates.fit(pairs, "depth")
    assert found["updates"].value == pytest.approx(np.linalg.lstsq(design, change, rcond=None)[0][0])
    clusters = sorted(set(where))
    rest = [
        np.linalg.lstsq(design[keep], change[keep], rcond=None)[0][0]
        for keep in ([w != cell for w in where] for cell in clusters)
    ]
    error = np.sqrt((len(clusters) - 1) / len(clusters) * np.square(np.array(rest) - found["updates"].value).sum())
    half = found["updates"].high - found["updates"].value
    assert half == pytest.approx(error * stats.t.ppf(0.975, len(clusters) - 1))


def test_reruns():
    changes = [float(row["bpb_64"]) - float(row["bpb_128"]) for row in read("autoresearch")]
    found = reruns.heads()
    assert (found["runs"], found["worse"]) == (22, sum(x > 0 for x in changes)) and min(changes) > 0
    assert found["median"] == pytest.approx(plain.median(changes))
    printed = [float(row["difference"]) for row in read("autoresearch")]
    assert changes == pytest.approx(printed, abs=1.01e-4)
    plain_setting = reruns.depth()["2_epochs", "learned", "false", "true", "false"]
    rows = [
        r
        for r in read("depth_width")
        if tuple(r[n] for n in ("table", *reruns.SETTING)) == ("2_epochs", "learned", "false", "true", "false")
    ]
    means = [
        plain.mean(float(r["val_loss_last"]) for r in rows if (int(r["depth"]), int(r["width"])) == shape)
        for shape in (reruns.DEEP, reruns.WIDE)
    ]
    assert plain_setting.value == pytest.approx(means[0] - means[1])


def test_first_step_is_between_logged_steps():
    curve = {100: 5.0, 200: 4.0, 300: 2.0}
    assert afterwards.first_step(curve, 3.0) == 250 and afterwards.first_step(curve, 4.5) == 150
    assert np.isnan(afterwards.first_step(curve, 1.0))


def test_pooled_error_agrees_with_a_two_way_layout():
    """Of two arms it is the paired one."""
    table = {1: np.array([1.0, 2.0, 4.0]), 2: np.array([1.5, 2.2, 5.0])}
    pooled, paired = afterwards.pool(table)[1, 2], verdicts.change(table, 1, 2)
    assert (pooled.value, pooled.error, pooled.df) == pytest.approx((paired.value, paired.error, paired.df))


def test_changes_after_long_training_are_inside_the_margin_of_the_plan():
    assert all(inside for _, inside in afterwards.per_doubling().values())
