"""Device memory of a training step: limit, check before the first step, and settings that need less memory."""

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import jax
from ml_collections import ConfigDict

from leanformer.costs import count
from leanformer.errors import TrainingError


FRACTION = "XLA_PYTHON_CLIENT_MEM_FRACTION"
NCCL = {  # messages by what NCCL's errors contain
    "/dev/shm": "/dev/shm is too small for NCCL; containers have 64 MiB. Start them with --shm-size=8g, or mount a "
    "volume of memory there as launch/kubernetes.yaml does.",
    "out of memory": "NCCL found no GPU memory outside JAX's pool, which has 75 % of it by default. Set "
    f"{FRACTION}=0.7, or lower if it is set already.",
}
STEP = "step"  # name of the training step among programs


@dataclasses.dataclass(frozen=True)
class Setting:
    """Change of config keys that lowers the memory of a training step.

    `str(setting)` is its line in a message: flags, and the effect.

    Attributes:
        changes: new values by key, such as {"accumulate": 4}.
        why: effect of the change, for messages.
    """

    changes: dict[str, Any]
    why: str

    def __str__(self) -> str:
        flags = " ".join(f"--config.{key}={value}" for key, value in self.changes.items())
        return f"{flags}: {self.why}"


def suggest(c: ConfigDict, devices: int) -> list[Setting]:
    """Return changes of a config that need less memory and are valid on `devices` devices, the first to try first."""
    return list(_settings(c, devices // c.mesh.tensor))


def _settings(c: ConfigDict, shares: int) -> Iterator[Setting]:
    """Yield the settings for a batch that is split into `shares`."""
    steps = range(2 * c.accumulate, c.batch_size + 1)
    if valid := next((n for n in steps if c.batch_size % (n * shares) == 0), None):
        yield Setting({"accumulate": valid}, "smaller micro-batches; same result, except with batch norm")
    if c.model.remat != "block":
        yield Setting({"model.remat": "block"}, "stores activations of one block at a time; about a third slower")
    if shares > 1 and c.mesh.fsdp not in (shares, -1) and c.batch_size % (c.accumulate * shares) == 0:
        data = {} if c.mesh.data in (1, -1) else {"mesh.data": 1}
        yield Setting(data | {"mesh.fsdp": shares}, "shards parameters and moments over the devices")
    step = shares * c.accumulate
    if half := c.batch_size // 2 // step * step:
        yield Setting({"batch_size": half}, "changes the recipe; lower optim.lr too")


def describe(c: ConfigDict, problem: str = "Out of device memory.") -> str:
    """Return a message with up to three ways to need less memory on the attached devices.

    Args:
        c: config of the run.
        problem: first sentence of the message.
    """
    settings = suggest(c, jax.device_count())
    options = [*map(str, settings), "use a smaller model, or more devices"]
    return f"{problem} Change the first of these that you can:\n  " + "\n  ".join(options[:3])


def memory_limit(device: Any) -> int | None:
    """Return the memory of a device that JAX may use, in bytes; None if the device does not report it."""
    return (device.memory_stats() or {}).get("bytes_limit")


def check_memory(c: ConfigDict, peaks: Mapping[str, int], device: Any) -> None:
    """Raise TrainingError if a compiled program needs more memory than the device has. Call this before step 1.

    The message has what to change: settings from `describe` for the training step, otherwise probe.examples or
    eval.batch_size.

    Args:
        c: config of the run.
        peaks: bytes per device by name of the program: "step" (STEP) for the training step, else that of an evaluator,
            such as "probe".
        device: device with the memory limit; nothing is checked if it does not report one.
    """
    limit, human = memory_limit(device), count.format_number
    for name, peak in peaks.items():
        if limit and peak > limit:
            problem = f"The compiled {name} needs {human(float(peak))}B per device, "
            problem += f"{human(float(peak - limit))}B more than the {human(float(limit))}B available."
            if name == STEP:
                raise TrainingError(describe(c, problem))
            key = "probe.examples" if name == "probe" else "eval.batch_size"
            section, _, leaf = key.partition(".")
            raise TrainingError(f"{problem} It would fail at its first turn. Lower --config.{key}={c[section][leaf]}.")


@contextlib.contextmanager
def explained(c: ConfigDict) -> Iterator[None]:
    """Raise TrainingError in place of JAX's error within a `with` block if a device, or NCCL, is out of memory.

    Args:
        c: config of the run, for the settings to try in the message.
    """
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        text = str(error)
        if "NCCL" in text and (remedy := next((r for sign, r in NCCL.items() if sign in text), None)):
            raise TrainingError(remedy) from error
        if "RESOURCE_EXHAUSTED" not in text:
            raise
        raise TrainingError(describe(c)) from error
