"""VOLO (Vision Outlooker), with independent heads, head dimension, depth and MLP in every stage.

timm's `VOLO` semantics (Yuan et al. 2021, https://arxiv.org/abs/2106.13112): a convolutional stem; stage 1 of outlook
attention on the full map; the map halved and learned positions added; stages of transformer blocks; class attention;
one head on the class token and one on every other token, the token-labelling head.
"""

import functools
from collections.abc import Sequence
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Key

from leanformer.config.architectures import VoloKeys
from leanformer.config.rules import image_sides, require
from leanformer.layers.attention import normal, times_weights
from leanformer.layers.blocks import Block, BlockConfig, Mlp, MlpConfig
from leanformer.layers.convolution import BatchNorm, Conv, PatchConv, check_sides, patch_grid
from leanformer.layers.masks import EVAL_CONTEXT, Context, Tap
from leanformer.layers.model_base import Family
from leanformer.layers.multihead import ClassAttention
from leanformer.layers.norms import LayerNorm
from leanformer.layers.positions import prepend
from leanformer.layers.stack import Stack
from leanformer.runtime.mesh import over_heads


EPSILON = 1e-5  # epsilon of every layer norm


def _thirds(x: Array, axis: int) -> tuple[Array, Array, Array]:
    """Return, per pair along an even axis, the preceding number (0 before the first), the first and the second."""
    x = x.reshape(*x.shape[:axis], x.shape[axis] // 2, 2, *x.shape[axis + 1 :])
    first, second = jnp.moveaxis(x, axis + 1, 0)
    one_before = [(int(a == axis), 0) for a in range(second.ndim)]
    before = jax.lax.slice_in_dim(jnp.pad(second, one_before), 0, second.shape[axis], axis=axis)
    return before, first, second


def windows(x: Float[Array, "b rows columns n h"]) -> Float[Array, "b i j n 9 h"]:
    """Return the 3 x 3 windows around every other pixel of a map, zero-padded, as B I J N 9 H.

    I x J is half the map, rounded up; the axis of 9 is the pixels of a window, row by row. Built from slices of odd and
    even rows and columns, so neither it nor its derivative gathers or scatters.
    """
    rows, columns = x.shape[1:3]
    x = jnp.pad(x, ((0, 0), (0, rows % 2), (0, columns % 2), (0, 0), (0, 0)))
    return jnp.stack([piece for row in _thirds(x, 1) for piece in _thirds(row, 2)], axis=4)


def overlap_add(y: Float[Array, "b i j n 9 h"], rows: int, columns: int) -> Float[Array, "b rows columns n h"]:
    """Sum windows at their positions in a map, B rows columns N H: the transpose of `windows`."""
    b, _, _, n, _, h = y.shape
    return jax.linear_transpose(windows, jax.ShapeDtypeStruct((b, rows, columns, n, h), y.dtype))(y)[0]


def _halved(x: Float[Array, "b rows columns d"]) -> Float[Array, "b i j d"]:
    """Return means over 2 x 2 pixels; an odd last row or column is averaged alone."""
    b, rows, columns, d = x.shape
    x = jnp.pad(x, ((0, 0), (0, rows % 2), (0, columns % 2), (0, 0)), mode="edge")
    return x.reshape(b, -(-rows // 2), 2, -(-columns // 2), 2, d).mean((2, 4))


class OutlookAttention(nnx.Module):
    """Attention inside 3 x 3 windows of a map, with weights computed linearly from means of 2 x 2 pixels (section 3.1).

    Each head of a window has a 9 x 9 matrix with a softmax per row; outputs of overlapping windows are summed. There
    are no queries and keys: H only scales the logits, by 1 / √H. `grid` is rows and columns of the map, whose pixels
    are the tokens, row by row. Parameters: value (D, N, H') without bias, weights (D, N, 9, 9) and out (N, H', D) with
    biases.
    """

    masks = ()

    def __init__(
        self,
        width: int,
        num_heads: int,
        head_dim: int,
        value_dim: int | None = None,
        *,
        grid: tuple[int, int],
        dtype: Any = jnp.float32,
        rngs: nnx.Rngs,
    ):
        value_dim = value_dim or head_dim
        self.grid, self.scale, common = grid, head_dim**-0.5, {"dtype": dtype, "rngs": rngs}
        linear = functools.partial(nnx.LinearGeneral, kernel_init=normal, dot_general=times_weights, **common)
        of_weights = {"kernel_metadata": over_heads(-3), "bias_metadata": over_heads(-3)}
        self.value = linear(width, (num_heads, value_dim), use_bias=False, kernel_metadata=over_heads(-2))
        self.weights = linear(width, (num_heads, 9, 9), **of_weights)
        self.out = linear((num_heads, value_dim), width, axis=(-2, -1), kernel_metadata=over_heads(-3))

    def __call__(
        self, x: Float[Array, "b t d"], context: Context = EVAL_CONTEXT
    ) -> tuple[Float[Array, "b t d"], dict[str, Array], None]:
        """Return the projected output, for a tap v and out, B T N H', with windows summed, and no cache."""

        def as_map(tokens: Float[Array, "b t *rest"]) -> Float[Array, "b rows columns *rest"]:
            return tokens.reshape(tokens.shape[0], *self.grid, *tokens.shape[2:])

        v, logits = self.value(x), self.weights(_halved(as_map(x)))
        wide = jnp.promote_types(x.dtype, jnp.float32)
        weights = jax.nn.softmax(logits.astype(wide) * self.scale)
        # P and Q are pixels of a window: of its outputs, and of its values.
        y = jnp.einsum("bijnpq,bijnqh->bijnph", weights.astype(v.dtype), windows(as_map(v)))
        out = overlap_add(y.astype(wide), *self.grid).reshape(v.shape).astype(v.dtype)
        return self.out(out), {"v": v, "out": out}, None


class Stem(nnx.Module):
    """Three convolutions with batch norm and ReLU, the first 7 x 7 and strided, then patch embedding of side `size`."""

    def __init__(
        self, channels: int, stem_width: int, width: int, *, stride: int, size: int, dtype: Any, rngs: nnx.Rngs
    ):
        conv = functools.partial(Conv, use_bias=False, dtype=dtype, rngs=rngs)
        self.conv1 = conv(channels, stem_width, 7, stride=stride, padding=3)
        self.conv2 = conv(stem_width, stem_width, 3, padding=1)
        self.conv3 = conv(stem_width, stem_width, 3, padding=1)
        self.norm1, self.norm2, self.norm3 = (BatchNorm(stem_width, dtype=dtype) for _ in range(3))
        self.patches = PatchConv(stem_width, width, size, dtype=dtype, rngs=rngs)

    def __call__(self, x: Float[Array, "b height width c"], *, train: bool) -> Float[Array, "b rows columns d"]:
        for conv, norm in ((self.conv1, self.norm1), (self.conv2, self.norm2), (self.conv3, self.norm3)):
            x = jax.nn.relu(norm(conv(x), train=train))
        return self.patches(x)


class ClassBlock(nnx.Module):
    """Pre-norm block that updates only the class token, the first, without stochastic depth or a tap (section 3.3)."""

    branches, dropout = 0, 0.0

    def __init__(self, attention: ClassAttention, width: int, mlp_dim: int, *, epsilon: float, **common: Any):
        self.class_attention = attention
        self.norm1, self.norm2 = (LayerNorm(width, epsilon=epsilon, **common) for _ in range(2))
        self.mlp = Mlp(width, MlpConfig(mlp_dim), **common)

    def __call__(self, x: Float[Array, "b t d"], _: Context) -> tuple[Float[Array, "b t d"], None, None]:
        token = x[:, :1] + self.class_attention(self.norm1(x))
        token = token + self.mlp(self.norm2(token))[0]
        return jnp.concatenate([token, x[:, 1:]], axis=1), None, None


class Model(Family):
    """VOLO for classification.

    The first stage uses outlook attention, the others self-attention. Tap results are named "stage1", "stage2" and so
    on. Class blocks have no tap: their attention has one row, whose condition number is meaningless. Stochastic depth
    rises linearly from 0 over the blocks of all stages, but there is none in stage 1 and in the class-attention blocks.
    """

    keys = VoloKeys
    classifiers = ("head", "aux_head")
    no_decay = ("cls_token", "pos_embed")
    staged, fixed = True, MappingProxyType({"epsilon": EPSILON, "qkv_bias": False})

    def __init__(self, keys: VoloKeys, blocks: Sequence[BlockConfig], *, rngs: nnx.Rngs):
        patch_size, stem_stride = keys.patch_size, keys.stem_stride
        widths = tuple(stage.width for stage in blocks)
        shared = f"model.width={widths}: stages after the first share their tokens. Set one width for them."
        require(len(set(widths[1:])) == 1, shared)
        whole = patch_size % stem_stride == 0
        require(whole, f"model.patch_size={patch_size} is not a multiple of model.stem_stride={stem_stride}.")
        self.sides, grid = image_sides(keys.image_size), patch_grid(keys.image_size, patch_size)
        first, last, dtype = blocks[0], widths[-1], blocks[0].dtype
        self.dtype = dtype
        common: dict[str, Any] = {"dtype": dtype, "rngs": rngs}

        size = patch_size // stem_stride
        self.patch_embed = Stem(keys.channels, keys.stem_width, first.width, stride=stem_stride, size=size, **common)

        def outlook(stage: BlockConfig, rngs: nnx.Rngs) -> Block:
            config = stage.attention
            sizes = (stage.width, config.num_heads, config.head_dim, config.value_dim)
            return Block(OutlookAttention(*sizes, grid=grid, dtype=dtype, rngs=rngs), stage, rngs=rngs)

        def class_block(rngs: nnx.Rngs) -> ClassBlock:
            common: dict[str, Any] = {"dtype": dtype, "rngs": rngs}
            options: dict[str, Any] = {"qkv_bias": False, "backend": first.attention.backend}
            attention = ClassAttention(last, keys.class_heads, keys.class_head_dim, **options, **common)
            return ClassBlock(attention, last, keys.class_mlp_dim or blocks[-1].mlp.mlp_dim, epsilon=EPSILON, **common)

        depths = [stage.depth for stage in blocks]
        rates = [first.drop_path * block / (sum(depths) - 1) for block in range(sum(depths))]
        self.stage1 = Stack.from_config(first, outlook, drop_path=0.0, rngs=rngs)
        for i in range(1, len(blocks)):
            of_stage = rates[sum(depths[:i]) : sum(depths[: i + 1])]
            setattr(self, f"stage{i + 1}", Stack.from_config(blocks[i], drop_path=of_stage, rngs=rngs))
        self.stages = tuple(f"stage{i + 1}" for i in range(len(blocks)))
        self.downsample = PatchConv(first.width, last, 2, **common)
        self.pos_embed = nnx.Param(normal(rngs.params(), (1, grid[0] // 2, grid[1] // 2, last)))
        self.cls_token = nnx.Param(normal(rngs.params(), (1, 1, last)))
        self.class_blocks = Stack(class_block, keys.class_depth, remat=first.remat, unroll=first.unroll, rngs=rngs)
        self.norm = LayerNorm(last, epsilon=EPSILON, **common)
        self.head = first.make_linear(last, keys.num_classes, rngs)
        if keys.token_head:
            self.aux_head = first.make_linear(last, keys.num_classes, rngs)

    def stacks(self) -> dict[str, nnx.Module]:
        return {name: getattr(self, name).layers for name in self.stages}

    def heads(
        self, images: Float[Array, "b height width c"], *, key: Key[Array, "b"] | None = None, tap: Tap | None = None
    ) -> tuple[dict[str, Array], Any]:
        """Return {"class": logits B V, "tokens": B T V, row by row, with a token-labelling head}, and taps by stage."""
        check_sides(images, self.sides)
        x, taps = self.patch_embed(images.astype(self.dtype), train=key is not None), {}
        grid = x.shape[:-1]
        for number, name in enumerate(self.stages):
            if number == 1:
                x = self.downsample(x.reshape(*grid, x.shape[-1])) + self.pos_embed[...].astype(self.dtype)
            x = jax.lax.collapse(x, 1, -1)
            # A key per stage: each stack counts its layers from 0.
            of_stage = None if key is None else jax.vmap(jax.random.fold_in, (0, None))(key, number)
            x, taps[name] = getattr(self, name)(x, Context(key=of_stage, tap=tap))
        x, _ = self.class_blocks(prepend(self.cls_token, x))
        x = self.norm(x)
        logits = {"class": self.head(x[:, 0])}
        if hasattr(self, "aux_head"):
            logits["tokens"] = self.aux_head(x[:, 1:])
        return logits, taps

    def __call__(
        self, images: Float[Array, "b height width c"], *, key: Key[Array, "b"] | None = None, tap: Tap | None = None
    ) -> tuple[Float[Array, "b v"], Any]:
        """Return logits (B, V), class + ½ max over tokens of tokens, and {stage: tap results stacked over layers}."""
        logits, taps = self.heads(images, key=key, tap=tap)
        if "tokens" in logits:
            return logits["class"] + 0.5 * logits["tokens"].max(axis=1), taps
        return logits["class"], taps
