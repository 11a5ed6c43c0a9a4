"""Files of GPT-2 in Hugging Face's format."""

import jax
import numpy as np
from messages import refuses
from parity import case

from leanformer.errors import WeightsError


GPT2 = case("gpt_huggingface", "gpt2")


def test_only_expected_extra_tensors_are_ignored():
    """Mask buffers and a copy of the head are ignored; unknown tensors are refused."""
    tensors = GPT2.tensors | {"lm_head.weight": GPT2.tensors["transformer.wte.weight"].copy()}
    tensors |= {f"transformer.h.{i}.attn.{name}": np.zeros(1, bool) for i in (0, 1) for name in ("bias", "masked_bias")}
    GPT2.load(tensors)
    with refuses("transformer.h.9.x", "(1,)", error=WeightsError):
        GPT2.load(tensors | {"transformer.h.9.x": np.zeros(1)})
    with refuses("(24, 71)", "blocks.layers.attention.query.kernel", "(24, 4, 6)", error=WeightsError):
        GPT2.load(tensors | {f"transformer.h.{i}.attn.c_attn.weight": np.zeros((24, 71)) for i in (0, 1)})


def test_untied_head_is_refused_by_a_model_with_tied_embeddings():
    with refuses("lm_head.weight", "transformer.wte.weight", "--config.model.tied=False", error=WeightsError):
        GPT2.load(GPT2.tensors | {"lm_head.weight": np.zeros((23, 24), np.float32)})


def test_files_without_the_name_prefix_are_read():
    """The hub's gpt2 is such a file. An unknown tensor is still refused, by its name in the file."""
    plain = {name.removeprefix("transformer."): x for name, x in GPT2.tensors.items()}
    jax.tree.map(np.testing.assert_array_equal, GPT2.load(plain), GPT2.weights)
    with refuses("what", "(3,)", error=WeightsError):
        GPT2.load(plain | {"what": np.zeros(3, np.float32)})
