"""Families against the libraries that publish their weights: same weights, same outputs, and their names back.

Fixtures by experiments/fixtures. What a family computes in its own way, done another way, is seen in the files of
families.
"""

import jax
import pytest
from flax import nnx
from parity import OUTPUTS, TOLERANCE, case, cases, check_back, distance, outputs


CASES = cases()
ALL = pytest.mark.parametrize(("file", "name"), CASES, ids=[f"{file} {name}" for file, name in CASES])
NAIVE = {("xcit_timm", "xcit_tiny"), ("volo_timm", "volo_tiny_wide"), ("tnt_timm", "original_wide")}
NAIVE |= {(file, name) for file, name in CASES if file.startswith("vit")}


def test_every_case_is_here():
    """The files hold as many cases as were put into them."""
    assert len(CASES) == 37


@pytest.mark.parametrize("backend", ["xla", "naive"])
@ALL
def test_logits(file, name, backend):
    if backend == "naive" and (file, name) not in NAIVE:
        pytest.skip("one case of each family is enough")
    it = case(file, name)
    result = outputs(it.build(backend=backend), it.arrays["input"])
    for output in it.arrays.keys() & OUTPUTS:
        assert distance(result[output], it.arrays[output]) < TOLERANCE, output


@ALL
def test_logits_in_float64(file, name):
    it = case(file, name)
    it.weights  # noqa: B018 - loaded in float32
    with jax.enable_x64(True):
        graphdef, weights = it.doubled()
        result = outputs(nnx.merge(graphdef, *weights), it.arrays["input"])
        for output in OUTPUTS:
            if f"{output}64" in it.arrays:
                tolerance = 1e-6 if it.family == "gpt" else 1e-9  # rotary angles are float32
                assert distance(result[output], it.arrays[f"{output}64"]) < tolerance, output


@ALL
def test_weights_go_back_as_they_came(file, name):
    it = case(file, name)
    # A backbone has no head, and we no mask token.
    alone = {"classifier.weight", "classifier.bias", "embeddings.mask_token"} if name == "dinov2" else ()
    check_back(it.weights, it.layout, it.tensors, alone=alone)
