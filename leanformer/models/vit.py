"""Vision Transformer and DeiT, with heads, head width, depth and MLP free of one another.

timm's `VisionTransformer` semantics (Dosovitskiy et al. 2021; Touvron et al. 2021): patches by one strided
convolution, a class token in front, learned positions, pre-norm blocks, final norm, class row, one linear head.
Leaner Transformers (Table 4) widens the attention: num_heads × head_dim may exceed the width.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Key

from leanformer.config.rules import sides
from leanformer.errors import ConfigError
from leanformer.layers.attention import normal, times_weights
from leanformer.layers.blocks import Block, Stack
from leanformer.layers.context import Context, Tap
from leanformer.layers.convolution import PatchConv
from leanformer.layers.families import Family
from leanformer.layers.kinds import make
from leanformer.layers.levers import check_graying, grayed
from leanformer.layers.norms import LayerNorm


class Model(Family):
    """ViT for classification.

    Args:
        image_size: side in pixels, or (height, width); whole multiples of `patch_size`.
        channels: of the image; 1 or 3.
        width: D. depth: L. num_heads: N. head_dim: H of queries and keys. mlp_dim: F.
        value_dim: H of values; `head_dim` if None.
        pool: "token", the class token after the final norm; or "mean", no class token and the final norm of the mean
            over patches.
        distilled: DeiT's second token and second head (Touvron et al. 2021, section 4); the logits are their mean.
        attention: its kind, "softmax", "latent" or "nystrom" (see `kinds.KINDS`).
        layer_scale: what the vectors that scale each branch start from; None for no such vectors.
        norm_scaling, mlp_sigma_reparam: of the blocks, see `blocks.Block`.
        graying, graying_by: of the tokens that enter the first block, see `levers.grayed`; None for none.
        drop_path: stochastic depth rate of the last block, linear from 0.
        remat: what the backward pass computes again: "none", "light" or "block" (see `remat.REMAT`).
        unroll: layers that one turn of the loop over a stack holds; 1 if None.
        backend: of attention, already resolved ("xla", "cudnn" or "naive").
        dtype: of activations; parameters are float32.
        options: of the attention, such as `landmarks` for "nystrom"; None leaves one at its default.
    """

    # Exempt from weight decay, besides biases and norms.
    no_decay = ("cls_token", "dist_token", "pos_embed", "gamma1", "gamma2")
    classifiers = ("head", "head_dist")
    bottom_up = (("patch_embed", "cls_token", "dist_token", "pos_embed"), ("blocks",))  # see rates.BottomUp

    def __init__(
        self,
        *,
        image_size: int | Sequence[int],
        patch_size: int,
        channels: int,
        num_classes: int,
        width: int,
        depth: int,
        num_heads: int,
        head_dim: int,
        mlp_dim: int,
        value_dim: int | None = None,
        pool: str = "token",
        distilled: bool = False,
        attention: str = "softmax",
        layer_scale: float | None = None,
        norm_scaling: bool | None = None,
        mlp_sigma_reparam: bool | None = None,
        graying: float | None = None,
        graying_by: str | None = None,
        drop_path: float = 0.0,
        remat: str = "light",
        unroll: int | None = None,
        backend: str = "xla",
        dtype: Any = jnp.float32,
        rngs: nnx.Rngs,
        **options: Any,
    ):
        if pool not in ("token", "mean") or (distilled and pool == "mean"):
            raise ConfigError(f'model.pool="{pool}", distilled={distilled}: choose token, or mean without distilled.')
        height, breadth = sides(image_size)
        if height % patch_size or breadth % patch_size:
            raise ConfigError(
                f"model.image_size={image_size} is not a whole number of patches of model.patch_size={patch_size}. "
                "Choose sides that it divides."
            )
        check_graying(graying, graying_by)
        self.pool, self.dtype, self.graying = pool, dtype, (graying, graying_by)
        tokens = (height // patch_size) * (breadth // patch_size) + (pool == "token") + distilled

        def block(rngs: nnx.Rngs) -> Block:
            common = {"backend": backend, "dtype": dtype, "rngs": rngs}
            heads = make(attention, width, num_heads, head_dim, value_dim, options=options, **common)
            more = {"norm_scaling": norm_scaling, "mlp_sigma_reparam": mlp_sigma_reparam}
            return Block(heads, width, mlp_dim, layer_scale=layer_scale, **more, dtype=dtype, rngs=rngs)

        def head() -> nnx.Linear:
            return nnx.Linear(width, num_classes, kernel_init=normal, dot_general=times_weights, dtype=dtype, rngs=rngs)

        self.patch_embed = PatchConv(channels, width, patch_size, first=True, dtype=dtype, rngs=rngs)
        if pool == "token":
            self.cls_token = nnx.Param(1e-6 * jax.random.normal(rngs.params(), (1, 1, width)))
        self.pos_embed = nnx.Param(normal(rngs.params(), (1, tokens, width)))
        self.blocks = Stack(block, depth, drop_path=drop_path, remat=remat, unroll=unroll, rngs=rngs)
        self.norm = LayerNorm(width, dtype=dtype, rngs=rngs)
        self.head = head()
        if distilled:
            self.dist_token = nnx.Param(normal(rngs.params(), (1, 1, width)))
            self.head_dist = head()

    def heads(
        self, images: Float[Array, "b height width c"], *, key: Key[Array, "b"] | None = None, tap: Tap | None = None
    ) -> tuple[dict[str, Float[Array, "b v"]], Any]:
        """The logits of each head, `class` and, of a distilled model, `distilled`; and the taps."""
        x = self.patch_embed(images.astype(self.dtype))
        x = x.reshape(x.shape[0], -1, x.shape[-1])
        names = [name for name in ("cls_token", "dist_token") if hasattr(self, name)]
        tokens = [jnp.broadcast_to(getattr(self, name)[...], (len(x), 1, x.shape[-1])) for name in names]
        x = jnp.concatenate([*(token.astype(self.dtype) for token in tokens), x], axis=1)
        x = grayed(x + self.pos_embed[...].astype(self.dtype), *self.graying)
        x, taps = self.blocks(x, Context(key=key, tap=tap))
        first = self.norm(x.mean(axis=1) if self.pool == "mean" else x[:, 0])
        logits = {"class": self.head(first)}
        if hasattr(self, "head_dist"):
            logits["distilled"] = self.head_dist(self.norm(x[:, 1]))
        return logits, {"blocks": taps}

    def __call__(
        self, images: Float[Array, "b height width c"], *, key: Key[Array, "b"] | None = None, tap: Tap | None = None
    ) -> tuple[Float[Array, "b v"], Any]:
        """Logits (B, V), the mean of the heads, and {"blocks": the tap's results stacked over layers}.

        `key`, one an example, means training and switches drop path on.
        """
        logits, taps = self.heads(images, key=key, tap=tap)
        return sum(logits.values()) / len(logits), taps
