"""Console output of a run: progress bar or lines with the remaining time, and tables of text."""

import statistics
import sys
from collections.abc import Mapping
from typing import Any

import tqdm

from leanformer.conditioning.spectrum import beyond_float32
from leanformer.quantities import find
from leanformer.runtime.text import format_duration, format_value, wrap


UNSAID = ("wall_s", "examples_seen", "tokens_seen", "examples")  # numbers that are not printed
SMOOTHING = 0.3  # weight of the newest interval in the speed from which the time left is estimated
NO_BREAK = "\N{NO-BREAK SPACE}"  # keeps a name and its number in one line
WAITING = 0.1  # smallest fraction of time spent waiting for data that is printed


class Progress:
    """Console output of a run: a progress bar on a terminal, otherwise one line per record.

    Args:
        start: step from which the run starts.
        total: number of steps of the run.
    """

    def __init__(self, *, start: int, total: int):
        self._total = total
        self._shown: tuple[float, float] | None = None  # completed fraction of the run and wall_s at the last line
        self._pace: float | None = None  # seconds for the whole run, smoothed over intervals between lines
        terminal = sys.stderr.isatty()
        self._bar = tqdm.tqdm(total=total, initial=start, unit="step", dynamic_ncols=True) if terminal else None

    def close(self) -> None:
        """Close the progress bar, if there is one."""
        if self._bar is not None:
            self._bar.close()

    def advance(self, step: int) -> None:
        """Move the progress bar to `step`; do nothing without a terminal."""
        if self._bar is not None:
            self._bar.update(step - self._bar.n)

    def print(self, step: int, kind: str, values: dict[str, Any]) -> None:
        """Print a record to stdout as a line; on a terminal, train records are shown beside the progress bar instead.

        Args:
            step: step of the record.
            kind: kind of the record, such as "train" or "eval".
            values: values of the record by name; for "probe" the result of `step.probe_record`.
        """
        if kind == "probe":  # one number per measure; metrics.jsonl, TensorBoard and `probe` have the layers
            medians = {name: format_value(name, _median(measure["median"])) for name, measure in values.items()}
            for name, measure in values.items():
                if singular := sum(map(bool, measure.get("singular", ()))):
                    medians[name] += f" ({beyond_float32(singular, len(measure['median']))})"
            values = {("κ of " if "singular" in values[name] else "") + name: shown for name, shown in medians.items()}
            kind = "probe, medians over layers:"
        parts = _format_train(values) if kind == "train" else _format_record(values)
        if self._bar is not None and kind == "train":
            self._bar.set_postfix_str("  ".join(parts))
            return
        if kind == "train":
            parts += self._estimate(step / self._total, values)
        heading = [] if kind == "train" else [kind]
        parts = [part.replace(" ", NO_BREAK) for part in (f"step {step}/{self._total}", *heading, *parts)]
        line = wrap("  ".join(parts), indent="    ").replace(NO_BREAK, " ")
        print(line, flush=True) if self._bar is None else self._bar.write(line)

    def _estimate(self, done: float, values: Mapping[str, Any]) -> list[str]:
        """Return the time left, from the smoothed speed without the first interval, which includes compilation."""
        if "wall_s" not in values:
            return []
        if self._shown and done > self._shown[0]:
            before, then = self._shown
            newest = (values["wall_s"] - then) / (done - before)
            self._pace = newest if self._pace is None else self._pace + SMOOTHING * (newest - self._pace)
        self._shown = done, values["wall_s"]
        return [] if self._pace is None else [f"{format_duration(self._pace * (1 - done))} left"]


def _format_train(values: Mapping[str, Any]) -> list[str]:
    parts = [f"loss {format_value('loss', values['loss'])}"] if "loss" in values else []
    if values.get("examples_per_s") is not None:
        speed = values["examples_per_s"]
        parts.append(f"{f'{speed:.3g}' if speed < 100 else f'{speed:,.0f}'} examples/s")
    if values.get("skipped"):
        parts.append(f"{find('skipped').label} {values['skipped']:g}")
    if (values.get("data_wait") or 0) >= WAITING:
        parts.append(f"{find('data_wait').label} {values['data_wait']:.0%}")
    return parts


def _format_record(values: Mapping[str, Any]) -> list[str]:
    return [f"{find(name).label} {format_value(name, value)}" for name, value in values.items() if name not in UNSAID]


def _median(values: list[float | None]) -> float | None:
    valid = [value for value in values if value is not None]
    return statistics.median(valid) if valid else None
