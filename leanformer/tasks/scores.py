"""Score of a run: the metric that selects the best checkpoint, and its direction."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any


@dataclasses.dataclass(frozen=True)
class Score:
    """Metric that selects checkpoints, by its name in evaluation records."""

    name: str
    higher: bool = True  # True: higher is better

    def best(self, scores: Mapping[int, float]) -> int | None:
        """Return the step with the best finite score, the first among ties; None if there is none."""
        finite = {step: scores[step] for step in sorted(scores) if math.isfinite(scores[step])}
        return (max if self.higher else min)(finite, key=finite.__getitem__, default=None)

    def since_best(self, scores: Mapping[int, float]) -> int:
        """Return the number of evaluations after the best one."""
        best = self.best(scores)
        return sum(best is not None and step > best for step in scores)

    def record(self, value: float) -> dict[str, Any]:
        """Return what is written beside a checkpoint, for `read`: the score `value`, the metric and its direction."""
        return {"score": value, "of": self.name, "higher": self.higher}


def read(record: Mapping[str, Any]) -> tuple[Score, float]:
    """Read a record of `Score.record`; null becomes NaN, and records of older runs have top-1."""
    score, value = Score("top1"), record.get("top1")
    if "score" in record:
        score, value = Score(record["of"], record["higher"]), record["score"]
    return score, math.nan if value is None else value
