"""The learning rate, and AdamW's first decay, as functions of the step."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int


SCHEDULES = {
    "cosine": lambda progress: 0.5 * (1 + jnp.cos(jnp.pi * progress)),
    "linear": lambda progress: 1 - progress,
}


def learning_rate(
    step: Int[Array, ""] | int,
    *,
    lr: float,
    warmup_lr: float,
    final_lr: float,
    warmup: int,
    total: int,
    schedule: str = "cosine",
) -> Float[Array, ""]:
    """Linear from `warmup_lr` at step 0 to `lr` at step `warmup`, then down to `final_lr` at `total`: by half a cosine,
    or in a line, which with a rise is the one-cycle schedule."""
    step = jnp.asarray(step, jnp.float32)
    rising = warmup_lr + (lr - warmup_lr) * step / max(warmup, 1)
    progress = jnp.clip((step - warmup) / max(total - warmup, 1), 0, 1)
    falling = final_lr + (lr - final_lr) * SCHEDULES[schedule](progress)
    return jnp.where(step < warmup, rising, falling)


def first_decay(step: Int[Array, ""] | int, *, b1: float, b1_peak: float, warmup: int, total: int) -> Float[Array, ""]:
    """AdamW's β₁ opposite to a one-cycle learning rate: in a line from `b1` to `b1_peak` at its peak, and back."""
    return learning_rate(step, lr=b1_peak, warmup_lr=b1, final_lr=b1, warmup=warmup, total=total, schedule="linear")
