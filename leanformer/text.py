"""Text for people: words for recorded quantities, and paragraphs and tables for a terminal, in plain characters.

Records keep the short names of quantities.
"""

import shutil
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple


GAP = "  "


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


def lookup(name: str) -> Quantity:
    """Return the words for a quantity by its name in records; an unknown name becomes its label, without direction.

    >>> lookup("top1").axis, lookup("seconds").axis, lookup("ema_top1").label
    ('top-1 accuracy (%)', 'training time (s)', 'top-1 accuracy, EMA weights')
    """
    if name.startswith(EMA):
        plain = lookup(name.removeprefix(EMA))
        return plain._replace(label=f"{plain.label}, EMA weights")
    return QUANTITIES.get(name) or Quantity(name.replace("_", " "))


def columns() -> int:
    """Return the number of columns of the terminal, by COLUMNS if it is set; at least 30, and 80 without a terminal."""
    return max(30, shutil.get_terminal_size((80, 0)).columns)


def wrap(lines: str, indent: str = "") -> str:
    """Return lines wrapped between words to the columns of the terminal; continued lines begin with `indent`."""
    fill = textwrap.TextWrapper(
        columns(), subsequent_indent=indent, break_long_words=False, break_on_hyphens=False, drop_whitespace=True
    )
    return "\n".join(fill.fill(line) if len(line) > columns() else line for line in lines.splitlines())


def page(title: str, rows: Mapping[str, object]) -> str:
    """Format a title and rows of a name and a value, aligned in two columns, for the width of the terminal."""
    margin = max(map(len, rows), default=0)
    margin = margin if margin <= columns() // 2 else 2  # long names have their values on the next line
    lines = []
    for name, value in rows.items():
        line = wrap(f"{GAP}{name:<{margin}}{GAP}{value}", indent=" " * (margin + 2 * len(GAP)))
        lines.append(line.rstrip())
    return "\n".join([wrap(title), *lines, ""])


def table(head: Sequence[str], rows: Sequence[Sequence[str]], indent: str = GAP) -> str:
    """Format a table, whose first column names the rows; one wider than the terminal is split into several."""
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    free = columns() - len(indent) - widths[0] - len(GAP)
    blocks: list[list[int]] = [[]]
    for i, width in enumerate(widths[1:], 1):
        if blocks[-1] and sum(widths[k] + len(GAP) for k in blocks[-1]) + width > free:
            blocks.append([])
        blocks[-1].append(i)
    return "\n\n".join(
        "\n".join((indent + GAP.join(row[i].ljust(widths[i]) for i in (0, *block))).rstrip() for row in (head, *rows))
        for block in blocks
    )


def format_duration(seconds: int | float) -> str:
    """Format a duration in seconds below 2 minutes, in minutes below 2 hours, else in hours, such as "5 min"."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.0f} h"


def format_value(name: str, value: Any) -> str:
    """Return the recorded value of a quantity as text, a float with its unit and four significant digits."""
    if not isinstance(value, float):
        return str(value)
    unit = lookup(name).unit
    return f"{lookup(name).scale * value:.4g}{unit and f' {unit}'}"


def format_scores(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return {name in words, with its unit: value}; floats become text of four digits, or whole from 10,000 on."""
    scaled = {lookup(name).axis: lookup(name).scale * x if isinstance(x, float) else x for name, x in values.items()}
    return {name: format_float(x) if isinstance(x, float) else x for name, x in scaled.items()}


def format_float(x: float) -> str:
    """Format a float with four significant digits, or as a whole number from 10,000 on."""
    return f"{x:.4g}" if abs(x) < 1e4 else f"{x:,.0f}"
