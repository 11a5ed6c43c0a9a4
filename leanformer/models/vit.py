"""Vision Transformer and DeiT, with independent heads, head dimension, depth and MLP.

timm's `VisionTransformer` semantics (Dosovitskiy et al. 2021; Touvron et al. 2021): patches by one strided
convolution, a class token in front, learned positions, pre-norm blocks, final norm, class row, one linear head.
Leaner Transformers (Table 4) widens the attention: num_heads × head_dim may exceed the embedding dimension.
"""

import math
from typing import Any

import jax
from flax import nnx
from jaxtyping import Array, Float, Key

from leanformer.config.architectures import VitKeys
from leanformer.config.rules import image_sides, require
from leanformer.layers.attention import normal
from leanformer.layers.blocks import BlockConfig
from leanformer.layers.convolution import PatchConv, check_sides, patch_grid
from leanformer.layers.masks import Context, Tap
from leanformer.layers.model_base import Family
from leanformer.layers.positions import prepend
from leanformer.layers.stack import Stack


class Model(Family):
    """Vision Transformer for classification."""

    keys = VitKeys
    no_decay = ("cls_token", "dist_token", "pos_embed", "gamma1", "gamma2")
    classifiers = ("head", "head_dist")

    def __init__(self, keys: VitKeys, blocks: BlockConfig, *, rngs: nnx.Rngs):
        pool, distilled, patch_size = keys.pool, keys.distilled, keys.patch_size
        require(not distilled or pool == "token", 'model.distilled=True needs model.pool="token".')
        self.sides = image_sides(keys.image_size)
        self.pool, self.dtype, width = pool, blocks.dtype, blocks.width
        tokens = math.prod(patch_grid(keys.image_size, patch_size)) + (pool == "token") + distilled

        self.patch_embed = PatchConv(keys.channels, width, patch_size, first=True, dtype=blocks.dtype, rngs=rngs)
        if pool == "token":
            self.cls_token = nnx.Param(1e-6 * jax.random.normal(rngs.params(), (1, 1, width)))
        self.pos_embed = nnx.Param(normal(rngs.params(), (1, tokens, width)))
        self.blocks = Stack.from_config(blocks, rngs=rngs)
        self.norm = blocks.make_norm(rngs)
        self.head = blocks.make_linear(width, keys.num_classes, rngs)
        if distilled:
            self.dist_token = nnx.Param(normal(rngs.params(), (1, 1, width)))
            self.head_dist = blocks.make_linear(width, keys.num_classes, rngs)

    def heads(
        self, images: Float[Array, "b height width c"], *, key: Key[Array, "b"] | None = None, tap: Tap | None = None
    ) -> tuple[dict[str, Float[Array, "b v"]], Any]:
        """Return {"class": logits B V, "distilled": if the model has the second head}, and {"blocks": tap results}."""
        check_sides(images, self.sides)
        x = jax.lax.collapse(self.patch_embed(images.astype(self.dtype)), 1, -1)
        for name in ("dist_token", "cls_token"):  # the class token comes first
            x = prepend(getattr(self, name), x) if hasattr(self, name) else x
        x = x + self.pos_embed[...].astype(self.dtype)
        x, taps = self.blocks(x, Context(key=key, tap=tap))
        first = self.norm(x.mean(axis=1) if self.pool == "mean" else x[:, 0])
        logits = {"class": self.head(first)}
        if hasattr(self, "head_dist"):
            logits["distilled"] = self.head_dist(self.norm(x[:, 1]))
        return logits, {"blocks": taps}

    def __call__(
        self, images: Float[Array, "b height width c"], *, key: Key[Array, "b"] | None = None, tap: Tap | None = None
    ) -> tuple[Float[Array, "b v"], Any]:
        """Return the mean of the heads' logits (B, V), and {"blocks": the tap's results stacked over layers}."""
        logits, taps = self.heads(images, key=key, tap=tap)
        total: Any = sum(logits.values())
        return total / len(logits), taps
