"""nanochat against Hugging Face: detection of wrong details, its config.json, and refused exports."""

import pytest
from messages import refuses
from parity import TOLERANCE, case, layout

from leanformer import config
from leanformer.errors import WeightsError
from leanformer.exports import huggingface


NANOCHAT = case("nanochat_huggingface", "nanochat")


def exchange_halves(x):
    """Exchange the halves of the channels of each head."""
    halves = x.reshape(*x.shape[:-1], 2, -1)
    return halves[..., ::-1, :].reshape(x.shape)


@pytest.mark.slow  # sees whether the tolerance would detect a mistake, not whether there is one
@pytest.mark.parametrize("detail", ["embedding norm", "rotary direction", "soft cap"])
def test_wrong_details_are_detected(detail):
    model = NANOCHAT.build()
    attention = model.blocks.layers.attention
    if detail == "embedding norm":
        model.embed[...] = NANOCHAT.tensors["model.embed_tokens.weight"]
    if detail == "rotary direction":
        for part in (attention.query, attention.key):
            part.kernel[...] = exchange_halves(part.kernel[...])
    if detail == "soft cap":
        model.head_cap = 14.0
    assert NANOCHAT.error(model) > 100 * TOLERANCE


def test_missing_tensors_and_other_models_are_refused():
    without = {name: x for name, x in NANOCHAT.tensors.items() if name != "model.embed_tokens.weight"}
    with refuses("model.embed_tokens.weight", error=WeightsError):
        NANOCHAT.load(without)
    with refuses("model.qk_norm=None"):
        layout("gpt", NANOCHAT.arguments | {"qk_norm": None}, "huggingface")


def test_config_fits_the_file_and_is_not_exported():
    c = config.load("configs/nanochat_small.py")
    layout("gpt", c.model.to_dict(), "huggingface")
    with refuses("model.head_cap=15.0", "--to=own"):
        huggingface.describe(c.model.to_dict(), [])
