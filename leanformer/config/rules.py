"""Rules that a config must keep, by arithmetic alone: no device is asked. `config.check` applies them."""

import math
from collections.abc import Sequence
from typing import Any

from leanformer.errors import ConfigError


FLOAT32, TINY, EPSILON = (2 - 2**-23) * 2.0**127, 2.0**-126, 2.0**-23  # largest, least positive, its spacing at 1
WHOLE_NUMBER = 2**31 - 1  # largest: steps and sizes are int32 on devices
# What a run may be measured by, one of them at a time; raised, a run goes on from its end.
LENGTHS = ("total_steps", "total_epochs", "total_tokens")
SIDE = 2**15 - 1  # largest of an image that OpenCV changes


def require(ok: bool, message: str) -> None:
    """Raises ConfigError(message) unless `ok`."""
    if not ok:
        raise ConfigError(message)


def nearest_divisors(n: int, wanted: int) -> str:
    """The divisors of `n` next to `wanted`, below and above."""
    divisors = [d for d in range(1, n + 1) if n % d == 0]
    below = [d for d in divisors if d <= wanted][-1:]
    above = [d for d in divisors if d > wanted][:1]
    return " or ".join(map(str, below + above))


def sides(size: int | Sequence[int]) -> tuple[int, int]:
    """Height and width of images of a size: of one number both. Raises ConfigError for what is no size."""
    _check_image_size(size)
    height, width = (size, size) if isinstance(size, int) else size
    return height, width


def patches(m: Any) -> tuple[int, int] | None:
    """Rows and columns of an image's patches, by a config's section `model`; None in a family without."""
    if "patch_size" not in m:
        return None
    height, width = sides(m.image_size)
    return height // m.patch_size, width // m.patch_size


def check(c: Any) -> None:
    """Raises ConfigError on the first rule of all configs that `c` breaks."""
    _check_finite(c)
    _check_sizes(c)
    _check_optim(c)
    _check_model(c.model)


def _check_finite(c: Any, prefix: str = "") -> None:
    """No key takes a number that is not finite, or not in float32 or int32, in which it would be used."""
    for name, value in c.items():
        if hasattr(value, "items"):
            _check_finite(value, f"{prefix}{name}.")
            continue
        for number in value if isinstance(value, tuple | list) else (value,):
            fits = not isinstance(number, float) or abs(number) <= FLOAT32
            require(fits, f"{prefix}{name}={value} must be finite, in float32 too: of at most {FLOAT32:.2g} in size.")
            fits = prefix == "data.recipe." or not isinstance(number, int) or abs(number) <= WHOLE_NUMBER
            require(fits, f"{prefix}{name}={value} must be at most {WHOLE_NUMBER:,} in size, as an int32.")


def _check_sizes(c: Any) -> None:
    positive = {"batch_size": c.batch_size, "accumulate": c.accumulate, "log_every": c.log_every}
    positive |= {"eval.batch_size": c.eval.batch_size, "checkpoint.keep": c.checkpoint.keep}
    positive |= {"probe.examples": c.probe.examples}
    positive |= {"data.prefetch": c.data.prefetch, "optim.max_skipped": c.optim.max_skipped}
    for name, value in positive.items():
        require(value >= 1, f"{name}={value} must be at least 1.")
    non_negative = {
        "seed": c.seed,
        "eval.every": c.eval.every,
        "eval.examples": c.eval.examples,
        "checkpoint.every": c.checkpoint.every,
    }
    non_negative |= {"probe.every": c.probe.every, "hang_seconds": c.hang_seconds}
    non_negative |= {"data.workers": c.data.workers, "optim.clip_norm": c.optim.clip_norm}
    non_negative |= {"optim.weight_decay": c.optim.weight_decay, "optim.lr": c.optim.lr}
    non_negative |= {"optim.warmup_steps": c.optim.warmup_steps, "optim.warmup_epochs": c.optim.warmup_epochs}
    for name, value in non_negative.items():
        require(value >= 0, f"{name}={value} must not be negative.")
    lengths = {name: c[name] for name in LENGTHS if name in c}
    *others, last = (f"{name}={value}" for name, value in lengths.items())
    require(
        min(lengths.values()) == 0 and sum(value > 0 for value in lengths.values()) == 1,
        f"Set exactly one of {', '.join(others)} and {last}, and 0 for the others.",
    )
    require(
        c.batch_size % c.accumulate == 0,
        f"batch_size={c.batch_size} cannot be split into accumulate={c.accumulate} equal micro-batches; "
        f"nearest that can: {nearest_divisors(c.batch_size, c.accumulate)}.",
    )
    require(0 <= c.data.max_corrupt <= 1, f"data.max_corrupt={c.data.max_corrupt} is a share: 0 to 1.")


def _check_optim(c: Any) -> None:
    o = c.optim
    shares = f"optim.decay_share={o.decay_share}", f"optim.warmup_share={o.warmup_share}"
    require(0 < o.decay_share <= 1, f"{shares[0]} is a share of the whole run: above 0, at most 1.")
    require(0 <= o.warmup_share < 1, f"{shares[1]} is a share of the whole run: at least 0, under 1.")
    require(
        o.schedule != "wsd" or o.warmup_share + o.decay_share <= 1,
        f"{shares[1]} and {shares[0]} are more than the whole run. Lower one of them.",
    )
    require(
        o.schedule != "constant" or o.final_lr == 0,
        f'optim.schedule="constant" stays at optim.lr={o.lr}, and optim.final_lr={o.final_lr} says where it should '
        "end. Leave optim.final_lr at 0, or choose another schedule.",
    )
    require(0 < o.layer_decay <= 1, f"optim.layer_decay={o.layer_decay} must be above 0 and at most 1; 1 is off.")
    require(
        o.head_lr is None or (o.head_lr >= 0 and o.lr > 0),
        f"optim.head_lr={o.head_lr} must not be negative, and is a multiple of optim.lr={o.lr}, which must be "
        "positive.",
    )
    patience = c.eval.patience
    require(patience >= 0, f"eval.patience={patience} must not be negative; 0 switches it off.")
    require(
        patience == 0 or c.eval.every > 0,
        f"eval.patience={patience} counts evaluations, and eval.every=0 makes one, at the end. Set eval.every.",
    )
    require(
        o.b1_peak is None or o.name == "adamw",
        f'optim.b1_peak={o.b1_peak} is AdamW\'s alone: optim.name="{o.name}" has one b1 for all steps. Unset it.',
    )
    warmups = [f"optim.{name}={o[name]}" for name in ("warmup_epochs", "warmup_steps", "warmup_share") if o[name]]
    require(
        len(warmups) < 2,
        f"{' and '.join(warmups)} say the same in different ways. Leave one of them, and set 0 for the rest.",
    )
    for total, warmup in (("total_epochs", "warmup_epochs"), ("total_steps", "warmup_steps")):
        fits = not c[total] or o[warmup] < c[total]
        require(fits, f"optim.{warmup}={o[warmup]} must be under {total}={c[total]}.")
    for name in ("b1", "b1_peak", "b2"):
        fits = o[name] is None or 0 <= o[name] <= 1 - EPSILON / 2
        require(fits, f"optim.{name}={o[name]} must be in [0, 1), and not 1 once it is rounded to float32.")
    require(
        o.eps >= TINY,
        f"optim.eps={o.eps} must be positive, {TINY:.1g} at least: a parameter without a gradient is divided by it.",
    )
    require(0 <= o.ema < 1, f"optim.ema={o.ema} must be in [0, 1); 0 switches it off.")


def _check_model(m: Any) -> None:
    if "image_size" in m:
        _check_image_size(m.image_size)
    sizes = ("width", "depth", "num_heads", "head_dim", "mlp_dim", "patch_size", "num_classes")
    sizes += ("vocabulary", "max_length", "unroll")
    for name in (name for name in sizes if m.get(name) is not None):
        least = min(m[name]) if isinstance(m[name], tuple) else m[name]  # of each stage
        require(least >= 1, f"model.{name}={m[name]} must be at least 1.")
    for name in ("drop_path", "dropout"):
        require(0 <= m.get(name, 0) < 1, f"model.{name}={m.get(name)} must be in [0, 1).")
    if "patch_size" in m:
        require(
            all(side % m.patch_size == 0 for side in sides(m.image_size)),
            f"model.image_size={m.image_size} is not a whole number of patches of model.patch_size={m.patch_size}; "
            f"nearest patch sizes that fit: {nearest_divisors(math.gcd(*sides(m.image_size)), m.patch_size)}.",
        )
    if m.backend == "cudnn" and isinstance(m.get("head_dim"), int):
        require(
            m.head_dim % 8 == 0 and m.head_dim <= 256,
            f'model.backend="cudnn" needs model.head_dim in multiples of 8 up to 256, found {m.head_dim}. '
            f'Take head_dim={max(8, min(256, 8 * math.ceil(m.head_dim / 8)))} or model.backend="xla".',
        )


def _check_image_size(size: Any) -> None:
    both = size if isinstance(size, tuple | list) else (size, size)
    require(
        len(both) == 2 and all(type(side) is int and side >= 1 for side in both),
        f"model.image_size={size!r}: give the side in pixels, 224, or height and width, (224, 160); at least 1 each.",
    )


def check_classes(c: Any) -> None:
    """Raises ConfigError for a loss that does not suit labels of one class each."""
    smoothing = c.augment.label_smoothing
    require(0 <= smoothing < 1, f"augment.label_smoothing={smoothing} must be in [0, 1).")
    require(
        c.loss == "softmax" or smoothing == 0,
        f'loss="sigmoid" scores every class by itself, so augment.label_smoothing={smoothing}, which spreads '
        'one unit over the classes, has no meaning for it. Set augment.label_smoothing=0 or loss="softmax".',
    )


def check_mesh(c: Any) -> None:
    """What of `c.mesh` can be known to be impossible before the number of devices is."""
    for axis in ("data", "fsdp"):
        size = c.mesh[axis]
        require(size >= 1 or size == -1, f"mesh.{axis}={size} must be positive, or -1 for all that are left.")
    require(c.mesh.data != -1 or c.mesh.fsdp != -1, "Only one mesh axis can be -1.")
    require(c.mesh.tensor >= 1, f"mesh.tensor={c.mesh.tensor} must be at least 1.")
    if -1 not in (c.mesh.data, c.mesh.fsdp):
        for name, size in shared_out(c).items():
            check_shares(name, size, c.mesh.data * c.mesh.fsdp)


def shared_out(c: Any) -> dict[str, int]:
    """The sizes that `data` x `fsdp` devices must share out evenly, by the names of the keys behind them."""
    name = "batch_size / accumulate" if c.accumulate > 1 else "batch_size"
    sizes = {name: c.batch_size // c.accumulate, "eval.batch_size": c.eval.batch_size}
    return sizes | ({"probe.examples": c.probe.examples} if c.probe.every else {})


def check_shares(name: str, size: int, parts: int) -> None:
    """Raises ConfigError unless `parts` devices can share out `size` examples evenly."""
    if size % parts:
        down = size // parts * parts
        near = f"{down} or {down + parts}" if down else f"{parts}"
        raise ConfigError(f"{name} is {size}, which {parts} devices cannot share out evenly. Nearest: {near}.")
