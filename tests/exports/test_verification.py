"""Check of converted weights: right conversions of every family pass, and a wrong epsilon does not."""

import numpy as np
import pytest
from flax import nnx
from messages import refuses
from parity import OUTPUTS, TOLERANCE, case, compute_outputs

from leanformer.errors import WeightsError
from leanformer.exports import verification


CASES = {  # the case of each family whose outputs depend least on the epsilon
    **{"vit_timm": "vit_tiny_wide", "xcit_timm": "xcit_tiny_patch8", "volo_timm": "volo_tiny_odd"},
    **{"tnt_timm": "patchwise", "davit_timm": "davit_tiny_rect", "vit_huggingface": "vit"},
    **{"gpt_huggingface": "qwen3", "nanochat_huggingface": "nanochat"},
}


def check_case(reference, factor=1):
    """Check the outputs of a reference with the epsilons of all norms multiplied by a factor."""
    model, changed = reference.build(), 0
    for _, module in nnx.iter_modules(model):
        if isinstance(getattr(module, "epsilon", None), float):
            module.epsilon, changed = factor * module.epsilon, changed + 1
    assert changed >= 3
    result = compute_outputs(model, reference.arrays["input"])
    name = min(reference.arrays.keys() & OUTPUTS)
    return verification.check_outputs(np.asarray(result[name]), reference.arrays[name], "theirs", "Do not use it.")


FILES = [pytest.param(file, marks=[pytest.mark.slow] * (file != "gpt_huggingface")) for file in CASES]


@pytest.mark.parametrize("file", FILES)
def test_wrong_epsilon_is_refused(file):
    reference = case(file, CASES[file])
    assert 0 < check_case(reference) < verification.LIMIT / 5
    with refuses("theirs", f"{verification.LIMIT:.0e}", error=WeightsError):
        check_case(reference, factor=10)


def test_limit_equals_the_parity_tests_tolerance():
    assert verification.LIMIT == TOLERANCE


def test_outputs_that_do_not_count_are_left_out():
    ours, theirs = np.ones((2, 3, 5), np.float32), np.ones((2, 3, 5), np.float32)
    theirs[1, 2] = 7
    valid = np.array([[True] * 3, [True, True, False]])
    assert verification.check_outputs(ours, theirs, "theirs", "", valid=valid) == 0
    with refuses("theirs", error=WeightsError):
        verification.check_outputs(ours, theirs, "theirs", "")


@pytest.mark.parametrize("theirs", [np.full((2, 3), np.nan), np.zeros((2, 3)), np.ones((2, 4))], ids=str)
def test_outputs_that_cannot_be_compared_are_refused(theirs):
    with np.errstate(all="ignore"), refuses("theirs", error=WeightsError):
        verification.check_outputs(np.ones((2, 3)), theirs, "theirs", "")
