"""Interventions on the conditioning of attention that keep its shapes: on weights, initialisation and tokens.

Matrices have inputs as rows and outputs as columns: W_Q is D x N·H.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from leanformer.config.attention import InterventionKeys
from leanformer.config.rules import require
from leanformer.layers.attention import Projection


FLOOR = 1e-6  # smallest value of a spectrum, relative to the largest; smaller values are clamped


def effective(
    kernel: Float[Array, "r c"],
    spectral: float = 0.0,
    scale: Float[Array, ""] | None = None,
    direction: Float[Array, "c"] | None = None,
) -> Float[Array, "r c"]:
    """Return the matrix that multiplies tokens: W + λI, and with a `scale` γ that matrix times γ / σ₁.

    σ₁ is ‖W v‖ for the unit vector v along `direction`, an estimate of the first right singular vector. v has no
    gradient, so the gradient of σ₁ is u vᵀ, as for the singular value.
    """
    matrix = kernel + spectral * jnp.eye(*kernel.shape, dtype=kernel.dtype) if spectral else kernel
    if scale is None or direction is None:
        return matrix
    unit = jax.lax.stop_gradient(_unit(direction))
    return matrix * (scale / jnp.linalg.norm(_times(matrix, unit)))


def _unit(x: Array) -> Array:
    return x / jnp.linalg.norm(x)


def _times(matrix: Array, vector: Array) -> Array:
    return jnp.matmul(matrix, vector, precision="highest")


class Linear(Projection):
    """Linear layer whose weights are transformed by `effective`, in float32 for any dtype of activations.

    Parameters: kernel and bias as in `nnx.LinearGeneral`; with `sigma` a `scale`, γ, initially 1 (σReparam, Zhai et al.
    2023, arXiv 2303.06296). Statistic, as in batch normalisation: `direction` (columns), initially the first right
    singular vector; `power_iteration_step` updates it by one step of power iteration per training step.

    With `spectral`, λ, the kernel is only the trained part W of W + λI, so weight decay does not change λI (arXiv
    2603.07162, Theorem 3.8). For a non-square W, I is `eye(rows, columns)`; the source leaves this open. Caution: with
    λ = 10 the logit of a token with itself is so large that softmax is one-hot on it. The entropy is then 0, and
    attention's output has the condition number of W_V. Also, κ(W) of Gaussian weights falls from 1e3 or 1e4 at 768 x
    768 to 13 at 768 x 1024, because the matrix is not square, not because there are more heads.
    """

    def __init__(self, *sizes: Any, spectral: float = 0.0, sigma: bool = False, rngs: nnx.Rngs, **linear: Any):
        super().__init__(*sizes, rngs=rngs, **linear)
        self.spectral = spectral
        if sigma:
            matrix = effective(self._flat(), spectral)
            _, _, right = jnp.linalg.svd(matrix, full_matrices=False)
            self.scale, self.direction = nnx.Param(jnp.ones(())), nnx.BatchStat(right[0])

    def _flat(self) -> Float[Array, "r c"]:
        return self.kernel[...].reshape(-1, math.prod(self.out_features))

    def weights(self) -> Array:
        """Return the transformed weights that multiply tokens, in the shape of the kernel."""
        learned = (self.scale[...], self.direction[...]) if hasattr(self, "scale") else ()
        return effective(self._flat(), self.spectral, *learned).reshape(self.kernel.shape)

    def move(self) -> None:
        """Update `direction` by one step of power iteration, v ← Wᵀ W v, normalised; do nothing without `sigma`."""
        if hasattr(self, "direction"):
            matrix = jax.lax.stop_gradient(effective(self._flat(), self.spectral))
            self.direction[...] = _unit(_times(matrix.T, _unit(_times(matrix, self.direction[...]))))


def power_iteration_step(module: nnx.Module) -> None:
    """Update the singular vectors of all `Linear` layers in a module by one step of power iteration."""
    for linear in linears(module):
        linear.move()


def linears(module: nnx.Module) -> list[Linear]:
    return [m for _, m in nnx.iter_modules(module) if isinstance(m, Linear)]


def with_effective_weights(graphdef: Any, weights: tuple[Any, Any]) -> Any:
    """Return a model whose `Linear` kernels are the weights that multiply tokens, for measures of weights."""
    model = nnx.merge(graphdef, *weights)
    for linear in linears(model):
        stacked = linear.kernel.ndim > len(linear.in_features) + len(linear.out_features)
        graph, state = nnx.split(linear)
        of_one = lambda state, graph=graph: nnx.merge(graph, state).weights()  # noqa: E731
        linear.kernel[...] = jax.vmap(of_one)(state) if stacked else of_one(state)
    return model


def modified_init(kind: str, base: nnx.Initializer) -> nnx.Initializer:
    """Return an initialiser of matrices that modifies the singular values S of a draw U S Vᵀ of `base`.

    "orthogonal" gives U Vᵀ with the same mean square: κ(W) is 1, but attention's output hardly changes. "spectral"
    gives U (S + σ₁) Vᵀ: κ(W) is at most 2, without λI's diagonal (arXiv 2603.07162, Theorem 3.5).
    """

    def init(key: Any, shape: tuple[int, ...], dtype: Any = jnp.float32, *_: Any) -> Array:
        drawn = base(key, shape, dtype)
        left, values, right = jnp.linalg.svd(drawn, full_matrices=False)
        polar = jnp.matmul(left, right, precision="highest")
        return drawn + values[0] * polar if kind == "spectral" else polar * jnp.sqrt(jnp.square(values).mean())

    return init


def intervene(
    options: InterventionKeys, name: str, linear: functools.partial[nnx.Module]
) -> functools.partial[nnx.Module]:
    """Return the constructor of the projection "query", "key", "value" or "out" with the options that act on it."""
    on = options.levers_on
    if on is not None:
        unused = options.spectral is None and options.qkv_init is None
        require(not unused, f'model.levers_on="{on}" requires model.spectral or model.qkv_init. Set one of them.')
        require(on != "" and set(on) <= set("qkv"), f'model.levers_on="{on}": use the letters q, k, v, as in "qk".')
    chosen = name != "out" and name[0] in (on or "qkv")
    if chosen and options.qkv_init:
        linear = functools.partial(linear, kernel_init=modified_init(options.qkv_init, linear.keywords["kernel_init"]))
    spectral = (options.spectral or 0.0) if chosen else 0.0
    if not (spectral or options.sigma_reparam):
        return linear
    return functools.partial(
        Linear, *linear.args, spectral=spectral, sigma=bool(options.sigma_reparam), **linear.keywords
    )


def check_flattening(epsilon: float | None, by: str | None, *, causal: bool = False) -> None:
    """Raise ConfigError if token graying is invalid, or would leak later tokens of a causal model."""
    if epsilon is None:
        require(by is None, f'model.graying_by="{by}" requires model.graying. Set it.')
        return
    require(0 < epsilon <= 1, f"model.graying={epsilon} must be an exponent above 0 and at most 1. 1 = off.")
    require(not causal, f"model.graying={epsilon} mixes all tokens, which model.causal=True forbids. Unset one.")


def flatten_token_spectrum(
    x: Float[Array, "b t d"], epsilon: float | None, by: str | None = None
) -> Float[Array, "b t d"]:
    """Flatten the spectrum of tokens B T D: values s become s₁ (s / s₁)^ε, with s₁ the largest (arXiv 2505.01996).

    "svd", the default, uses the singular values of each example's T x D matrix, which are slow on a GPU, and a gradient
    with their T x T weighting constant. "dct" uses the coefficients of a cosine transform along both axes, with their
    signs; it is cheap, and its gradient exact. The source divides by s₁; here the scale of tokens is kept, so ε = 1 is
    a no-op.
    """
    if epsilon is None or epsilon == 1:
        return x
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    if by == "dct":
        along, across = (jnp.asarray(_cosines(size), wide.dtype) for size in x.shape[1:])
        product = functools.partial(jnp.einsum, precision="highest")
        coefficients = product("st,btd,cd->bsc", along, wide, across)
        coefficients *= _factors(jnp.abs(coefficients), epsilon, axis=(1, 2))
        return product("st,bsc,cd->btd", along, coefficients, across).astype(x.dtype)
    left, values, _ = jnp.linalg.svd(jax.lax.stop_gradient(wide), full_matrices=False)
    weighting = (left * _factors(values, epsilon, axis=(1,))[:, None]) @ left.mT
    return jnp.matmul(weighting, wide, precision="highest").astype(x.dtype)


def _factors(sizes: Array, epsilon: float, axis: tuple[int, ...]) -> Array:
    """Return the factors of a spectrum; values below FLOOR, and spectra of zeros, use the factor of FLOOR."""
    largest = sizes.max(axis=axis, keepdims=True)
    largest = jnp.where(largest > 0, largest, 1)
    return jnp.maximum(sizes / largest, FLOOR) ** (epsilon - 1)


def _cosines(size: int) -> Float[np.ndarray, "n n"]:
    """Return the matrix of the orthonormal cosine transform (DCT-II), one frequency per row."""
    rows, columns = np.arange(size)[:, None], np.arange(size)[None]
    matrix = np.cos(np.pi * rows * (2 * columns + 1) / (2 * size)) * math.sqrt(2 / size)
    matrix[0] /= math.sqrt(2)
    return matrix
