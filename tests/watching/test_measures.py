"""Statistics over many examples in bounded memory, and bounds."""

import json

import numpy as np
import pytest
from messages import mentions

from leanformer import conditioning
from leanformer.watching.measures import CAPACITY, FIELDS, Layer, _interval, pack, reduce
from leanformer.watching.results import judge


def test_memory_does_not_grow_and_the_last_examples_count():
    """20 times the capacity: quantiles of the last, counts of all."""
    rng, layer = np.random.default_rng(0), Layer("attention", ("attention_entropy",))
    for call in range(20):
        values = rng.uniform(size=CAPACITY) + call
        values[:7] = np.nan
        reading = conditioning.Reading(np.nan_to_num(values), np.isfinite(values))
        layer.add({"attention_entropy": pack(reading)})
        layer.calls += 1
    (row,) = layer.rows()
    assert row["examples"] == 20 * CAPACITY and row["not_finite"] == 140
    assert row["median"] == pytest.approx(19.5, abs=0.05) and row["interval"][0] < row["median"] < row["interval"][1]
    assert layer.total["attention_entropy"].values.nbytes == CAPACITY * len(FIELDS) * 4


def test_interval_covers_the_median():
    """In 95 % of samples or more, of few and many examples; there is none for fewer than six."""
    rng = np.random.default_rng(0)
    for count in (6, 8, 30):
        samples = np.exp(rng.standard_normal((400, count, 1)))
        covered = [low <= 1 <= high for low, high in map(_interval, samples)]
        assert 0.93 < np.mean(covered) <= 1
    assert _interval(np.ones((5, 1))) is None


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_bounds_lie_below_the_truth(dtype):
    """For matrices of known condition number, rounded to a narrow type."""
    import ml_dtypes

    rng, narrow = np.random.default_rng(0), getattr(ml_dtypes, dtype, None) or np.dtype(dtype)
    for true in (3, 30, 300, 3e3, 3e4):
        u, v = (np.linalg.qr(rng.standard_normal((n, 24)))[0] for n in (60, 24))
        x = ((u * np.geomspace(1, 1 / true, 24)) @ v.T).astype(narrow)
        layer = Layer("attention", ("attention_output",))
        layer.add(reduce({"out": np.stack([x[:, None]] * 6)}, None, ("attention_output",)))
        row, summary = layer.total["attention_output"].describe(None), conditioning.condition(x)
        assert row["median"] == pytest.approx(float(summary.condition_number)) and summary.valid == (not row["bounds"])
        assert row["median"] <= 1.1 * true and (row["bounds"] or row["median"] == pytest.approx(true, rel=0.1))
    assert (row["bounds"], row["interval"]) == (["q10", "median", "q90"], None)


def judged(names, kappa, reference=None, heads=()):
    """Return the verdict on layers with given condition numbers of 20 x 8 matrices, and ranks of heads."""
    shape = {"shape": [20, 8], "bounds": [], "gaussian": {"median": 2.0}, "measure": "attention_output", "head": None}
    shape["calls"] = 1
    rows = [shape | {"layer": n, "median": k, "effective_rank": 4.0} for n, k in zip(names, kappa, strict=True)]
    for row, other in zip(rows, reference or [], strict=False):
        row["reference"] = {"median": other, "effective_rank": 4.0, "bounds": ["median"] if other == 3.0 else []}
    of_heads = shape | {"measure": "head_output", "layer": names[0], "median": 3.0}
    return judge([*rows, *(of_heads | {"head": i, "effective_rank": rank} for i, rank in enumerate(heads))])


def test_verdict_names_layers_and_its_references():
    verdict = judged("abcd", [4.0, 200.0, 1.7e6, 6.0], [8.0, 20.0, 1.7e6, 3.0], heads=(2.0, 6.0, 4.0))
    assert [x["layer"] for x in verdict["worst"]] == ["c", "b", "d"] and verdict["worst"][1]["times_gaussian"] == 100
    assert verdict["singular"] == 1 and verdict["median_times_gaussian"] == pytest.approx((3 + 100) / 2)
    assert (verdict["change"]["higher"], verdict["change"]["lower"]) == (1, 1)
    assert verdict["change"]["most"]["layer"] == "b" and verdict["change"]["most"]["times"] == 10
    assert verdict["heads"] == {"median": 0.5, "lowest": 0.25, "highest": 0.75}
    assert json.loads(json.dumps(verdict))["layers"] == 4
    assert mentions(str(verdict), "c, 1.7e+06", "20 to 200", "50%", "25%", "float32")
    assert len(str(judged("a", [4.0])).split(". ")) == 1 and judge([])["sentences"]


@pytest.mark.parametrize(("bound", "at_least"), [(4.0, False), (3.0, True), (2.0, True)])
def test_median_over_layers_is_a_bound_if_bounds_are_not_above_it(bound, at_least):
    shape = {"measure": "tokens", "head": None, "calls": 1, "gaussian": {"median": 1.0}, "layer": "a"}
    rows = [shape | {"median": x, "bounds": ["median"] * (x == bound)} for x in (1.0, 2.0, 3.0, 4.0)]
    verdict = judge(rows)
    assert verdict["median_at_least"] == at_least and ("at least 2.5" in verdict["sentences"][0]) == at_least
