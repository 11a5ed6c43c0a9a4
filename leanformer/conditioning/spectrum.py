"""Singular values of matrices, and summaries of them: condition number, ranks and validity.

Importing this module sets OPENBLAS_NUM_THREADS=1, also for a SciPy that is loaded already, unless it is set.
"""

import dataclasses
import os
from pathlib import Path
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
import threadpoolctl
from jaxtyping import Array, Float, Float64, Int
from numpy.typing import ArrayLike


# On a CPU, XLA passes a batch to SciPy's LAPACK one matrix at a time, and a pool of BLAS threads only slows matrices
# this small: 1.6 times on an idle machine, over ten times on a busy one. SciPy reads the variable when it is loaded, at
# the first SVD, or before by a package such as transformers. NumPy's own library keeps the threads it has.
if "OPENBLAS_NUM_THREADS" not in os.environ:
    os.environ["OPENBLAS_NUM_THREADS"] = "1"
    for library in threadpoolctl.ThreadpoolController().lib_controllers:
        if Path(library.filepath).parent.name == "scipy.libs":
            library.set_num_threads(1)

# Singular values of at most this many float32 epsilons of the largest are rounding noise. Rounding a singular matrix
# to float32 raises its smallest value to at most 0.2 epsilons (measured up to 1024 x 1024); computing it adds more.
NOISE = 5
FLOOR = NOISE * float(np.finfo(np.float32).eps)

# Ratio of rows to columns from which a QR before the SVD is faster, measured on a CPU (benchmarks/probe.py).
TALL = 1.5


@jax.jit
def singular_values(x: Float[Array | np.ndarray, "*b m n"]) -> Float[Array, "*b r"]:
    """Return the singular values of each matrix in a batch, largest first, in float32; r = min(m, n).

    Computed in float64, since float32 gives κ = 1e6 with an error of up to 15 %: by `by_reflections` on a CPU, by
    `by_gram` elsewhere (see there). The remaining error is that of rounding the matrix itself to float32: at most 2e-4
    of κ at 1e4 and 2e-2 at 1e6 (if half the values are the smallest), far less for most spectra.

    A matrix with a NaN or an infinity gives a row of NaN and does not affect the others.

    Raises:
        TypeError: the matrices are complex, and float32 would drop the imaginary parts.
        ValueError: the matrices are empty.

    >>> singular_values(jnp.diag(jnp.array([1.0, 3.0]))).tolist()
    [3.0, 1.0]
    """
    if jnp.iscomplexobj(x):
        raise TypeError(f"singular_values takes real matrices, found {x.dtype}; condition() takes complex ones.")
    if min(x.shape[-2:]) == 0:
        raise ValueError(f"singular_values needs at least one row and one column, found shape {x.shape}.")
    x = jnp.asarray(x, jnp.float32)  # the result is promised for the matrix rounded to float32
    finite = jnp.isfinite(x).all(axis=(-2, -1), keepdims=True)
    x = jnp.where(finite, x, 0)  # on some platforms a factorisation hangs on a NaN
    x = x if x.shape[-2] >= x.shape[-1] else x.swapaxes(-2, -1)
    with jax.enable_x64(True):
        s = jax.lax.platform_dependent(x.astype(jnp.float64), cpu=by_reflections, default=by_gram).astype(jnp.float32)
    return jnp.where(finite[..., 0], s, jnp.nan)


def by_reflections(x: Float64[Array, "*b m n"]) -> Float64[Array, "*b n"]:
    """Return singular values by orthogonal reductions, m ≥ n: QR if the matrix is tall, then bidiagonalisation.

    The largest value comes first.
    """
    if x.shape[-2] >= TALL * x.shape[-1]:
        x = jnp.linalg.qr(x, mode="r")
    return jax.lax.linalg.svd(x, full_matrices=False, compute_uv=False)


def by_gram(x: Float64[Array, "*b m n"]) -> Float64[Array, "*b n"]:
    """Return singular values as √λ(xᵀx), largest first; m ≥ n. Products of float32 values are exact in float64.

    The Gram matrix squares κ, and float64 has the range for it. The result differs by at most 1e-3 at κ = 1e6 and by
    1e-6 at κ = 1e4 (measured against `by_reflections`). FLOOR is a hundred times above the rounding error here.

    Reason to use it on a GPU: cuSOLVER's Jacobi SVD takes batches of at most 32 x 32. Larger matrices run one by one,
    at 5 ms each for 900 x 100 in float32 on a V100 (pytorch/pytorch#41306), so seconds for the hundreds of one probe.
    Matmuls are batched, and so is cuSOLVER's symmetric eigensolver (XsyevBatched): 500 matrices of 100 x 100 take 8 ms,
    and 914 ms one by one (pytorch/pytorch#174674). It needs about 9 n³ flops. With the matmul that is 0.15 GFLOP for
    197 x 1024: at peak float64 throughput 0.01 ms on an A100, and 0.1 ms on an RTX 4090, whose float64 is 64 times
    slower than its float32.
    """
    # Not `@`, which records a dtype of the result that a vmap outside `enable_x64` would truncate to float32.
    gram = jax.lax.batch_matmul(x.mT, x)
    eigenvalues = jnp.linalg.eigvalsh(gram, symmetrize_input=False)
    return jnp.sqrt(jnp.maximum(eigenvalues[..., ::-1], 0))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Summary:
    """Summaries of the spectra of matrices of one shape: arrays of the batch's shape, float32 unless noted.

    No value is NaN, so check `valid` before using one.

    If a matrix is numerically singular in float32, `condition_number` is the lower bound 1 / FLOOR = 1.7e6 (for float64
    see `condition`). For a matrix with a NaN or an infinity it is infinite, and the ranks are zero.

    Attributes:
        condition_number: σ_1 / σ_r, the largest over the smallest singular value.
        log10_condition: logarithm of the condition number to base 10.
        effective_rank: exp of the entropy of σ_i / Σσ (Roy and Vetterli 2007).
        stable_rank: Σσ_i² / σ_1².
        negligible: number of singular values of at most FLOOR σ_1, integers.
        finite: True if no entry is NaN or infinite, booleans.
        shape: rows and columns of a matrix, static under `jit`.
        rows: number of rows that are not padding, integers; None if no row is.
    """

    condition_number: Any
    log10_condition: Any
    effective_rank: Any
    stable_rank: Any
    negligible: Any
    finite: Any
    shape: tuple[int, int] = dataclasses.field(metadata={"static": True})
    rows: Any = None

    @property
    def valid(self) -> Any:
        """True, per matrix, if it is finite, has no negligible singular value, and has more than one."""
        several = min(self.shape) > 1 if self.rows is None else (self.rows > 1) & (self.shape[1] > 1)
        return self.finite & (self.negligible == 0) & several


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Reading:
    """Values that are not computed from a spectrum, such as an entropy.

    Attributes:
        value: the values, float32 of any shape; 0 if not valid.
        valid: True for each value that is finite and defined for the model; booleans of the same shape.
    """

    value: Any
    valid: Any


def summarise(
    s: Float[Array, "*b r"], shape: tuple[int, int], floor: float = FLOOR, rows: Int[Array, "*#b"] | None = None
) -> Summary:
    """Summarise singular values, largest first, of matrices of `shape`.

    The fields `finite` and `negligible` of the summary flag problems. Values of at most `floor` times the largest count
    as rounding noise.

    Args:
        s: singular values, r = min(shape) per matrix; NaN for a matrix that is not finite.
        shape: rows and columns of a matrix.
        floor: fraction of the largest value up to which others are negligible; the condition number is at most 1 /
            floor.
        rows: number of rows of each matrix that are not padding; all if None. Rows of zeros add singular values of
            zero, which do not count, and change no other.

    >>> bool(summarise(jnp.array([2.0, 1.0, 0.0]), (3, 3)).valid)
    False
    """
    finite = jnp.isfinite(s).all(axis=-1)
    s = jnp.where(finite[..., None], s, 0)
    # XLA divides by multiplying with the reciprocal, and a subnormal one (here above 2^126) is flushed to zero.
    s = jnp.where(s[..., :1] > 0.25 / jnp.finfo(s.dtype).tiny, s / 4, s)
    largest = s[..., :1]
    # Divided by the largest, so that neither squares nor sums overflow.
    relative = s / jnp.where(largest > 0, largest, 1)
    if rows is None:
        smallest, counted = relative[..., -1], True
    else:
        rows = jnp.broadcast_to(rows, s.shape[:-1])
        rank = jnp.clip(rows, 1, min(shape))[..., None]
        smallest = jnp.take_along_axis(relative, rank - 1, axis=-1)[..., 0]
        counted = jax.lax.broadcasted_iota(rank.dtype, s.shape, s.ndim - 1) < rank
    ratio = 1 / jnp.maximum(smallest, floor)
    total = relative.sum(axis=-1, keepdims=True)
    share = relative / jnp.where(total > 0, total, 1)
    entropy = -jnp.sum(share * jnp.log(jnp.where(share > 0, share, 1)), axis=-1)
    return Summary(
        condition_number=jnp.where(finite, ratio, jnp.inf),
        log10_condition=jnp.where(finite, jnp.log10(ratio), jnp.inf),
        effective_rank=jnp.where(largest[..., 0] > 0, jnp.exp(entropy), 0),
        stable_rank=jnp.sum(relative**2, axis=-1),
        negligible=jnp.where(finite, jnp.sum((relative <= floor) & counted, axis=-1), 0),
        finite=finite,
        shape=shape,
        rows=rows,
    )


def condition(x: ArrayLike) -> Summary:
    """Return the summary of each matrix in a batch (..., m, n), a JAX array or anything that NumPy converts to one.

    Float32 and below use `singular_values` on any device. Float64, complex numbers, integers and lists use LAPACK on
    the host in NumPy's precision for them. Their values are NumPy float64, and the lower bound for singular matrices is
    1 / (NOISE ε) of float64, 9e14; for complex64 it is that of float32.

    Raises:
        TypeError: the entries are not numbers, or have more than 64 bits; under `jit`, anything above float32.
        ValueError: the input is not a batch of matrices, rows differ in length, a side is empty, or it is masked.

    >>> float(condition([[4.0, 0.0], [0.0, 2.0]]).condition_number)
    2.0
    """
    if np.ma.is_masked(x):
        raise ValueError("condition() found a NumPy array with masked entries. Fill them, or leave the rows out.")
    a: Any = x if isinstance(x, jax.Array) else np.asarray(x)
    if a.ndim < 2 or 0 in a.shape[-2:]:
        raise ValueError(f"condition() takes matrices, (..., m, n) and none of them empty; found shape {a.shape}.")
    if jnp.issubdtype(a.dtype, jnp.floating) and a.dtype.itemsize <= 4:
        return summarise(singular_values(a), a.shape[-2:])
    if isinstance(a, jax.core.Tracer):
        raise TypeError(f"condition() under jit takes float32 and below, found {a.dtype}: call it outside, or cast.")
    return _on_host(np.asarray(a))


def _on_host(x: np.ndarray) -> Summary:
    wide = np.dtype(np.complex128 if x.dtype.kind == "c" else np.float64)
    if x.dtype.kind not in "biufc" or x.dtype.itemsize > wide.itemsize:
        raise TypeError(f"condition() takes matrices of numbers of at most 64 bits a part, found {x.dtype}.")
    narrow = np.float32 if x.dtype == np.complex64 else np.float64
    finite = np.isfinite(x).all(axis=(-2, -1))[..., None]
    s = np.linalg.svd(np.where(finite[..., None], x, 0).astype(wide), compute_uv=False)
    with jax.enable_x64(True):
        summary = summarise(jnp.asarray(np.where(finite, s, np.nan)), x.shape[-2:], NOISE * float(np.finfo(narrow).eps))
        return jax.device_get(summary)  # float64 JAX arrays would warn when used outside enable_x64


def with_spectrum(
    x: Float[Array | np.ndarray, "*b m n"], rows: Int[Array, "*#b"] | None = None
) -> tuple[Float[Array, "*b r"], Summary]:
    """Return the singular values of each matrix in a batch, float32, largest first, and their summary; r = min(m, n).

    `rows` are those of `summarise`. Raises the errors of `singular_values`.
    """
    s = singular_values(x)
    return s, summarise(s, (x.shape[-2], x.shape[-1]), rows=rows)


def read(value: Float[Array, "*b"], defined: bool = True) -> Reading:
    """Return values as a float32 `Reading`: each is valid if it is finite, and if they are `defined` for the model."""
    value = value.astype(jnp.float32)
    valid = jnp.isfinite(value) & defined
    return Reading(jnp.where(valid, value, 0), valid)


QUANTILES = {"q10": 0.1, "median": 0.5, "q90": 0.9}


def digest(measured: Summary | Reading | list[Any]) -> list[dict[str, Any]]:
    """Return one dictionary per layer (leading axis L), ready for JSON, over all the layer's examples and heads.

    Keys for a `Summary`: q10, median and q90 of the condition number; medians effective_rank and stable_rank; shape of
    a matrix, without rows of padding (the median of the examples); numbers of matrices count, not_finite and singular;
    negligible, the largest number of negligible singular values of one matrix; and flags, sentences about problems.
    Keys for a `Reading`: q10, median, q90, count, not_finite, flags.

    Quantiles are used since condition numbers have a heavy tail, which makes a mean misleading. Matrices with a NaN or
    an infinity are left out and counted. Singular ones stay in at their lower bound, since leaving out the worst would
    lower the median. A value is None if no matrix is left.

    Args:
        measured: summaries or readings with a leading axis L; or a list of them, one per group of layers from the
            first layer up, whose dictionaries are joined.

    Raises ValueError if there is no axis of layers.

    >>> layers = digest(condition(np.stack([np.eye(3), np.diag([4.0, 2.0, 1.0])])[:, None]))
    >>> [layer["median"] for layer in layers]
    [1.0, 4.0]
    """
    if isinstance(measured, list):
        return [layer for group in measured for layer in digest(group)]
    measured = jax.device_get(measured)
    usable = np.asarray(measured.finite if isinstance(measured, Summary) else measured.valid)
    if not usable.ndim:
        raise ValueError("digest() takes a batch with a leading axis of layers, found one matrix: condition(x[None]).")
    return [
        _layer(jax.tree.map(lambda x, i=i: np.ravel(x[i]), measured), usable[i].ravel()) for i in range(len(usable))
    ]


def _layer(values: Summary | Reading, usable: np.ndarray) -> dict[str, Any]:
    count, not_finite = usable.size, int((~usable).sum())
    if isinstance(values, Reading):
        flags = [f"undefined or not finite in {not_finite} of {count}"] if not_finite else []
        return _quantiles(values.value[usable]) | {"count": count, "not_finite": not_finite, "flags": flags}
    shape = list(values.shape)
    if values.rows is not None and values.rows.size:
        shape[0] = int(np.median(values.rows))
    rank, singular = min(shape), int((values.negligible > 0).sum())
    flags = []
    if not_finite:
        flags.append(f"{not_finite} of {count} matrices hold a NaN or an infinity and are left out")
    most = int(values.negligible.max(initial=0))
    if singular:
        bound = values.condition_number[values.negligible > 0].max()  # the floor that `summarise` was given
        flags.append(
            f"{singular} of {count} matrices are singular in float{32 if bound < 2 / FLOOR else 64} (up to {most} of "
            f"{rank} singular values are rounding noise), their condition number is at least {bound:.1e}"
        )
    if rank > 1 and values.rows is not None and (single := int((values.rows <= 1).sum())):
        flags.append(f"{single} of {count} matrices have a single row: their condition number is always 1")
    if rank == 1:
        flags.append("a single row or column: its condition number is always 1")
    return _quantiles(values.condition_number[usable]) | {
        "effective_rank": _median(values.effective_rank[usable]),
        "stable_rank": _median(values.stable_rank[usable]),
        "shape": shape,
        "count": count,
        "not_finite": not_finite,
        "singular": singular,
        "negligible": most,
        "flags": flags,
    }


def _quantiles(values: np.ndarray) -> dict[str, float | None]:
    return {name: float(np.quantile(values, q)) if values.size else None for name, q in QUANTILES.items()}


def _median(values: np.ndarray) -> float | None:
    return float(np.median(values)) if values.size else None
