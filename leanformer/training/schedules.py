"""Schedules of the learning rate and of AdamW's beta1, as functions of the step."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Real

from leanformer.errors import ConfigError


# Remaining fraction of the decay from the peak to the final learning rate, by the progress of the decay from 0 to 1.
SCHEDULES = {
    "cosine": lambda progress: 0.5 * (1 + jnp.cos(jnp.pi * progress)),
    "linear": lambda progress: 1 - progress,
    "constant": jnp.ones_like,
}


def learning_rate(
    step: Real[Array, ""] | int,
    *,
    lr: float,
    warmup_lr: float,
    final_lr: float,
    warmup: int | float,
    total: int | float,
    schedule: str = "cosine",
) -> Float[Array, ""]:
    """Return the learning rate at a step: linear warm-up from `warmup_lr` to `lr`, then decay to `final_lr` at `total`.

    Args:
        step: step; all lengths may also be examples or fractions of the run, in one unit.
        schedule: "cosine": half a cosine; "linear": linear decay (one-cycle with a warm-up); "constant": no decay.
        lr, warmup_lr, final_lr: learning rates at the peak, at step 0 and at the end.
        warmup: length of the warm-up; 0 for none.
        total: length of the run.
    """
    step = jnp.asarray(step, jnp.float32)
    rising = warmup_lr + (lr - warmup_lr) * step / (warmup or 1)
    progress = jnp.clip((step - warmup) / ((total - warmup) or 1), 0, 1)
    falling = final_lr + (lr - final_lr) * SCHEDULES[schedule](progress)
    return jnp.where(step < warmup, rising, falling)


def beta1_schedule(
    step: Real[Array, ""] | int, *, b1: float, b1_peak: float, warmup: int | float, total: int | float
) -> Float[Array, ""]:
    """Return AdamW's beta1 at a step: linear from `b1` to `b1_peak` during warm-up, then back to `b1` at `total`.

    It is that of a one-cycle schedule. `step`, `warmup` and `total` have one unit, as in `learning_rate`.
    """
    return learning_rate(step, lr=b1_peak, warmup_lr=b1, final_lr=b1, warmup=warmup, total=total, schedule="linear")


@dataclasses.dataclass(frozen=True)
class Schedule:
    """Learning rate and beta1 of every step of a run; called with a step, it returns (learning rate, beta1).

    Attributes:
        warmup: number of warm-up steps.
        learning_rate: function from the step to the learning rate.
        b1: function from the step to beta1.
    """

    warmup: int
    learning_rate: Callable[[Any], Array]
    b1: Callable[[Any], Any]

    def __call__(self, step: Any) -> tuple[Array, Any]:
        return self.learning_rate(step), self.b1(step)


def make(o: Any, *, batch_size: int, examples: int | None, total: int) -> Schedule:
    """Return the schedule of a config.

    Args:
        o: section `optim` of the config.
        batch_size: global batch size, which converts epochs to steps.
        examples: number of training examples per epoch; None if the data are unlimited.
        total: number of steps of the run.

    Raises:
        ConfigError: the schedule is longer than the run, or a length is in epochs and the data are unlimited.
    """
    if o.warmup_epochs and examples is None:
        raise ConfigError(
            f"optim.warmup_epochs={o.warmup_epochs}: the training data are unlimited and have no epochs. Set "
            "--config.optim.warmup_epochs=0 and --config.optim.warmup_steps."
        )
    warmup = o.warmup_steps or round(o.warmup_epochs * (examples or 0) / batch_size)
    if o.warmup_share:
        warmup = round(o.warmup_share * total)
    if warmup and warmup >= total:
        keys = ", ".join(f"optim.{name}={o[name]}" for name in ("warmup_epochs", "warmup_steps", "warmup_share"))
        raise ConfigError(
            f"{keys}: the warm-up has {warmup} steps, but the whole run only {total}. Shorten the warm-up or lengthen "
            "the run."
        )
    plan = {name: o[name] for name in ("lr", "warmup_lr", "final_lr", "schedule")}
    rate = functools.partial(learning_rate, **plan, warmup=warmup, total=total)
    b1 = functools.partial(beta1_schedule, b1=o.b1, b1_peak=o.b1_peak, warmup=warmup, total=total)
    return Schedule(warmup, rate, b1 if o.b1_peak is not None else lambda _: o.b1)
