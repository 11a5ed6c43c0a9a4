"""Settings, normalisation and tokenizer of the weights that a model starts from, where shapes show no difference."""

import json

import jax
import numpy as np
import pytest
from messages import refuses

from leanformer import pretrained
from leanformer.errors import WeightsError
from leanformer.exports import folders
from leanformer.training import model_setup
from tools.exports import CASES, case_config, random_weights


def write_own(folder, c):
    model = model_setup.set_up_model(c)
    tensors = pretrained.export(jax.device_get(random_weights(model)), model.layout("own"))
    pretrained.write(folder / "weights.safetensors", tensors)
    (folder / "config.json").write_text(json.dumps({"config": json.loads(c.to_json())}))


@pytest.mark.parametrize(
    ("layout", "size"),
    [("own", (2, 12)), ("timm", (4, 4)), pytest.param("huggingface", (2, 12), marks=pytest.mark.slow)],
)
def test_positions_of_another_grid_are_resized_if_allowed(tmp_path, layout, size):
    """Shapes do not show that 2 x 8 patches are not 4 x 4, nor that the 17 positions of the file are not a square's."""
    c = case_config(*CASES["ViT"])
    c.model.image_size = (2 * c.model.patch_size, 8 * c.model.patch_size)
    before = model_setup.set_up_model(c)
    weights = random_weights(before)
    if layout == "own":
        write_own(tmp_path, c)
    else:
        folders.write_folder(tmp_path, before, weights, layout, folders.Origin())
    c.model.image_size = tuple(side * c.model.patch_size for side in size)
    with refuses("init_from.resize_positions=True", error=WeightsError):
        model_setup.set_up_model(c).read_weights(str(tmp_path), layout)
    c.init_from.resize_positions = True
    params, _ = model_setup.set_up_model(c).read_weights(str(tmp_path), layout)
    old, new = np.asarray(weights[0]["pos_embed"]), np.asarray(params["pos_embed"])
    grid = old[:, 1:].reshape(1, 2, 8, -1)
    resized = jax.image.resize(grid, (1, *size, grid.shape[-1]), "cubic")
    np.testing.assert_array_equal(new[:, :1], old[:, :1])
    np.testing.assert_allclose(new[:, 1:], np.reshape(resized, (1, -1, grid.shape[-1])), atol=1e-6)
