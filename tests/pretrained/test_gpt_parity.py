"""GPT-2, Llama and Qwen3 against Hugging Face: same weights, same logits, and their names back.

Fixture by experiments/fixtures/make_gpt_fixture.py.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from messages import refuses
from parity import check_back, distance, in_float64, layout, load, stored

from leanformer.errors import WeightsError


CASES = ("gpt2", "llama", "qwen3")
TOLERANCE = 1e-5  # of the largest logit


@functools.cache
def fixture(case):
    """Arguments of our model, their weights, and input and logits."""
    about, tensors = stored("gpt_huggingface", case)
    return about["cases"][case], tensors, {name: tensors.pop(name) for name in ("input", "logits", "logits64")}


def ours(case, tensors=None, **other):
    """In our names their weights."""
    arguments, theirs, _ = fixture(case)
    return load("gpt", arguments | other, theirs if tensors is None else tensors, "huggingface")[1]


@pytest.mark.parametrize("case", CASES)
def test_logits(case):
    arguments, tensors, others = fixture(case)
    tokens = jnp.asarray(others["input"])
    graphdef, weights = load("gpt", arguments, tensors, "huggingface")

    def logits(graphdef, weights):
        return jax.jit(lambda weights: nnx.merge(graphdef, *weights)(tokens)[0])(weights)

    assert distance(logits(graphdef, weights), others["logits"]) < TOLERANCE
    with jax.enable_x64(True):
        double = in_float64("gpt", arguments, tensors, "huggingface")
        assert distance(logits(*double), others["logits64"]) < 1e-6  # its angles are float32


@pytest.mark.parametrize("case", CASES)
def test_there_and_back(case):
    arguments, tensors, _ = fixture(case)
    check_back(ours(case), layout("gpt", arguments, "huggingface"), tensors)


def test_extra_tensors_in_files():
    """Masks as buffers and the head once more; nothing that is not known."""
    tensors = fixture("gpt2")[1] | {"lm_head.weight": np.zeros((23, 24), np.float32)}
    tensors |= {f"transformer.h.{i}.attn.{name}": np.zeros(1, bool) for i in (0, 1) for name in ("bias", "masked_bias")}
    ours("gpt2", tensors)
    with refuses("transformer.h.9.x", "(1,)", error=WeightsError):
        ours("gpt2", tensors | {"transformer.h.9.x": np.zeros(1)})
    with refuses("(24, 71)", "blocks.layers.attention.query.kernel", "(24, 4, 6)", error=WeightsError):
        ours("gpt2", tensors | {f"transformer.h.{i}.attn.c_attn.weight": np.zeros((24, 71)) for i in (0, 1)})


def test_files_of_the_model_without_its_head_lack_the_first_part_of_names():
    """As the hub's own gpt2; a name that is not known is still refused, as it stands in the file."""
    plain = {name.removeprefix("transformer."): x for name, x in fixture("gpt2")[1].items()}
    jax.tree.map(np.testing.assert_array_equal, ours("gpt2", plain), ours("gpt2"))
    with refuses("what", "(3,)", error=WeightsError):
        ours("gpt2", plain | {"what": np.zeros(3, np.float32)})


def test_models_that_a_layout_cannot_hold_are_refused():
    with refuses("model.gated=True", "huggingface", "model.positions"):
        ours("gpt2", gated=True)
