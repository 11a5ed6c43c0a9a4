"""Levers on the conditioning of attention that leave its shape alone: of weights, of their start, and of tokens.

Axes as in `leanformer.layers.attention`. A matrix is rows, all inputs, x columns, all outputs: W_Q is D x N·H.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from leanformer.errors import ConfigError


INITS = ("orthogonal", "spectral")
SPECTRA = ("svd", "dct")
FLOOR = 1e-6  # of a spectrum, relative to its largest: what is smaller is raised no further


def effective(
    kernel: Float[Array, "r c"],
    spectral: float = 0.0,
    scale: Float[Array, ""] | None = None,
    direction: Float[Array, "c"] | None = None,
) -> Float[Array, "r c"]:
    """The matrix that tokens are multiplied by: W + λI, and of that, where there is a scale, γ W / σ₁(W).

    σ₁ is ‖W v‖ for the unit vector v along `direction`, which is held: its gradient is u vᵀ, as of the singular value.
    """
    matrix = kernel + spectral * jnp.eye(*kernel.shape, dtype=kernel.dtype) if spectral else kernel
    if scale is None:
        return matrix
    unit = jax.lax.stop_gradient(_unit(direction))
    return matrix * (scale / jnp.linalg.norm(_times(matrix, unit)))


def _unit(x: Array) -> Array:
    return x / jnp.linalg.norm(x)


def _times(matrix: Array, vector: Array) -> Array:
    return jnp.matmul(matrix, vector, precision="highest")


class Linear(nnx.LinearGeneral):
    """A linear map whose weights pass through `effective` on the way: inside in float32, whatever the activations.

    Parameters: kernel and bias as of `nnx.LinearGeneral`; with `sigma` a `scale`, γ, 1 at the start (σReparam, Zhai et
    al. 2023, arXiv 2303.06296); and `direction` (columns), a statistic as batch normalisation has them: the
    first right singular vector at the start, from which `move` goes on by a step of power iteration each training step.

    With `spectral`, λ, the kernel is the trained part of W + λI alone, so that weight decay leaves λI as it is
    (arXiv 2603.07162, Theorem 3.8). Of a W that is not square, I is `eye(rows, columns)`, which the source leaves open.
    The trap: λ = 10 makes the logits of a token with itself so large that softmax is one-hot on it, the entropy 0 and
    the condition number of attention's output that of W_V. And κ(W) of Gaussian weights falls from 1e3 or 1e4 to 13
    from 768 x 768 to 768 x 1024, because the matrix is no longer square: not because there are more heads.
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
        """As tokens are multiplied by them, of the kernel's shape."""
        learned = (self.scale[...], self.direction[...]) if hasattr(self, "scale") else ()
        return effective(self._flat(), self.spectral, *learned).reshape(self.kernel.shape)

    def move(self) -> None:
        """One step of power iteration, v ← Wᵀ W v of length 1; nothing without `sigma`."""
        if hasattr(self, "direction"):
            matrix = jax.lax.stop_gradient(effective(self._flat(), self.spectral))
            self.direction[...] = _unit(_times(matrix.T, _unit(_times(matrix, self.direction[...]))))

    def __call__(self, inputs: Float[Array, "..."]) -> Float[Array, "..."]:
        bias = None if self.bias is None else self.bias[...]
        inputs, kernel, bias = self.promote_dtype((inputs, self.weights(), bias), dtype=self.dtype)
        number = len(self.in_features)
        axes = tuple(range(inputs.ndim - number, inputs.ndim))
        out = self.dot_general(inputs, kernel, ((axes, tuple(range(number))), ((), ())))
        return out if bias is None else out + jnp.broadcast_to(bias, out.shape)


def move(module: nnx.Module) -> None:
    """A training step's `Linear.move` of all that a module holds."""
    for linear in linears(module):
        linear.move()


def linears(module: nnx.Module) -> list[Linear]:
    return [found for _, found in nnx.iter_modules(module) if isinstance(found, Linear)]


def applied(graphdef: Any, weights: tuple[Any, Any]) -> Any:
    """The model, with the weights that tokens are multiplied by as kernels: what measures of weights read."""
    model = nnx.merge(graphdef, *weights)
    for linear in linears(model):
        stacked = linear.kernel.ndim > len(linear.in_features) + len(linear.out_features)
        graph, state = nnx.split(linear)
        of_one = lambda state, graph=graph: nnx.merge(graph, state).weights()  # noqa: E731
        linear.kernel[...] = jax.vmap(of_one)(state) if stacked else of_one(state)
    return model


def start(kind: str, base: nnx.Initializer) -> nnx.Initializer:
    """An initializer of matrices, from what `base` draws, U S Vᵀ.

    "orthogonal": U Vᵀ, of the same mean square, so that κ is 1, of W alone: attention's output hardly moves.
    "spectral": U (S + σ₁) Vᵀ, so that κ is 2 at most, without λI's diagonal (arXiv 2603.07162, Theorem 3.5).
    """

    def init(key: Any, shape: tuple[int, ...], dtype: Any = jnp.float32, *_: Any) -> Array:
        drawn = base(key, shape, dtype)
        left, values, right = jnp.linalg.svd(drawn, full_matrices=False)
        polar = jnp.matmul(left, right, precision="highest")
        return drawn + values[0] * polar if kind == "spectral" else polar * jnp.sqrt(jnp.square(values).mean())

    return init


@dataclasses.dataclass(frozen=True)
class Levers:
    """Of one attention's matrices, by the keys of config.model; the default leaves all as it is.

    Raises:
        ConfigError: words that are not known, or a choice of matrices where nothing acts on them.
    """

    spectral: float | None = None
    qkv_init: str | None = None
    levers_on: str | None = None
    sigma_reparam: bool | None = None

    def __post_init__(self) -> None:
        if self.qkv_init is not None and self.qkv_init not in INITS:
            raise ConfigError(f'model.qkv_init="{self.qkv_init}": choose {" or ".join(INITS)}, or leave it out.')
        on = self.levers_on
        if on is not None and self.spectral is None and self.qkv_init is None:
            raise ConfigError(f'model.levers_on="{on}" is of model.spectral and model.qkv_init, and neither is set.')
        if on is not None and (not on or set(on) - set("qkv") or len(set(on)) < len(on)):
            raise ConfigError(f'model.levers_on="{on}": some of the letters q, k and v, each once: "qk", say.')

    def of(self, name: str, linear: Callable[..., nnx.Module]) -> Callable[..., nnx.Module]:
        """What makes the projection `name`, "query", "key", "value" or "out", where `linear` makes plain ones."""
        chosen = name != "out" and name[0] in (self.levers_on or "qkv")
        if chosen and self.qkv_init:
            linear = functools.partial(linear, kernel_init=start(self.qkv_init, linear.keywords["kernel_init"]))
        spectral = (self.spectral or 0.0) if chosen else 0.0
        if not (spectral or self.sigma_reparam):
            return linear
        return functools.partial(
            Linear, *linear.args, spectral=spectral, sigma=bool(self.sigma_reparam), **linear.keywords
        )


def check_graying(epsilon: float | None, by: str | None, *, causal: bool = False) -> None:
    """Raises ConfigError for a graying that cannot be, or would let tokens see later ones."""
    if epsilon is None and by is not None:
        raise ConfigError(f'model.graying_by="{by}" is of model.graying, which is not set.')
    if by is not None and by not in SPECTRA:
        raise ConfigError(f'model.graying_by="{by}": choose {" or ".join(SPECTRA)}.')
    if epsilon is not None and not 0 < epsilon <= 1:
        raise ConfigError(f"model.graying={epsilon} is an exponent: above 0, and at most 1, which changes nothing.")
    if epsilon is not None and causal:
        raise ConfigError(f"model.graying={epsilon} mixes all tokens, and with model.causal=True none sees later ones.")


def grayed(x: Float[Array, "b t d"], epsilon: float | None, by: str | None = None) -> Float[Array, "b t d"]:
    """Tokens with a flatter spectrum: its values s become s₁ (s / s₁)^ε, s₁ the largest (arXiv 2505.01996).

    "svd" raises the singular values of each example's T x D; "dct", which is cheap, the coefficients of a cosine
    transform along both axes, signs kept. The source divides by s₁ and leaves it; here tokens keep their size, so that
    ε = 1 changes nothing. The gradient of "svd" is that of its T x T weighting held as it is, that of "dct" is exact.
    On a GPU singular values are slow.
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
    """By which a spectrum is multiplied. Of zeros alone they are what they are of the floor."""
    largest = sizes.max(axis=axis, keepdims=True)
    largest = jnp.where(largest > 0, largest, 1)
    return jnp.maximum(sizes / largest, FLOOR) ** (epsilon - 1)


def _cosines(size: int) -> Float[np.ndarray, "n n"]:
    """The orthonormal cosine transform (DCT-II), a frequency a row."""
    rows, columns = np.arange(size)[:, None], np.arange(size)[None]
    matrix = np.cos(np.pi * rows * (2 * columns + 1) / (2 * size)) * math.sqrt(2 / size)
    matrix[0] /= math.sqrt(2)
    return matrix
