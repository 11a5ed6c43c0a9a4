"""Console output of a run: progress bar or lines with the remaining time, and tables of text."""

import statistics
import sys
import time
from collections.abc import Mapping
from typing import Any

import tqdm

from leanformer.runtime import files


UNSAID = ("wall_s", "examples_seen", "tokens_seen")  # numbers that are not printed


class Progress:
    """Progress bar on a terminal; otherwise one line per record."""

    def __init__(self, *, start: int, total: int):
        self._total = total
        self._shown: tuple[float, float] | None = None  # completed fraction of the run and wall_s at the last line
        terminal = sys.stderr.isatty()
        self._bar = tqdm.tqdm(total=total, initial=start, unit="step", dynamic_ncols=True) if terminal else None

    def close(self) -> None:
        """Close the bar."""
        if self._bar is not None:
            self._bar.close()

    def advance(self, step: int) -> None:
        """Move the bar to `step`."""
        if self._bar is not None:
            self._bar.update(step - self._bar.n)

    def print(self, step: int, kind: str, values: dict[str, Any]) -> None:
        """Print a record."""
        if kind == "probe":  # one number per measure; metrics.jsonl, TensorBoard and `probe` have the layers
            medians = {name: _format(name, _median(measure["median"])) for name, measure in values.items()}
            for name, measure in values.items():
                if singular := sum(map(bool, measure.get("singular", ()))):
                    medians[name] += f" (numerically singular in {singular} of {len(measure['median'])} layers)"
            values = {("κ of " if "singular" in values[name] else "") + name: text for name, text in medians.items()}
            kind = "probe, medians over layers:"
        text = "  ".join(f"{name} {_format(name, value)}" for name, value in values.items() if name not in UNSAID)
        if self._bar is not None and kind == "train":
            self._bar.set_postfix_str(text)
            return
        left = ""
        if kind == "train" and "wall_s" in values:
            done = step / self._total
            # Estimated from the last interval, because the first one includes compilation.
            if self._shown and done > self._shown[0]:
                then, wall_s = self._shown
                left = f"  left {clock((values['wall_s'] - wall_s) / (done - then) * (1 - done))}"
            self._shown = done, values["wall_s"]
        line = f"step {step}/{self._total}  {kind}  {text}{left}"
        print(line, flush=True) if self._bar is None else self._bar.write(line)


def clock(seconds: int | float) -> str:
    """Format a duration as HH:MM:SS, or in hours from one day on."""
    return time.strftime("%H:%M:%S", time.gmtime(seconds)) if seconds < 86400 else f"{seconds / 3600:.0f} h"


def _median(values: list[float | None]) -> float | None:
    valid = [value for value in values if value is not None]
    return statistics.median(valid) if valid else None


def _format(name: str, value: Any) -> str:
    if name in ("data_wait", "mfu") and value is not None:
        return f"{100 * value:.1f}%"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def round_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return values for printing: fractions with four significant digits. Files contain all digits."""
    return {
        name: (f"{x:.4g}" if abs(x) < 1e4 else f"{x:,.0f}") if isinstance(x, float) else x for name, x in values.items()
    }


def format_page(title: str, rows: dict[str, Any]) -> str:
    """Format a title and aligned rows."""
    rows = {files.printable(name): value for name, value in rows.items()}
    width = max(map(len, rows))
    return "\n".join([title, *(f"  {name:<{width}}  {value}" for name, value in rows.items()), ""])
