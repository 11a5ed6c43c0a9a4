"""TNT by itself: counts, taps, gradients, stochastic depth of patches, wrong arguments."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from filled import filled
from flax import nnx

from leanformer import conditioning, models
from leanformer.layers.context import Context


DEPTH, BATCH, PATCHES, PIXELS, WIDTH, INNER = 2, 5, 6, 9, 13, 11
TINY = {
    **{"image_size": (12, 18), "patch_size": 6, "pixel_stride": 2, "channels": 3, "num_classes": 23},
    **{"width": WIDTH, "depth": DEPTH, "num_heads": 3, "head_dim": 7, "value_dim": 4, "mlp_dim": 17},
    **{"inner_width": INNER, "inner_heads": 2, "inner_head_dim": 8, "inner_mlp_dim": 19},
}


def build(layout="original", **changes):
    """Return a model; changes that leave shapes alone leave its weights alone too."""
    return filled(lambda: models.build("tnt", **TINY | changes, layout=layout, rngs=nnx.Rngs(0)))


@pytest.fixture
def images(rng):
    return jnp.asarray(rng.standard_normal((BATCH, *TINY["image_size"], 3)), jnp.float32)


def test_taps_of_both_stacks(images):
    model = build()
    _, taps = jax.eval_shape(lambda: model(images, tap=lambda arrays: arrays))

    def shapes(batch, tokens, width, heads, head_dim, value_dim, mlp_dim):
        lead = (DEPTH, batch, tokens)
        names = dict.fromkeys(("tokens", "normed", "attention", "middle", "block"), (*lead, width))
        names |= dict.fromkeys(("q", "k"), (*lead, heads, head_dim)) | {"hidden": (*lead, mlp_dim)}
        return names | dict.fromkeys(("v", "out"), (*lead, heads, value_dim))

    assert {stack: {name: x.shape for name, x in arrays.items()} for stack, arrays in taps.items()} == {
        "blocks.inner": shapes(BATCH * PATCHES, PIXELS, INNER, 2, 8, 8, 19),
        "blocks.outer": shapes(BATCH, PATCHES + 1, WIDTH, 3, 7, 4, 17),
    }


def test_weights_are_found_under_the_taps_names(images):
    names = ["query_weights", "output_weights_per_head", "mlp_up_weights"]
    model = build()
    result = jax.eval_shape(lambda: conditioning.weights(model.measured(), names))
    _, taps = jax.eval_shape(lambda: model(images, tap=conditioning.tap(["attention_output", "attention_entropy"])))
    assert result.keys() == taps.keys() == {"blocks.inner", "blocks.outer"}
    for stack in result:
        assert result[stack].keys() == set(names) and taps[stack].keys() == {"attention_output", "attention_entropy"}


def one_block(model):
    graphdef, params = nnx.split(model.blocks.layers)
    return nnx.merge(graphdef, jax.jit(lambda params: jax.tree.map(lambda x: x[1], params))(params))


def test_inner_branches_are_scaled_patch_by_patch(rng):
    block = one_block(build())
    pixels = jnp.asarray(rng.standard_normal((BATCH, PATCHES, PIXELS, INNER)), jnp.float32)
    patches = jnp.asarray(rng.standard_normal((BATCH, PATCHES + 1, WIDTH)), jnp.float32)
    assert block.branches == 2 * PATCHES + 2
    scales = jnp.asarray(rng.uniform(0, 9, (block.branches, BATCH)), jnp.float32)
    (result, found_patches), *_ = jax.jit(lambda *x: block(x, Context(scales=scales)))(pixels, patches)

    inner = jax.jit(lambda x, scales: block.inner(x, Context(scales=scales))[0])
    for p in range(PATCHES):
        own = np.asarray(scales)[[p, PATCHES + p]]  # of the attention and of the MLP of this patch, in every image
        expected = inner(np.asarray(pixels)[:, p], own)
        np.testing.assert_allclose(result[:, p], expected, rtol=0, atol=1e-5 * np.abs(expected).max())

    @jax.jit
    def outer(patches, pixels):  # the class token gets nothing of the pixels, and nothing of that is dropped
        return block.outer(patches.at[:, 1:].add(block.injection(pixels)), Context(scales=scales[-2:]))[0]

    expected = outer(patches, result)
    np.testing.assert_allclose(found_patches, expected, rtol=0, atol=1e-5 * np.abs(expected).max())


def test_patches_drop_independently_at_their_layers_rate(rng):
    images = jnp.asarray(rng.standard_normal((41, *TINY["image_size"], 3)), jnp.float32)

    def dropped(arrays):
        steps = ((arrays["tokens"], arrays["middle"]), (arrays["middle"], arrays["block"]))
        return jnp.stack([jnp.all(before == after, axis=(1, 2)) for before, after in steps])

    keys = jax.random.split(jax.random.key(3), len(images))
    model = build(drop_path=0.4)
    _, taps = jax.jit(lambda x: model(x, key=keys, tap=dropped))(images)
    inner, outer = np.asarray(taps["blocks.inner"]), np.asarray(taps["blocks.outer"])
    assert not inner[0].any() and not outer[0].any()  # the first layer's rate is 0
    attention, mlp = inner[1].reshape(2, len(images), PATCHES)
    noise = np.sqrt(0.4 * 0.6 / attention.size)
    for result in (attention, mlp):
        assert abs(result.mean() - 0.4) < 4 * noise
        # Patches of an image share nothing: the spread over images of how many it lost is a binomial's.
        assert abs(result.sum(axis=1).var() / (PATCHES * 0.24) - 1) < 4 * np.sqrt(2 / len(images))
        for other in range(PATCHES):
            assert not (result[:, 0] == result[:, other]).all() or other == 0
    assert abs(np.corrcoef(attention.ravel(), mlp.ravel())[0, 1]) < 4 / np.sqrt(attention.size)
    assert 0 < outer[1].mean() < 1


def test_an_image_is_dropped_whatever_its_place_and_batch_mates(images):
    model = build(drop_path=0.6)
    logits = jax.jit(lambda images, keys: model(images, key=keys)[0])
    keys, others = jax.random.split(jax.random.key(1), (2, BATCH))
    whole = logits(images, keys)
    assert np.abs(whole - logits(images, others)).max() > 1e-3
    moved = logits(jnp.concatenate([-images[1:], images[:1]]), jnp.concatenate([others[1:], keys[:1]]))
    np.testing.assert_allclose(moved[-1], whole[0], rtol=0, atol=1e-5 * np.abs(whole).max())


def test_the_fused_kernel_is_for_patches_alone():
    layers = build(backend="cudnn").blocks.layers
    assert (layers.inner.attention.backend, layers.outer.attention.backend) == ("xla", "cudnn")
