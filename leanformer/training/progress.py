"""The line of progress of a run: what its records say to whoever watches it, and how long it will still take."""

import statistics
import sys
import time
from typing import Any

import tqdm


UNSAID = ("wall_s", "examples_seen", "tokens_seen")


class Progress:
    """A bar on a terminal, and a line a record elsewhere.

    Args:
        start: the step training starts from.
        total: steps of the whole run.
    """

    def __init__(self, *, start: int, total: int):
        self._total = total
        self._shown: tuple[float, float] | None = None  # share of the run that is done, and wall_s, of the last line
        terminal = sys.stderr.isatty()
        self._bar = tqdm.tqdm(total=total, initial=start, unit="step", dynamic_ncols=True) if terminal else None

    def close(self) -> None:
        """Lets go of the terminal."""
        if self._bar is not None:
            self._bar.close()

    def advance(self, step: int) -> None:
        """Moves the bar to `step`."""
        if self._bar is not None:
            self._bar.update(step - self._bar.n)

    def say(self, step: int, kind: str, values: dict[str, Any]) -> None:
        """Shows a record."""
        if kind == "probe":  # a table by layer: too much for a line; in the record, on TensorBoard, and in `probe`
            middle = {name: _short(name, _middle(figures["median"])) for name, figures in values.items()}
            for name, figures in values.items():
                if singular := sum(map(bool, figures.get("singular", ()))):
                    middle[name] += f" (singular ones in {singular} of {len(figures['median'])} layers)"
            values = {("κ of " if "singular" in values[name] else "") + name: text for name, text in middle.items()}
            kind = "probe, medians over layers:"
        text = "  ".join(f"{name} {_short(name, value)}" for name, value in values.items() if name not in UNSAID)
        if self._bar is not None and kind == "train":
            self._bar.set_postfix_str(text)
            return
        left = ""
        if kind == "train" and "wall_s" in values:
            done = step / self._total
            # By what was done since the last line: before the first one programs were compiled.
            if self._shown and done > self._shown[0]:
                then, wall_s = self._shown
                left = f"  left {clock((values['wall_s'] - wall_s) / (done - then) * (1 - done))}"
            self._shown = done, values["wall_s"]
        line = f"step {step}/{self._total}  {kind}  {text}{left}"
        print(line, flush=True) if self._bar is None else self._bar.write(line)


def clock(seconds: int | float) -> str:
    """Hours, minutes and seconds; of days on end, hours."""
    return time.strftime("%H:%M:%S", time.gmtime(seconds)) if seconds < 86400 else f"{seconds / 3600:.0f} h"


def _middle(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def _short(name: str, value: Any) -> str:
    if name in ("data_wait", "mfu") and value is not None:
        return f"{100 * value:.1f}%"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
