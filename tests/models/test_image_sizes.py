"""Images that are not square: from a config and the command line, cropped as timm crops them, through every family."""

import io
import math
import re

import jax
import numpy as np
import pytest
from flax import nnx
from PIL import Image

from leanformer import cli, config, models, pretrained, tasks
from leanformer.data.images import transforms as image
from leanformer.errors import ConfigError, WeightsError
from leanformer.runtime import mesh as sharding
from leanformer.training import experiment, streams
from tests.models.test_zoo import FAMILIES


# Height and width: grids of 3 x 5 patches; VOLO's halved once; DaViT's of 11 x 7 and 6 x 4, no whole windows of 3.
SIZES = {"vit": (21, 35), "xcit": (12, 20), "tnt": (42, 70), "volo": (24, 40), "davit": (44, 28)}


def sized(name, size):
    """A step of everything that is random on synthetic images of that size."""
    c = config.base()
    c.update(batch_size=4, total_epochs=0.0, total_steps=2, dtype="float32")
    c.unlock()
    c.model = config.model(name, image_size=size, channels=1, num_classes=5, drop_path=0.1, **FAMILIES[name])
    c.lock()
    c.data.update(name="synthetic", mean=(0.5,), std=(0.5,), workers=0)
    c.augment.update(erase=0.3)
    if name not in ("vit", "volo"):  # pictures are mixed before a model has them; VOLO has labels of tokens
        c.augment.update(erase=0.0, mixup=0.0, cutmix=0.0)
    c.optim.update(warmup_epochs=0.0)
    c.eval.batch_size = 4
    c.probe.update(examples=4, measures=("attention_output", "tokens"))
    config.check(c)
    return c


@pytest.mark.slow
@pytest.mark.parametrize("name", SIZES)
def test_every_family_trains_evaluates_and_is_probed(name, meshes):
    """Parity with timm on such images is tested beside each family's other parity."""
    c, (height, width) = sized(name, SIZES[name]), SIZES[name]
    run = experiment.build(c, examples=64, mesh=meshes(1, 1))
    train, held_out = tasks.open_data(tasks.of(c), c)
    held_out = held_out[""]
    batches = streams.train(run, train, 0)
    host = next(batches)
    batches.close()
    assert host["image"].shape == (4, height, width, 1)
    state = run.initial_state()
    after, metrics = jax.jit(run.train_step)(state, streams.put(run, host), run.run_key())
    assert np.isfinite(metrics["loss"]) and not metrics["skipped"]
    still = [
        leaf
        for leaf, a, b in zip(
            pretrained.named(state.params), *map(jax.tree.leaves, (state.params, after.params)), strict=True
        )
        if (np.asarray(a) == b).all()
    ]
    assert all(leaf.endswith("key.bias") for leaf in still), still  # whose gradient is rounding
    sums = jax.jit(run.eval_step)(after.weights, next(streams.evaluation(run, held_out)))
    assert sums["examples"] == 4 and np.isfinite(sums["loss"])
    found = jax.jit(run.probe_step)(after.weights, streams.probe(run, held_out))
    shown = {
        name: x for name, x in jax.device_get(found).items() if "attention_output" in name
    }  # by stack, where several
    assert shown and not any(np.isnan(x).any() for x in jax.tree.leaves(shown))
    forward, training = run.flops_per_example
    assert 0 < forward < training


@pytest.mark.parametrize("words", [["--config.model.image_size=(224,160)"], ["--config.model.image_size=(224, 160)"]])
def test_from_the_command_line(words, tmp_path):
    file, found = tmp_path / "square.py", []
    file.write_text("from leanformer import config\n\n\ndef get_config():\n    return config.base()\n")
    command = cli.command(cli.CONFIG)(lambda f: found.append(f.config))
    assert command([f"--config={file}", *words]) == 0
    (c,) = found
    assert c.model.image_size == (224, 160)
    like = experiment.build(c, examples=10**6, mesh=None).like.params
    assert like["pos_embed"].shape == (1, 14 * 10 + 1, 768)


@pytest.mark.parametrize(
    ("size", "message"),
    [
        (0, "model.image_size=0: give the side in pixels"),
        ((224,), "model.image_size=(224,): give the side in pixels, 224, or height and width, (224, 160)"),
        ((224, 0), "at least 1 each"),
        ("big", "model.image_size='big'"),
        (224.0, "model.image_size=224.0"),
        (True, "model.image_size=True"),
        ((224, 168), "not a whole number of patches of model.patch_size=16; nearest patch sizes that fit: 14 or 28"),
    ],
)
def test_sizes_that_cannot_be_are_refused(size, message):
    c = config.base()
    c.model.image_size = size
    with pytest.raises(ConfigError, match=re.escape(message)):
        config.check(c)


@pytest.mark.parametrize("name", ["vit", "xcit", "tnt", "volo"])
def test_families_of_patches_say_which_sizes_fit(name):
    height, width = SIZES[name]
    arguments = {"channels": 1, "num_classes": 5, **FAMILIES[name]}
    with pytest.raises(ConfigError, match="whole (number of patches|multiple)"):
        config.check(sized(name, (height, width + 1)))
    if name != "vit":
        with pytest.raises(ConfigError, match=re.escape(f"model.image_size={(height, width + 1)}")):
            models.build(name, image_size=(height, width + 1), **arguments, rngs=nnx.Rngs(0))


@pytest.mark.parametrize("shape", [(97, 131), (131, 97), (40, 300), (60, 30)])
def test_evaluation_covers_and_crops_as_timm_does(rng, shape):
    """ResizeKeepRatio to the least that covers, then the centre; Pillow's own numbers."""
    pixels = rng.integers(0, 256, (*shape, 3), dtype=np.uint8)
    found = image.eval_transform(pixels, size=(35, 21), channels=3, crop_fraction=0.9)
    rows, columns = math.floor(35 / 0.9), math.floor(21 / 0.9)
    scale = min(shape[0] / rows, shape[1] / columns)
    height, width = round(shape[0] / scale), round(shape[1] / scale)
    assert height >= rows and width >= columns and (height == rows or width == columns)
    resized = np.asarray(Image.fromarray(pixels).resize((width, height), Image.Resampling.BICUBIC))
    top, left = round((height - 35) / 2), round((width - 21) / 2)
    np.testing.assert_array_equal(found, resized[top : top + 35, left : left + 21])


def test_training_views_have_the_shape_and_all_of_the_crop(rng):
    """A ramp down and one across end where they should: height is height."""
    down, across = np.mgrid[:120, :80]
    pixels = np.stack([2 * down, 3 * across, 0 * down], axis=-1).astype(np.uint8)
    plain = {"crop_scale": (1.0, 1.0), "crop_ratio": (80 / 120, 80 / 120), "flip": 0.0}
    found = image.train_transform(pixels, rng, size=(60, 20), channels=3, **plain)
    assert found.shape == (60, 20, 3)
    np.testing.assert_allclose(found[:, 10, 0], 2 * (2 * np.arange(60) + 0.5), atol=2)
    np.testing.assert_allclose(found[30, :, 1], 3 * (4 * np.arange(20) + 1.5), atol=3)


def test_a_jpeg_is_decoded_small_only_where_both_sides_stay_large_enough(rng, monkeypatch):
    raw = io.BytesIO()
    Image.fromarray(rng.integers(0, 256, (400, 400, 3), dtype=np.uint8)).save(raw, "JPEG")
    asked, decode = [], image.decode_jpeg
    monkeypatch.setattr(image, "decode_jpeg", lambda data, channels, k: asked.append(k) or decode(data, channels, k))
    plain = {"crop_scale": (1.0, 1.0), "crop_ratio": (1.0, 1.0), "channels": 3}
    for size in ((100, 50), (50, 100), (50, 50), (101, 50)):
        image.train_transform(raw.getvalue(), rng, size=size, **plain)
    assert asked == [4, 4, 8, 2]


def test_positions_are_resized_to_a_grid_that_is_not_square(rng):
    """Bicubic keeps a ramp between its ends: rows are rows."""
    ramp = np.broadcast_to(np.arange(8.0)[:, None], (8, 8)).reshape(1, 64, 1)
    table = np.concatenate([np.full((1, 1, 1), 7.5), ramp], axis=1).astype(np.float32)
    found = pretrained.resize_positions(table, (1, 4 * 16 + 1, 1), (4, 16))
    assert found[0, 0] == 7.5
    grid = found[0, 1:, 0].reshape(4, 16)
    np.testing.assert_allclose(grid[1:3], np.broadcast_to([[2.5], [4.5]], (2, 16)), atol=0.1)
    with pytest.raises(WeightsError, match="of 4 x 16 patches"):
        pretrained.resize_positions(table[:, 1:], (1, 65, 1), (4, 16))


@pytest.mark.slow
def test_eight_devices_are_one(meshes):
    c = sized("vit", SIZES["vit"])
    c.update(batch_size=8)
    c.eval.batch_size = c.probe.examples = 8
    losses = []
    for shape in ((1, 1), (2, 4)):
        run = experiment.build(c, examples=64, mesh=meshes(*shape))
        host = {"image": np.arange(8 * 21 * 35, dtype=np.uint8).reshape(8, 21, 35, 1), "label": np.arange(8) % 5}
        batch = sharding.put_batch(run.mesh, host | {"label": host["label"].astype(np.int32)})
        losses.append(jax.jit(run.train_step)(run.initial_state(), batch, run.run_key())[1]["loss"])
    np.testing.assert_allclose(*losses, rtol=2e-6)
