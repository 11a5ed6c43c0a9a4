"""Nyströmformer against the released model for LRA (fixture by tests/fixtures/make/make_nystrom_fixture.py)."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors import safe_open

from leanformer import models
from leanformer.tasks.classification import classify
from tests.models.test_nystromformer import relative_error


FIXTURE = Path(__file__).parents[1] / "fixtures" / "nystrom_lra.safetensors"
CASES = ("nystrom", "no_convolution", "as_many_landmarks_as_tokens", "softmax", "pair")
ORIGINAL = {"zero_is_padding": True, "pool": "padded_mean"}
ORIGINAL_NYSTROM = {"padding": "zeros", "scale": "batch"}
TOLERANCE = 1e-5  # relative to the largest; float32 is 3e-7 from float64


def load_case(case):
    with safe_open(str(FIXTURE), "numpy") as file:
        shape = json.loads(file.metadata()["cases"])[case]
        names = [name for name in file.keys() if name.startswith(f"{case}/")]  # noqa: SIM118 - the file is no dict
        tensors = {name.removeprefix(f"{case}/"): file.get_tensor(name) for name in names}
    return shape, tensors


def convert_released(w, shape, prefix=""):
    """Return our tree of parameters from the released names, or our tree of gradients under `prefix`."""
    n, h, d = shape["num_heads"], shape["head_dim"], shape["width"]

    def leaf(name, change=lambda x: x):
        return change(w[prefix + name])

    def linear(name, kernel=lambda x: x.T, bias=lambda x: x):
        return {"kernel": leaf(f"{name}.weight", kernel), "bias": leaf(f"{name}.bias", bias)}

    def norm(name):
        return {"scale": leaf(f"{name}.weight"), "bias": leaf(f"{name}.bias")}

    def layer(block):
        parts = {"query": "W_q", "key": "W_k", "value": "W_v"}
        attention = {
            ours: linear(f"{block}.mha.{name}", lambda x: x.T.reshape(d, n, h), lambda x: x.reshape(n, h))
            for ours, name in parts.items()
        }
        attention["out"] = linear(f"{block}.mha.ff", lambda x: x.T.reshape(n, h, d))
        if shape["convolution"]:
            attention["skip"] = leaf(f"{block}.mha.attn.conv.weight", lambda x: x[:, 0, :, 0].T)
        mlp = {"up": linear(f"{block}.mlpblock.0"), "down": linear(f"{block}.mlpblock.3")}
        return {"attention": attention, "mlp": mlp, "norm1": norm(f"{block}.norm1"), "norm2": norm(f"{block}.norm2")}

    layers = [layer(f"model.transformer_{i}") for i in range(shape["depth"])]
    return {
        "blocks": {"layers": jax.tree.map(lambda *leaves: np.stack(leaves), *layers)},
        "embed": leaf("model.embeddings.word_embeddings.weight"),
        "head": linear("seq_classifer.mlpblock.2"),
        "hidden": linear("seq_classifer.mlpblock.0"),
        "norm": norm("model.norm"),
        "pos_embed": leaf("model.embeddings.position_embeddings.weight"),
    }


def build_released(shape, **changes):
    """Return the model of a case with the original's options."""
    options = dict(shape)
    if shape["attention"] == "nystrom":
        options |= ORIGINAL_NYSTROM
    else:
        del options["landmarks"], options["convolution"]
    return models.build("nystromformer", **(options | ORIGINAL | changes), rngs=nnx.Rngs(0))


def apply(model, tree, tokens):
    graphdef, params = nnx.split(model, nnx.Param)
    jax.tree.map(lambda a, b: np.testing.assert_equal(a.shape, b.shape), nnx.to_pure_dict(params), tree)
    return jax.jit(lambda p: nnx.merge(graphdef, nnx.State(p))(tokens)[0])(tree)


@pytest.mark.parametrize("case", CASES)
def test_logits_match_the_original(case):
    shape, w = load_case(case)
    assert (
        relative_error(apply(build_released(shape), convert_released(w, shape), jnp.asarray(w["tokens"])), w["logits"])
        < TOLERANCE
    )


@pytest.mark.slow  # sees whether the tolerance would detect a mistake, not whether there is one
@pytest.mark.parametrize(
    "changes",
    [{"padding": "masked"}, {"scale": "matrix"}, {"pool": "mean"}, {"zero_is_padding": False}, {"iterations": 7}],
    ids=str,
)
def test_every_option_of_the_original_changes_logits(changes):
    shape, w = load_case("nystrom")
    result = apply(build_released(shape, **changes), convert_released(w, shape), jnp.asarray(w["tokens"]))
    assert relative_error(result, w["logits"]) > 10 * TOLERANCE


@pytest.mark.slow
def test_gradients_match_the_original():
    shape, w = load_case("nystrom")
    model, tokens = build_released(shape), jnp.asarray(w["tokens"])
    targets = jax.nn.one_hot(w["labels"], shape["num_classes"])
    tree = jax.tree.map(jnp.asarray, convert_released(w, shape))
    loss = jax.jit(jax.grad(lambda p: classify(apply(model, p, tokens), targets, "softmax").mean()))
    result, expected = loss(tree), convert_released(w, shape, "grad/")
    for (path, a), b in zip(jax.tree.leaves_with_path(result), jax.tree.leaves(expected), strict=True):
        # The float32 gradients of the original are 2.4e-6 from its float64 gradients.
        assert relative_error(a, b) < 2e-5, jax.tree_util.keystr(path)
