"""Vision Transformer and one-token DeiT, with heads, head width, depth and MLP free of one another.

timm's `VisionTransformer` semantics (Dosovitskiy et al. 2021; Touvron et al. 2021): patches by one strided
convolution, a class token in front, learned positions, pre-norm blocks, final norm, class row, one linear head.
Leaner Transformers (Table 4) widens the attention: num_heads × head_dim may exceed the width.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Key

from leanformer.attention import MultiHeadAttention, normal, times_weights
from leanformer.blocks import Block, Stack, Tap, layer_norm


def _conv_uniform(key: Array, shape: tuple[int, ...], dtype: Any = jnp.float32, *, fan_in: int) -> Array:
    """Uniform in ±1/√fan_in: what timm leaves a convolution's weight and bias at."""
    return jax.random.uniform(key, shape, dtype, -(fan_in**-0.5), fan_in**-0.5)


class Model(nnx.Module):
    """ViT for classification.

    Args:
        image_size: side in pixels, or (height, width); whole multiples of `patch_size`.
        channels: of the image; 1 or 3.
        width: D. depth: L. num_heads: N. head_dim: H of queries and keys. mlp_dim: F.
        value_dim: H of values; `head_dim` if None.
        drop_path: stochastic depth rate of the last block, linear from 0.
        remat: what the backward pass computes again: "none", "light" or "block" (see `blocks.REMAT`).
        backend: of attention, already resolved ("xla", "cudnn" or "naive").
        dtype: of activations; parameters are float32.
    """

    no_decay = ("cls_token", "pos_embed")  # parameters exempt from weight decay, besides biases and norms

    def __init__(
        self,
        *,
        image_size: int | tuple[int, int],
        patch_size: int,
        channels: int,
        num_classes: int,
        width: int,
        depth: int,
        num_heads: int,
        head_dim: int,
        mlp_dim: int,
        value_dim: int | None = None,
        drop_path: float = 0.0,
        remat: str = "light",
        backend: str = "xla",
        dtype: Any = jnp.float32,
        rngs: nnx.Rngs,
    ):
        height, breadth = (image_size, image_size) if isinstance(image_size, int) else image_size
        tokens = (height // patch_size) * (breadth // patch_size) + 1
        fan_in = patch_size * patch_size * channels
        self.patch_size, self.dtype = patch_size, dtype

        def init(key, shape, dtype=jnp.float32):
            return _conv_uniform(key, shape, dtype, fan_in=fan_in)

        def block(rngs: nnx.Rngs) -> Block:
            attention = MultiHeadAttention(
                width, num_heads, head_dim, value_dim, backend=backend, dtype=dtype, rngs=rngs
            )
            return Block(attention, width, mlp_dim, dtype=dtype, rngs=rngs)

        linear = functools.partial(nnx.Linear, dot_general=times_weights, dtype=dtype, rngs=rngs)
        # The plain product, whose derivative by the image, which nobody wants, is never made or counted.
        self.patch_embed = linear(fan_in, width, kernel_init=init, bias_init=init, dot_general=jax.lax.dot_general)
        self.cls_token = nnx.Param(1e-6 * jax.random.normal(rngs.params(), (1, 1, width)))
        self.pos_embed = nnx.Param(normal(rngs.params(), (1, tokens, width)))
        self.blocks = Stack(block, depth, drop_path=drop_path, remat=remat, rngs=rngs)
        self.norm = layer_norm(width, dtype=dtype, rngs=rngs)
        self.head = linear(width, num_classes, kernel_init=normal)

    def __call__(
        self,
        images: Float[Array, "b height width c"],
        *,
        key: Key[Array, "b"] | None = None,
        tap: Tap | None = None,
    ) -> tuple[Float[Array, "b v"], Any]:
        """Logits (B, V) and the taps stacked over layers. `key`, one an example, switches drop path on."""
        x = self.patch_embed(_patches(images.astype(self.dtype), self.patch_size))
        cls = jnp.broadcast_to(self.cls_token[...], (x.shape[0], 1, x.shape[-1])).astype(self.dtype)
        x = jnp.concatenate([cls, x], axis=1) + self.pos_embed[...].astype(self.dtype)
        x, taps = self.blocks(x, key=key, tap=tap)
        return self.head(self.norm(x[:, 0])), taps


def _patches(images: Float[Array, "b height width c"], size: int) -> Float[Array, "b t p"]:
    """Non-overlapping patches in row-major order, each flattened as (row, column, channel).

    A strided convolution is this reshape and one matrix product, which runs at the matrix rate everywhere.
    """
    b, height, width, c = images.shape
    x = images.reshape(b, height // size, size, width // size, size, c).swapaxes(2, 3)
    return x.reshape(b, -1, size * size * c)
