"""Words for recorded quantities (scores, costs, progress): label, unit, direction. Records keep the short names."""

from typing import NamedTuple


class Quantity(NamedTuple):
    """Words for one recorded quantity."""

    label: str  # name for people, such as "top-1 accuracy"
    unit: str = ""  # unit of values times `scale`
    higher: bool | None = None  # True if higher is better, False if lower is, None if neither is

    @property
    def axis(self) -> str:
        """Label of an axis: the name with its unit."""
        return f"{self.label} ({self.unit})" if self.unit else self.label

    @property
    def scale(self) -> int:
        """Factor from a recorded value to the unit: 100 for fractions in percent, 1 otherwise."""
        return 100 if self.unit == "%" else 1

    @property
    def points(self) -> str:
        """Unit of a difference, with a space before it: " points" for percent, "" without a unit."""
        return {"%": " points", "": ""}.get(self.unit, f" {self.unit}")


QUANTITIES = {
    "top1": Quantity("top-1 accuracy", "%", higher=True),
    "top5": Quantity("top-5 accuracy", "%", higher=True),
    "accuracy": Quantity("accuracy", "%", higher=True),
    "loss": Quantity("loss", higher=False),
    "bits_per_byte": Quantity("bits per byte", "bits/byte", higher=False),
    "error": Quantity("normalised error", higher=False),
    "unexplained": Quantity("fraction of variance unexplained", higher=False),
    "f1": Quantity("F1", higher=True),
    "matthews": Quantity("Matthews correlation", higher=True),
    "pearson": Quantity("Pearson correlation", higher=True),
    "spearman": Quantity("Spearman correlation", higher=True),
    "params": Quantity("parameters", higher=False),
    "flops": Quantity("training compute", "FLOP", higher=False),
    "seconds": Quantity("training time", "s", higher=False),
    "bytes": Quantity("peak memory", "B", higher=False),
    "wall_s": Quantity("wall-clock time", "s", higher=False),
    "goodput": Quantity("goodput", higher=True),
    "step": Quantity("training step"),
    "lr": Quantity("learning rate"),
    "grad_norm": Quantity("gradient norm"),
    "skipped": Quantity("skipped steps", higher=False),
    "examples": Quantity("examples"),
    "examples_per_s": Quantity("throughput", "examples/s", higher=True),
    "data_wait": Quantity("data wait", higher=False),
    "mfu": Quantity("utilisation", higher=True),
    "condition": Quantity("condition number κ", higher=False),
}
EMA = "ema_"  # prefix of scores of the averaged weights


def find(name: str) -> Quantity:
    """Return the words for a quantity by its name in records; an unknown name becomes its label, without direction.

    >>> find("top1").axis, find("seconds").axis, find("ema_top1").label
    ('top-1 accuracy (%)', 'training time (s)', 'top-1 accuracy, EMA weights')
    """
    if name.startswith(EMA):
        plain = find(name.removeprefix(EMA))
        return plain._replace(label=f"{plain.label}, EMA weights")
    return QUANTITIES.get(name) or Quantity(name.replace("_", " "))
