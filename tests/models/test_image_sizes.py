"""Non-square images: from a config and the command line."""

import numpy as np
from messages import refuses

from leanformer import cli, pretrained
from leanformer.data.images import transforms as image
from leanformer.errors import WeightsError
from leanformer.training import train_setup


def test_image_size_from_the_command_line(tmp_path):
    file, result = tmp_path / "square.py", []
    file.write_text("from leanformer import config\n\n\ndef get_config():\n    return config.base()\n")
    command = cli.command(cli.CONFIG)(lambda f: result.append(f.config))
    for size in ("(224,160)", "(224, 160)"):
        assert command([f"--config={file}", f"--config.model.image_size={size}"]) == 0
        assert result[-1].model.image_size == (224, 160)
    params = train_setup.set_up_training(result[-1], examples=10**6, mesh=None).state.params
    assert params["pos_embed"].shape == (1, 14 * 10 + 1, 768)


def test_training_views_have_shape_and_extent_of_the_crop(rng):
    """A vertical and a horizontal ramp show the full extent, and that height and width are not exchanged."""
    down, across = np.mgrid[:120, :80]
    pixels = np.stack([2 * down, 3 * across, 0 * down], axis=-1).astype(np.uint8)
    plain = {"crop_scale": (1.0, 1.0), "crop_ratio": (80 / 120, 80 / 120), "flip": 0.0}
    result = image.train_transform(pixels, rng, size=(60, 20), channels=3, augmentation=image.Augmentation(**plain))
    assert result.shape == (60, 20, 3)
    np.testing.assert_allclose(result[:, 10, 0], 2 * (2 * np.arange(60) + 0.5), atol=2)
    np.testing.assert_allclose(result[30, :, 1], 3 * (4 * np.arange(20) + 1.5), atol=3)


def test_positions_are_resized_to_a_non_square_grid(rng):
    """Bicubic interpolation keeps a ramp away from its ends; exchanged rows and columns would break it."""
    ramp = np.broadcast_to(np.arange(8.0)[:, None], (8, 8)).reshape(1, 64, 1)
    table = np.concatenate([np.full((1, 1, 1), 7.5), ramp], axis=1).astype(np.float32)
    result = pretrained.resize_positions(table, (1, 4 * 16 + 1, 1), (4, 16))
    assert result[0, 0] == 7.5
    grid = result[0, 1:, 0].reshape(4, 16)
    np.testing.assert_allclose(grid[1:3], np.broadcast_to([[2.5], [4.5]], (2, 16)), atol=0.1)
    with refuses("4 x 16", error=WeightsError):
        pretrained.resize_positions(table[:, 1:], (1, 65, 1), (4, 16))
