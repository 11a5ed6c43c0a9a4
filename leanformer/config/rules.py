"""Validation rules of configs that need no device. `config.check` applies them."""

import math
import operator
from collections.abc import Sequence
from typing import Any

from leanformer.errors import ConfigError


# Of float32: maximum, smallest normal, spacing at 1.
FLOAT32, TINY, EPSILON = (2 - 2**-23) * 2.0**127, 2.0**-126, 2.0**-23
WHOLE_NUMBER = 2**31 - 1  # maximum of int32, the dtype of steps and sizes on devices
# Keys of the training length, of which one is above 0; a finished run resumes if it is increased.
LENGTHS = ("total_steps", "total_epochs", "total_tokens")
SECTIONS_WITH_INTERVALS = ("eval", "probe", "checkpoint")  # sections with the keys `every` and `every_epochs`
MAX_DEPTH = 10_000
SIDE = 2**15 - 1  # largest side of an image that OpenCV can resize


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
    """Return (height, width) in pixels from the side of a square or a pair. Raises ConfigError for an invalid size."""
    _check_image_size(size)
    height, width = (size, size) if isinstance(size, int) else size
    return height, width


def patch_grid(m: Any) -> tuple[int, int] | None:
    """Return the numbers of rows and columns of patches for a section `model`; None for one without `patch_size`.

    Raises the ConfigError of `image_sides`.
    """
    if "patch_size" not in m:
        return None
    height, width = image_sides(m.image_size)
    return height // m.patch_size, width // m.patch_size


def check(c: Any) -> None:
    """Raise ConfigError at the first invalid value of a key that the configs of all tasks have."""
    _check_finite(c)
    _check_sizes(c)
    _check_optim(c)
    _check_model(c.model)
    _check_urls(c.data)


def _check_finite(c: Any, prefix: str = "") -> None:
    """Raise ConfigError for numbers that are not finite or do not fit float32 or int32, their dtypes on devices."""
    for name, value in c.items():
        if hasattr(value, "items"):
            _check_finite(value, f"{prefix}{name}.")
            continue
        for number in value if isinstance(value, tuple | list) else (value,):
            fits = not isinstance(number, float) or abs(number) <= FLOAT32
            require(fits, f"{prefix}{name}={value} must be finite in float32: magnitude at most {FLOAT32:.2g}.")
            fits = prefix == "data.recipe." or not isinstance(number, int) or abs(number) <= WHOLE_NUMBER
            require(fits, f"{prefix}{name}={value} must fit int32: magnitude at most {WHOLE_NUMBER:,}.")


POSITIVE = "batch_size accumulate log_every eval.batch_size checkpoint.keep probe.examples data.prefetch"
POSITIVE += " optim.max_skipped"
NOT_NEGATIVE = "seed eval.every eval.examples checkpoint.every probe.every hang_seconds data.workers optim.clip_norm"
NOT_NEGATIVE += " optim.weight_decay optim.lr optim.warmup_lr optim.final_lr optim.warmup_steps optim.warmup_epochs"
NOT_NEGATIVE += " eval.every_epochs probe.every_epochs checkpoint.every_epochs"


def _check_urls(data: Any) -> None:
    """Raise ConfigError for URLs in place of folders that would be made in the current folder."""
    for key, reads in (("dir", data.name.startswith("tfds:")), ("name", data.name.startswith("cache:"))):
        require(
            reads or "://" not in str(data.get(key)),
            f"data.{key}={data.get(key)}: only data.name=cache:gs://... and, for data.name=tfds:..., "
            "data.dir=gs://... may be URLs. Copy the data, or mount the bucket, for example with gcsfuse or mount-s3.",
        )


def _check_sizes(c: Any) -> None:
    for name in POSITIVE.split():
        value = operator.attrgetter(name)(c)
        require(value >= 1, f"{name}={value} must be at least 1.")
    for name in NOT_NEGATIVE.split():
        value = operator.attrgetter(name)(c)
        require(value >= 0, f"{name}={value} must not be negative.")
    for section in SECTIONS_WITH_INTERVALS:
        steps, epochs = c[section].every, c[section].every_epochs
        require(
            not (steps and epochs),
            f"{section}.every={steps} and {section}.every_epochs={epochs} are alternatives. Set one of them to 0.",
        )
    lengths = {name: c[name] for name in LENGTHS if name in c}
    *others, last = (f"{name}={value}" for name, value in lengths.items())
    require(
        min(lengths.values()) == 0 and sum(value > 0 for value in lengths.values()) == 1,
        f"Set exactly one of {', '.join(others)} and {last} above 0, and the others to 0.",
    )
    require(
        c.batch_size % c.accumulate == 0,
        f"batch_size={c.batch_size} is not divisible by accumulate={c.accumulate} micro-batches. "
        f"Nearest divisors: {nearest_divisors(c.batch_size, c.accumulate)}.",
    )
    require(0 <= c.data.max_corrupt <= 1, f"data.max_corrupt={c.data.max_corrupt} must be a fraction, 0 to 1.")


def _check_optim(c: Any) -> None:
    o = c.optim
    share = f"optim.warmup_share={o.warmup_share}"
    require(0 <= o.warmup_share < 1, f"{share} must be a fraction of the whole run, at least 0 and below 1.")
    require(
        o.schedule != "constant" or o.final_lr == 0,
        f'optim.schedule="constant" keeps optim.lr={o.lr}, but optim.final_lr={o.final_lr} is set. '
        "Set optim.final_lr=0, or choose another schedule.",
    )
    require(
        o.b1_peak is None or o.name == "adamw",
        f'optim.b1_peak={o.b1_peak}: not supported by optim.name="{o.name}", only by adamw. Leave it unset.',
    )
    warmups = [f"optim.{name}={o[name]}" for name in ("warmup_epochs", "warmup_steps", "warmup_share") if o[name]]
    require(len(warmups) < 2, f"{' and '.join(warmups)} are alternatives. Keep one of them, and set the others to 0.")
    for total, warmup in (("total_epochs", "warmup_epochs"), ("total_steps", "warmup_steps")):
        fits = not c[total] or o[warmup] < c[total]
        require(fits, f"optim.{warmup}={o[warmup]} must be below {total}={c[total]}.")
    for name in ("b1", "b1_peak", "b2"):
        fits = o[name] is None or 0 <= o[name] <= 1 - EPSILON / 2
        require(fits, f"optim.{name}={o[name]} must be in [0, 1), also after rounding to float32.")
    require(
        o.eps >= TINY,
        f"optim.eps={o.eps} must be at least {TINY:.1g}: updates of parameters without a gradient are divided by it.",
    )
    require(0 <= o.ema < 1, f"optim.ema={o.ema} must be in [0, 1). 0 = off.")


def _check_model(m: Any) -> None:
    if "image_size" in m:
        _check_image_size(m.image_size)
    sizes = ("width", "depth", "num_heads", "head_dim", "mlp_dim", "patch_size", "num_classes")
    sizes += ("vocabulary", "max_length", "unroll")
    for name in (name for name in sizes if m.get(name) is not None and not isinstance(m[name], str)):  # or a schedule
        several = _numbers(m[name])
        require(min(several, default=0) >= 1, f"model.{name}={m[name]} must be at least 1.")
        # Some settings are one Python number per layer, so a mistyped depth would take minutes to reject.
        require(name != "depth" or max(several) <= MAX_DEPTH, f"model.depth={m[name]} must be at most {MAX_DEPTH}.")
    for name in ("drop_path", "dropout"):
        require(0 <= m.get(name, 0) < 1, f"model.{name}={m.get(name)} must be in [0, 1).")
    epsilon = m.get("epsilon")
    require(epsilon is None or epsilon >= 0, f"model.epsilon={epsilon} must not be negative.")
    if "patch_size" in m:
        require(
            all(side % m.patch_size == 0 for side in image_sides(m.image_size)),
            f"model.image_size={m.image_size} is not a whole number of patches of model.patch_size={m.patch_size}; "
            f"nearest valid patch sizes: {nearest_divisors(math.gcd(*image_sides(m.image_size)), m.patch_size)}.",
        )
    staged = not isinstance(m.get("depth"), int)  # not all stages have such attention
    for head_dim in () if m.backend != "cudnn" or staged else _numbers(m.head_dim):
        require(
            head_dim % 8 == 0 and head_dim <= 256,
            f'model.backend="cudnn" requires model.head_dim to be a multiple of 8 up to 256, found {head_dim}. '
            f'Set head_dim={max(8, min(256, 8 * math.ceil(head_dim / 8)))} or model.backend="xla".',
        )


def _numbers(sizes: Any) -> tuple[int, ...]:
    """Return a size, or one per layer or stage, as a tuple."""
    return tuple(sizes) if isinstance(sizes, tuple | list) else (sizes,)


def _check_image_size(size: Any) -> None:
    both = size if isinstance(size, tuple | list) else (size, size)
    require(
        len(both) == 2 and all(type(side) is int and side >= 1 for side in both),
        f"model.image_size={size!r}: invalid size. Set a side in pixels, 224, or (height, width), (224, 160), from 1.",
    )


def check_classes(c: Any) -> None:
    """Raise ConfigError for label smoothing that is out of range or does not fit the loss."""
    smoothing = c.augment.label_smoothing
    require(0 <= smoothing < 1, f"augment.label_smoothing={smoothing} must be in [0, 1).")
    require(
        c.loss == "softmax" or smoothing == 0,
        f'augment.label_smoothing={smoothing}: not supported by loss="sigmoid", which has independent '
        'classes. Set augment.label_smoothing=0 or loss="softmax".',
    )


def check_mesh(c: Any) -> None:
    """Raise ConfigError for a mesh that is invalid for any number of devices.

    If mesh.data and mesh.fsdp are both set, their product must divide each of the `sharded_batches`.
    """
    for axis in ("data", "fsdp"):
        size = c.mesh[axis]
        require(size >= 1 or size == -1, f"mesh.{axis}={size} must be positive, or -1 for all remaining devices.")
    require(
        c.mesh.data != -1 or c.mesh.fsdp != -1,
        "mesh.data=-1 and mesh.fsdp=-1: only one mesh axis can be -1. Set one of them to a number.",
    )
    require(c.mesh.tensor >= 1, f"mesh.tensor={c.mesh.tensor} must be at least 1.")
    if -1 not in (c.mesh.data, c.mesh.fsdp):
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
