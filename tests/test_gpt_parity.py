"""GPT-2, Llama and Qwen3 against Hugging Face: same weights, same logits, and their names back.

Fixture by tests/fixtures/make_gpt_fixture.py.
"""

import functools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors import safe_open

from leanformer import models, pretrained
from leanformer.errors import ConfigError, WeightsError
from leanformer.pretrained import layouts
from leanformer.training import state


FILE = Path(__file__).parent / "fixtures" / "gpt_huggingface.safetensors"
CASES = ("gpt2", "llama", "qwen3")
TOLERANCE = 1e-5  # of the largest logit


@functools.cache
def fixture(case):
    """Arguments of our model, their weights, and input and logits."""
    with safe_open(str(FILE), "numpy") as file:
        arguments = json.loads(file.metadata()["cases"])[case]
        names = [name for name in file.keys() if name.startswith(f"{case}/")]  # noqa: SIM118 - the file is no dict
        tensors = {name.removeprefix(f"{case}/"): file.get_tensor(name) for name in names}
    return arguments, tensors, {name: tensors.pop(name) for name in ("input", "logits", "logits64")}


def definition(arguments, **other):
    return state.split(lambda rngs: models.build("gpt", **arguments, **other, rngs=rngs))[:2]


def load(case, tensors=None, **other):
    arguments, theirs, _ = fixture(case)
    shapes = jax.eval_shape(definition(arguments | other)[1], jax.random.key(0))
    layout = layouts.layout("huggingface", {"name": "gpt", **arguments, **other})
    return layout, pretrained.load(theirs if tensors is None else tensors, layout, shapes)


def difference(found, expected):
    return np.abs(found - expected).max() / np.abs(expected).max()


@pytest.mark.parametrize("case", CASES)
def test_logits(case):
    arguments, _, others = fixture(case)
    tokens = jnp.asarray(others["input"])
    model = nnx.merge(definition(arguments)[0], *jax.tree.map(jnp.asarray, load(case)[1]))
    found = jax.jit(lambda tokens: model(tokens)[0])(tokens)
    assert difference(found, others["logits"]) < TOLERANCE
    with jax.enable_x64(True):
        double = jax.tree.map(lambda x: jnp.asarray(x, np.float64), load(case)[1])
        model = nnx.merge(definition(arguments, dtype=jnp.float64)[0], *double)
        assert difference(model(tokens)[0], others["logits64"]) < 1e-6  # its angles are float32


@pytest.mark.parametrize("case", CASES)
def test_there_and_back(case):
    _, tensors, _ = fixture(case)
    layout, weights = load(case)
    found = pretrained.export(weights, layout)
    assert found.keys() == tensors.keys()
    for name, x in tensors.items():
        np.testing.assert_array_equal(found[name], x, err_msg=name)


def test_what_else_files_have():
    """Masks as buffers and the head once more; nothing that is not known."""
    tensors = fixture("gpt2")[1] | {"lm_head.weight": np.zeros((23, 24), np.float32)}
    tensors |= {f"transformer.h.{i}.attn.{name}": np.zeros(1, bool) for i in (0, 1) for name in ("bias", "masked_bias")}
    load("gpt2", tensors)
    with pytest.raises(WeightsError, match=r"transformer.h.9.x \(1,\): in the file, not in this model"):
        load("gpt2", tensors | {"transformer.h.9.x": np.zeros(1)})
    with pytest.raises(WeightsError, match="c_attn.weight: .24, 71. in the file, .*query.kernel wants .24, 4, 6."):
        load("gpt2", tensors | {f"transformer.h.{i}.attn.c_attn.weight": np.zeros((24, 71)) for i in (0, 1)})


def test_files_of_the_model_without_its_head_lack_the_first_part_of_names():
    """As the hub's own gpt2; a name that is not known is still refused, as it stands in the file."""
    plain = {name.removeprefix("transformer."): x for name, x in fixture("gpt2")[1].items()}
    jax.tree.map(np.testing.assert_array_equal, load("gpt2", plain)[1], load("gpt2")[1])
    with pytest.raises(WeightsError, match=r"what .*: in the file, not in this model"):
        load("gpt2", plain | {"what": np.zeros(3, np.float32)})


def test_no_such_model():
    with pytest.raises(ConfigError, match="model.gated=True: .huggingface. has no such model with model.positions="):
        load("gpt2", gated=True)
