"""Convolutions and batch normalisation over feature maps (B, height, width, channels), with PyTorch's semantics."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Key

from leanformer.config.rules import image_sides, require
from leanformer.layers.attention import times_weights
from leanformer.runtime.mesh import REPLICATED


def conv_init(fan_in: int) -> nnx.initializers.Initializer:
    """Return the initialiser of convolution weights and biases in timm: uniform in ±1/√fan_in."""

    def init(key: Key[Array, ""], shape: tuple[int, ...], dtype: Any = jnp.float32) -> Array:
        return jax.random.uniform(key, shape, dtype, -(fan_in**-0.5), fan_in**-0.5)

    return init


class Conv(nnx.Conv):
    """k × k convolution with `padding` zeros on every side of the map; parameters: kernel (k, k, in, out), bias (out).

    The padding is explicit since "SAME" would shift a strided grid.
    """

    def __init__(self, channels: int, width: int, kernel: int, *, stride: int = 1, padding: int = 0, **common: Any):
        init = conv_init(kernel * kernel * channels)
        padded, inits = ((padding, padding),) * 2, dict[str, Any](kernel_init=init, bias_init=init)
        super().__init__(channels, width, (kernel, kernel), strides=stride, padding=padded, **inits, **common)


def check_sides(images: Float[Array, "b height width c"], sides: tuple[int, int]) -> None:
    """Raise ConfigError unless images have the (height, width) for which a model was built."""
    found, expected = (" x ".join(map(str, pair)) for pair in (images.shape[1:3], sides))
    require(found == expected, f"Images of {found} pixels: the model was built for model.image_size={expected}.")


def patch_grid(image_size: int | Sequence[int], patch_size: int) -> tuple[int, int]:
    """Return the numbers of patches of an image as (rows, columns). Raises ConfigError if patches do not fit a side."""
    height, width = image_sides(image_size)
    fits = height % patch_size == width % patch_size == 0
    require(fits, f"model.image_size={image_size} is not a multiple of model.patch_size={patch_size}.")
    return height // patch_size, width // patch_size


class PatchConv(nnx.Linear):
    """Convolution with stride equal to its kernel size: non-overlapping patches, each multiplied by one matrix.

    Computed by a reshape and a matmul, which is fast on all devices. Rows and columns that fill no whole patch are left
    out, as by a convolution without padding. Parameters: kernel (size · size · channels, D), rows in the order (row,
    column, channel); bias (D). `first` is True if the input is the image, whose gradient is not needed.
    """

    def __init__(
        self, channels: int, width: int, size: int, *, first: bool = False, dtype: Any = jnp.float32, rngs: nnx.Rngs
    ):
        fan_in = size * size * channels
        # The plain matmul avoids computing and counting the gradient of the image.
        product = jax.lax.dot_general if first else times_weights
        init = conv_init(fan_in)
        super().__init__(fan_in, width, kernel_init=init, bias_init=init, dot_general=product, dtype=dtype, rngs=rngs)
        self.size = size

    def __call__(  # ty: ignore[incompatible-method-override] - shapes differ
        self, x: Float[Array, "b height width c"]
    ) -> Float[Array, "b rows columns d"]:
        b, height, width, c = x.shape
        rows, columns = height // self.size, width // self.size
        x = x[:, : rows * self.size, : columns * self.size]
        x = x.reshape(b, rows, self.size, columns, self.size, c).swapaxes(2, 3)
        return super().__call__(x.reshape(b, rows, columns, self.size * self.size * c))


class DepthwiseConv(nnx.Module):
    """Depthwise 3 × 3 convolution with bias, zero-padded to equal size; kernel (3, 3, channels), bias (channels).

    Nine shifted multiply-adds, which compilers fuse into one pass; their depthwise convolution is slow on CPUs.
    """

    def __init__(self, channels: int, *, dtype: Any = jnp.float32, rngs: nnx.Rngs):
        self.dtype, init = dtype, conv_init(9)
        self.kernel = nnx.Param(init(rngs.params(), (3, 3, channels)), **REPLICATED)
        self.bias = nnx.Param(init(rngs.params(), (channels,)))

    def __call__(self, x: Float[Array, "b height width c"]) -> Float[Array, "b height width c"]:
        height, width = x.shape[1:3]
        kernel = self.kernel[...].astype(self.dtype)[:, :, None, None, None]
        padded = jnp.pad(x.astype(self.dtype), ((0, 0), (1, 1), (1, 1), (0, 0)))
        shifted = (padded[:, i : i + height, j : j + width] * kernel[i, j] for i in range(3) for j in range(3))
        return sum(shifted, start=jnp.broadcast_to(self.bias[...].astype(self.dtype), x.shape))


class BatchNorm(nnx.Module):
    """Batch normalisation of the last axis, as PyTorch's BatchNorm2d: momentum 0.1, ε 1e-5; float32 inside.

    If called with `train=True`, it normalises with the statistics of the whole global batch, or micro-batch, and
    updates the running ones, with the unbiased variance; under `jit` a mean over a sharded axis is the mean over all
    devices. Parameters: scale, bias (channels). Statistics (`nnx.BatchStat`): mean, var (channels).
    """

    MOMENTUM, EPSILON = 0.1, 1e-5

    def __init__(self, channels: int, *, dtype: Any = jnp.float32):
        self.dtype = dtype
        self.scale, self.bias = nnx.Param(jnp.ones(channels)), nnx.Param(jnp.zeros(channels))
        self.mean, self.var = nnx.BatchStat(jnp.zeros(channels)), nnx.BatchStat(jnp.ones(channels))

    def __call__(self, x: Float[Array, "*b c"], *, train: bool) -> Float[Array, "*b c"]:
        wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
        mean, var = self.mean[...], self.var[...]
        if train:
            axes, count = tuple(range(x.ndim - 1)), x.size // x.shape[-1]
            batch_mean, batch_var = wide.mean(axes), wide.var(axes)
            unbiased = batch_var * (count / max(count - 1, 1))
            self.mean[...] = mean + self.MOMENTUM * (jax.lax.stop_gradient(batch_mean) - mean)
            self.var[...] = var + self.MOMENTUM * (jax.lax.stop_gradient(unbiased) - var)
            mean, var = batch_mean, batch_var
        gain = self.scale[...] * jax.lax.rsqrt(var + self.EPSILON)
        gain, mean, bias = (jnp.broadcast_to(vector, wide.shape) for vector in (gain, mean, self.bias[...]))
        return ((wide - mean) * gain + bias).astype(self.dtype)
