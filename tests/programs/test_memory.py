"""Memory of compiled programs against sizes known by hand."""

import jax
import numpy as np

from leanformer import programs


def test_peak_memory_with_and_without_donation():
    x = jax.ShapeDtypeStruct((256, 256), np.float32)
    compiled = jax.jit(lambda x: x + 1).lower(x).compile()
    assert programs.peak_memory(compiled) == 2 * 256 * 256 * 4
    donated = jax.jit(lambda x: x + 1, donate_argnums=0).lower(x).compile()
    assert programs.peak_memory(donated) == 256 * 256 * 4
