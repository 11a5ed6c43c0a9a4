"""Tables of results in study/data, one row per run, and estimates from them."""

import csv
from collections.abc import Hashable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np

from leanformer.analysis import statistics
from leanformer.analysis.statistics import Difference


EVIDENCE = Path(__file__).parent / "data"
Row = dict[str, str]


class Estimate(NamedTuple):
    """Estimate with its interval.

    Formatted by a number format and a unit: `f"{x:+.1f %}"` is -8.8 % (-10.9 to -7.1), `f"{x:.3f ±}"` 0.150 ± 0.006.
    """

    value: float
    low: float
    high: float

    @classmethod
    def of(cls, difference: Difference, level: float = 0.95) -> Self:
        """Return a difference of means with its confidence interval."""
        interval = difference.interval(level)
        return cls(difference.value, interval.low, interval.high)

    @classmethod
    def mean(cls, values: Iterable[Any]) -> Self:
        """Return the mean of values of several seeds, numbers or their texts, with its 95 % interval."""
        scores = np.array([float(value) for value in values])
        interval = statistics.mean_interval(scores)
        return cls(float(scores.mean()), interval.low, interval.high)

    def __format__(self, spec: str) -> str:
        number, space, unit = spec.partition(" ")
        plain = "z" + number.lstrip("+")  # no negative zero
        number = "+" * number.startswith("+") + plain
        value, low, high = (round_to(x, 6) for x in self)  # without noise of float32: 2.85, not 2.84999996
        if unit.startswith("±"):
            return f"{value:{plain}} ± {high - value:{plain}}{unit[1:]}"
        return f"{value:{number}}{space}{unit} ({low:{plain}} to {high:{plain}})"


def read(path: str | Path) -> list[Row]:
    """Return the rows of a CSV file, or of the table of this name in study/data."""
    path = EVIDENCE / f"{path}.csv" if isinstance(path, str) else path
    with path.open(newline="", encoding="utf-8") as file:
        return [*csv.DictReader(file)]


def write(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write rows as a CSV file, with the columns of the first row."""
    with path.open("w", newline="", encoding="utf-8") as file:
        table = csv.DictWriter(file, [*rows[0]], lineterminator="\n")
        table.writeheader()
        table.writerows(rows)


def group(rows: Iterable[Row], *columns: str) -> dict[Any, list[Row]]:
    """Return rows by their values of columns: the text of one column, a tuple for several."""
    result: dict[Hashable, list[Row]] = {}
    for row in rows:
        key = tuple(row[column] for column in columns)
        result.setdefault(key if len(key) > 1 else key[0], []).append(row)
    return result


def round_to(value: float, digits: int) -> float:
    """Return a value rounded to significant digits."""
    return float(f"{value:.{digits}g}")
