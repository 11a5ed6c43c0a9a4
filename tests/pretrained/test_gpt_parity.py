"""Files of GPT-2, Llama and Qwen3 as Hugging Face has them."""

import jax
import numpy as np
from messages import refuses
from parity import case, load

from leanformer.errors import WeightsError


GPT2 = case("gpt_huggingface", "gpt2")


def test_extra_tensors_in_files():
    """Masks as buffers and the head once more; nothing that is not known."""
    tensors = GPT2.tensors | {"lm_head.weight": np.zeros((23, 24), np.float32)}
    tensors |= {f"transformer.h.{i}.attn.{name}": np.zeros(1, bool) for i in (0, 1) for name in ("bias", "masked_bias")}
    GPT2.load(tensors)
    with refuses("transformer.h.9.x", "(1,)", error=WeightsError):
        GPT2.load(tensors | {"transformer.h.9.x": np.zeros(1)})
    with refuses("(24, 71)", "blocks.layers.attention.query.kernel", "(24, 4, 6)", error=WeightsError):
        GPT2.load(tensors | {f"transformer.h.{i}.attn.c_attn.weight": np.zeros((24, 71)) for i in (0, 1)})


def test_files_of_the_model_without_its_head_lack_the_first_part_of_names():
    """As the hub's own gpt2; a name that is not known is still refused, as it stands in the file."""
    plain = {name.removeprefix("transformer."): x for name, x in GPT2.tensors.items()}
    jax.tree.map(np.testing.assert_array_equal, GPT2.load(plain), GPT2.weights)
    with refuses("what", "(3,)", error=WeightsError):
        GPT2.load(plain | {"what": np.zeros(3, np.float32)})


def test_models_that_a_layout_cannot_hold_are_refused():
    with refuses("model.gated=True", "huggingface", "model.positions"):
        load("gpt", GPT2.arguments | {"gated": True}, GPT2.tensors, "huggingface")
