"""What `plan --budget` may name, and what the figures of a budget rest on, in words."""

import dataclasses
import math

from ml_collections import ConfigDict

from leanformer.costs import hardware, plugin
from leanformer.costs.count import human
from leanformer.errors import ConfigError


COUNTED = {"params": "params", "flops": "train_flops", "seconds": "train_flops", "memory": None}  # of training.shapes
FORMS = "give params:40e6, flops:1e9, seconds:0.25@h100, memory:60e9@h100 or memory:8e9"


@dataclasses.dataclass(frozen=True)
class Budget:
    """A budget as it was asked for.

    Attributes:
        amount: in what is counted for it: parameters, training FLOPs of an example, bytes of a device.
        unit: of what is counted, in a unit of the budget: FLOPs of an example in a second of the whole batch's step.
        device: a GPU by its name in lower case, None where none was named.
    """

    text: str
    kind: str
    amount: float
    unit: float = 1.0
    device: str | None = None

    @property
    def counted(self) -> str | None:
        """Which count is held against it; None for memory, which is no count."""
        return COUNTED[self.kind]


def parse(text: str, c: ConfigDict, share: float) -> Budget:
    """The budget of --budget, for a config's batch; `share` of a GPU's peak makes seconds.

    Raises:
        ConfigError: it is none, of a device whose peak is not known, or more than the device has.
    """
    kind, _, rest = text.partition(":")
    amount, at, device = rest.partition("@")
    try:
        value = float(amount)
    except ValueError:
        value = math.nan
    needs, may = kind == "seconds", kind in ("seconds", "memory")
    if kind not in COUNTED or not 0 < value < math.inf or (needs and not device) or (at and not (may and device)):
        raise ConfigError(f"--budget={text}: {FORMS}.")
    device = device.lower() or None
    if kind == "memory":
        return Budget(text, kind, value, device=_with_room(text, device, value))
    if kind != "seconds":
        return Budget(text, kind, value)
    peaks = {name.lower(): sheet.peak for name, sheet in hardware.SHEETS.items() if sheet.peak}
    if device not in peaks:
        raise ConfigError(f"--budget={text}: no peak is known of {device}. Known: {', '.join(peaks)}.")
    unit = peaks[device] * share / c.batch_size
    return Budget(text, kind, value * unit, unit, device)


def _with_room(text: str, device: str | None, value: float) -> str | None:
    """The device, if it may have as much memory. Raises ConfigError where it has not, or is not known."""
    if device is None:
        return None
    if device not in plugin.DEVICES:
        raise ConfigError(
            f"--budget={text}: nothing is known of {device}'s memory. Known: {', '.join(plugin.DEVICES)}."
        )
    if not missing(device) and value > plugin.memory(device):
        raise ConfigError(f"--budget={text}: {device} has {human(float(plugin.memory(device)))}B. Give less.")
    return device


def missing(device: str | None) -> str | None:
    """Why no step can be compiled for a device that need not be here; None where one can. This machine's always can."""
    try:
        if device is not None:
            plugin.memory(device)
    except ConfigError as error:
        return str(error)
    return None


def told(budget: Budget, c: ConfigDict, share: float, first: float) -> list[str]:
    """What must be known of a budget in seconds or bytes to believe its figures; `first` is the first shape's count."""
    if budget.kind == "seconds":
        said = [
            f"Seconds are not measured: they are FLOPs at {share:.0%} of one {budget.device}'s bfloat16 peak, an "
            f"assumption and the same for every shape, so this is a budget of {budget.amount:.4g} training FLOPs an "
            f"example; narrow heads and small layers take longer. The first: {first / budget.unit:.3g} s a step."
        ]
        if c.dtype != "bfloat16":
            said.append(f"*** The config trains in {c.dtype}, for which no peak is known: it will take longer.")
        return said
    if budget.kind == "memory" and budget.device and not missing(budget.device):
        memory = plugin.memory(budget.device)
        if budget.amount > (taken := hardware.TAKEN * memory):
            return [
                f"*** Of {budget.device}'s {human(float(memory))}B JAX takes {hardware.TAKEN:.0%} unless "
                f"XLA_PYTHON_CLIENT_MEM_FRACTION says otherwise: {human(taken)}B, less than the budget."
            ]
    return []
