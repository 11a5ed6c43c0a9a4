"""Vision Transformer and DeiT, with independent heads, head dimension, depth and MLP.

timm's `VisionTransformer` semantics (Dosovitskiy et al. 2021; Touvron et al. 2021): patches by one strided
convolution, a class token in front, learned positions, pre-norm blocks, final norm, class row, one linear head.
Leaner Transformers (Table 4) widens the attention: num_heads × head_dim may exceed the embedding dimension.
"""

from collections.abc import Sequence
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Key

from leanformer.config.rules import image_sides
from leanformer.errors import ConfigError
from leanformer.layers.attention import normal
from leanformer.layers.blocks import BlockConfig
from leanformer.layers.context import Context, Tap
from leanformer.layers.convolution import PatchConv, check_sides, patch_grid
from leanformer.layers.model_base import Family
from leanformer.layers.stack import Stack


class Model(Family):
    """Vision Transformer for classification.

    Args:
        image_size: side in pixels, or (height, width); whole multiples of `patch_size`.
        patch_size: side of a patch in pixels.
        channels: number of image channels; 1 or 3.
        num_classes: V, number of logits of each head.
        pool: "token", the class token after the final norm; or "mean", no class token and the final norm of the mean
            over patches.
        distilled: DeiT's second token and second head (Touvron et al. 2021, section 4); the logits are their mean.
        blocks: settings of the blocks; the final norm has the settings of their norms.

    Raises:
        ConfigError: `pool` is unknown or not possible with `distilled`, or patches do not fit the image.
    """

    # Parameters exempt from weight decay, in addition to biases and norms.
    no_decay = ("cls_token", "dist_token", "pos_embed", "gamma1", "gamma2")
    classifiers = ("head", "head_dist")
    takes = MappingProxyType(
        {"epsilon": 1e-6} | dict.fromkeys(("layer_scale", "mlp_sigma_reparam", "graying", "graying_by"))
    )

    def __init__(
        self,
        *,
        image_size: int | Sequence[int],
        patch_size: int,
        channels: int,
        num_classes: int,
        pool: str = "token",
        distilled: bool = False,
        blocks: BlockConfig,
        rngs: nnx.Rngs,
    ):
        if pool not in ("token", "mean") or (distilled and pool == "mean"):
            raise ConfigError(
                f'model.pool="{pool}", distilled={distilled}: invalid. Choose token, or mean without distilled.'
            )
        rows, columns = patch_grid(image_size, patch_size)
        self.sides = image_sides(image_size)
        self.pool, self.dtype, width = pool, blocks.dtype, blocks.width
        tokens = rows * columns + (pool == "token") + distilled

        self.patch_embed = PatchConv(channels, width, patch_size, first=True, dtype=blocks.dtype, rngs=rngs)
        if pool == "token":
            self.cls_token = nnx.Param(1e-6 * jax.random.normal(rngs.params(), (1, 1, width)))
        self.pos_embed = nnx.Param(normal(rngs.params(), (1, tokens, width)))
        self.blocks = Stack.from_config(blocks, rngs=rngs)
        self.norm = blocks.make_norm(rngs)
        self.head = blocks.make_linear(width, num_classes, rngs)
        if distilled:
            self.dist_token = nnx.Param(normal(rngs.params(), (1, 1, width)))
            self.head_dist = blocks.make_linear(width, num_classes, rngs)

    def heads(
        self, images: Float[Array, "b height width c"], *, key: Key[Array, "b"] | None = None, tap: Tap | None = None
    ) -> tuple[dict[str, Float[Array, "b v"]], Any]:
        """Return the logits of each head, and {"blocks": the tap's results stacked over layers}.

        The logits are {"class": B V}, with "distilled" (B V) if the model has the second head. `key`, one per example,
        switches training on, with drop path.
        """
        check_sides(images, self.sides)
        x = self.patch_embed(images.astype(self.dtype))
        x = x.reshape(x.shape[0], x.shape[1] * x.shape[2], x.shape[-1])
        names = [name for name in ("cls_token", "dist_token") if hasattr(self, name)]
        tokens = [jnp.broadcast_to(getattr(self, name)[...], (x.shape[0], 1, x.shape[-1])) for name in names]
        x = jnp.concatenate([*(token.astype(self.dtype) for token in tokens), x], axis=1)
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
        """Return logits (B, V), the mean of the heads, and {"blocks": the tap's results stacked over layers}.

        `key`, one per example, switches training on, with drop path.
        """
        logits, taps = self.heads(images, key=key, tap=tap)
        total: Any = sum(logits.values())
        return total / len(logits), taps
