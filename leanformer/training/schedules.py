"""The learning rate, and AdamW's first decay, as functions of the step."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Real

from leanformer.errors import ConfigError


# What is left of the way from the peak to the end, by the progress of the fall, 0 to 1.
SCHEDULES = {
    "cosine": lambda progress: 0.5 * (1 + jnp.cos(jnp.pi * progress)),
    "linear": lambda progress: 1 - progress,
    "wsd": lambda progress: 1 - progress,
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
    decay: int | float = 0,
) -> Float[Array, ""]:
    """Linear from `warmup_lr` at step 0 to `lr` at step `warmup`, then down to `final_lr` at `total`: by half a cosine;
    in a line, which with a rise is the one-cycle schedule; in a line over the last `decay` steps alone, which is
    "wsd", warm-up, stable, decay (Hu et al. 2024, MiniCPM: Unveiling the Potential of Small Language Models with
    Scalable Training Strategies); or not at all, "constant". Steps, examples or shares of the run: all in one unit."""
    step = jnp.asarray(step, jnp.float32)
    rising = warmup_lr + (lr - warmup_lr) * step / (warmup or 1)
    falls = total - decay if schedule == "wsd" else warmup
    progress = jnp.clip((step - falls) / ((total - falls) or 1), 0, 1)
    falling = final_lr + (lr - final_lr) * SCHEDULES[schedule](progress)
    return jnp.where(step < warmup, rising, falling)


def first_decay(
    step: Real[Array, ""] | int, *, b1: float, b1_peak: float, warmup: int | float, total: int | float
) -> Float[Array, ""]:
    """AdamW's β₁ opposite to a one-cycle learning rate: in a line from `b1` to `b1_peak` at its peak, and back."""
    return learning_rate(step, lr=b1_peak, warmup_lr=b1, final_lr=b1, warmup=warmup, total=total, schedule="linear")


@dataclasses.dataclass(frozen=True)
class Schedule:
    """Learning rate and first-moment decay of every step of a run.

    Attributes:
        total: optimizer steps of the run.
        warmup: steps of warm-up among them.
        learning_rate, b1: functions of the step.
    """

    total: int
    warmup: int
    learning_rate: Callable[[Any], Array]
    b1: Callable[[Any], Any]

    def __call__(self, step: Any) -> tuple[Array, Any]:
        return self.learning_rate(step), self.b1(step)


def make(o: Any, *, batch_size: int, examples: int | None, total: int) -> Schedule:
    """Return the schedule of a config's section `optim`.

    Args:
        o: the section.
        batch_size: examples of a step.
        examples: size of an epoch; None if the data have no end.
        total: steps of the run.

    Raises:
        ConfigError: the parts of the schedule are longer than the run, or one is in epochs, which data without an end
            have not.
    """
    if o.warmup_epochs and examples is None:
        raise ConfigError(
            f"optim.warmup_epochs={o.warmup_epochs}, and the training data have no end. Set "
            "--config.optim.warmup_epochs=0 and --config.optim.warmup_steps."
        )
    warmup = o.warmup_steps or round(o.warmup_epochs * (examples or 0) / batch_size)
    if o.warmup_share:
        warmup = round(o.warmup_share * total)
    if warmup and warmup >= total:
        said = ", ".join(f"optim.{name}={o[name]}" for name in ("warmup_epochs", "warmup_steps", "warmup_share"))
        raise ConfigError(
            f"The warm-up ({said}) is {warmup} steps, and the whole run is {total}. Shorten the warm-up or lengthen "
            "the run."
        )
    decay = round(o.decay_share * total)
    if o.schedule == "wsd" and warmup + decay > total:
        raise ConfigError(
            f"{warmup} steps of warm-up and {decay} of decay (optim.decay_share={o.decay_share}) are more than the "
            f"run's {total}. Shorten one of them."
        )
    plan = {name: o[name] for name in ("lr", "warmup_lr", "final_lr", "schedule")}
    rate = functools.partial(learning_rate, **plan, warmup=warmup, total=total, decay=decay)
    b1 = functools.partial(first_decay, b1=o.b1, b1_peak=o.b1_peak, warmup=warmup, total=total)
    return Schedule(total, warmup, rate, b1 if o.b1_peak is not None else lambda _: o.b1)
