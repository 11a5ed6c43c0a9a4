"""TNT: taps, names of weights, stochastic depth of patches, fused attention."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from random_weights import fill_weights

from leanformer import models
from leanformer.layers.masks import Context


DEPTH, BATCH, PATCHES, PIXELS, WIDTH, INNER = 2, 5, 6, 9, 13, 11
TINY = {
    **{"image_size": (12, 18), "patch_size": 6, "pixel_stride": 2, "channels": 3, "num_classes": 23},
    **{"width": WIDTH, "depth": DEPTH, "num_heads": 3, "head_dim": 7, "value_dim": 4, "mlp_dim": 17},
    **{"inner_width": INNER, "inner_heads": 2, "inner_head_dim": 8, "inner_mlp_dim": 19},
}


def build(layout="original", **changes):
    """Return a model; changes that do not affect shapes do not affect its weights either."""
    return fill_weights(lambda: models.build("tnt", **TINY | changes, layout=layout, rngs=nnx.Rngs(0)))


@pytest.fixture
def images(rng):
    return jnp.asarray(rng.standard_normal((BATCH, *TINY["image_size"], 3)), jnp.float32)


def test_tap_shapes_of_both_stacks(images):
    model = build()
    _, taps = jax.eval_shape(lambda: model(images, tap=lambda arrays: arrays))

    def expected_shapes(batch, tokens, width, heads, head_dim, value_dim, mlp_dim):
        lead = (DEPTH, batch, tokens)
        names = dict.fromkeys(("tokens", "normed", "attention", "middle", "block"), (*lead, width))
        names |= dict.fromkeys(("q", "k"), (*lead, heads, head_dim)) | {"hidden": (*lead, mlp_dim)}
        return names | dict.fromkeys(("v", "out"), (*lead, heads, value_dim))

    assert {stack: {name: x.shape for name, x in arrays.items()} for stack, arrays in taps.items()} == {
        "blocks.inner": expected_shapes(BATCH * PATCHES, PIXELS, INNER, 2, 8, 8, 19),
        "blocks.outer": expected_shapes(BATCH, PATCHES + 1, WIDTH, 3, 7, 4, 17),
    }


def extract_block(model):
    graphdef, params = nnx.split(model.blocks.layers)
    return nnx.merge(graphdef, jax.jit(lambda params: jax.tree.map(lambda x: x[1], params))(params))


def test_inner_branches_are_scaled_per_patch(rng):
    block = extract_block(build())
    pixels = jnp.asarray(rng.standard_normal((BATCH, PATCHES, PIXELS, INNER)), jnp.float32)
    patches = jnp.asarray(rng.standard_normal((BATCH, PATCHES + 1, WIDTH)), jnp.float32)
    assert block.branches == 2 * PATCHES + 2
    scales = jnp.asarray(rng.uniform(0, 9, (block.branches, BATCH)), jnp.float32)
    (result, patch_result), *_ = jax.jit(lambda *x: block(x, Context(scales=scales)))(pixels, patches)

    inner = jax.jit(lambda x, scales: block.inner(x, Context(scales=scales))[0])
    for p in range(PATCHES):
        # Scales of this patch's attention and MLP, in every image.
        patch_scales = np.asarray(scales)[[p, PATCHES + p]]
        expected = inner(np.asarray(pixels)[:, p], patch_scales)
        np.testing.assert_allclose(result[:, p], expected, rtol=0, atol=1e-5 * np.abs(expected).max())

    @jax.jit
    def outer(patches, pixels):  # pixels are not added to the class token, and their addition is never dropped
        return block.outer(patches.at[:, 1:].add(block.injection(pixels)), Context(scales=scales[-2:]))[0]

    expected = outer(patches, result)
    np.testing.assert_allclose(patch_result, expected, rtol=0, atol=1e-5 * np.abs(expected).max())


def test_fused_kernel_is_used_only_for_patches():
    layers = build(backend="cudnn").blocks.layers
    assert (layers.inner.attention.backend, layers.outer.attention.backend) == ("xla", "cudnn")
