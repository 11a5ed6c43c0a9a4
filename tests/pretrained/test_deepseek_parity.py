"""Dense DeepSeek-V2 and V3 against Hugging Face: attention matrices, files, and detection of wrong details."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from messages import mentions, refuses
from parity import case, layout, split_model

from leanformer import pretrained
from leanformer.conditioning import attention_matrix
from leanformer.errors import WeightsError
from leanformer.pretrained.layouts.entries import matrix


CASES = ("deepseek_v2_lite", "deepseek_v2", "deepseek_v3")
FILE = "deepseek_huggingface"
V3 = case(FILE, "deepseek_v3")


@pytest.mark.parametrize("name", CASES)
def test_probed_attention_matrices_match(name):
    reference = case(FILE, name)
    model, tokens = reference.build(), jnp.asarray(reference.arrays["input"])
    read_probabilities = lambda arrays: attention_matrix.probabilities({"soft_cap": None} | dict(arrays))  # noqa: E731
    _, taps = jax.jit(lambda tokens: model(tokens, tap=read_probabilities))(tokens)
    np.testing.assert_allclose(taps["blocks"], reference.arrays["attentions"], rtol=0, atol=2e-5)


@pytest.mark.slow  # sees whether the tolerance would detect a mistake, not whether there is one
def test_wrong_details_are_detected():
    """Rotary pairs of queries and keys, order of keys and values of all heads, scales of norms, logit scale."""
    tensors, entries = V3.tensors, V3.layout

    def compute_error(weights):
        return V3.error(nnx.merge(split_model("gpt", V3.arguments)[0], *jax.tree.map(jnp.asarray, weights)))

    def check_detected(*names, **changes):
        changed = [dataclasses.replace(e, **changes) if any(name in e.theirs for name in names) else e for e in entries]
        assert compute_error(pretrained.load(tensors, changed, V3.weights)) > 0.01

    check_detected("q_b_proj", "kv_a_proj", form=matrix())
    check_detected("q_b_proj", form=matrix())
    check_detected("kv_a_proj", form=matrix())
    check_detected("kv_b_proj", blocks=1)
    for norm in ("q_a_layernorm", "kv_a_layernorm"):
        changed = {name: np.ones_like(x) if norm in name else x for name, x in tensors.items()}
        assert compute_error(V3.load(changed)) > 0.01
    scaled = {name: x * (16 / 10) ** 0.5 if "q_b_proj" in name else x for name, x in tensors.items()}
    assert compute_error(V3.load(scaled)) > 0.01


def test_expert_weights_are_refused_in_one_line():
    """The message has the first matrix and the number of others, instead of one line per tensor."""
    v2 = case(FILE, "deepseek_v2")
    gates = {f"model.layers.{i}.mlp.gate.weight": np.ones((5, 15), np.float32) for i in (0, 1)}
    experts = {"model.layers.1.mlp.experts.0.up_proj.weight": np.ones((7, 15), np.float32)}
    with refuses("model.layers.0.mlp.gate.weight", "1 more", error=WeightsError) as error:
        v2.load(v2.tensors | gates | experts)
    assert "\n" not in str(error.value) and not mentions(str(error.value), "model.layers.1.mlp.gate.weight")
    with refuses("model.layers.1.mlp.gate.weight", error=WeightsError):
        v2.load(v2.tensors | {name: x for name, x in gates.items() if ".1." in name})


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"latent_norm": None}, ("model.latent_norm=None",)),
        ({"latent_norm": "layernorm"}, ("model.latent_norm='layernorm'",)),
        ({"rotary": None, "rotary_width": None}, ("model.rotary=None",)),
        ({"qkv_bias": True}, ("model.qkv_bias=True",)),
        ({"out_bias": None}, ("model.out_bias=None",)),
        ({"soft_cap": 3.0}, ("model.soft_cap=3.0",)),
        ({"logit_scale": 0.5}, ("model.logit_scale=0.5",)),
        (
            {"positions": "learned", "norm": "layernorm", "gated": False},
            ("model.mlp_bias=False", "model.attention='latent'"),
        ),
    ],
)
def test_models_without_checkpoint_format_are_refused(changes, parts):
    with refuses(*parts, "huggingface", "model.positions"):
        layout("gpt", V3.arguments | changes, "huggingface")


def test_parameters_missing_from_the_format_are_refused():
    params, statistics = V3.weights
    with refuses("more", error=WeightsError):
        pretrained.export((params | {"more": np.ones(3)}, statistics), V3.layout)
