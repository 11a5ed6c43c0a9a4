"""TNT: taps, names of weights, stochastic depth of patches, fused attention."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from random_weights import fill_weights

from leanformer import conditioning, models
from leanformer.layers.context import Context


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


def test_weights_and_taps_have_the_same_names(images):
    names = ["query_weights", "output_weights_per_head", "mlp_up_weights"]
    model = build()
    result = jax.eval_shape(lambda: conditioning.weights(model.measured(), names))
    _, taps = jax.eval_shape(lambda: model(images, tap=conditioning.tap(["attention_output", "attention_entropy"])))
    assert result.keys() == taps.keys() == {"blocks.inner", "blocks.outer"}
    for stack in result:
        assert result[stack].keys() == set(names) and taps[stack].keys() == {"attention_output", "attention_entropy"}


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


def test_patches_are_dropped_independently_at_the_layer_rate(rng):
    images = jnp.asarray(rng.standard_normal((41, *TINY["image_size"], 3)), jnp.float32)

    def find_dropped(arrays):
        steps = ((arrays["tokens"], arrays["middle"]), (arrays["middle"], arrays["block"]))
        return jnp.stack([jnp.all(before == after, axis=(1, 2)) for before, after in steps])

    keys = jax.random.split(jax.random.key(3), len(images))
    model = build(drop_path=0.4)
    _, taps = jax.jit(lambda x: model(x, key=keys, tap=find_dropped))(images)
    inner, outer = np.asarray(taps["blocks.inner"]), np.asarray(taps["blocks.outer"])
    assert not inner[0].any() and not outer[0].any()  # the first layer's rate is 0
    attention, mlp = inner[1].reshape(2, len(images), PATCHES)
    noise = np.sqrt(0.4 * 0.6 / attention.size)
    for result in (attention, mlp):
        assert abs(result.mean() - 0.4) < 4 * noise
        # Patches of an image are independent: the number dropped per image has a binomial's variance.
        assert abs(result.sum(axis=1).var() / (PATCHES * 0.24) - 1) < 4 * np.sqrt(2 / len(images))
        for other in range(PATCHES):
            assert not (result[:, 0] == result[:, other]).all() or other == 0
    assert abs(np.corrcoef(attention.ravel(), mlp.ravel())[0, 1]) < 4 / np.sqrt(attention.size)
    assert 0 < outer[1].mean() < 1


def test_drop_path_is_independent_of_position_in_batch(images):
    model = build(drop_path=0.6)
    compute_logits = jax.jit(lambda images, keys: model(images, key=keys)[0])
    keys, other_keys = jax.random.split(jax.random.key(1), (2, BATCH))
    full = compute_logits(images, keys)
    assert np.abs(full - compute_logits(images, other_keys)).max() > 1e-3
    shifted = compute_logits(jnp.concatenate([-images[1:], images[:1]]), jnp.concatenate([other_keys[1:], keys[:1]]))
    np.testing.assert_allclose(shifted[-1], full[0], rtol=0, atol=1e-5 * np.abs(full).max())


def test_fused_kernel_is_used_only_for_patches():
    layers = build(backend="cudnn").blocks.layers
    assert (layers.inner.attention.backend, layers.outer.attention.backend) == ("xla", "cudnn")
