"""DaViT: attention between tokens inside windows, then attention between channels (Ding et al. 2022).

timm's `DaVit` semantics: a strided convolution, stages with a 2 × 2 convolution between them, in each stage units of a
spatial and a channel block, position codes by depthwise convolutions, the mean over the map, norm, one linear head.
There are no tokens and no positions to learn, so an image of any size goes through any of these models.
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

from leanformer.errors import ConfigError
from leanformer.layers.attention import normal, times_weights
from leanformer.layers.blocks import Block, BlockConfig
from leanformer.layers.context import PLAIN, Context, Tap
from leanformer.layers.convolution import Conv, DepthwiseConv, PatchConv
from leanformer.layers.dropping import drop_path
from leanformer.layers.families import Family
from leanformer.layers.multihead import MultiHeadAttention
from leanformer.layers.norms import LayerNorm
from leanformer.layers.nystrom import NystromAttention
from leanformer.layers.stack import Stack


EPSILON = 1e-5  # of every LayerNorm


def _tokens(x: Float[Array, "b height width d"]) -> Float[Array, "b t d"]:
    return x.reshape(len(x), -1, x.shape[-1])


def _windows(
    x: Float[Array, "b height width d"], size: int
) -> tuple[Float[Array, "windows t d"], Callable[[Array], Array]]:
    """The windows of a map as sequences, padded with zeros; and what makes a map of anything a token again."""
    batch, height, width, channels = x.shape
    rows, columns = -(-height // size), -(-width // size)
    x = jnp.pad(x, ((0, 0), (0, rows * size - height), (0, columns * size - width), (0, 0)))
    x = x.reshape(batch, rows, size, columns, size, channels).swapaxes(2, 3)

    def whole(windows: Array) -> Array:
        rest = windows.shape[2:]
        found = windows.reshape(batch, rows, columns, size, size, *rest).swapaxes(2, 3)
        return found.reshape(batch, rows * size, columns * size, *rest)[:, :height, :width]

    return x.reshape(-1, size * size, channels), whole


class WindowAttention(MultiHeadAttention):
    """Self-attention inside each window of a map, without shifts or positions.

    A map that is no whole number of windows gets zeros below and to the right, which take part like any token: through
    the biases of query, key and value they are not neutral.
    """

    masks = ()
    options = MappingProxyType(  # not positions along a line, which a window has not, nor values of another layer
        {name: kind for name, kind in MultiHeadAttention.options.items() if not name.startswith(("rotary", "value_"))}
    )

    def __init__(self, *sizes: int | None, window_size: int, **arguments: Any):
        super().__init__(*sizes, **arguments)
        self.window_size = window_size

    def __call__(
        self, x: Float[Array, "b height width d"], context: Context = PLAIN
    ) -> tuple[Float[Array, "b height width d"], dict[str, Array], None]:
        """The projected output, and for a tap q, k, v of each window (B·windows, T = window_size², N, H) and `out`
        of the whole map (B T N H)."""
        windows, whole = _windows(x, self.window_size)
        arrays, _ = self.attended(windows)
        arrays = {name: array[:, : windows.shape[1]] for name, array in arrays.items()}
        out = whole(arrays["out"])
        return self.out(out), arrays | {"out": out.reshape(len(x), -1, *out.shape[-2:])} | self.capped(), None


class WindowNystrom(NystromAttention):
    """Nyström attention inside each window of a map; windows as those of `WindowAttention`, parameters as
    `NystromAttention`'s."""

    masks = ()

    def __init__(self, *sizes: int | None, window_size: int, **arguments: Any):
        super().__init__(*sizes, **arguments)
        self.window_size = window_size

    def __call__(
        self, x: Float[Array, "b height width d"], context: Context = PLAIN
    ) -> tuple[Float[Array, "b height width d"], dict[str, Array], None]:
        """The projected output, and for a tap `out` of the whole map (B T N H), and of each window v and what
        `NystromAttention` gives besides."""
        windows, whole = _windows(x, self.window_size)
        projected, arrays, _ = super().__call__(windows)
        out = whole(arrays["out"])
        return whole(projected), arrays | {"out": out.reshape(len(x), -1, *out.shape[-2:])}, None


WINDOWED = MappingProxyType({"softmax": WindowAttention, "nystrom": WindowNystrom})


class ChannelAttention(MultiHeadAttention):
    """Attention between the channels of each head: softmax(Qᵀ K / √H) Vᵀ, its matrix H × H whatever the tokens.

    Named by what they do: queries and keys make the matrix, values are mixed by it. Published weights hold the three in
    the order value, query, key.
    """

    masks = ()

    def __call__(
        self, x: Float[Array, "b height width d"], context: Context = PLAIN
    ) -> tuple[Float[Array, "b height width d"], dict[str, Array], None]:
        """The projected output, and for a tap v and `out` (B T N H); q and k make no T × T matrix here."""
        tokens = _tokens(x)
        q, k, v = self.query(tokens), self.key(tokens), self.value(tokens)
        wide = jnp.promote_types(q.dtype, jnp.float32)
        logits = jnp.einsum("btnh,btng->bnhg", q * q.shape[-1] ** -0.5, k, preferred_element_type=wide)
        out = jnp.einsum("bnhg,btng->btnh", jax.nn.softmax(logits).astype(v.dtype), v)
        return self.out(out).reshape(x.shape), {"v": v, "out": out}, None


class MapBlock(Block):
    """`blocks.Block` over a map, with a position code, map + depthwise convolution of it, before each branch.

    A tap sees maps as tokens, B T D, row by row. `tokens` are those entering the block, `normed` is LN(tokens + code)
    and `middle` is tokens + code + attention.
    """

    def __init__(self, attention: nnx.Module, config: BlockConfig, *, rngs: nnx.Rngs):
        super().__init__(attention, config, rngs=rngs)
        self.code1, self.code2 = (DepthwiseConv(config.width, dtype=config.dtype, rngs=rngs) for _ in range(2))

    def __call__(
        self, x: Float[Array, "b height width d"], context: Context = PLAIN
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
    """A spatial block, then a channel block: what the depth of a stage counts."""

    branches, dropout = 4, 0.0

    def __init__(self, spatial: MapBlock, channel: MapBlock):
        self.spatial, self.channel = spatial, channel

    def __call__(
        self, x: Float[Array, "b height width d"], context: Context = PLAIN
    ) -> tuple[Float[Array, "b height width d"], dict[str, Any], None]:
        scales = context.scales
        first, second = (None, None) if scales is None else (scales[:2], scales[2:])
        x, spatial, _ = self.spatial(x, dataclasses.replace(context, scales=first))
        x, channel, _ = self.channel(x, dataclasses.replace(context, scales=second))
        return x, {"spatial": spatial, "channel": channel}, None


class Downsample(nnx.Module):
    """Between stages: LayerNorm, then a 2 × 2 convolution of stride 2. An odd map gets zeros after the norm."""

    def __init__(self, channels: int, width: int, *, dtype: Any, rngs: nnx.Rngs):
        self.norm = LayerNorm(channels, epsilon=EPSILON, dtype=dtype, rngs=rngs)
        self.conv = PatchConv(channels, width, 2, dtype=dtype, rngs=rngs)

    def __call__(self, x: Float[Array, "b height width c"]) -> Float[Array, "b rows columns d"]:
        x = self.norm(x)
        return self.conv(jnp.pad(x, ((0, 0), (0, x.shape[1] % 2), (0, x.shape[2] % 2), (0, 0))))


class Model(Family):
    """DaViT for classification.

    Both blocks of a unit share num_heads and mlp_dim. Stacks of taps and of weight measures: "stage1.spatial",
    "stage1.channel", "stage2.spatial", ... Measures of attention matrices exist for spatial ones alone, one a window,
    so that their leading axis is B·windows.

    Args:
        image_size: in pixels, as every family takes it; no shape depends on it.
        channels: of the image; 1 or 3.
        channel_head_dim: H of the channel attention, all three, of each stage; `head_dim` if None.
        window_size: side of a window.
        blocks: settings of each stage, whose depth counts units of two blocks. Attention is inside the windows,
            "softmax" or "nystrom" with at most `window_size`² landmarks; biases of queries, keys and values are of the
            channel attention too. Stochastic depth rises linearly from 0 over the units of all stages.

    Raises:
        ConfigError: no such attention, sizes for different numbers of stages, or a size below 1.
    """

    no_decay = ()  # biases and norms apart, everything is decayed
    # See rates.BottomUp.
    bottom_up = (("stem", "stem_norm"), *((name,) for i in range(1, 10) for name in (f"down{i}", f"stage{i}")))
    attentions = WINDOWED
    staged, takes = True, MappingProxyType({"qkv_bias": True})
    fixed = MappingProxyType({"epsilon": EPSILON})

    def __init__(
        self,
        *,
        image_size: int | Sequence[int],
        channels: int,
        num_classes: int,
        channel_head_dim: Sequence[int] | None = None,
        window_size: int = 7,
        blocks: Sequence[BlockConfig],
        rngs: nnx.Rngs,
    ):
        dtype, widths, depths = blocks[0].dtype, [stage.width for stage in blocks], [stage.depth for stage in blocks]
        channels_of = channel_head_dim or [stage.attention.head_dim for stage in blocks]
        if len(channels_of) != len(blocks):
            raise ConfigError(f"model.channel_head_dim={channel_head_dim}: give one for each of {len(blocks)} stages.")
        self.dtype, self.stages = dtype, len(blocks)

        def unit(stage: BlockConfig, channel: int, rngs: nnx.Rngs) -> Unit:
            a = stage.attention
            windows = dataclasses.replace(a, options={**a.options, "window_size": window_size})
            own = {"qkv_bias": a.qkv_bias, "backend": a.backend, "dtype": dtype, "rngs": rngs}
            between_tokens = windows.make(stage.width, kernel_init=stage.kernel_init, dtype=dtype, rngs=rngs)
            between_channels = ChannelAttention(stage.width, a.num_heads, channel, **own)
            return Unit(*(MapBlock(each, stage, rngs=rngs) for each in (between_tokens, between_channels)))

        rates = np.split(np.linspace(0, blocks[0].drop_path, sum(depths)), np.cumsum(depths)[:-1])
        self.stem = Conv(channels, widths[0], 7, stride=4, padding=3, dtype=dtype, rngs=rngs)
        self.stem_norm = blocks[0].make_norm(rngs)
        for i, stage in enumerate(blocks):
            if i:
                setattr(self, f"down{i + 1}", Downsample(widths[i - 1], widths[i], dtype=dtype, rngs=rngs))
            make_unit = functools.partial(unit, stage, channels_of[i])
            stack = Stack.from_config(stage, make_unit, drop_path=rates[i].tolist(), rngs=rngs)
            setattr(self, f"stage{i + 1}", stack)
        self.norm = blocks[-1].make_norm(rngs)
        self.head = nnx.Linear(
            widths[-1], num_classes, kernel_init=normal, dot_general=times_weights, dtype=dtype, rngs=rngs
        )

    def stacks(self) -> dict[str, nnx.Module]:
        """See `families.Family`."""
        units = {f"stage{i}": getattr(self, f"stage{i}").layers for i in range(1, self.stages + 1)}
        return {f"{stage}.{n}": getattr(unit, n) for stage, unit in units.items() for n in ("spatial", "channel")}

    def __call__(
        self, images: Float[Array, "b height width c"], *, key: Key[Array, "b"] | None = None, tap: Tap | None = None
    ) -> tuple[Float[Array, "b v"], Any]:
        """Logits (B, V), and the tap's results by stack, stacked over its layers.

        `key`, one an example, means training and switches drop path on.
        """
        x = self.stem_norm(self.stem(images.astype(self.dtype)))
        taps = {}
        for i in range(1, self.stages + 1):
            x = getattr(self, f"down{i}")(x) if i > 1 else x
            # A stack numbers its draws from 0: the same key in every stage would drop them together.
            own = None if key is None else jax.vmap(jax.random.fold_in, (0, None))(key, i)
            x, found = getattr(self, f"stage{i}")(x, Context(key=own, tap=tap))
            taps |= {f"stage{i}.{name}": result for name, result in found.items()}
        return self.head(self.norm(x.mean(axis=(1, 2)))), taps
