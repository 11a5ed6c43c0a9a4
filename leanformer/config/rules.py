"""Rules on the values of config keys, without which a run would train wrongly and nobody would notice."""

from collections.abc import Sequence
from typing import Any

from leanformer.config.declare import iterate_keys
from leanformer.errors import ConfigError


# Keys of the training length, of which one is above 0; a finished run resumes if it is increased.
LENGTHS = ("total_steps", "total_epochs", "total_tokens")
SECTIONS_WITH_INTERVALS = ("eval", "probe", "checkpoint")  # sections with the keys `every` and `every_epochs`
POSITIVE = ("batch_size", "accumulate", "log_every", "eval.batch_size", "checkpoint.keep", "probe.examples")
POSITIVE += ("optim.eps", "optim.max_skipped", "data.prefetch", "logits_at_once", "augment.repeats")
POSITIVE += ("data.points", "data.dim", "data.num_items", "data.examples")
POSITIVE += tuple(f"data.curriculum.{name}" for name in ("dim", "dim_step", "points", "points_step"))
BELOW_ONE = ("optim.b1", "optim.b1_peak", "optim.b2", "optim.ema", "optim.warmup_share", "mask_share")
BELOW_ONE += ("augment.label_smoothing", "model.drop_path", "model.dropout", "model.attention_dropout")
AT_MOST_ONE = ("data.crop_fraction", "augment.flip", "augment.rand_prob", "augment.erase", "augment.mix_prob")
AT_MOST_ONE += ("augment.switch_prob",)
UNLIMITED = ("mesh.", "data.recipe.", "model.")  # sections whose other numbers are checked elsewhere


def require(ok: bool, message: str) -> None:
    """Raise ConfigError(message) unless `ok`."""
    if not ok:
        raise ConfigError(message)


def image_sides(size: int | Sequence[int]) -> tuple[int, int]:
    """Return (height, width) in pixels from the side of a square or a pair."""
    height, width = (size, size) if isinstance(size, int) else size
    return height, width


def check(c: Any) -> None:
    """Raise ConfigError at the first invalid value of a key that the configs of all tasks have."""
    for name, value in iterate_keys(c):
        if not isinstance(value, int | float):
            continue
        if name in BELOW_ONE:
            require(0 <= value < 1, f"{name}={value} must be at least 0, and below 1.")
        elif name in AT_MOST_ONE:
            require(0 <= value <= 1, f"{name}={value} must be from 0 to 1.")
        elif name in POSITIVE:
            require(value > 0, f"{name}={value} must be above 0.")
        elif not name.startswith(UNLIMITED):
            require(value >= 0, f"{name}={value} must be at least 0.")
    _check_lengths(c)
    _check_optim(c)
    whole = c.batch_size % c.accumulate == 0
    require(whole, f"batch_size={c.batch_size} is not divisible by accumulate={c.accumulate} micro-batches.")


def _check_lengths(c: Any) -> None:
    for section in SECTIONS_WITH_INTERVALS:
        steps, epochs = c[section].every, c[section].every_epochs
        require(
            not (steps and epochs),
            f"{section}.every={steps} and {section}.every_epochs={epochs} are alternatives. Set one of them to 0.",
        )
    lengths = {name: c[name] for name in LENGTHS if name in c}
    require(
        sum(value > 0 for value in lengths.values()) == 1,
        f"Exactly one of {', '.join(f'{name}={value}' for name, value in lengths.items())} must be above 0. Set the "
        "others to 0, as in --config.total_epochs=0.",
    )


def _check_optim(c: Any) -> None:
    o = c.optim
    require(
        o.schedule != "constant" or o.final_lr == 0,
        f'optim.schedule="constant" keeps optim.lr={o.lr}, but optim.final_lr={o.final_lr} is set. Set it to 0.',
    )
    start = o.warmup_lr if o.warmup_epochs or o.warmup_steps or o.warmup_share else 0.0
    require(
        max(start, o.final_lr) <= o.lr or o.lr == 0,
        f"optim.lr={o.lr} is below optim.warmup_lr={o.warmup_lr} or optim.final_lr={o.final_lr}. Lower these.",
    )
    require(
        o.b1_peak is None or o.name == "adamw",
        f'optim.b1_peak={o.b1_peak}: not supported by optim.name="{o.name}", only by adamw. Leave it unset.',
    )
    for unit in ("steps", "epochs"):  # here, so that a sweep starts no run; in other units the trainer compares them
        warmup, total = o[f"warmup_{unit}"], c[f"total_{unit}"]
        require(
            not total or warmup < total,
            f"optim.warmup_{unit}={warmup} is not below total_{unit}={total}. Shorten the warm-up or lengthen the run.",
        )
    warmups = [f"optim.{name}={o[name]}" for name in ("warmup_epochs", "warmup_steps", "warmup_share") if o[name]]
    require(len(warmups) < 2, f"{' and '.join(warmups)} are alternatives. Keep one of them, and set the others to 0.")


def check_classes(c: Any) -> None:
    smoothing = c.augment.label_smoothing
    require(
        c.loss == "softmax" or smoothing == 0,
        f'augment.label_smoothing={smoothing}: not supported by loss="sigmoid", which has independent '
        'classes. Set augment.label_smoothing=0 or loss="softmax".',
    )


def check_length(c: Any, least: int = 1) -> None:
    """Raise ConfigError unless rows of `data.max_length` tokens fit the positions of the model."""
    tokens, positions = c.data.max_length, c.model.max_length
    require(
        least <= tokens <= positions,
        f"data.max_length={tokens}: set at least {least} and at most model.max_length={positions}, the positions.",
    )


def measures_conditioning(c: Any) -> bool:
    return bool(c.probe.every or c.probe.every_epochs)


def sharded_batches(c: Any) -> dict[str, int]:
    """Return the batch sizes, by key, that `data` x `fsdp` devices must divide."""
    name = "batch_size / accumulate" if c.accumulate > 1 else "batch_size"
    sizes = {name: c.batch_size // c.accumulate, "eval.batch_size": c.eval.batch_size}
    return sizes | ({"probe.examples": c.probe.examples} if measures_conditioning(c) else {})
