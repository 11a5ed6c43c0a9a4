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

from leanformer.config.common import ImageKeys
from leanformer.config.declare import dataclass
from leanformer.errors import ConfigError
from leanformer.layers.blocks import Block, BlockConfig, drop_path
from leanformer.layers.convolution import Conv, DepthwiseConv, PatchConv
from leanformer.layers.masks import EVAL_CONTEXT, Context, Tap
from leanformer.layers.model_base import Family
from leanformer.layers.multihead import MultiHeadAttention
from leanformer.layers.norms import LayerNorm
from leanformer.layers.nystrom import NystromAttention
from leanformer.layers.stack import Stack


EPSILON = 1e-5  # of every LayerNorm


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
    """Self-attention inside each window of a map, without shifts or positions.

    Called with a map, B height width D, it returns one of the same shape, arrays for a tap and None as the cache; the
    context is not read. A map is zero-padded below and to the right to whole windows. Padding takes part like any
    token, and is not neutral because of the biases of query, key and value.

    Args:
        sizes: width, num_heads, head_dim and value_dim, as of `MultiHeadAttention`.
        window_size: side of a window, in tokens.
        arguments: further arguments of `MultiHeadAttention`, without rotary positions.
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
        """Return the projected output, and for a tap q, k, v per window (B·windows, T = window_size², N, H) and `out`
        of the whole map (B T N H)."""
        windows, whole = _windows(x, self.window_size)
        arrays, _ = self.attended(windows)
        arrays = {name: array[:, : windows.shape[1]] for name, array in arrays.items()}
        out = whole(arrays["out"])
        return self.out(out), arrays | {"out": jax.lax.collapse(out, 1, 3)} | self.capped(), None


class WindowNystrom(NystromAttention):
    """Nyström attention inside each window of a map, without shifts or positions; parameters as in `NystromAttention`.

    Called with a map, B height width D, it returns one of the same shape, arrays for a tap and None as the cache; the
    context is not read.

    Args:
        sizes: width, num_heads, head_dim and value_dim, as of `MultiHeadAttention`.
        window_size: side of a window, in tokens; maps are zero-padded to whole windows.
        arguments: further arguments of `NystromAttention`.
    """

    masks = ()

    def __init__(self, *sizes: Any, window_size: int, **arguments: Any):
        super().__init__(*sizes, **arguments)
        self.window_size = window_size

    def __call__(
        self, x: Float[Array, "b height width d"], context: Context = EVAL_CONTEXT
    ) -> tuple[Float[Array, "b height width d"], dict[str, Array], None]:
        """Return the projected output, and for a tap `out` of the whole map (B T N H), and per window v and the other
        arrays of `NystromAttention`."""
        windows, whole = _windows(x, self.window_size)
        projected, arrays, _ = super().__call__(windows)
        out = whole(arrays["out"])
        return whole(projected), arrays | {"out": jax.lax.collapse(out, 1, 3)}, None


WINDOWED = MappingProxyType({"softmax": WindowAttention, "nystrom": WindowNystrom})


class ChannelAttention(MultiHeadAttention):
    """Attention between the channels of each head over a map: softmax(Qᵀ K / √H) Vᵀ, with an H × H matrix.

    Called with a map, B height width D, it returns one of the same shape, arrays for a tap and None as the cache; the
    context is not read. Arguments and parameters are those of `MultiHeadAttention`, of which norms and rotary positions
    of queries and keys, the logit scale, the temperature, the soft cap and attention dropout have no effect. Published
    weights store the three projections in the order value, query, key.
    """

    masks = ()

    def __call__(
        self, x: Float[Array, "b height width d"], context: Context = EVAL_CONTEXT
    ) -> tuple[Float[Array, "b height width d"], dict[str, Array], None]:
        """Return the projected output, and for a tap v and `out` (B T N H); there is no T × T matrix of q and k."""
        tokens = _tokens(x)
        q, k, v = self.query(tokens), self.key(tokens), self.value(tokens)
        wide = jnp.promote_types(q.dtype, jnp.float32)
        logits = jnp.einsum("btnh,btng->bnhg", q * q.shape[-1] ** -0.5, k, preferred_element_type=wide)
        out = jnp.einsum("bnhg,btng->btnh", jax.nn.softmax(logits).astype(v.dtype), v)
        return self.out(out).reshape(x.shape), {"v": v, "out": out}, None


class MapBlock(Block):
    """Pre-norm block over a map, with a position code (map + depthwise convolution) before each branch.

    It maps B height width D to the same shape. It is `blocks.Block` with this code; it needs an MLP, and `post_norm`,
    `layer_scale`, `dropout` and `graying` of its config have no effect.

    A tap receives maps as tokens, B T D, row by row. `tokens` enter the block, `normed` is LN(tokens + code) and
    `middle` is tokens + code + attention.

    Args:
        attention: attention over maps, B height width D.
        config: settings of the block.
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
        attention, arrays, _ = self.attend(normed, context)
        middle = coded + drop_path(attention, first)
        coded = middle + self.code2(middle)
        branch, hidden = self.mlp(_tokens(self.norm2(coded)))
        block = coded + drop_path(branch.reshape(x.shape), second)
        if context.tap is None:
            return block, None, None
        maps = {"tokens": x, "normed": normed, "attention": attention, "middle": middle, "block": block}
        return block, context.tap(arrays | {name: _tokens(m) for name, m in maps.items()} | {"hidden": hidden}), None


class Unit(nnx.Module):
    """Spatial block (attention inside windows) followed by a channel block; the depth of a stage counts units.

    Called with a map, B height width D, it returns a map of the same shape, {"spatial": tap result of the first block,
    "channel": that of the second}, and None as the cache.

    Args:
        spatial: block with attention inside windows.
        channel: block with attention between channels.
    """

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
    """Downsampling between stages: LayerNorm, then a 2 × 2 convolution of stride 2.

    It maps (B, height, width, channels) to (B, height / 2, width / 2, D); odd sides are zero-padded to even ones.

    Args:
        channels: number of input channels.
        width: D, number of output channels.
    """

    def __init__(self, channels: int, width: int, *, dtype: Any, rngs: nnx.Rngs):
        self.norm = LayerNorm(channels, epsilon=EPSILON, dtype=dtype, rngs=rngs)
        self.conv = PatchConv(channels, width, 2, dtype=dtype, rngs=rngs)

    def __call__(self, x: Float[Array, "b height width c"]) -> Float[Array, "b rows columns d"]:
        x = self.norm(x)
        return self.conv(jnp.pad(x, ((0, 0), (0, x.shape[1] % 2), (0, x.shape[2] % 2), (0, 0))))


@dataclass(frozen=True)
class Keys(ImageKeys):
    """Keys of model.name="davit"; the defaults are DaViT-T. A depth counts units of two blocks."""

    width: tuple[int, ...] = (96, 192, 384, 768)
    depth: tuple[int, ...] = (1, 1, 3, 1)
    num_heads: tuple[int, ...] = (3, 6, 12, 24)
    head_dim: tuple[int, ...] = (32, 32, 32, 32)
    value_dim: tuple[int, ...] | None = None
    mlp_dim: tuple[int, ...] = (384, 768, 1536, 3072)
    # head dimension of the attention between channels, one number per stage; model.head_dim if unset
    channel_head_dim: tuple[int, ...] | None = None
    window_size: int = 7  # side of an attention window, in tokens
    qkv_bias: bool = True  # True: query, key and value projections have biases


class Model(Family):
    """DaViT for classification.

    Both blocks of a unit share num_heads and mlp_dim. Stacks of taps and of weight measures: "stage1.spatial",
    "stage1.channel", "stage2.spatial", ... Measures of attention matrices exist only for spatial blocks, one per
    window: their leading axis is B·windows.

    Args:
        keys: keys of config.model; no shape depends on `image_size`.
        blocks: settings of each stage, whose depth counts units of two blocks. Attention inside the windows is
            "softmax", or "nystrom" with at most `window_size`² landmarks; `qkv_bias` also applies to channel attention.
            Stochastic depth rises linearly from 0 over the units of all stages.

    Raises:
        ConfigError: `channel_head_dim` has another number of stages.
    """

    keys = Keys
    attentions = WINDOWED
    staged = True
    fixed = MappingProxyType({"epsilon": EPSILON})

    def __init__(self, keys: Keys, blocks: Sequence[BlockConfig], *, rngs: nnx.Rngs):
        channel_head_dim = keys.channel_head_dim
        dtype, widths, depths = blocks[0].dtype, [stage.width for stage in blocks], [stage.depth for stage in blocks]
        channels_of = channel_head_dim or [stage.attention_config.head_dim for stage in blocks]
        if len(channels_of) != len(blocks):
            raise ConfigError(
                f"model.channel_head_dim={channel_head_dim}: wrong length. Set one for each of {len(blocks)} stages."
            )
        self.dtype, self.stages = dtype, len(blocks)

        def unit(channel: int, stage: BlockConfig, rngs: nnx.Rngs) -> Unit:
            a = stage.attention_config
            windows = dataclasses.replace(a, options={**a.options, "window_size": keys.window_size})
            options: dict[str, Any] = {"qkv_bias": a.qkv_bias, "backend": a.backend, "dtype": dtype, "rngs": rngs}
            between_tokens = windows.make(stage.width, kernel_init=stage.kernel_init, dtype=dtype, rngs=rngs)
            between_channels = ChannelAttention(stage.width, a.num_heads, channel, **options)
            return Unit(*(MapBlock(attention, stage, rngs=rngs) for attention in (between_tokens, between_channels)))

        rates = np.split(np.linspace(0, blocks[0].drop_path, sum(depths)), np.cumsum(depths)[:-1])
        self.stem = Conv(keys.channels, widths[0], 7, stride=4, padding=3, dtype=dtype, rngs=rngs)
        self.stem_norm = blocks[0].make_norm(rngs)
        for i, stage in enumerate(blocks):
            if i:
                setattr(self, f"down{i + 1}", Downsample(widths[i - 1], widths[i], dtype=dtype, rngs=rngs))
            make_unit = functools.partial(unit, channels_of[i])
            stack = Stack.from_config(stage, make_unit, drop_path=rates[i].tolist(), rngs=rngs)
            setattr(self, f"stage{i + 1}", stack)
        self.norm = blocks[-1].make_norm(rngs)
        self.head = blocks[-1].make_linear(widths[-1], keys.num_classes, rngs)

    def stacks(self) -> dict[str, nnx.Module]:
        """Return the stacked blocks by "stage1.spatial", "stage1.channel", "stage2.spatial" and so on."""
        units = {f"stage{i}": getattr(self, f"stage{i}").layers for i in range(1, self.stages + 1)}
        return {f"{stage}.{n}": getattr(unit, n) for stage, unit in units.items() for n in ("spatial", "channel")}

    def __call__(
        self, images: Float[Array, "b height width c"], *, key: Key[Array, "b"] | None = None, tap: Tap | None = None
    ) -> tuple[Float[Array, "b v"], Any]:
        """Return logits (B, V), and tap results by stack, stacked over its layers.

        `key`, one per example, switches training on, with drop path.
        """
        x = self.stem_norm(self.stem(images.astype(self.dtype)))
        taps = {}
        for i in range(1, self.stages + 1):
            x = getattr(self, f"down{i}")(x) if i > 1 else x
            # Each stack counts its layers from 0: with the same key, stages would drop the same branches.
            stage_key = None if key is None else jax.vmap(jax.random.fold_in, (0, None))(key, i)
            x, results = getattr(self, f"stage{i}")(x, Context(key=stage_key, tap=tap))
            taps |= {f"stage{i}.{name}": result for name, result in results.items()}
        return self.head(self.norm(x.mean(axis=(1, 2)))), taps
