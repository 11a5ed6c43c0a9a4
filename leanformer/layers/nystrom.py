"""Nyström attention: softmax attention approximated by M landmarks, linear in the tokens (Xiong et al. 2021)."""

import math
from types import MappingProxyType
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float

from leanformer.config.attention import InterventionKeys, NystromKeys
from leanformer.config.declare import types_of
from leanformer.config.rules import require
from leanformer.layers.attention import attend, fan_in, probabilities
from leanformer.layers.masks import EVAL_CONTEXT, PADDING, UNMASKED, Context, Mask, check_supported
from leanformer.layers.multihead import MultiHeadAttention
from leanformer.runtime.mesh import REPLICATED


def landmark_tokens(mask: Mask, tokens: int, landmarks: int) -> Bool[Array, "*b m t"]:
    """Return the assignment of tokens to landmarks, boolean B M T, or M T without padding.

    The tokens of a landmark are consecutive valid tokens; the numbers of tokens differ by at most one. An example with
    fewer tokens than landmarks has one token per landmark, and none in the last landmarks.
    """
    present = mask.valid_tokens(tokens)
    if present is None:
        return jnp.asarray(np.arange(tokens) * landmarks // tokens == np.arange(landmarks)[:, None])
    rank = jnp.arange(tokens)[None] if mask.keep is None else jnp.cumsum(present, axis=1) - 1
    total = present.sum(axis=1, keepdims=True)
    segment = rank * jnp.minimum(total, landmarks) // jnp.maximum(total, 1)
    return (segment[:, None] == jnp.arange(landmarks)[None, :, None]) & present[:, None]


def landmark_means(x: Float[Array, "b t n h"], members: Bool[Array, "*b m t"]) -> Float[Array, "b m n h"]:
    """Return the mean over the tokens of each landmark, B M N H; 0 for landmarks without tokens.

    Computed as a matmul with zeros and ones, whose products are exact in any dtype: a scatter is slow, and not
    deterministic on a GPU.
    """
    axes = "mt" if members.ndim == 2 else "bmt"
    members, counts = members.astype(x.dtype), members.sum(axis=-1)
    sums = jnp.einsum(f"{axes},btnh->bmnh", members, x, precision="highest", preferred_element_type=jnp.float32)
    counts = jnp.broadcast_to(jnp.maximum(counts, 1), sums.shape[:2])
    return (sums / counts[..., None, None]).astype(x.dtype)


def segment_means(x: Float[Array, "b t n h"], landmarks: int) -> Float[Array, "b m n h"]:
    """Return the mean of each of `landmarks` equal runs of consecutive tokens, B M N H; T must be a multiple of M."""
    return x.reshape(x.shape[0], landmarks, x.shape[1] // landmarks, *x.shape[2:]).mean(axis=2)


def pseudo_inverse(
    a: Float[Array, "b n m m"], *, iterations: int = 6, scale: str = "matrix"
) -> Float[Array, "b n m m"]:
    """Approximate the Moore-Penrose inverses of matrices, B N M M, by matmuls (Xiong et al. 2021, section 3.4).

    The first estimate is aᵀ / c. Each iteration multiplies its small singular values by 3.25 and cubes the error of the
    others. Singular values of `a` under about √(c / 3.25^iterations) are therefore not fully inverted. Rows and columns
    of zeros stay zero. c is the largest column sum times the largest row sum: with `scale` "matrix" of each matrix,
    with "batch" over the whole batch, as in the original, where results of an example depend on the rest of the batch.
    """
    largest = [jnp.abs(a).sum(axis=axis, keepdims=True).max(axis=(-2, -1), keepdims=True) for axis in (-2, -1)]
    if scale == "batch":
        largest = [sums.max() for sums in largest]
    scale_of = largest[0] * largest[1]
    z = a.mT / jnp.where(scale_of > 0, scale_of, 1)  # a matrix of zeros has the inverse 0, and gradient 0
    eye = jnp.eye(a.shape[-1], dtype=a.dtype)[None, None]
    for _ in range(iterations):
        az = _product(a, z)
        z = 0.25 * _product(z, 13 * eye - _product(az, 15 * eye - _product(az, 7 * eye - az)))
    return z


def _product(a: Array, b: Array) -> Array:
    return jnp.matmul(a, b, precision="highest")  # small matrices whose rounding errors grow with the condition number


def convolve(x: Float[Array, "b t n h"], kernel: Float[Array, "taps n"]) -> Float[Array, "b t n h"]:
    """Convolve each channel of head n along the tokens with kernel[:, n] (cross-correlation), zero-padded; odd taps.

    Computed as matmuls of runs of tokens with banded matrices: a depthwise convolution takes 50 times as long on a CPU.
    """
    (b, t, n, h), taps = x.shape, len(kernel)
    run = 64 * math.ceil(taps / 64)
    runs, reach = math.ceil(t / run), run + taps - 1
    # Repeating period reach + 1 and slicing rows of `reach` shifts the taps right by one per row.
    band = jnp.tile(jnp.pad(kernel, ((0, run), (0, 0))), (run, 1))[: run * reach].reshape(run, reach, n)
    x = jnp.pad(x, ((0, 0), (taps // 2, (runs + 1) * run - t - taps // 2), (0, 0), (0, 0)))
    x = x.reshape(b, runs + 1, run, n, h)
    x = jnp.concatenate([x[:, :-1], x[:, 1:, : taps - 1]], axis=2)
    return jnp.einsum("ijn,brjnh->brinh", band, x).reshape(b, runs * run, n, h)[:, :t]


class NystromAttention(MultiHeadAttention):
    """Nyström self-attention: F₁ F₂⁺ F₃ V plus a convolution of V along the tokens (Xiong et al. 2021, section 3).

    F₁, F₂ and F₃ are the softmax matrices of tokens and landmarks, landmarks and landmarks, and landmarks and tokens. A
    landmark is the mean query, and the mean key, of a run of tokens. With as many landmarks as tokens, attention is
    exact, unless padding is masked: then results do not depend on the length that rows are padded to. With padding
    "zeros", as in the original, queries and keys of padding are zeros, which count in the means, and only F₃ masks
    padding.

    Parameters: as in `MultiHeadAttention`, and with a convolution `skip` (taps, N).

    >>> attention = NystromAttention(12, 2, 6, landmarks=4, rngs=nnx.Rngs(0))
    >>> attention(jnp.ones((1, 16, 12)))[0].shape
    (1, 16, 12)
    """

    options = MappingProxyType(types_of(NystromKeys) | types_of(InterventionKeys))
    masks = PADDING

    def __init__(
        self,
        width: int,
        num_heads: int,
        head_dim: int,
        value_dim: int | None = None,
        *,
        landmarks: int = 64,
        iterations: int = 6,
        convolution: int = 35,
        scale: str = "matrix",
        padding: str = "masked",
        rngs: nnx.Rngs,
        **arguments: Any,
    ):
        counts = f"model.landmarks={landmarks}, model.iterations={iterations}"
        require(landmarks >= 1 <= iterations, f"{counts}: both must be at least 1.")
        odd = convolution == 0 or convolution % 2 == 1
        require(odd, f"model.convolution={convolution}: set an odd number of taps, or 0 for no convolution.")
        super().__init__(width, num_heads, head_dim, value_dim, rngs=rngs, **arguments)
        self.landmarks, self.iterations, self.scale, self.padding = landmarks, iterations, scale, padding
        if convolution:
            self.skip = nnx.Param(fan_in(rngs.params(), (convolution, num_heads)), **REPLICATED)

    def __call__(
        self, x: Float[Array, "b t d"], context: Context = EVAL_CONTEXT
    ) -> tuple[Float[Array, "b t d"], dict[str, Array], None]:
        """Return the projected output, the arrays for a tap, and None as there is no cache.

        Arrays: v and out, B T N H; and, unless attention is exact, `landmark_probabilities` F₂ and its
        `pseudo_inverse`, B N M M, float32. There are no `q` and `k`, which identify softmax attention to a tap.
        """
        mask = context.mask
        check_supported("NystromAttention", self.masks, mask.parts)
        q, k, v = self.query(x), self.key(x), self.value(x)
        real = mask.valid_tokens(x.shape[1])
        if real is not None:
            valid = real[..., None, None]  # B T 1 1
            v = jnp.where(valid, v, 0)
            if self.padding == "zeros":
                q, k = jnp.where(valid, q, 0), jnp.where(valid, k, 0)
        # Whether rows with padding are exact must not depend on the length they are padded to.
        if x.shape[1] == self.landmarks and (real is None or self.padding == "zeros"):
            out, arrays = attend(q, k, v, mask=mask, backend=self.backend), {}
        else:
            out, arrays = self._approximate(q, k, v, mask)
        if hasattr(self, "skip"):
            out += convolve(v, self.skip[...].astype(v.dtype))
        return self.out(out), arrays | {"v": v, "out": out}, None

    def _approximate(
        self, q: Float[Array, "b t n h"], k: Float[Array, "b t n h"], v: Array, mask: Mask
    ) -> tuple[Array, dict[str, Array]]:
        q_m, k_m, of_landmarks = self._landmarks(q, k, mask)  # B M N H
        matrix = probabilities(q_m, k_m, of_landmarks)  # B N M M
        present = of_landmarks.valid_tokens(self.landmarks)
        if present is not None:  # landmarks without tokens have rows of zeros
            matrix = jnp.where(present[:, None, :, None], matrix, 0)
        inverse = pseudo_inverse(matrix, iterations=self.iterations, scale=self.scale)
        values = attend(q_m, k, v, mask=mask, backend=self.backend).astype(jnp.float32)
        values = jnp.einsum("bnij,bjnh->binh", inverse, values, precision="highest").astype(v.dtype)
        out = attend(q, k_m, values, mask=of_landmarks, backend=self.backend)
        return out, {"landmark_probabilities": matrix, "pseudo_inverse": inverse}

    def _landmarks(self, q: Array, k: Array, mask: Mask) -> tuple[Array, Array, Mask]:
        """Return mean queries, mean keys, and the mask of landmarks that each example has."""
        tokens, number = q.shape[1], self.landmarks
        require(number <= tokens, f"model.landmarks={number}: there are only {tokens} tokens. Set at most {tokens}.")
        fits = self.padding == "masked" or tokens % number == 0
        require(fits, f'model.padding="zeros": model.landmarks={number} must divide the number of tokens, {tokens}.')
        real = mask.valid_tokens(tokens)
        if tokens % number == 0 and (real is None or self.padding == "zeros"):
            return segment_means(q, number), segment_means(k, number), UNMASKED
        of = landmark_tokens(mask, tokens, number)
        present = UNMASKED if real is None else Mask(lengths=jnp.minimum(real.sum(axis=1), number))
        return landmark_means(q, of), landmark_means(k, of), present
