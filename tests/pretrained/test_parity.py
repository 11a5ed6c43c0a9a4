"""Architectures against the libraries that publish their weights: outputs from the same weights, and export.

Fixtures by tests/fixtures/make. The test files of single architectures check that their other wrong details are
detected.
"""

import jax
import pytest
from flax import nnx
from parity import OUTPUTS, TOLERANCE, case, check_export, compute_outputs, list_cases, relative_difference

from leanformer.layers import blocks
from leanformer.layers.convolution import BatchNorm
from leanformer.layers.norms import LayerNorm
from leanformer.models import xcit


CASES = list_cases()
ALL = pytest.mark.parametrize(("file", "name"), CASES, ids=[f"{file} {name}" for file, name in CASES])
NAIVE = {("xcit_timm", "xcit_tiny"), ("volo_timm", "volo_tiny_wide"), ("tnt_timm", "original_wide")}
NAIVE |= {(file, name) for file, name in CASES if file.startswith("vit")}
# One case for each mechanism; the others differ in sizes, and float64 is stricter than float32.
FAST = {"vit_tiny_wide", "deit_tiny_distilled", "vit_tiny_mean", "vit_tiny_scaled", "vit", "dinov2", "nanochat", "gpt2"}
FAST |= {"qwen3", "xcit_tiny_wide", "volo_tiny_wide", "volo_tiny_odd", "original_wide", "patchwise"}
FAST |= {"davit_tiny_wide", "davit_tiny_odd", "xcit_tiny_plain_tokens", "xcit_tiny_patch8", "deit"}


def tier(*values, fast):
    return pytest.param(*values, id=" ".join(values), marks=[] if fast else [pytest.mark.slow])


FLOAT32 = [tier(file, name, "xla", fast=name in ("vit_tiny_wide", "gpt2")) for file, name in CASES]
FLOAT32 += [tier(file, name, "naive", fast=False) for file, name in CASES if (file, name) in NAIVE]
FLOAT64 = [tier(file, name, fast=name in FAST) for file, name in CASES]


def test_number_of_cases():
    """The files contain all cases that were written to them."""
    assert len(CASES) == 35


@pytest.mark.parametrize(("file", "name", "backend"), FLOAT32)
def test_logits_match_the_reference(file, name, backend):
    reference = case(file, name)
    result = compute_outputs(reference.build(backend=backend), reference.arrays["input"])
    for output in reference.arrays.keys() & OUTPUTS:
        assert relative_difference(result[output], reference.arrays[output]) < TOLERANCE, output


@pytest.mark.parametrize(("file", "name"), FLOAT64)
def test_float64_logits_match_the_reference(file, name):
    reference = case(file, name)
    reference.weights  # noqa: B018 - loaded in float32
    with jax.enable_x64(True):
        graphdef, weights = reference.doubled()
        result = compute_outputs(nnx.merge(graphdef, *weights), reference.arrays["input"])
        for output in OUTPUTS:
            if f"{output}64" in reference.arrays:
                tolerance = 1e-6 if reference.family == "gpt" else 1e-9  # rotary angles are float32
                assert relative_difference(result[output], reference.arrays[f"{output}64"]) < tolerance, output


@ALL
def test_exported_weights_equal_the_imported_ones(file, name):
    if name == "nanochat":
        pytest.skip("nanochat is only imported")
    reference = case(file, name)
    # A backbone has no head, and our models have no mask token.
    alone = {"classifier.weight", "classifier.bias", "embeddings.mask_token"} if name == "dinov2" else ()
    check_export(reference.weights, reference.layout, reference.tensors, alone=alone)


def layer_norm_epsilon(model, _):
    for _, module in nnx.iter_modules(model):
        if isinstance(module, LayerNorm):
            module.epsilon = 1e-5 if module.epsilon == 1e-6 else 1e-6


def batch_norm_epsilon(_, patch):
    patch.setattr(BatchNorm, "EPSILON", 1e-3)


def tanh_gelu(_, patch):
    patch.setitem(blocks.ACTIVATIONS, "gelu", jax.nn.gelu)  # the tanh form, by default
    patch.setattr(xcit, "gelu", jax.nn.gelu)


SMALL = {"volo_timm": "volo_tiny", "xcit_timm": "xcit_tiny", "davit_timm": "davit_tiny_odd", "tnt_timm": "patchwise"}
TINY = list(SMALL.items())
OTHERS = [("tnt_timm", "original"), ("vit_timm", "vit_tiny")]
OTHERS += [("vit_huggingface", name) for name in ("vit", "deit", "dinov2")]
SMALL_CHANGES = [(layer_norm_epsilon, TINY + OTHERS), (batch_norm_epsilon, TINY[:2]), (tanh_gelu, TINY)]


@pytest.mark.slow  # sees whether the tolerance would detect a mistake, not whether there is one
@pytest.mark.parametrize(("change", "of"), [(change, of) for change, cases in SMALL_CHANGES for of in cases])
def test_tolerance_detects_small_changes(change, of, monkeypatch):
    reference = case(*of)
    model = reference.build()
    change(model, monkeypatch)
    assert reference.error(model) > 5 * TOLERANCE
