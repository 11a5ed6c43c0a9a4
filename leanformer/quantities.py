"""Words for every recorded quantity (score, cost, measure): name for people, unit, direction, one sentence.

Terminal, pages, charts, manual and notebooks read these entries. Records and flags keep the short names, which are the
keys. Measures of matrices have their sentences in `conditioning.measures`; `conditioning.measures.quantity` adds them.
"""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Quantity:
    """Words for one recorded quantity.

    Attributes:
        label: name for people, such as "top-1 accuracy".
        what: description, as a noun phrase.
        unit: unit of values after multiplication by `scale`; empty if there is none.
        higher: True if higher is better, False if lower is, None if neither is.
    """

    label: str
    what: str
    unit: str = ""
    higher: bool | None = None

    @property
    def axis(self) -> str:
        """Label of an axis: the name with its unit."""
        return f"{self.label} ({self.unit})" if self.unit else self.label

    @property
    def scale(self) -> int:
        """Factor from a recorded value to the unit: 100 for fractions in percent, 1 otherwise."""
        return 100 if self.unit == "%" else 1

    @property
    def direction(self) -> str:
        """Direction in words, such as "higher is better"; empty if there is none."""
        return "" if self.higher is None else f"{'higher' if self.higher else 'lower'} is better"

    @property
    def sentence(self) -> str:
        """The label, what it is, and which direction is better, in one sentence."""
        better = f"; {self.direction}" if self.direction else ""
        return f"{self.label[0].upper()}{self.label[1:]}: {self.what}{better}."


SCORES = {
    "top1": Quantity(
        "top-1 accuracy", "fraction of examples whose most probable class is the right one", "%", higher=True
    ),
    "top5": Quantity(
        "top-5 accuracy", "fraction of examples with the right class among the five most probable", "%", higher=True
    ),
    "accuracy": Quantity("accuracy", "fraction of predictions that are right", "%", higher=True),
    "loss": Quantity(
        "loss", "mean over targets of the cross-entropy in nats, or of the squared error of vectors", higher=False
    ),
    "bits_per_byte": Quantity("bits per byte", "loss per byte of text, in bits", "bits/byte", False),
    "error": Quantity("normalised error", "squared error over that of predicting zero, which has 1", higher=False),
    "unexplained": Quantity(
        "fraction of variance unexplained", "1 - R²: squared error over that of predicting the mean", higher=False
    ),
    "f1": Quantity("F1", "harmonic mean of precision and recall, 0 to 1", higher=True),
    "matthews": Quantity("Matthews correlation", "correlation of labels and predictions, -1 to 1", higher=True),
    "pearson": Quantity("Pearson correlation", "linear correlation of targets and predictions, -1 to 1", higher=True),
    "spearman": Quantity("Spearman correlation", "rank correlation of targets and predictions, -1 to 1", higher=True),
}
COSTS = {
    "params": Quantity("parameters", "number of parameters, including embeddings and head", higher=False),
    "flops": Quantity(
        "training compute", "training FLOPs of the whole run, including attention's T² matmuls", "FLOP", False
    ),
    "seconds": Quantity("training time", "seconds in training steps, on the machine of the runs", "s", False),
    "bytes": Quantity("peak memory", "bytes per device of the compiled training step", "B", False),
    "forward_flops": Quantity("forward FLOPs per example", "floating-point operations of one prediction", higher=False),
    "train_flops": Quantity("training FLOPs per example", "forward and backward pass of one example", higher=False),
    "memory_bytes": Quantity("peak memory per device", "bytes of the compiled training step", "B", False),
    "wall_s": Quantity("wall-clock time", "seconds from start to end of the run", "s", False),
    "goodput": Quantity("goodput", "fraction of the wall-clock time spent in training steps", higher=True),
}
PROGRESS = {
    "step": Quantity("training step", "updates of the weights so far"),
    "lr": Quantity("learning rate", "step size of the optimizer, after schedule and warm-up"),
    "grad_norm": Quantity("gradient norm", "mean norm of the gradient before clipping"),
    "skipped": Quantity("skipped steps", "steps left out because they diverged or were not finite", higher=False),
    "examples": Quantity("examples", "number of evaluated examples"),
    "examples_per_s": Quantity(
        "throughput", "training examples per second; of a run the median over its records", "examples/s", True
    ),
    "data_wait": Quantity("data wait", "fraction of the time in which the device waited for data", higher=False),
    "mfu": Quantity("utilisation", "fraction of the device's peak matmul throughput", higher=True),
}
CONDITION = Quantity(
    "condition number κ",
    "largest over smallest singular value of a matrix: 1 is the best, and a large κ means that some directions of the "
    "matrix hardly count",
    higher=False,
)
ALL = SCORES | COSTS | PROGRESS
EMA = "ema_"  # prefix of scores of the averaged weights


def find(name: str) -> Quantity:
    """Return the words for a quantity by its name in records; for `ema_NAME` those of NAME, with EMA weights.

    Names of a task outside this package have no entry: their label is the name in words, without a direction.

    >>> find("top1").axis, find("seconds").axis, find("ema_top1").label
    ('top-1 accuracy (%)', 'training time (s)', 'top-1 accuracy, EMA weights')
    """
    if name in ALL:
        return ALL[name]
    if name.startswith(EMA):
        plain = find(name.removeprefix(EMA))
        what = f"{plain.what}, with the moving average of the weights"
        return dataclasses.replace(plain, label=f"{plain.label}, EMA weights", what=what)
    words = name.replace("_", " ")
    return Quantity(words, f"{words}, as the task defines it")
