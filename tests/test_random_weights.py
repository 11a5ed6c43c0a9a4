"""Tests of weights drawn by NumPy: shapes, scales, finite outputs and reproducibility."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from random_weights import fill_weights

from leanformer import models
from leanformer.training import state


SMALL = {"image_size": 8, "patch_size": 4, "channels": 1, "num_classes": 3, "width": 12, "depth": 2, "num_heads": 3}
SMALL |= {"head_dim": 5, "mlp_dim": 20, "class_heads": 2, "class_head_dim": 7, "layer_scale": 0.1}


def build():
    return models.build("xcit", **SMALL, rngs=nnx.Rngs(0))


def test_weights_have_expected_shapes_and_scales():
    model = fill_weights(build)
    expected = nnx.to_pure_dict(nnx.state(nnx.eval_shape(build)))
    weights = nnx.to_pure_dict(nnx.state(model))
    assert jax.tree.map(lambda x: (x.shape, x.dtype), weights) == jax.tree.map(lambda x: (x.shape, x.dtype), expected)
    for path, x in jax.tree.leaves_with_path(weights):
        name = jax.tree_util.keystr(path)
        assert np.isfinite(x).all() and np.abs(x).min() > 0, name
        assert name.endswith(("['var']", "['scale']")) <= (x.min() > 0.5), name
    images = jnp.asarray(np.random.default_rng(0).standard_normal((2, 8, 8, 1)), jnp.float32)
    logits = nnx.jit(lambda model, x: model(x)[0])(model, images)
    assert 0.01 < np.abs(logits).mean() < 100


def test_values_depend_only_on_name_and_seed():
    _, _, shapes = state.split(lambda rngs: models.build("xcit", **SMALL, rngs=rngs))
    first, again, other = fill_weights(shapes), fill_weights(build), fill_weights(shapes, seed=1)
    np.testing.assert_array_equal(first[0]["head"]["kernel"], again.head.kernel[...])
    assert not np.array_equal(first[0]["head"]["kernel"], other[0]["head"]["kernel"])
    assert isinstance(first, tuple) and len(first[1]) > 0
