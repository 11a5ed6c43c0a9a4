"""Constructed weights: their error, and the parts that it depends on."""

import jax
import jax.numpy as jnp
import numpy as np

from leanformer.data import points as point_tasks
from study.paper import constructions


def relative_error(model, name, number=256, **sizes):
    """Return the squared error of a model relative to predicting zero or, for sums, the mean."""
    sizes = point_tasks.Sizes(**sizes)
    source = point_tasks.Points(name, sizes, "held_out", 0)
    examples = [source[i] for i in range(number)]
    points, targets = (np.stack([e[key] for e in examples]) for key in ("points", "targets"))
    outputs = jax.jit(lambda x: model(x)[0])(jnp.asarray(points, jnp.float32))
    result = np.asarray(outputs, np.float64)[:, point_tasks.find(name).read]
    base = targets.mean() if name == "retrieval" else 0
    return np.square(result - targets).sum() / np.square(targets - base).sum()


def test_full_rank_head_is_exact_at_high_temperature():
    sizes = {"points": 16, "dim": 64}
    errors = [relative_error(constructions.nearest(64, t), "nearest", **sizes) for t in (10.0, 1e3, 1e5)]
    assert errors[0] > 0.3 and 1e-3 < errors[1] < 0.02 and errors[2] < 1e-4
    model = constructions.nearest(64, 1e3)
    np.testing.assert_allclose(constructions.angle_from_minus_identity(model), 0, atol=1e-4)
    keys = model.blocks.layers.attention.key.kernel
    keys[...] = keys[...] + 0.02 * jax.random.normal(jax.random.key(0), keys.shape)
    assert 5 < constructions.angle_from_minus_identity(model) < 15
    assert relative_error(model, "nearest", **sizes) > 2 * errors[1]


def test_retrieval_needs_one_head_per_item():
    sizes = {"points": 128, "dim": 5, "num_items": 4}
    errors = [
        relative_error(constructions.retrieval(point_tasks.Sizes(**sizes), t), "retrieval", **sizes)
        for t in (10.0, 1e4)
    ]
    assert errors[0] > 1 and errors[1] < 1e-6
    model = constructions.retrieval(point_tasks.Sizes(**sizes), 1e4)
    out = model.blocks.layers.attention.out.kernel
    out[...] = out[...].at[:, 3].set(0)
    assert relative_error(model, "retrieval", **sizes) > 1  # one head too few


def test_error_of_majority_vote_falls_with_heads():
    errors = [relative_error(constructions.majority(3, n, 1e4), "nearest_query", points=2, dim=3) for n in (1, 31, 301)]
    assert errors[0] > 0.5 and errors[1] < 0.6 * errors[0] and errors[2] < 0.05
