"""Rules on the values of config keys, without which a run would train wrongly and nobody would notice."""

from collections.abc import Iterator, Sequence
from typing import Any

from leanformer.errors import ConfigError


WHOLE_NUMBER = 2**31 - 1  # maximum of int32, the dtype of steps and sizes on devices
# Keys of the training length, of which one is above 0; a finished run resumes if it is increased.
LENGTHS = ("total_steps", "total_epochs", "total_tokens")
SECTIONS_WITH_INTERVALS = ("eval", "probe", "checkpoint")  # sections with the keys `every` and `every_epochs`
POSITIVE = ("batch_size", "accumulate", "log_every", "eval.batch_size", "checkpoint.keep", "probe.examples")
POSITIVE += ("optim.eps", "optim.max_skipped", "data.prefetch", "mask_share", "logits_at_once")


def require(ok: bool, message: str) -> None:
    """Raise ConfigError(message) unless `ok`."""
    if not ok:
        raise ConfigError(message)


def nearest_divisors(n: int, target: int) -> str:
    """Return the divisors of `n` nearest to `target`, the largest up to it and the smallest above it, as "12 or 16"."""
    divisors = [d for d in range(1, n + 1) if n % d == 0]
    below = [d for d in divisors if d <= target][-1:]
    above = [d for d in divisors if d > target][:1]
    return " or ".join(map(str, below + above))


def image_sides(size: int | Sequence[int]) -> tuple[int, int]:
    """Return (height, width) in pixels from the side of a square or a pair."""
    height, width = (size, size) if isinstance(size, int) else size
    return height, width


def patch_grid(m: Any) -> tuple[int, int] | None:
    """Return the numbers of rows and columns of patches for a section `model`; None for one without `patch_size`."""
    if "patch_size" not in m:
        return None
    height, width = image_sides(m.image_size)
    return height // m.patch_size, width // m.patch_size


def check(c: Any) -> None:
    """Raise ConfigError at the first invalid value of a key that the configs of all tasks have."""
    for name, value in _numbers(c):
        least = 1e-38 if name == "optim.eps" else 0 if name not in POSITIVE else 1 if isinstance(value, int) else 1e-9
        free = name.startswith(("mesh.", "data.recipe.", "model."))
        require(free or value >= least, f"{name}={value} must be {'above 0' if least else 'at least 0'}.")
    _check_lengths(c)
    _check_optim(c)
    for name, more in c.eval.more.items():
        require(
            hasattr(more, "items") and {*more} == {"split", "every"} and isinstance(more["every"], int),
            f'eval.more.{name}={more}: expected a split and an interval, as {{"split": "test", "every": 1000}}.',
        )
    require(
        c.batch_size % c.accumulate == 0,
        f"batch_size={c.batch_size} is not divisible by accumulate={c.accumulate} micro-batches. "
        f"Nearest divisors: {nearest_divisors(c.batch_size, c.accumulate)}.",
    )
    for name in ("drop_path", "dropout", "attention_dropout"):
        require(0 <= (c.model.get(name) or 0) < 1, f"model.{name}={c.model.get(name)} must be in [0, 1).")


def _numbers(c: Any, prefix: str = "") -> Iterator[tuple[str, int | float]]:
    """Yield (dotted key, value) of all numbers."""
    for name, value in c.items():
        if hasattr(value, "items"):
            yield from _numbers(value, f"{prefix}{name}.")
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield f"{prefix}{name}", value


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
        f"Set exactly one of {', '.join(f'{name}={value}' for name, value in lengths.items())} above 0.",
    )


def _check_optim(c: Any) -> None:
    o = c.optim
    require(
        o.schedule != "constant" or o.final_lr == 0,
        f'optim.schedule="constant" keeps optim.lr={o.lr}, but optim.final_lr={o.final_lr} is set. Set it to 0.',
    )
    require(
        o.b1_peak is None or o.name == "adamw",
        f'optim.b1_peak={o.b1_peak}: not supported by optim.name="{o.name}", only by adamw. Leave it unset.',
    )
    warmups = [f"optim.{name}={o[name]}" for name in ("warmup_epochs", "warmup_steps", "warmup_share") if o[name]]
    require(len(warmups) < 2, f"{' and '.join(warmups)} are alternatives. Keep one of them, and set the others to 0.")
    for name in ("b1", "b1_peak", "b2", "ema", "warmup_share"):
        require((o[name] or 0) < 1, f"optim.{name}={o[name]} must be below 1.")


def check_classes(c: Any) -> None:
    """Raise ConfigError for label smoothing that is out of range or does not fit the loss."""
    smoothing = c.augment.label_smoothing
    require(smoothing < 1, f"augment.label_smoothing={smoothing} must be below 1.")
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


def check_mesh(c: Any) -> None:
    """Raise ConfigError for a mesh that is invalid for any number of devices.

    If mesh.data and mesh.fsdp are both set, their product must divide each of the `sharded_batches`.
    """
    sizes = c.mesh.data, c.mesh.fsdp
    require(
        all(size >= 1 or size == -1 for size in sizes) and sizes != (-1, -1) and c.mesh.tensor >= 1,
        f"mesh.data={sizes[0]}, mesh.fsdp={sizes[1]}, mesh.tensor={c.mesh.tensor}: set numbers from 1; data or fsdp "
        "may be -1 for all remaining devices.",
    )
    if -1 not in sizes:
        for name, size in sharded_batches(c).items():
            check_shares(name, size, c.mesh.data * c.mesh.fsdp)


def measures_conditioning(c: Any) -> bool:
    """Return True if a run of the config measures conditioning (`probe.every` or `probe.every_epochs`)."""
    return bool(c.probe.every or c.probe.every_epochs)


def sharded_batches(c: Any) -> dict[str, int]:
    """Return the batch sizes that must be divisible by `data` x `fsdp` devices, by key.

    With gradient accumulation, the size per accumulation step replaces `batch_size`, under "batch_size / accumulate".
    `probe.examples` is included if conditioning is measured.
    """
    name = "batch_size / accumulate" if c.accumulate > 1 else "batch_size"
    sizes = {name: c.batch_size // c.accumulate, "eval.batch_size": c.eval.batch_size}
    return sizes | ({"probe.examples": c.probe.examples} if measures_conditioning(c) else {})


def check_shares(name: str, size: int, parts: int) -> None:
    """Raise ConfigError unless a batch size, of the key `name`, is divisible by `parts` devices."""
    if size % parts:
        down = size // parts * parts
        near = f"{down} or {down + parts}" if down else f"{parts}"
        raise ConfigError(f"{name}={size}: not divisible by {parts} devices. Nearest: {near}.")
