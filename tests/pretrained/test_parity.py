"""Architectures against the libraries that publish their weights: outputs from the same weights, and export.

Fixtures by experiments/fixtures. The test files of single architectures check that wrong details are detected.
"""

import jax
import pytest
from flax import nnx
from parity import OUTPUTS, TOLERANCE, case, check_export, compute_outputs, list_cases, relative_difference


CASES = list_cases()
ALL = pytest.mark.parametrize(("file", "name"), CASES, ids=[f"{file} {name}" for file, name in CASES])
NAIVE = {("xcit_timm", "xcit_tiny"), ("volo_timm", "volo_tiny_wide"), ("tnt_timm", "original_wide")}
NAIVE |= {(file, name) for file, name in CASES if file.startswith("vit")}


def test_number_of_cases():
    """The files contain all cases that were written to them."""
    assert len(CASES) == 37


@pytest.mark.parametrize("backend", ["xla", "naive"])
@ALL
def test_logits_match_the_reference(file, name, backend):
    if backend == "naive" and (file, name) not in NAIVE:
        pytest.skip("one case of each family is enough")
    reference = case(file, name)
    result = compute_outputs(reference.build(backend=backend), reference.arrays["input"])
    for output in reference.arrays.keys() & OUTPUTS:
        assert relative_difference(result[output], reference.arrays[output]) < TOLERANCE, output


@ALL
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
    reference = case(file, name)
    # A backbone has no head, and our models have no mask token.
    alone = {"classifier.weight", "classifier.bias", "embeddings.mask_token"} if name == "dinov2" else ()
    check_export(reference.weights, reference.layout, reference.tensors, alone=alone)
