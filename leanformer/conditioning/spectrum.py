"""Singular values of matrices, and summaries of them: condition number, ranks and validity.

Arrays of NumPy, PyTorch and JAX are measured where they are, also inside `jax.jit`. JAX is imported for its
arrays only.
"""

import dataclasses
import functools
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
from array_api_compat import array_namespace, device, is_array_api_obj, is_jax_array


# Singular values of at most this many float32 epsilons of the largest are rounding noise. Rounding a singular matrix
# to float32 raises its smallest value to at most 0.2 epsilons (measured up to 1024 x 1024); computing it adds more.
NOISE = 5
FLOOR = NOISE * float(np.finfo(np.float32).eps)
# Unit roundoff of float types narrower than float32.
ROUNDOFF = {"float16": 2**-11, "bfloat16": 2**-8, "float8_e4m3fn": 2**-4, "float8_e5m2": 2**-3}
RESOLVED = 0.1  # largest relative error, from a narrow type, of a singular value that counts as one
# Ratio of rows to columns from which a QR before the SVD is faster, measured on a CPU (tools/speed/probe.py).
TALL = 1.5
QUANTILES = {"q10": 0.1, "median": 0.5, "q90": 0.9}


def singular_values(x: Any) -> Any:
    """Return the singular values (..., r) of each matrix in a batch (..., m, n), largest first; r = min(m, n).

    They are computed in float64, since float32 gives κ = 1e6 with an error of up to 15 %. What remains is the error of
    rounding the matrix itself to float32: at most 2e-4 of κ at 1e4 and 2e-2 at 1e6 (if half the values are the
    smallest), far less for most spectra. A matrix with a NaN or an infinity gives a row of NaN and does not affect the
    others. The result is float32 for JAX and float64 otherwise. Raises TypeError for complex matrices.

    >>> singular_values(np.diag([1.0, 3.0])).tolist()
    [3.0, 1.0]
    """
    xp = array_namespace(x)
    if "complex" in str(x.dtype):
        raise TypeError(f"singular_values takes real matrices, found {x.dtype}; condition() takes complex ones.")
    x = xp.astype(x, xp.float32)  # the result is promised for the matrix rounded to float32
    finite = xp.all(xp.isfinite(x), axis=(-2, -1), keepdims=True)
    x = xp.where(finite, x, 0)  # on some platforms a factorisation hangs on a NaN
    x = x if x.shape[-2] >= x.shape[-1] else xp.matrix_transpose(x)
    s = use_jax()(x) if is_jax_array(x) else by_gram(xp.astype(x, xp.float64))
    return xp.where(finite[..., 0], s, xp.nan)


def by_gram(x: Any) -> Any:
    """Return singular values as √λ(xᵀx), largest first; x in float64, m ≥ n. Products of float32 values are exact.

    The Gram matrix squares κ, and float64 has the range for it: the result differs from orthogonal reductions by at
    most 1e-3 at κ = 1e6 and 1e-6 at 1e4 (measured). Matmuls and symmetric eigensolvers work on whole batches, also on a
    GPU, where PyTorch's SVD takes the matrices one by one (pytorch/pytorch#41306), and cuSOLVER's those above 32 x 32.
    """
    xp = array_namespace(x)
    matmul = xp.matmul
    if is_jax_array(x):  # JAX's `matmul` records a dtype that a vmap outside `enable_x64` would truncate to float32
        from jax.lax import batch_matmul as matmul
    gram = matmul(xp.matrix_transpose(x), x)
    return xp.sqrt(xp.clip(xp.flip(xp.linalg.eigvalsh(gram), axis=-1), 0, None))


def by_reflections(x: Any) -> Any:
    """Return singular values of JAX matrices by orthogonal reductions, m ≥ n: QR if tall, then bidiagonalisation."""
    import jax

    if x.shape[-2] >= TALL * x.shape[-1]:
        x = jax.numpy.linalg.qr(x, mode="r")
    return jax.lax.linalg.svd(x, full_matrices=False, compute_uv=False)


def factorised(x: Any) -> Any:
    """Return the float32 singular values of float32 JAX matrices, m ≥ n, by the method of the platform in float64."""
    import jax

    with jax.enable_x64(True):
        x = x.astype("float64")
        return jax.lax.platform_dependent(x, cpu=by_reflections, default=by_gram).astype("float32")


@functools.cache
def use_jax() -> Any:
    """Import JAX, make the classes here pytrees, and return `factorised`, compiled."""
    import jax

    for one in (Summary, Reading):
        jax.tree_util.register_dataclass(one)
    return jax.jit(factorised)


def observed(arrays: Any) -> Any:
    """Cut JAX arrays off from gradients and XLA's fusion, so that measuring cannot change how the model rounds."""
    use_jax()
    import jax

    return jax.lax.optimization_barrier(jax.lax.stop_gradient(arrays))


@dataclasses.dataclass(frozen=True)
class Summary:
    """Summaries of the spectra of matrices of one shape: arrays of the batch's shape, floats unless noted; none is NaN.

    Check `valid` before using one. If a matrix is numerically singular in float32, `condition_number` is the lower
    bound 1 / FLOOR = 1.7e6 (for float64 see `condition`); in bfloat16, which resolves some hundreds, a lower bound that
    depends on the matrix (`summarise`). With a NaN or an infinity it is infinite, and the ranks are zero.

    Attributes:
        condition_number: σ_1 / σ_r, the largest over the smallest singular value.
        log10_condition: logarithm of the condition number to base 10.
        effective_rank: exp of the entropy of σ_i / Σσ (Roy and Vetterli 2007).
        stable_rank: Σσ_i² / σ_1².
        negligible: number of singular values that are rounding noise, of at most FLOOR σ_1 in float32; integers.
        finite: True if no entry is NaN or infinite, booleans.
        shape: rows and columns of a matrix, static under `jit`.
        rows: number of rows that are not padding, integers; None without padding.
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


@dataclasses.dataclass(frozen=True)
class Reading:
    """Values that are not computed from a spectrum, such as an entropy.

    Attributes:
        value: the values, floats of any shape; 0 if not valid.
        valid: True for each value that is finite and defined for the model; booleans of the same shape.
    """

    value: Any
    valid: Any


if "jax" in sys.modules:  # else at the first array of JAX
    use_jax()


def map_arrays(function: Callable[[Any], Any], measured: Any) -> Any:
    fields = {f.name: getattr(measured, f.name) for f in dataclasses.fields(measured) if not f.metadata}
    return dataclasses.replace(measured, **{n: None if x is None else function(x) for n, x in fields.items()})


def to_numpy(x: Any) -> np.ndarray:
    """Return an array of any library in host memory."""
    return np.asarray(x.detach().cpu() if hasattr(x, "detach") else x)


def unit_roundoff(dtype: Any) -> float:
    """Return the unit roundoff of a float type narrower than float32, by dtype or name; 0 for float32 and wider.

    >>> unit_roundoff("bfloat16"), unit_roundoff("float32")
    (0.00390625, 0.0)
    """
    return ROUNDOFF.get(str(dtype).removeprefix("torch."), 0.0)


def summarise(s: Any, shape: tuple[int, int], floor: float = FLOOR, rows: Any = None, roundoff: float = 0.0) -> Summary:
    """Summarise singular values (..., r), largest first, of matrices of `shape`; NaN marks a matrix that is not finite.

    Values of at most `floor` times the largest count as rounding noise. `rows`, which broadcast to (...), are the
    numbers of rows that are not padding: rows of zeros add singular values of zero, which do not count.

    A type of unit `roundoff` u, narrower than float32, stored A + E with independent relative errors of at most u per
    entry. The spectral norm of E is about u / √3 · ‖A‖_F · (1 / √m + 1 / √n) (Vershynin 2012, theorem 5.31). By Weyl's
    inequality each singular value is known to within ‖E‖. If that exceeds RESOLVED of one, it counts as rounding noise,
    and the condition number is the lower bound (σ_1 - ‖E‖) / (σ_r + ‖E‖).

    >>> bool(summarise(np.array([2.0, 1.0, 0.0]), (3, 3)).valid)
    False
    """
    xp = array_namespace(s)
    finite = xp.all(xp.isfinite(s), axis=-1)
    s = xp.where(finite[..., None], s, 0)
    # XLA divides by multiplying with the reciprocal, and a subnormal one (here above 2^126) is flushed to zero.
    s = xp.where(s[..., :1] > 0.25 / float(xp.finfo(s.dtype).smallest_normal), s / 4, s)
    largest = s[..., :1]
    # Divided by the largest, so that neither squares nor sums overflow.
    relative = s / xp.where(largest > 0, largest, 1)
    negligible = relative <= floor
    if rows is None:
        smallest, counts = relative[..., -1], True
    else:
        rows = xp.broadcast_to(rows, s.shape[:-1])
        rank = xp.clip(rows, 1, min(shape))[..., None]
        smallest = xp.take_along_axis(relative, rank - 1, axis=-1)[..., 0]
        index = xp.reshape(xp.arange(s.shape[-1], device=device(s)), (*(1,) * (s.ndim - 1), -1))
        counts = index < rank
    ratio = 1 / xp.clip(smallest, floor, None)
    if roundoff:
        height = xp.clip(xp.astype(rows, s.dtype), 1, None) if rows is not None else shape[0]
        noise = xp.sum(relative**2, axis=-1) ** 0.5 * (height**-0.5 + shape[1] ** -0.5) * (roundoff / 3**0.5)
        bound = xp.clip((1 - noise) / (smallest + noise), 1, None)
        ratio = xp.where(smallest < noise / RESOLVED, xp.minimum(bound, ratio), ratio)
        negligible = negligible | (relative < noise[..., None] / RESOLVED)
    total = xp.sum(relative, axis=-1, keepdims=True)
    share = relative / xp.where(total > 0, total, 1)
    entropy = -xp.sum(share * xp.log(xp.where(share > 0, share, 1)), axis=-1)
    return Summary(
        condition_number=xp.where(finite, ratio, xp.inf),
        log10_condition=xp.where(finite, xp.log10(ratio), xp.inf),
        effective_rank=xp.where(largest[..., 0] > 0, xp.exp(entropy), 0),
        stable_rank=xp.sum(relative**2, axis=-1),
        negligible=xp.where(finite, xp.sum(xp.astype(negligible & counts, xp.int32), axis=-1), 0),
        finite=finite,
        shape=shape,
        rows=rows,
    )


def precision(bound: float) -> str:
    """Return words for the type in which matrices are singular, from the smallest lower bound of their κ."""
    return "float64" if bound > 2 / FLOOR else "float32" if bound > 0.9 / FLOOR else "the type that stores them"


def beyond_float32(count: int, layers: int) -> str:
    """Return words for condition numbers of layers that float32 does not resolve."""
    return f"at least {1 / FLOOR:.3e}, more than float32 resolves, in {count} of {layers} layers"


def condition(x: Any) -> Summary:
    """Return the summary of each matrix in a batch (..., m, n): an array, or anything that NumPy converts to one.

    Float32 and below use `singular_values` where they are. Float64, complex numbers, integers and lists use LAPACK on
    the host in NumPy's precision for them, not under `jit`; their values are NumPy float64, and the lower bound for
    singular matrices is 1 / (NOISE ε) of float64, 9e14 (for complex64, of float32). Raises ValueError for no batch of
    matrices, an empty side and masked entries.

    >>> float(condition([[4.0, 0.0], [0.0, 2.0]]).condition_number)
    2.0
    """
    if np.ma.is_masked(x):  # NumPy would measure what is behind the mask
        raise ValueError("condition() found a NumPy array with masked entries. Fill them, or leave the rows out.")
    a: Any = x if is_array_api_obj(x) else np.asarray(x)
    if a.ndim < 2 or 0 in a.shape[-2:]:
        raise ValueError(f"condition() takes matrices, (..., m, n) and none of them empty; found shape {a.shape}.")
    if "float" in str(a.dtype) and a.dtype.itemsize <= 4:
        return with_spectrum(a)[1]
    host = to_numpy(a)
    wide, narrow = np.result_type(host, np.float64), np.float32 if host.dtype == np.complex64 else np.float64
    finite = np.isfinite(host).all(axis=(-2, -1))[..., None]
    s = np.linalg.svd(np.where(finite[..., None], host, 0).astype(wide), compute_uv=False)
    return summarise(np.where(finite, s, np.nan), host.shape[-2:], NOISE * float(np.finfo(narrow).eps))


def with_spectrum(x: Any, rows: Any = None, dtype: Any = None) -> tuple[Any, Summary]:
    """Return the singular values (..., r) of each matrix in a batch, largest first, and their summary.

    `rows` as in `summarise`; `dtype` is the type that stored the matrices, if it is not their own.
    """
    s = singular_values(x)
    roundoff = unit_roundoff(x.dtype if dtype is None else dtype)
    return s, summarise(s, (x.shape[-2], x.shape[-1]), rows=rows, roundoff=roundoff)


def read(value: Any, defined: bool = True) -> Reading:
    """Return values as a float32 `Reading`: each is valid if it is finite, and if they are `defined` for the model."""
    xp = array_namespace(value)
    value = xp.astype(value, xp.float32)
    valid = xp.isfinite(value) & defined
    return Reading(xp.where(valid, value, 0), valid)


def digest(measured: Any) -> list[dict[str, Any]]:
    """Return one dictionary per layer, ready for JSON, over all the layer's examples and heads.

    Keys for a `Summary`: q10, median and q90 of the condition number; medians effective_rank and stable_rank; shape of
    a matrix, without rows of padding (the median of the examples); numbers of matrices count, not_finite and singular;
    negligible, the largest number of negligible singular values of one matrix; and flags, sentences about problems.
    Keys for a `Reading`: q10, median, q90, count, not_finite, flags. A value is None if no matrix is left.

    Quantiles are used since a heavy tail makes a mean misleading. Matrices with a NaN or an infinity are left out and
    counted; singular ones stay in at their lower bound, since leaving out the worst would lower the median.

    `measured` are summaries or readings with a leading axis L (ValueError without it); or a list of them, one per group
    of layers from the first layer up, whose dictionaries are joined.

    >>> layers = digest(condition(np.stack([np.eye(3), np.diag([4.0, 2.0, 1.0])])[:, None]))
    >>> [layer["median"] for layer in layers]
    [1.0, 4.0]
    """
    if isinstance(measured, list):
        return [layer for group in measured for layer in digest(group)]
    measured = map_arrays(to_numpy, measured)
    usable = measured.finite if isinstance(measured, Summary) else measured.valid
    if not usable.ndim:
        raise ValueError("digest() takes a batch with a leading axis of layers, found one matrix: condition(x[None]).")
    return [_layer(map_arrays(lambda x, i=i: np.ravel(x[i]), measured), usable[i].ravel()) for i in range(len(usable))]


def _layer(values: Any, usable: np.ndarray) -> dict[str, Any]:
    count, not_finite = usable.size, int((~usable).sum())
    if isinstance(values, Reading):
        flags = [f"undefined or not finite in {not_finite} of {count}"] if not_finite else []
        return quantiles(values.value[usable]) | {"count": count, "not_finite": not_finite, "flags": flags}
    shape = list(values.shape)
    if values.rows is not None and values.rows.size:
        shape[0] = int(np.median(values.rows))
    rank, singular = min(shape), int((values.negligible > 0).sum())
    flags = []
    if not_finite:
        flags.append(f"{not_finite} of {count} matrices hold a NaN or an infinity and are left out")
    most = int(values.negligible.max(initial=0))
    if singular:
        bound = float(values.condition_number[values.negligible > 0].min())
        flags.append(
            f"{singular} of {count} matrices are singular in {precision(bound)} (up to {most} of {rank} singular "
            f"values are rounding noise), their condition number is at least {bound:.1e}"
        )
    if rank > 1 and values.rows is not None and (single := int((values.rows <= 1).sum())):
        flags.append(f"{single} of {count} matrices have a single row: their condition number is always 1")
    if rank == 1:
        flags.append("a single row or column: its condition number is always 1")
    return quantiles(values.condition_number[usable]) | {
        "effective_rank": _median(values.effective_rank[usable]),
        "stable_rank": _median(values.stable_rank[usable]),
        "shape": shape,
        "count": count,
        "not_finite": not_finite,
        "singular": singular,
        "negligible": most,
        "flags": flags,
    }


def quantiles(values: np.ndarray) -> dict[str, float | None]:
    return {name: float(np.quantile(values, q)) if values.size else None for name, q in QUANTILES.items()}


def _median(values: np.ndarray) -> float | None:
    return float(np.median(values)) if values.size else None
