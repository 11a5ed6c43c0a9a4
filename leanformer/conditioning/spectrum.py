"""Singular values of matrices and what is read off them: condition number, ranks, and whether to believe them.

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
        TypeError: they are complex, which float32 would cut in half.
        ValueError: the matrices are empty.
    """
    if jnp.iscomplexobj(x):
        raise TypeError(f"singular_values takes real matrices, found {x.dtype}; condition() takes complex ones.")
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

    Where float32 sees no smallest singular value, `condition_number` is the bound 1 / FLOOR = 1.7e6, "at least"
    (`condition` says what of float64); for a matrix with a NaN or an infinity it is infinite and the ranks are zero.
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


def summarise(s: Float[Array, "*b r"], shape: tuple[int, int], floor: float = FLOOR) -> Summary:
    """Reduces singular values, largest first, of matrices of `shape`. Nothing is clipped or left out but by a flag.

    Values of at most `floor` times the largest are rounding noise.
    """
    finite = jnp.isfinite(s).all(axis=-1)
    s = jnp.where(finite[..., None], s, 0)
    largest = s[..., :1]
    # Relative to the largest, so that neither squares nor sums overflow.
    relative = s / jnp.where(largest > 0, largest, 1)
    ratio = 1 / jnp.maximum(relative[..., -1], floor)
    total = relative.sum(axis=-1, keepdims=True)
    share = relative / jnp.where(total > 0, total, 1)
    entropy = -jnp.sum(share * jnp.log(jnp.where(share > 0, share, 1)), axis=-1)
    return Summary(
        condition_number=jnp.where(finite, ratio, jnp.inf),
        log10_condition=jnp.where(finite, jnp.log10(ratio), jnp.inf),
        effective_rank=jnp.where(largest[..., 0] > 0, jnp.exp(entropy), 0),
        stable_rank=jnp.sum(relative**2, axis=-1),
        negligible=jnp.where(finite, jnp.sum(relative <= floor, axis=-1), 0),
        finite=finite,
        shape=shape,
    )


def condition(x: Any) -> Summary:
    """The summary of each matrix in a batch (..., m, n): of a JAX array, or of whatever NumPy makes an array of.

    Float32 and below are `singular_values`' task, wherever they are. Float64, complex numbers, integers and lists are
    taken in NumPy's precision for them, by LAPACK on the host: figures are NumPy's float64, and the bound where no
    smallest singular value is seen is 1 / (NOISE ε) of float64, 9e14; of complex64 it is float32's.

    Raises:
        TypeError: these are no numbers, or of more than 64 bits; under `jit`, anything but float32 and below.
        ValueError: these are no matrices, rows differ in length, or a side is empty.
    """
    x = x if isinstance(x, jax.Array) else np.asarray(x)
    if x.ndim < 2 or 0 in x.shape[-2:]:
        raise ValueError(f"condition() takes matrices, (..., m, n) and none of them empty; found shape {x.shape}.")
    if jnp.issubdtype(x.dtype, jnp.floating) and x.dtype.itemsize <= 4:
        return summarise(singular_values(x), x.shape[-2:])
    if isinstance(x, jax.core.Tracer):
        raise TypeError(f"condition() under jit takes float32 and below, found {x.dtype}: call it outside, or cast.")
    return _on_host(np.asarray(x))


def _on_host(x: np.ndarray) -> Summary:
    wide = np.dtype(np.complex128 if x.dtype.kind == "c" else np.float64)
    if x.dtype.kind not in "biufc" or x.dtype.itemsize > wide.itemsize:
        raise TypeError(f"condition() takes matrices of numbers of at most 64 bits a part, found {x.dtype}.")
    narrow = np.float32 if x.dtype == np.complex64 else np.float64
    finite = np.isfinite(x).all(axis=(-2, -1))[..., None]
    s = np.linalg.svd(np.where(finite[..., None], x, 0).astype(wide), compute_uv=False)
    with jax.enable_x64(True):
        found = summarise(jnp.asarray(np.where(finite, s, np.nan)), x.shape[-2:], NOISE * float(np.finfo(narrow).eps))
        return jax.device_get(found)  # JAX arrays in float64 would warn of all that is done with them outside of here


def with_spectrum(x: Float[Array | np.ndarray, "*b m n"]) -> tuple[Float[Array, "*b r"], Summary]:
    """The singular values too."""
    s = singular_values(x)
    return s, summarise(s, x.shape[-2:])


def read(value: Float[Array, "*b"], defined: bool = True) -> Reading:
    """A reading in float32, valid where it is finite and `defined` for such a model at all."""
    value = value.astype(jnp.float32)
    valid = jnp.isfinite(value) & defined
    return Reading(jnp.where(valid, value, 0), valid)


QUANTILES = {"q10": 0.1, "median": 0.5, "q90": 0.9}


def digest(found: Summary | Reading) -> list[dict[str, Any]]:
    """One dictionary a layer (leading axis L) over all its examples and heads, ready for JSON.

    A mean would mislead: condition numbers have a heavy tail. Matrices with a NaN or an infinity are left out and
    counted; singular ones stay in at their lower bound, since leaving out the worst would flatter the median. A figure
    is None where nothing is left of it. `flags` are sentences, none if all is well.
    """
    found = jax.device_get(found)
    usable = np.asarray(found.finite if isinstance(found, Summary) else found.valid)
    return [_layer(jax.tree.map(lambda x, i=i: np.ravel(x[i]), found), usable[i].ravel()) for i in range(len(usable))]


def _layer(found: Summary | Reading, usable: np.ndarray) -> dict[str, Any]:
    count, lost = usable.size, int((~usable).sum())
    if isinstance(found, Reading):
        flags = [f"undefined or not finite in {lost} of {count}"] if lost else []
        return _quantiles(found.value[usable]) | {"count": count, "not_finite": lost, "flags": flags}
    rank, singular = min(found.shape), int((found.negligible > 0).sum())
    flags = []
    if lost:
        flags.append(f"{lost} of {count} matrices hold a NaN or an infinity and are left out")
    if singular:
        flags.append(
            f"{singular} of {count} matrices are singular in float32 (up to {found.negligible.max()} of {rank} "
            f"singular values are rounding noise), their condition number is at least {1 / FLOOR:.1e}"
        )
    if rank == 1:
        flags.append("a single row or column: its condition number is 1 whatever it holds")
    return _quantiles(found.condition_number[usable]) | {
        "effective_rank": _median(found.effective_rank[usable]),
        "stable_rank": _median(found.stable_rank[usable]),
        "shape": list(found.shape),
        "count": count,
        "not_finite": lost,
        "singular": singular,
        "negligible": int(found.negligible.max()),
        "flags": flags,
    }


def _quantiles(values: np.ndarray) -> dict[str, float | None]:
    return {name: float(np.quantile(values, q)) if values.size else None for name, q in QUANTILES.items()}


def _median(values: np.ndarray) -> float | None:
    return float(np.median(values)) if values.size else None
