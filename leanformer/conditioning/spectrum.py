"""Singular values of float32 matrices and what is read off them: condition number, ranks, and whether to believe them.

Importing this sets OPENBLAS_NUM_THREADS=1 unless it is set already.
"""

import dataclasses
import os
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float64


# XLA hands a CPU batch to SciPy's LAPACK one matrix at a time, and a pool of BLAS threads only slows matrices this
# small: 1.6 times in the quiet, over ten times beside a busy core. The first factorisation loads SciPy, after this.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

# Singular values at most this many float32 epsilons of the largest are rounding noise. Rounding a singular matrix to
# float32 lifts its smallest value to 0.2 at most (measured up to 1024 x 1024); what computed it in float32 adds more.
NOISE = 5
FLOOR = NOISE * float(np.finfo(np.float32).eps)

# Rows over columns from which a QR beforehand pays, measured on a CPU (benchmarks/probe.py).
TALL = 1.5


@jax.jit
def singular_values(x: Float[Array | np.ndarray, "*b m n"]) -> Float[Array, "*b r"]:
    """Singular values of each matrix in a batch, largest first, in float32; r = min(m, n).

    Inside in float64: in float32 κ = 1e6 comes out wrong by up to 15 %. On a CPU `by_reflections`, elsewhere `by_gram`,
    which says why. What is left either way is the error of rounding the matrix itself to float32: at most 2e-4 of κ at
    1e4 and 2e-2 at 1e6 (half the values at the bottom), far less for most spectra.

    A matrix with a NaN or an infinity gives a row of NaN and leaves its neighbours alone.

    Raises:
        ValueError: the matrices are empty.
    """
    if min(x.shape[-2:]) == 0:
        raise ValueError(f"singular_values needs at least one row and one column, found shape {x.shape}.")
    x = jnp.asarray(x, jnp.float32)  # of any precision: what is promised is what float32 holds
    finite = jnp.isfinite(x).all(axis=(-2, -1), keepdims=True)
    x = jnp.where(finite, x, 0)  # what a NaN does inside a factorisation differs by platform, hanging included
    x = x if x.shape[-2] >= x.shape[-1] else x.swapaxes(-2, -1)
    with jax.enable_x64(True):
        s = jax.lax.platform_dependent(x.astype(jnp.float64), cpu=by_reflections, default=by_gram).astype(jnp.float32)
    return jnp.where(finite[..., 0], s, jnp.nan)


def by_reflections(x: Float64[Array, "*b m n"]) -> Float64[Array, "*b n"]:
    """By orthogonal reductions alone, m ≥ n: QR where the matrix is far from square, then bidiagonalisation."""
    if x.shape[-2] >= TALL * x.shape[-1]:
        x = jnp.linalg.qr(x, mode="r")
    return jax.lax.linalg.svd(x, full_matrices=False, compute_uv=False)


def by_gram(x: Float64[Array, "*b m n"]) -> Float64[Array, "*b n"]:
    """√λ(xᵀx), m ≥ n, of float32 numbers held in float64, which holds their products exactly.

    The Gram matrix squares κ, and float64 has room for the square of all that float32 tells apart: this moves κ = 1e6
    by at most 1e-3 and κ = 1e4 by 1e-6 (measured against `by_reflections`), and FLOOR cuts off a hundred times above
    what is rounding here.

    Why on a GPU: cuSOLVER's Jacobi SVD takes batches of at most 32 x 32. Larger matrices follow one another, at 5 ms
    each for 900 x 100 in float32 on a V100 (pytorch/pytorch#41306): seconds for the hundreds of one probe. A product is
    batched, and so is cuSOLVER's symmetric eigensolver (XsyevBatched): 500 of 100 x 100 in 8 ms, 914 one by one
    (pytorch/pytorch#174674). It takes about 9 n³ flops; with the product 0.15 GFLOP for 197 x 1024, which at float64's
    peak is 0.01 ms of an A100 and 0.1 ms of an RTX 4090, whose float64 is a 64th of its float32.
    """
    gram = jax.lax.batch_matmul(x.mT, x)  # `@` names its dtype, which a vmap from outside `enable_x64` would cut
    eigenvalues = jnp.linalg.eigvalsh(gram, symmetrize_input=False)
    return jnp.sqrt(jnp.maximum(eigenvalues[..., ::-1], 0))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Summary:
    """What the spectra of matrices of one shape say: arrays of the batch's shape, float32 if nothing else is said.

    Never a NaN: look at `valid` before believing a figure.

    Where float32 sees no smallest singular value, `condition_number` is the bound 1 / FLOOR = 1.7e6, "at least"; for a
    matrix with a NaN or an infinity it is infinite and the ranks are zero.
    """

    condition_number: Any  # σ_1 / σ_r
    log10_condition: Any
    effective_rank: Any  # exp of the entropy of σ_i / Σσ (Roy and Vetterli 2007)
    stable_rank: Any  # Σσ_i² / σ_1²
    negligible: Any  # integer: singular values of at most FLOOR σ_1
    finite: Any  # boolean
    shape: tuple[int, int] = dataclasses.field(metadata={"static": True})  # of the matrix, rows and columns

    @property
    def valid(self) -> Any:
        """Finite, none negligible, and more than one singular value to compare."""
        return self.finite & (self.negligible == 0) & (min(self.shape) > 1)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Reading:
    """A figure that is not read off a spectrum, such as an entropy, in float32; 0 where it is not `valid`."""

    value: Any
    valid: Any


def summarise(s: Float[Array, "*b r"], shape: tuple[int, int]) -> Summary:
    """Reduces singular values, largest first, of matrices of `shape`. Nothing is clipped or left out but by a flag."""
    finite = jnp.isfinite(s).all(axis=-1)
    s = jnp.where(finite[..., None], s, 0)
    largest = s[..., :1]
    # Relative to the largest, so that neither squares nor sums overflow.
    relative = s / jnp.where(largest > 0, largest, 1)
    ratio = 1 / jnp.maximum(relative[..., -1], FLOOR)
    total = relative.sum(axis=-1, keepdims=True)
    share = relative / jnp.where(total > 0, total, 1)
    entropy = -jnp.sum(share * jnp.log(jnp.where(share > 0, share, 1)), axis=-1)
    return Summary(
        condition_number=jnp.where(finite, ratio, jnp.inf),
        log10_condition=jnp.where(finite, jnp.log10(ratio), jnp.inf),
        effective_rank=jnp.where(largest[..., 0] > 0, jnp.exp(entropy), 0),
        stable_rank=jnp.sum(relative**2, axis=-1),
        negligible=jnp.where(finite, jnp.sum(relative <= FLOOR, axis=-1), 0),
        finite=finite,
        shape=shape,
    )


def condition(x: Float[Array | np.ndarray, "*b m n"]) -> Summary:
    """`singular_values` and `summarise` in one."""
    return summarise(singular_values(x), x.shape[-2:])


def with_spectrum(x: Float[Array | np.ndarray, "*b m n"]) -> tuple[Float[Array, "*b r"], Summary]:
    """The singular values too."""
    s = singular_values(x)
    return s, summarise(s, x.shape[-2:])


def read(value: Float[Array, "*b"], defined: bool = True) -> Reading:
    """A reading in float32, valid where it is finite and `defined` for such a model at all."""
    value = value.astype(jnp.float32)
    valid = jnp.isfinite(value) & defined
    return Reading(jnp.where(valid, value, 0), valid)
