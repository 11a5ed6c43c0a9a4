"""Which kernel computes attention: decided once, at start, by the device, the dtype, the widths of heads, the mask, the
soft cap and dropout."""

from collections.abc import Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from leanformer.errors import ConfigError
from leanformer.runtime import target


BACKENDS = ("xla", "cudnn", "naive")
FITS = "fused kernel fits dtype and head width"


def resolve(
    backend: str,
    *,
    device: Any,
    dtype: Any,
    head_dim: int | Sequence[int],
    value_dim: int | Sequence[int] | None = None,
    mask: Collection[str] = (),
    soft_cap: float | None = None,
    dropout: float | None = None,
) -> tuple[str, str]:
    """Decides the attention backend once, at start.

    Args:
        backend: what was asked for: "auto" or one of BACKENDS.
        device: that it is to run on, here or not (see `target`).
        dtype: of queries, keys and values.
        head_dim: H of queries and keys, or of each stage; all of them must fit.
        value_dim: H of values; `head_dim` if None.
        mask: the parts of a `masks.Mask` that the model gives to attention.
        soft_cap: of its logits, if it has one.
        dropout: of its weights, if any are dropped.

    Returns:
        The backend and the reason, to be logged.

    Raises:
        ConfigError: cudnn was asked for by name and cannot run there.
    """
    if backend in ("xla", "naive"):
        return backend, "asked for"
    widths = ((size,) if isinstance(size, int) else size for size in (head_dim, value_dim or head_dim))
    obstacles = (_cudnn_obstacle(device, jnp.dtype(dtype), *pair) for pair in zip(*widths, strict=True))
    inside = mask_obstacle(mask) or cap_obstacle(soft_cap) or dropout_obstacle(dropout)
    obstacle = inside or next(filter(None, obstacles), None)
    if backend == "cudnn":
        if obstacle:
            raise ConfigError(f'model.backend="cudnn" cannot run: {obstacle}. Use model.backend="xla" or "auto".')
        return "cudnn", "asked for"
    return ("xla", f"no cuDNN: {obstacle}") if obstacle else ("cudnn", FITS)


def mask_obstacle(parts: Collection[str]) -> str | None:
    """Why JAX's interface to cuDNN's kernel takes no mask of these parts, or None. It takes lengths, a causal mask, and
    with that one a window."""
    words = {
        "keep": "some padding lies between tokens",
        "segments": "several sequences are packed into one",
        "offset": "the first query is not the first token",
    }
    if "window" in parts and "causal" not in parts:
        return "a window reaches ahead of its query"
    return next((reason for part, reason in words.items() if part in parts), None)


def cap_obstacle(soft_cap: float | None) -> str | None:
    """Why JAX's interface to cuDNN's kernel takes no soft cap, or None."""
    return None if soft_cap is None else f"it has no soft cap of logits, found {soft_cap}"


def dropout_obstacle(dropout: float | None) -> str | None:
    """Why JAX's interface to cuDNN's kernel drops no weights, or None."""
    return f"it drops no attention weights, asked for {dropout}" if dropout else None


def _cudnn_obstacle(device: Any, dtype: jnp.dtype, head_dim: int, value_dim: int) -> str | None:
    """Why cuDNN's fused attention cannot run on a device, or None."""
    if device.platform != "gpu":
        return f"the device is a {device.platform}, not a GPU"
    if dtype not in (jnp.bfloat16, jnp.float16):
        return f"it takes bfloat16 or float16, not {dtype}"
    capability = target.capability(device)
    # JAX lets newer ones have 256 too; cuDNN 9.23 refuses the gradient of 136 for 10.0, and of 136 and 256 for 12.0.
    widest = 256 if capability[:1] == (9,) else 128
    if capability < (8, 0):
        return f"it needs compute capability 8.0, this GPU has {'.'.join(map(str, capability))}"
    if head_dim != value_dim or head_dim % 8 or head_dim > widest:
        return f"head widths must be equal multiples of 8 up to {widest}, found {head_dim} and {value_dim}"
    return _refusal(device, dtype, head_dim)


def _refusal(device: Any, dtype: jnp.dtype, head_dim: int) -> str | None:
    """What JAX itself says against the kernel and its gradient, which it checks while tracing: a cuDNN that is missing
    or too old for the device, say."""
    x = jax.ShapeDtypeStruct((1, 2, 1, head_dim), dtype)

    def total(q: Array, k: Array, v: Array) -> Array:
        return jax.nn.dot_product_attention(q, k, v, implementation="cudnn").astype(jnp.float32).sum()

    try:
        with target.seen_by(device):
            jax.eval_shape(jax.grad(total, (0, 1, 2)), x, x, x)
    except (NotImplementedError, RuntimeError, ValueError) as error:
        return f"JAX refuses it: {error}"
    return None
