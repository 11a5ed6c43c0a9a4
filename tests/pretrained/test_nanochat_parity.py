"""nanochat in Hugging Face's format: its config.json, and refused weights and exports."""

from messages import refuses
from parity import case, layout

from leanformer import config
from leanformer.errors import WeightsError
from leanformer.exports import huggingface


NANOCHAT = case("nanochat_huggingface", "nanochat")


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
