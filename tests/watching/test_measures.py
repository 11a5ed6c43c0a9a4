"""Statistics over many examples in bounded memory, and bounds."""

import jax
import numpy as np
import pytest
from messages import mentions

from leanformer import conditioning
from leanformer.watching.measures import CAPACITY, Layer, bound_unresolved, reduce, unit_roundoff


def test_memory_does_not_grow_and_quantiles_stay():
    """A uniform sample of 20 times the capacity: quantiles to 5 %, exact counts."""
    rng, layer = np.random.default_rng(0), Layer("attention", ("attention_entropy",))
    total = 20 * CAPACITY
    for _ in range(20):
        values = rng.uniform(size=CAPACITY).astype(np.float32)
        values[:7] = np.nan
        reading = conditioning.Reading(np.nan_to_num(values), np.isfinite(values))
        layer.add({"attention_entropy": reading}, np.full(CAPACITY, 5), {})
        layer.calls += 1
    (row,) = layer.rows()
    assert row["examples"] == total and row["not_finite"] == 140
    assert all(row[name] == pytest.approx(q, abs=0.05) for name, q in {"q10": 0.1, "median": 0.5, "q90": 0.9}.items())
    assert layer.total["attention_entropy"].sample.values.shape == (CAPACITY, 1, 5)


def test_rows_of_padding_do_not_count():
    x = np.random.default_rng(0).standard_normal((3, 12, 2, 4)).astype(np.float32)
    valid = np.arange(12)[None] < np.array([12, 5, 1])[:, None]
    padded = jax.device_get(reduce({"out": x}, valid, ("attention_output", "head_output")))
    for i, rows in enumerate((12, 5, 1)):
        alone = conditioning.condition(x[i, :rows].reshape(rows, -1)[None])
        for field in ("condition_number", "effective_rank", "stable_rank", "negligible"):
            ours = getattr(padded["attention_output"], field)[i]
            np.testing.assert_allclose(ours, getattr(alone, field)[0], rtol=1e-5)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_bounds_lie_below_the_truth(dtype):
    """For matrices of known condition number, rounded to a narrow type."""
    import ml_dtypes

    rng, narrow = np.random.default_rng(0), getattr(ml_dtypes, dtype, None) or np.dtype(dtype)
    for true in (3, 30, 300, 3e3, 3e4):
        u, v = (np.linalg.qr(rng.standard_normal((n, 24)))[0] for n in (60, 24))
        x = ((u * np.geomspace(1, 1 / true, 24)) @ v.T).astype(narrow).astype(np.float32)
        summary = jax.device_get(reduce({"out": x[None, :, None]}, None, ("attention_output",)))["attention_output"]
        value, bound = bound_unresolved(summary, np.array([60]), unit_roundoff(dtype))
        assert value[0] <= 1.1 * true and (bound[0] or value[0] == pytest.approx(true, rel=0.1))
    assert bound[0]


def test_roundoff():
    assert [unit_roundoff(name) for name in ("float64", "float32", "bfloat16", "torch.float16")] == [
        0,
        0,
        2**-8,
        2**-11,
    ]


def test_status_says_why_a_measure_is_missing():
    every = ("attention_output", "tokens", "largest_logit", "attention_probabilities")
    x = np.random.default_rng(0).standard_normal((2, 7, 2, 3)).astype(np.float32)
    padding = np.arange(7)[None] < np.array([7, 5])[:, None]
    for names, arrays, valid, reason in (
        (every, {"out": x}, None, "largest_logit, attention_probabilities not"),
        (every, {"out": x, "q": x, "k": x}, padding, "attention_probabilities not measured: only"),
        (every[::3], {"out": x, "q": x, "k": x}, padding, "or there is padding"),
        (every[::3], {"out": x}, None, "queries and keys"),
    ):
        layer = Layer("attention", names)
        layer.add(jax.device_get(reduce(arrays, valid, names)), np.array([7, 5]), {})
        layer.calls, layer.single = 1, 1
        assert mentions(layer.status(), "1 call with", reason)
        assert ("tokens not measured" in layer.status()) == ("tokens" in names)
