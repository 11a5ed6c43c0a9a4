"""XCiT: cross-covariance attention between the channels of each head (El-Nouby et al. 2021).

timm's `Xcit` semantics: a stem of strided convolutions, a Fourier code of the positions, blocks of cross-covariance
attention, local patch interaction and MLP over the map, then a class token and two blocks of class attention.
Leaner Transformers (Tables 4 and 5) widens or narrows the heads of the first attention and leaves the second at D.
"""

import functools
import itertools
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Key

from leanformer.config.architectures import XcitKeys
from leanformer.config.rules import require
from leanformer.layers.attention import normal, times_weights
from leanformer.layers.blocks import Block, BlockConfig, Mlp, MlpConfig, drop_path, gelu, scaled
from leanformer.layers.convolution import BatchNorm, Conv, DepthwiseConv, conv_init
from leanformer.layers.masks import EVAL_CONTEXT, Context, Tap
from leanformer.layers.model_base import ATTENTIONS, Family
from leanformer.layers.multihead import ClassAttention, MultiHeadAttention
from leanformer.layers.norms import LayerNorm
from leanformer.layers.positions import prepend
from leanformer.layers.stack import Stack
from leanformer.runtime.mesh import REPLICATED


FREQUENCIES = 32  # sines and cosines of the row index; as many of the column index


def fourier_code(rows: int, columns: int) -> Float[np.ndarray, "rows columns 64"]:
    """Return the Fourier position code of a map, rows x columns x 64, a NumPy array.

    The first 32 channels encode the row, the others the column, by alternating sines and cosines. Positions 1 to length
    are scaled to one period, for maps of any size. Wavelengths rise geometrically from one length of the map towards
    10000.
    """

    def axis(length: int) -> np.ndarray:
        place = 2 * np.pi * np.arange(1, length + 1) / (length + 1e-6)
        index = np.arange(FREQUENCIES)
        angle = place[:, None] / 10000.0 ** (index // 2 * 2 / FREQUENCIES)
        return np.where(index % 2, np.cos(angle), np.sin(angle))

    shape = (rows, columns, FREQUENCIES)
    row, column = (np.broadcast_to(x, shape) for x in (axis(rows)[:, None], axis(columns)))
    return np.concatenate([row, column], axis=-1)


class Stem(nnx.Module):
    """`halvings` 3 × 3 convolutions of stride 2, BatchNorm, GELU between them; each doubles the channels, up to D."""

    def __init__(self, channels: int, width: int, halvings: int, *, dtype: Any, rngs: nnx.Rngs):
        widths = [channels, *(width >> i for i in reversed(range(halvings)))]
        self.halvings, shape = halvings, {"kernel": 3, "stride": 2, "padding": 1, "use_bias": False}
        for i, pair in enumerate(itertools.pairwise(widths), start=1):
            setattr(self, f"conv{i}", Conv(*pair, **shape, dtype=dtype, rngs=rngs))
            setattr(self, f"norm{i}", BatchNorm(pair[1], dtype=dtype))

    def __call__(self, x: Float[Array, "b height width c"], *, train: bool) -> Float[Array, "b rows columns d"]:
        for i in range(1, self.halvings + 1):
            x = x if i == 1 else gelu(x)
            x = getattr(self, f"norm{i}")(getattr(self, f"conv{i}")(x), train=train)
        return x


class CrossCovarianceAttention(MultiHeadAttention):
    """Cross-covariance attention: softmax(temperature · Q̂ᵀ K̂) Vᵀ per head, with an H × H matrix (section 3.2).

    Q̂ and K̂ are queries and keys, each of whose channels has norm 1 over the tokens. Parameters: as in
    `MultiHeadAttention`, and temperature (N, 1, 1). Of its options, only interventions and biases have an effect.
    """

    options = MappingProxyType({})
    masks = ()
    # Between channels, a bias inside the matmul would move 5 % more bytes on a GPU (`tools/gpu/kernels.md`).
    projection = staticmethod(functools.partial(nnx.LinearGeneral, dot_general=times_weights))

    def __init__(self, width: int, num_heads: int, head_dim: int, value_dim: int | None = None, **arguments: Any):
        equal = value_dim in (None, head_dim)
        require(equal, f"model.value_dim={value_dim}: cross-covariance attention has no other than model.head_dim.")
        super().__init__(width, num_heads, head_dim, value_dim, **arguments)
        self.temperature = nnx.Param(jnp.ones((num_heads, 1, 1)), **REPLICATED)

    def __call__(
        self, x: Float[Array, "b t d"], context: Context = EVAL_CONTEXT
    ) -> tuple[Float[Array, "b t d"], dict[str, Array], None]:
        """Return the output, for a tap v, out (B T N H) and channel_attention, the matrices (B N H H), and no cache."""
        q, k, v = self.query(x), self.key(x), self.value(x)
        wide = jnp.promote_types(q.dtype, jnp.float32)
        products = jnp.einsum("btnh,btng->bnhg", q, k, preferred_element_type=wide)
        # Divided after the matmul: H × H numbers instead of T × H, and no rounding to bfloat16.
        across, along = _inverse_lengths(q, wide)[..., :, None], _inverse_lengths(k, wide)[..., None, :]
        matrix = jax.nn.softmax(products * across * along * self.temperature[...][None])
        out = jnp.einsum("bnhg,btng->btnh", matrix.astype(v.dtype), v)
        return self.out(out), {"v": v, "out": out, "channel_attention": matrix}, None


def _inverse_lengths(x: Float[Array, "b t n h"], wide: Any) -> Float[Array, "b n h"]:
    """Return 1 / max(norm over tokens, 1e-12) of each channel."""
    return jax.lax.rsqrt(jnp.maximum(jnp.sum(jnp.square(x.astype(wide)), axis=1), 1e-24))


class LocalPatchInteraction(nnx.Module):
    """Local patch interaction over a map, B height width D: depthwise 3 × 3, GELU, BatchNorm, depthwise 3 × 3."""

    def __init__(self, width: int, *, dtype: Any, rngs: nnx.Rngs):
        self.conv1, self.conv2 = (DepthwiseConv(width, dtype=dtype, rngs=rngs) for _ in range(2))
        self.norm = BatchNorm(width, dtype=dtype)

    def __call__(self, x: Float[Array, "b height width d"], *, train: bool) -> Float[Array, "b height width d"]:
        return self.conv2(self.norm(gelu(self.conv1(x)), train=train))


class XcitBlock(Block):
    """Pre-norm block over a map: attention, local patch interaction and MLP, each with a layer scale and residual sum.

    It maps B height width D to the same shape: x + attention(norm(x)), then x + LPI(norm(x)), then x + MLP(norm(x)). It
    is `blocks.Block` with the second branch; `post_norm`, `dropout` and `graying` of its config have no effect. A tap
    receives tokens row by row, B T D; `attention` and the additional `local`, the output of the second branch, include
    their layer scale.
    """

    branches = 3

    def __init__(self, attention: Any, config: BlockConfig, *, rngs: nnx.Rngs):
        super().__init__(attention, config, rngs=rngs)
        scale: Any = config.layer_scale  # a number in all XCiT models
        self.norm3 = config.make_norm(rngs)
        self.local = LocalPatchInteraction(config.width, dtype=config.dtype, rngs=rngs)
        self.gamma3 = nnx.Param(jnp.full(config.width, scale))

    def __call__(
        self, x: Float[Array, "b height width d"], context: Context = EVAL_CONTEXT
    ) -> tuple[Float[Array, "b height width d"], Any, None]:
        first, second, third = (None,) * 3 if context.scales is None else context.scales
        tokens = jax.lax.collapse(x, 1, 3)
        normed = self.norm1(tokens)
        attention, arrays, _ = self.attention(normed, context)
        attention = scaled(attention, self.gamma1)
        middle = tokens + drop_path(attention, first)
        local = self.local(self.norm3(middle).reshape(x.shape), train=context.train).reshape(tokens.shape)
        local = scaled(local, self.gamma3)
        mixed = middle + drop_path(local, second)
        branch, hidden = self.mlp(self.norm2(mixed))
        block = mixed + drop_path(scaled(branch, self.gamma2), third)
        if context.tap is None:
            return block.reshape(x.shape), None, None
        inner = {"tokens": tokens, "normed": normed, "attention": attention, "middle": middle, "local": local}
        return block.reshape(x.shape), context.tap(arrays | inner | {"hidden": hidden, "block": block}), None


class ClassBlock(nnx.Module):
    """Class-attention block that also changes the patches, as required by published weights; without a tap.

    The first token is the class token. The attention update adds scaled normed patches, the second norm also replaces
    patches if `tokens_norm`, and patches are doubled in the MLP update.
    """

    branches, dropout = 0, 0.0  # no drop path

    def __init__(
        self, attention: nnx.Module, width: int, mlp_dim: int, *, layer_scale: float, tokens_norm: bool, **common: Any
    ):
        self.tokens_norm = tokens_norm
        self.class_attention = attention
        self.norm1, self.norm2 = (LayerNorm(width, **common) for _ in range(2))
        self.mlp = Mlp(width, MlpConfig(mlp_dim), **common)
        self.gamma1, self.gamma2 = (nnx.Param(jnp.full(width, layer_scale)) for _ in range(2))

    def __call__(self, x: Float[Array, "b t d"], _: Context) -> tuple[Float[Array, "b t d"], None, None]:
        normed = self.norm1(x)
        update = jnp.concatenate([self.class_attention(normed), normed[:, 1:]], axis=1)
        x = x + scaled(update, self.gamma1)
        normed = self.norm2(x)
        token, patches = normed[:, :1], (normed if self.tokens_norm else x)[:, 1:]
        branch = self.mlp(token)[0]
        return jnp.concatenate([token + scaled(branch, self.gamma2), 2 * patches], axis=1), None, None


class Model(Family):
    """XCiT for classification; no parameter depends on `image_size`.

    Stochastic depth has the same rate in each block, none in class blocks. Class blocks have no tap: their attention
    has one row, whose condition number is meaningless.
    """

    keys = XcitKeys
    no_decay = ("cls_token", "gamma1", "gamma2", "gamma3")
    attentions = MappingProxyType({"cross_covariance": CrossCovarianceAttention, **ATTENTIONS})

    def __init__(self, keys: XcitKeys, blocks: BlockConfig, *, rngs: nnx.Rngs):
        patch_size, tokens_norm = keys.patch_size, keys.tokens_norm
        width, dtype, backend = blocks.width, blocks.dtype, blocks.attention.backend
        halves = patch_size > 1 and patch_size.bit_count() == 1
        require(halves, f"model.patch_size={patch_size}: the stem halves the image several times. Set a power of 2.")
        self.dtype = dtype
        common: dict[str, Any] = {"dtype": dtype, "rngs": rngs}

        def class_block(rngs: nnx.Rngs) -> ClassBlock:
            common: dict[str, Any] = {"dtype": dtype, "rngs": rngs}
            attention = ClassAttention(width, keys.class_heads, keys.class_head_dim, backend=backend, **common)
            scale: dict[str, Any] = {"layer_scale": blocks.layer_scale, "tokens_norm": tokens_norm}
            return ClassBlock(attention, width, keys.class_mlp_dim or blocks.mlp.mlp_dim, **scale, **common)

        self.patch_embed = Stem(keys.channels, width, patch_size.bit_length() - 1, **common)
        init = conv_init(2 * FREQUENCIES)
        self.pos_embed = blocks.make_linear(2 * FREQUENCIES, width, rngs, kernel_init=init, bias_init=init)
        rates = (blocks.drop_path,) * blocks.depth
        self.blocks = Stack.from_config(blocks, XcitBlock.from_config, drop_path=rates, rngs=rngs)
        self.cls_token = nnx.Param(normal(rngs.params(), (1, 1, width)))
        self.class_blocks = Stack(class_block, keys.class_depth, remat=blocks.remat, unroll=blocks.unroll, rngs=rngs)
        self.norm = LayerNorm(width, **common)
        self.head = blocks.make_linear(width, keys.num_classes, rngs)

    def __call__(
        self, images: Float[Array, "b height width c"], *, key: Key[Array, "b"] | None = None, tap: Tap | None = None
    ) -> tuple[Float[Array, "b v"], Any]:
        """Return logits (B, V), and {"blocks": tap results stacked over layers}."""
        x = self.patch_embed(images.astype(self.dtype), train=key is not None)
        x = x + self.pos_embed(jnp.asarray(fourier_code(*x.shape[1:3]), self.dtype))[None]
        x, taps = self.blocks(x, Context(key=key, tap=tap))
        x, _ = self.class_blocks(prepend(self.cls_token, x))
        return self.head(self.norm(x[:, 0])), {"blocks": taps}
