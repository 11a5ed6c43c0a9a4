"""Conditioning of attention: spectra, named measures, and the Gaussian random-matrix reference, on plain arrays.

summary = condition(x)                       # x: any batch of matrices of NumPy, PyTorch or JAX; a `Summary`
_, taps = model(images, tap=tap(["attention_output"]))
measured = by_name(taps, ["attention_output"])
digest(measured["attention_output"])         # one dictionary per layer
gaussian(tokens, num_heads * head_dim)       # the prediction for that shape
"""

from leanformer.conditioning.measures import ACTIVATIONS, WEIGHTS, block_jacobian, by_name, measure, tap, weights
from leanformer.conditioning.spectrum import (
    Reading,
    Summary,
    condition,
    digest,
    singular_values,
    with_spectrum,
)
from leanformer.conditioning.theory import formula, gaussian


__all__ = [
    "ACTIVATIONS",
    "WEIGHTS",
    "Reading",
    "Summary",
    "block_jacobian",
    "by_name",
    "condition",
    "digest",
    "formula",
    "gaussian",
    "measure",
    "singular_values",
    "tap",
    "weights",
    "with_spectrum",
]
