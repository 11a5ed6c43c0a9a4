"""Selection of the attention backend from device, dtype, head dimensions, mask, soft cap and dropout."""

from collections.abc import Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from leanformer.costs import devices
from leanformer.errors import ConfigError


BACKENDS = ("xla", "cudnn", "naive")
FITS = "fused kernel supports dtype and head dimension"
UNSUPPORTED_PARTS = {  # parts of a mask that JAX's cuDNN interface does not support
    "keep": "some padding lies between tokens",
    "segments": "several sequences are packed into one",
    "offset": "the first query is not the first token",
}


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
    """Return the attention backend for a device and a model, and the reason for the selection as a text for the log.

    "auto" becomes "cudnn" if the fused kernel runs on the device, else "xla". Others are returned unchanged.
    `head_dim`, of queries and keys, and `value_dim` may be one number per stage. Raises ConfigError if cudnn is
    configured and cannot run.
    """
    if backend in ("xla", "naive"):
        return backend, "configured"
    widths = ((size,) if isinstance(size, int) else size for size in (head_dim, value_dim or head_dim))
    refusals = (_device_obstacle(device, jnp.dtype(dtype), *pair) for pair in zip(*widths, strict=True))
    reason = obstacle(mask, soft_cap, dropout) or next(filter(None, refusals), None)
    if backend == "cudnn" and reason:
        raise ConfigError(f'model.backend="cudnn" cannot run: {reason}. Use model.backend="xla" or "auto".')
    if backend == "cudnn":
        return "cudnn", "configured"
    return ("xla", f"no cuDNN: {reason}") if reason else ("cudnn", FITS)


def obstacle(mask: Collection[str], soft_cap: float | None = None, dropout: float | None = None) -> str | None:
    """Return why JAX's cuDNN interface cannot compute an attention, as a text; None if it can."""
    if unsupported := [reason for part, reason in UNSUPPORTED_PARTS.items() if part in mask]:
        return unsupported[0]
    if soft_cap is not None:
        return f"it does not support a soft cap of logits, found {soft_cap}"
    return f"it does not support attention dropout, found {dropout}" if dropout else None


def _device_obstacle(device: Any, dtype: jnp.dtype, head_dim: int, value_dim: int) -> str | None:
    """Return why cuDNN's fused attention cannot run on a device with these head dimensions, or None."""
    capability = devices.capability(device)
    # JAX lets newer ones have 256 too; cuDNN 9.23 refuses the gradient of 136 for 10.0, and of 136 and 256 for 12.0.
    widest = 256 if capability == 9.0 else 128
    if capability is None:
        return f"the device is a {device.platform}, not an NVIDIA GPU"
    if capability < 8.0:
        return f"it needs compute capability 8.0, this GPU has {capability}"
    if dtype not in (jnp.bfloat16, jnp.float16):
        return f"it takes bfloat16 or float16, not {dtype}"
    if head_dim != value_dim or head_dim % 8 or head_dim > widest:
        return f"head dimensions must be equal multiples of 8 up to {widest}, found {head_dim} and {value_dim}"
    x = jax.ShapeDtypeStruct((1, 2, 1, head_dim), dtype)
    try:  # JAX's own checks, such as the version of cuDNN, are made when the gradient is traced
        jax.eval_shape(jax.grad(_fused_total, (0, 1, 2)), x, x, x)
    except (NotImplementedError, RuntimeError, ValueError) as error:
        return f"JAX rejects it: {error}"
    return None


def _fused_total(q: Array, k: Array, v: Array) -> Array:
    return jax.nn.dot_product_attention(q, k, v, implementation="cudnn").astype(jnp.float32).sum()
