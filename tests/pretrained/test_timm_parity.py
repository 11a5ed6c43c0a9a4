"""Image models against timm, beyond logits: gradients, training, bfloat16 and drop-path rates."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from parity import case, compute_outputs, load_fixture, relative_difference

from leanformer import models, pretrained
from leanformer.tasks.classification import classify


GRADIENTS = [  # case, and the rounding of its gradients: those of ViT are timm's own in float32
    ("vit_timm", "vit_tiny", 2e-5),
    pytest.param("xcit_timm", "xcit_tiny", 1e-7, marks=pytest.mark.slow),  # long to compile
    pytest.param("volo_timm", "volo_tiny", 1e-7, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("file", "name", "tolerance"), GRADIENTS)
@jax.enable_x64(True)
def test_gradients_match_timm(file, name, tolerance):
    """In float64. Those of VOLO are of training: logits from batch statistics, and updated running statistics too."""
    reference = case(file, name)
    expected, (graphdef, (params, statistics)) = reference.arrays, reference.doubled(remat="none")
    images, targets = jnp.asarray(expected["input"], jnp.float64), jax.nn.one_hot(expected["labels"], 11)
    running = {name.removeprefix("train/") for name in expected if "running" in name}
    key = jax.random.split(jax.random.key(0), len(images)) if running else None

    @jax.jit
    @functools.partial(jax.grad, has_aux=True)
    def gradient(params):
        model = nnx.merge(graphdef, params, statistics)
        logits, _ = model(images, key=key)
        return classify(logits, targets, "softmax").mean(), (logits, nnx.as_pure(nnx.state(model, nnx.BatchStat)))

    grads, (logits, updated) = gradient(params)
    result = pretrained.export((grads, updated), reference.layout)
    theirs = {name.removeprefix("grad/"): x for name, x in expected.items() if name.startswith("grad/")}
    assert theirs.keys() == {name for name in result if "running" not in name and "tracked" not in name}
    assert not running or running == {name for name in result if "running" in name}
    assert not running or relative_difference(logits, expected["train/logits64"]) < 1e-9
    for name in running:
        assert relative_difference(result[name], expected[f"train/{name}"]) < 1e-9, name
    largest = max(np.abs(x).max() for x in theirs.values())
    for name, x in theirs.items():  # float32 in the file
        if name.endswith("attn.k.bias"):  # it cancels in the softmax: zero up to rounding
            assert max(np.abs(x).max(), np.abs(result[name]).max()) < 100 * np.finfo(np.float64).eps * largest
        else:
            assert np.abs(x).max() > 0 and np.abs(result[name] - x).max() / np.abs(x).max() < tolerance, name


def test_logits_of_xcit_in_bfloat16():
    reference = case("xcit_timm", "xcit_tiny")
    logits = compute_outputs(reference.build(dtype=jnp.bfloat16), reference.arrays["input"])["logits"]
    expected = reference.arrays["logits"]
    assert logits.dtype == jnp.bfloat16
    assert np.abs(logits - expected).max() < 0.05 * np.abs(expected).max()


def test_drop_path_rates_of_davit_match_in_both_blocks_of_a_unit():
    arguments = case("davit_timm", "davit_tiny_wide").arguments
    rates = load_fixture("davit_timm", "davit_tiny_wide")[0]["drop_path"]
    model = nnx.eval_shape(lambda: models.build("davit", **arguments, drop_path=0.3, rngs=nnx.Rngs(0)))
    for i, units in enumerate(rates):
        ours = getattr(model, f"stage{i + 1}").rates
        np.testing.assert_allclose(np.stack([ours, ours], axis=1), units, rtol=1e-6)
