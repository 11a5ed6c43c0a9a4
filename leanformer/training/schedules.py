"""The learning rate, and AdamW's first decay, as functions of the step."""

import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Real

from leanformer.config.ramp import Ramp
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


def make(
    o: Any, ramp: Ramp, *, examples: int | None, total: int, by_examples: bool
) -> tuple[int, Callable[..., tuple[Array, Any]]]:
    """Steps of warm-up, and the learning rate and the first decay of a step, of a config's section `optim`.

    Args:
        o: the section.
        ramp: how many examples each step takes.
        examples: of an epoch; None of data without an end.
        total: steps of the run.
        by_examples: where batches grow, whether the rate follows the share of all examples that were trained on, as
            in a run whose length is in epochs or tokens; else the share of all steps.

    Raises:
        ConfigError: the parts of the schedule are longer than the run, or one is in epochs, which data without an end
            have not.
    """
    if o.warmup_epochs and examples is None:
        raise ConfigError(
            f"optim.warmup_epochs={o.warmup_epochs}, and the training data have no end. Set "
            "--config.optim.warmup_epochs=0 and --config.optim.warmup_steps."
        )
    by_examples = by_examples and ramp.start > 0
    place = functools.partial(taken, ramp) if by_examples else lambda step: step
    end = place(total)
    warmup = o.warmup_steps or ramp.steps_for(o.warmup_epochs * (examples or 0))
    if o.warmup_share:
        warmup = ramp.steps_for(o.warmup_share * end) if by_examples else round(o.warmup_share * end)
    if warmup and warmup >= total:
        said = ", ".join(f"optim.{name}={o[name]}" for name in ("warmup_epochs", "warmup_steps", "warmup_share"))
        raise ConfigError(
            f"The warm-up ({said}) is {warmup} steps, and the whole run is {total}. Shorten the warm-up or lengthen "
            "the run."
        )
    decay = round(o.decay_share * end)
    if o.schedule == "wsd" and place(warmup) + decay > end:
        raise ConfigError(
            f"{place(warmup)} {'examples' if by_examples else 'steps'} of warm-up and {decay} of decay "
            f"(optim.decay_share={o.decay_share}) are more than the run's {end}. Shorten one of them."
        )
    at = _at(o, warmup=place(warmup), total=end, decay=decay)
    return warmup, lambda step: at(place(step))


def _at(o: Any, *, decay: int | float, **ends: int | float) -> Callable[[Array], tuple[Array, Any]]:
    """Both by the place in a run, in the unit that its parts are in."""
    plan = {name: o[name] for name in ("lr", "warmup_lr", "final_lr", "schedule")}
    rate = functools.partial(learning_rate, **plan, **ends, decay=decay)
    b1 = functools.partial(first_decay, b1=o.b1, b1_peak=o.b1_peak, **ends)
    return lambda here: (rate(here), o.b1 if o.b1_peak is None else b1(here))


def taken(ramp: Ramp, step: Any) -> Any:
    """Examples that so many steps take: exactly, of a number; of an array in float32."""
    if isinstance(step, int):
        return ramp.first(step)
    sizes, steps, firsts = (jnp.asarray(column, jnp.float32) for column in zip(*ramp.stages, strict=True))
    stage = jnp.sum(step >= steps) - 1
    return firsts[stage] + (step - steps[stage]) * sizes[stage]
