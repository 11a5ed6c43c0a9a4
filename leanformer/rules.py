"""Rules that a config must keep, by arithmetic alone: no device is asked. `config.check` applies them."""

import math
from typing import Any

from leanformer.errors import ConfigError


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


def check_mesh(c: Any) -> None:
    """What of `c.mesh` can be known to be impossible before the number of devices is."""
    for axis in ("data", "fsdp"):
        size = c.mesh[axis]
        require(size >= 1 or size == -1, f"mesh.{axis}={size} must be positive, or -1 for all that are left.")
    require(c.mesh.data != -1 or c.mesh.fsdp != -1, "Only one mesh axis can be -1.")
    tensor = c.mesh.tensor
    require(tensor >= 1, f"mesh.tensor={tensor} must be at least 1.")
    split = {name: value for name, value in c.model.items() if name.endswith(("heads", "mlp_dim")) and value}
    sizes = {name: value if isinstance(value, tuple) else (value,) for name, value in split.items()}
    divides_all = math.gcd(*(size for several in sizes.values() for size in several))
    for name, several in sizes.items():
        require(
            all(size % tensor == 0 for size in several),
            f"model.{name}={split[name]} cannot be split over mesh.tensor={tensor} devices. "
            f"Nearest mesh.tensor that can: {nearest_divisors(divides_all, tensor)}.",
        )
    if -1 not in (c.mesh.data, c.mesh.fsdp):
        for name, size in shared_out(c).items():
            check_shares(name, size, c.mesh.data * c.mesh.fsdp)


def shared_out(c: Any) -> dict[str, int]:
    """The sizes that `data` x `fsdp` devices must share out evenly, by the names of the keys behind them."""
    micro = "batch_size / accumulate" if c.accumulate > 1 else "batch_size"
    sizes = {micro: c.batch_size // c.accumulate, "eval.batch_size": c.eval.batch_size}
    return sizes | ({"probe.examples": c.probe.examples} if c.probe.every else {})


def check_shares(name: str, size: int, parts: int) -> None:
    """Raises ConfigError unless `parts` devices can share out `size` examples evenly."""
    if size % parts:
        down = size // parts * parts
        near = f"{down} or {down + parts}" if down else f"{parts}"
        raise ConfigError(f"{name} is {size}, which {parts} devices cannot share out evenly. Nearest: {near}.")
