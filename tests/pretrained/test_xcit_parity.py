"""XCiT against timm: bfloat16, gradients, and detection of wrong details."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from parity import TOLERANCE, case, compute_outputs

from leanformer import pretrained
from leanformer.models import xcit
from leanformer.tasks.classification import classify


TINY = case("xcit_timm", "xcit_tiny")


def test_logits_in_bfloat16():
    logits = compute_outputs(TINY.build(dtype=jnp.bfloat16), TINY.arrays["input"])["logits"]
    expected = TINY.arrays["logits"]
    assert logits.dtype == jnp.bfloat16
    assert np.abs(logits - expected).max() < 0.05 * np.abs(expected).max()


@pytest.mark.slow  # long to compile; faster tests compare logits
@jax.enable_x64(True)
def test_gradients_match_timm_in_float64():
    arrays = TINY.arrays
    graphdef, (params, statistics) = TINY.doubled(remat="none")
    images, targets = jnp.asarray(arrays["input"], jnp.float64), jax.nn.one_hot(arrays["labels"], 11)

    @jax.jit
    @jax.grad
    def gradient(params):
        logits = nnx.merge(graphdef, params, statistics)(images)[0]
        return classify(logits, targets, "softmax").mean()

    result = pretrained.export((gradient(params), statistics), TINY.layout)
    expected = {name.removeprefix("grad/"): x for name, x in arrays.items() if name.startswith("grad/")}
    largest = max(np.abs(x).max() for x in expected.values())
    assert expected.keys() == {name for name in result if "running" not in name and "tracked" not in name}
    for name, x in expected.items():
        if name.endswith("attn.k.bias"):  # it cancels in the softmax: zero up to rounding
            assert max(np.abs(x).max(), np.abs(result[name]).max()) < 100 * np.finfo(np.float64).eps * largest
        else:  # the file has them in float32
            assert np.abs(result[name] - x).max() / np.abs(x).max() < 1e-7, name


# Wrong details that the tolerance must detect.


def norm_before_gelu(_, patch):
    def wrong(self, x, *, train):
        return self.conv2(jax.nn.gelu(self.norm(self.conv1(x), train=train), approximate=False))

    patch.setattr(xcit.LocalPatchInteraction, "__call__", wrong)


def columns_first(_, patch):
    code = xcit.fourier_code
    patch.setattr(xcit, "fourier_code", lambda *size: np.roll(code(*size), xcit.FREQUENCIES, axis=-1))


def sines_then_cosines(_, patch):
    code = xcit.fourier_code

    def wrong(*size):
        halves = np.split(code(*size), 2, axis=-1)
        return np.concatenate([half[..., start::2] for half in halves for start in (0, 1)], axis=-1)

    patch.setattr(xcit, "fourier_code", wrong)


CHANGES = (norm_before_gelu, columns_first, sines_then_cosines)


@pytest.mark.slow  # sees whether the tolerance would detect a mistake, not whether there is one
@pytest.mark.parametrize("change", CHANGES)
def test_tolerance_detects_large_changes(change, monkeypatch):
    model = TINY.build()
    change(model, monkeypatch)
    assert TINY.error(model) > 1000 * TOLERANCE
