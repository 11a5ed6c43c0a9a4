"""Score of a run: the metric that selects the best checkpoint, and its direction."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any


@dataclasses.dataclass(frozen=True)
class Score:
    """Metric that selects the best checkpoint.

    Attributes:
        name: name of the metric in evaluation records, such as "top1".
        higher: True if higher is better, False if lower is.
    """

    name: str
    higher: bool = True

    def best(self, scores: Mapping[int, float]) -> int | None:
        """Return the step with the best finite value of {step: value}, the first among ties; None if there is none."""
        finite = {step: scores[step] for step in sorted(scores) if math.isfinite(scores[step])}
        return (max if self.higher else min)(finite, key=finite.__getitem__, default=None)

    def record(self, value: float) -> dict[str, Any]:
        """Return the record of a value for summary.json: {"score": value, "of": name, "higher": higher}."""
        return {"score": value, "of": self.name, "higher": self.higher}


def read(record: Mapping[str, Any]) -> Score:
    """Return the metric of a record of `Score.record`."""
    return Score(record["of"], record["higher"])
