"""TNT against timm: detection of wrong details, in both layouts."""

import pytest
from parity import TOLERANCE, case


pytestmark = pytest.mark.slow  # sees whether the tolerance would detect a mistake, not whether there is one


@pytest.mark.parametrize("name", ["original", "patchwise"])
def test_layouts_differ_in_their_stems(name):
    reference = case("tnt_timm", name)
    model = reference.build()
    model.layout = {"original": "patchwise", "patchwise": "original"}[name]  # the blocks stay unchanged
    assert reference.error(model) > 1000 * TOLERANCE
