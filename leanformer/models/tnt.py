"""Transformer in Transformer (Han et al. 2021): a transformer over pixels of each patch feeds one over patches.

timm's `TNT` semantics. A strided convolution computes M = (patch_size / pixel_stride)² pixel tokens per patch. A block
runs its inner transformer on the M tokens of every patch, adds their projection to the patch token, and runs its outer
transformer on the patches and the class token. timm has two variants, with equal stem parameters and
different outputs:

    "original"   up to timm 1.0.15, `legacy=True` since. The convolution reads the whole image; the update of a patch
                 is Linear(LN_d(pixels)) with a bias, with a norm over each pixel token.
    "patchwise"  timm 1.0.16 and later. The convolution reads each patch separately, zero-padded; the update is
                 LN(Linear(LN_Md(pixels))) without a bias, the first norm over all pixel tokens of the patch together.
"""

import dataclasses
import functools
import math
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Key

from leanformer.config.architectures import TntKeys
from leanformer.config.rules import image_sides, require
from leanformer.layers.attention import normal, times_weights
from leanformer.layers.blocks import Block, BlockConfig, MlpConfig
from leanformer.layers.convolution import Conv, check_sides, patch_grid
from leanformer.layers.masks import EVAL_CONTEXT, Context, Tap
from leanformer.layers.model_base import Family
from leanformer.layers.multihead import AttentionConfig
from leanformer.layers.norms import LayerNorm
from leanformer.layers.positions import prepend
from leanformer.layers.stack import Stack
from leanformer.runtime.mesh import REPLICATED


EPSILON = 1e-5  # epsilon of every norm


def cut(x: Float[Array, "b height width c"], size: int) -> Float[Array, "b p {size} {size} c"]:
    """Return the non-overlapping squares of maps, row by row, as B P size size C; `size` divides their sides."""
    b, height, width, c = x.shape
    x = x.reshape(b, height // size, size, width // size, size, c).swapaxes(2, 3)
    return jax.lax.collapse(x, 1, 3)


class Projection(nnx.Module):
    """Linear projection of the concatenated M pixel tokens of each patch to the patch dimension: B P M d to B P D.

    Parameters: linear (M·d, D); norm1 of all M·d numbers and norm2 of the result; or, if `pixelwise`, only norm1 of
    each pixel token, d.
    """

    def __init__(
        self,
        pixels: int,
        inner_width: int,
        width: int,
        *,
        pixelwise: bool,
        use_bias: bool,
        dtype: Any = jnp.float32,
        rngs: nnx.Rngs,
    ):
        norm = functools.partial(LayerNorm, epsilon=EPSILON, dtype=dtype, rngs=rngs)
        flat = pixels * inner_width
        self.norm1 = norm(inner_width if pixelwise else flat)
        options: dict[str, Any] = {"kernel_metadata": REPLICATED, "dot_general": times_weights}
        self.linear = nnx.Linear(flat, width, use_bias=use_bias, kernel_init=normal, dtype=dtype, rngs=rngs, **options)
        self.norm2 = None if pixelwise else norm(width)

    def __call__(self, pixels: Float[Array, "b p m d"]) -> Float[Array, "b p width"]:
        b, p, m, d = pixels.shape
        size = self.norm1.scale.shape[-1]
        normed = self.norm1(pixels.reshape(b, p, m * d // size, size))
        x = self.linear(normed.reshape(b, p, m * d))
        return x if self.norm2 is None else self.norm2(x)


class TntBlock(nnx.Module):
    """Inner block on the pixels of each patch, projection of pixels to patches, outer block on the patches.

    Called with a pair (pixels B P M d, tokens B T D: class token and P patches), it returns such a pair, {"inner": tap
    result of the inner block, "outer": of the outer one}, and None as the cache. The inner batch axis is B·P, with
    every patch as an example. Stochastic depth draws inner branches per patch and outer branches per image; the
    projection is never dropped.
    """

    dropout = 0.0

    def __init__(self, inner: Block, injection: Projection, outer: Block, *, patches: int):
        self.inner, self.injection, self.outer = inner, injection, outer
        self.branches = inner.branches * patches + outer.branches

    def __call__(
        self, x: tuple[Float[Array, "b p m d"], Float[Array, "b t width"]], context: Context = EVAL_CONTEXT
    ) -> tuple[tuple[Float[Array, "b p m d"], Float[Array, "b t width"]], dict[str, Any], None]:
        """`context.scales` are factors of the inner attention per patch, the inner MLP per patch, and the outer two."""
        pixels, patches = x
        b, p = pixels.shape[:2]
        of_pixels = of_patches = scales = context.scales
        if scales is not None:
            of_pixels, of_patches = scales[: 2 * p], scales[2 * p :]
            of_pixels = of_pixels.reshape(2, p, b).swapaxes(1, 2).reshape(2, b * p)
        flat = pixels.reshape(b * p, *pixels.shape[2:])
        inner, inner_taps, _ = self.inner(flat, dataclasses.replace(context, scales=of_pixels))
        pixels = inner.reshape(pixels.shape)
        patches = patches + jnp.pad(self.injection(pixels), ((0, 0), (1, 0), (0, 0)))  # no update of the class token
        patches, outer_taps, _ = self.outer(patches, dataclasses.replace(context, scales=of_patches))
        return (pixels, patches), {"inner": inner_taps, "outer": outer_taps}, None


class Model(Family):
    """Transformer in Transformer for classification.

    Attention of pixels is softmax, with "xla" instead of "cudnn": its head dimension may not fit the fused kernel, and
    its M × M matrices are small.
    """

    keys = TntKeys
    no_decay = ("cls_token", "pos_embed", "pixel_pos")
    fixed = MappingProxyType({"epsilon": EPSILON, "qkv_bias": False})
    layered = False

    def __init__(self, keys: TntKeys, blocks: BlockConfig, *, rngs: nnx.Rngs):
        patch_size, pixel_stride, inner_width = keys.patch_size, keys.pixel_stride, keys.inner_width
        width, dtype = blocks.width, blocks.dtype
        whole = patch_size % pixel_stride == 0
        require(whole, f"model.patch_size={patch_size} is not a multiple of model.pixel_stride={pixel_stride}.")
        self.sides, patches = image_sides(keys.image_size), math.prod(patch_grid(keys.image_size, patch_size))
        self.layout, self.dtype = keys.layout, dtype
        self.patch_size, self.grid = patch_size, patch_size // pixel_stride

        backend = "xla" if blocks.attention.backend == "cudnn" else blocks.attention.backend
        of_pixels = AttentionConfig(keys.inner_heads, keys.inner_head_dim, qkv_bias=False, backend=backend)
        inner = BlockConfig(
            inner_width, attention=of_pixels, mlp=MlpConfig(keys.inner_mlp_dim), epsilon=EPSILON, dtype=dtype
        )
        projection = functools.partial(Projection, self.grid**2, inner_width, width, dtype=dtype)

        def block(blocks: BlockConfig, rngs: nnx.Rngs) -> TntBlock:
            attentions = [(config.make_attention(rngs), config) for config in (inner, blocks)]
            of_pixels, of_patches = [Block(*pair, rngs=rngs) for pair in attentions]
            original = keys.layout == "original"
            injection = projection(pixelwise=original, use_bias=original, rngs=rngs)
            return TntBlock(of_pixels, injection, of_patches, patches=patches)

        self.pixel_embed = Conv(keys.channels, inner_width, 7, stride=pixel_stride, padding=3, dtype=dtype, rngs=rngs)
        self.pixel_pos = nnx.Param(normal(rngs.params(), (1, self.grid, self.grid, inner_width)))
        self.patch_embed = projection(pixelwise=False, use_bias=True, rngs=rngs)
        self.cls_token = nnx.Param(normal(rngs.params(), (1, 1, width)))
        self.pos_embed = nnx.Param(normal(rngs.params(), (1, patches + 1, width)))
        self.blocks = Stack.from_config(blocks, block, rngs=rngs)
        self.norm = blocks.make_norm(rngs)
        self.head = blocks.make_linear(width, keys.num_classes, rngs)

    def stacks(self) -> dict[str, nnx.Module]:
        """Return the stacked blocks "blocks.inner" of the pixels and "blocks.outer" of the patches."""
        return {f"blocks.{name}": getattr(self.blocks.layers, name) for name in ("inner", "outer")}

    def __call__(
        self, images: Float[Array, "b height width c"], *, key: Key[Array, "b"] | None = None, tap: Tap | None = None
    ) -> tuple[Float[Array, "b v"], Any]:
        """Return logits (B, V), and {"blocks.inner", "blocks.outer"}: tap results stacked over layers."""
        check_sides(images, self.sides)
        pixels = self._pixels(images.astype(self.dtype))
        patches = self.patch_embed(pixels)
        patches = prepend(self.cls_token, patches) + self.pos_embed[...].astype(self.dtype)
        (_, patches), taps = self.blocks((pixels, patches), Context(key=key, tap=tap))
        return self.head(self.norm(patches[:, 0])), {f"blocks.{name}": result for name, result in taps.items()}

    def _pixels(self, images: Float[Array, "b height width c"]) -> Float[Array, "b p m d"]:
        if self.layout == "original":
            pixels = cut(self.pixel_embed(images), self.grid)
        else:
            alone = cut(images, self.patch_size)
            pixels = self.pixel_embed(jax.lax.collapse(alone, 0, 2))
            pixels = pixels.reshape(*alone.shape[:2], *pixels.shape[1:])
        pixels = pixels + self.pixel_pos[...][None].astype(self.dtype)
        return jax.lax.collapse(pixels, 2, 4)
