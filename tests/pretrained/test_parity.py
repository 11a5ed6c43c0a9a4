"""Architectures against the libraries that publish their weights: outputs from the same weights, and export.

Fixtures by tests/fixtures/make. tools/mutants.py shows that wrong details of an architecture exceed the tolerances.
"""

import jax
import pytest
from flax import nnx
from parity import OUTPUTS, TOLERANCE, case, check_export, compute_outputs, list_cases, relative_difference


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
