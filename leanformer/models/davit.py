"""DaViT: attention between tokens inside windows, then between channels (Ding et al. 2022).

timm's `DaVit` semantics: a strided convolution, stages with a 2 × 2 convolution between them, in each stage units of a
spatial and a channel block, position codes by depthwise convolutions, the mean over the map, norm, one linear head.
There are no learned tokens or positions, so models accept images of any size.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Key

from leanformer.config.architectures import DavitKeys
from leanformer.config.attention import InterventionKeys
from leanformer.config.declare import types_of
from leanformer.layers.blocks import Block, BlockConfig, drop_path
from leanformer.layers.convolution import Conv, DepthwiseConv, PatchConv
from leanformer.layers.masks import EVAL_CONTEXT, Context, Tap
from leanformer.layers.model_base import Family
from leanformer.layers.multihead import MultiHeadAttention
from leanformer.layers.norms import LayerNorm
from leanformer.layers.nystrom import NystromAttention
from leanformer.layers.stack import Stack


EPSILON = 1e-5  # of every LayerNorm
INTERVENTIONS = types_of(InterventionKeys)


def _tokens(x: Float[Array, "b height width d"]) -> Float[Array, "b t d"]:
    return jax.lax.collapse(x, 1, 3)


def _windows(
    x: Float[Array, "b height width d"], size: int
) -> tuple[Float[Array, "windows t d"], Callable[[Array], Array]]:
    """Return the windows of a zero-padded map as sequences, and the function from arrays per token to a map."""
    batch, height, width, channels = x.shape
    rows, columns = -(-height // size), -(-width // size)
    x = jnp.pad(x, ((0, 0), (0, rows * size - height), (0, columns * size - width), (0, 0)))
    x = x.reshape(batch, rows, size, columns, size, channels).swapaxes(2, 3)

    def whole(windows: Array) -> Array:
        rest = windows.shape[2:]
        padded = windows.reshape(batch, rows, columns, size, size, *rest).swapaxes(2, 3)
        return padded.reshape(batch, rows * size, columns * size, *rest)[:, :height, :width]

    return x.reshape(batch * rows * columns, size * size, channels), whole


class WindowAttention(MultiHeadAttention):
    """Self-attention inside each window of a map, B height width D, without shifts or positions.

    A map is zero-padded below and to the right to whole windows. Padding takes part like any token, and is not neutral
    because of the biases of query, key and value.
    """

    masks = ()
    options = MappingProxyType(  # a window has no rotary positions
        {name: kind for name, kind in MultiHeadAttention.options.items() if not name.startswith("rotary")}
    )

    def __init__(self, *sizes: Any, window_size: int, **arguments: Any):
        super().__init__(*sizes, **arguments)
        self.window_size = window_size

    def __call__(
        self, x: Float[Array, "b height width d"], context: Context = EVAL_CONTEXT
    ) -> tuple[Float[Array, "b height width d"], dict[str, Array], None]:
        """Return the output, q, k, v per window (B·windows, T, N, H) and `out` of the map (B T N H), and no cache."""
        windows, whole = _windows(x, self.window_size)
        arrays, _ = self.attended(windows)
        arrays = {name: array[:, : windows.shape[1]] for name, array in arrays.items()}
        out = whole(arrays["out"])
        return self.out(out), arrays | {"out": jax.lax.collapse(out, 1, 3)} | self.capped(), None


class WindowNystrom(NystromAttention):
    """Nyström attention inside each window of a zero-padded map, without shifts or positions."""

    masks = ()

    def __init__(self, *sizes: Any, window_size: int, **arguments: Any):
        super().__init__(*sizes, **arguments)
        self.window_size = window_size

    def __call__(
        self, x: Float[Array, "b height width d"], context: Context = EVAL_CONTEXT
    ) -> tuple[Float[Array, "b height width d"], dict[str, Array], None]:
        """Return the output, for a tap `out` of the map (B T N H) and other arrays per window, and no cache."""
        windows, whole = _windows(x, self.window_size)
        projected, arrays, _ = super().__call__(windows)
        out = whole(arrays["out"])
        return whole(projected), arrays | {"out": jax.lax.collapse(out, 1, 3)}, None


class ChannelAttention(MultiHeadAttention):
    """Attention between the channels of each head over a map: softmax(Qᵀ K / √H) Vᵀ, with an H × H matrix.

    Of the options of `MultiHeadAttention`, only interventions and biases have an effect. Published weights store the
    three projections in the order value, query, key. There is no T × T matrix, so taps get no q and k.
    """

    masks = ()

    def __call__(
        self, x: Float[Array, "b height width d"], context: Context = EVAL_CONTEXT
    ) -> tuple[Float[Array, "b height width d"], dict[str, Array], None]:
        tokens = _tokens(x)
        q, k, v = self.query(tokens), self.key(tokens), self.value(tokens)
        wide = jnp.promote_types(q.dtype, jnp.float32)
        logits = jnp.einsum("btnh,btng->bnhg", q * q.shape[-1] ** -0.5, k, preferred_element_type=wide)
        out = jnp.einsum("bnhg,btng->btnh", jax.nn.softmax(logits).astype(v.dtype), v)
        return self.out(out).reshape(x.shape), {"v": v, "out": out}, None


class MapBlock(Block):
    """Pre-norm block over a map, with a position code (map + depthwise convolution) before each branch.

    It is `blocks.Block` with this code and an MLP; `post_norm`, `layer_scale`, `dropout` and `graying` have no effect.
    A tap receives maps as tokens, B T D, row by row: `tokens` enter the block, `normed` is LN(tokens + code) and
    `middle` is tokens + code + attention.
    """

    def __init__(self, attention: Any, config: BlockConfig, *, rngs: nnx.Rngs):
        super().__init__(attention, config, rngs=rngs)
        self.code1, self.code2 = (DepthwiseConv(config.width, dtype=config.dtype, rngs=rngs) for _ in range(2))

    def __call__(
        self, x: Float[Array, "b height width d"], context: Context = EVAL_CONTEXT
    ) -> tuple[Float[Array, "b height width d"], Any, None]:
        first, second = (None, None) if context.scales is None else context.scales
        coded = x + self.code1(x)
        normed = self.norm1(coded)
        attention, arrays, _ = self.attention(normed, context)
        middle = coded + drop_path(attention, first)
        coded = middle + self.code2(middle)
        branch, hidden = self.mlp(_tokens(self.norm2(coded)))
        block = coded + drop_path(branch.reshape(x.shape), second)
        if context.tap is None:
            return block, None, None
        maps = {"tokens": x, "normed": normed, "attention": attention, "middle": middle, "block": block}
        return block, context.tap(arrays | {name: _tokens(m) for name, m in maps.items()} | {"hidden": hidden}), None


class Unit(nnx.Module):
    """Spatial block (attention inside windows), then a channel block; taps are {"spatial": ..., "channel": ...}."""

    branches, dropout = 4, 0.0

    def __init__(self, spatial: MapBlock, channel: MapBlock):
        self.spatial, self.channel = spatial, channel

    def __call__(
        self, x: Float[Array, "b height width d"], context: Context = EVAL_CONTEXT
    ) -> tuple[Float[Array, "b height width d"], dict[str, Any], None]:
        scales = context.scales
        first, second = (None, None) if scales is None else (scales[:2], scales[2:])
        x, spatial, _ = self.spatial(x, dataclasses.replace(context, scales=first))
        x, channel, _ = self.channel(x, dataclasses.replace(context, scales=second))
        return x, {"spatial": spatial, "channel": channel}, None


class Downsample(nnx.Module):
    """LayerNorm, then a 2 × 2 convolution of stride 2; odd sides are zero-padded to even ones."""

    def __init__(self, channels: int, width: int, *, dtype: Any, rngs: nnx.Rngs):
        self.norm = LayerNorm(channels, epsilon=EPSILON, dtype=dtype, rngs=rngs)
        self.conv = PatchConv(channels, width, 2, dtype=dtype, rngs=rngs)

    def __call__(self, x: Float[Array, "b height width c"]) -> Float[Array, "b rows columns d"]:
        x = self.norm(x)
        return self.conv(jnp.pad(x, ((0, 0), (0, x.shape[1] % 2), (0, x.shape[2] % 2), (0, 0))))


class Model(Family):
    """DaViT for classification; no shape depends on `image_size`.

    Both blocks of a unit share num_heads and mlp_dim. Stacks of taps and of weight measures: "stage1.spatial",
    "stage1.channel", "stage2.spatial", ... Measures of attention matrices exist only for spatial blocks, one per
    window: their leading axis is B·windows. `qkv_bias` and interventions also apply to channel attention. Stochastic
    depth rises linearly from 0 over the units of all stages.
    """

    keys = DavitKeys
    attentions = MappingProxyType({"softmax": WindowAttention, "nystrom": WindowNystrom})
    staged = True
    fixed = MappingProxyType({"epsilon": EPSILON})

    def __init__(self, keys: DavitKeys, blocks: Sequence[BlockConfig], *, rngs: nnx.Rngs):
        dtype, widths, depths = blocks[0].dtype, [stage.width for stage in blocks], [stage.depth for stage in blocks]
        self.dtype, self.stages = dtype, len(blocks)

        def unit(channel_head_dim: int, stage: BlockConfig, rngs: nnx.Rngs) -> Unit:
            config = stage.attention
            windows = dataclasses.replace(config, options={**config.options, "window_size": keys.window_size})
            between_tokens = windows.make(stage.width, kernel_init=stage.kernel_init, dtype=dtype, rngs=rngs)
            options = {name: x for name, x in config.options.items() if name in INTERVENTIONS}
            options |= {"qkv_bias": config.qkv_bias, "backend": config.backend}
            sizes = (stage.width, config.num_heads, channel_head_dim)
            between_channels = ChannelAttention(*sizes, **options, dtype=dtype, rngs=rngs)
            return Unit(*(MapBlock(attention, stage, rngs=rngs) for attention in (between_tokens, between_channels)))

        rates = np.split(np.linspace(0, blocks[0].drop_path, sum(depths)), np.cumsum(depths)[:-1])
        self.stem = Conv(keys.channels, widths[0], 7, stride=4, padding=3, dtype=dtype, rngs=rngs)
        self.stem_norm = blocks[0].make_norm(rngs)
        channel_head_dims = keys.channel_head_dim or [stage.attention.head_dim for stage in blocks]
        for i, (stage, channel_head_dim) in enumerate(zip(blocks, channel_head_dims, strict=True)):
            if i:
                setattr(self, f"down{i + 1}", Downsample(widths[i - 1], widths[i], dtype=dtype, rngs=rngs))
            make_unit = functools.partial(unit, channel_head_dim)
            stack = Stack.from_config(stage, make_unit, drop_path=rates[i].tolist(), rngs=rngs)
            setattr(self, f"stage{i + 1}", stack)
        self.norm = blocks[-1].make_norm(rngs)
        self.head = blocks[-1].make_linear(widths[-1], keys.num_classes, rngs)

    def stacks(self) -> dict[str, nnx.Module]:
        units = {f"stage{i}": getattr(self, f"stage{i}").layers for i in range(1, self.stages + 1)}
        return {f"{stage}.{n}": getattr(unit, n) for stage, unit in units.items() for n in ("spatial", "channel")}

    def __call__(
        self, images: Float[Array, "b height width c"], *, key: Key[Array, "b"] | None = None, tap: Tap | None = None
    ) -> tuple[Float[Array, "b v"], Any]:
        """Return logits (B, V), and tap results by stack, stacked over its layers."""
        x = self.stem_norm(self.stem(images.astype(self.dtype)))
        taps = {}
        for i in range(1, self.stages + 1):
            x = getattr(self, f"down{i}")(x) if i > 1 else x
            # Each stack counts its layers from 0: with the same key, stages would drop the same branches.
            stage_key = None if key is None else jax.vmap(jax.random.fold_in, (0, None))(key, i)
            x, results = getattr(self, f"stage{i}")(x, Context(key=stage_key, tap=tap))
            taps |= {f"stage{i}.{name}": result for name, result in results.items()}
        return self.head(self.norm(x.mean(axis=(1, 2)))), taps
