"""The score of a run: which metric of an evaluation decides between its checkpoints, and which way."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any


@dataclasses.dataclass(frozen=True)
class Score:
    """A metric by name, as in the records of evaluations."""

    name: str
    higher: bool = True  # whether higher is better

    def best(self, scores: Mapping[int, float]) -> int | None:
        """The step with the best score, of equals the first. One that is not finite never wins."""
        known = {step: scores[step] for step in sorted(scores) if math.isfinite(scores[step])}
        return (max if self.higher else min)(known, key=known.get, default=None)

    def since_best(self, scores: Mapping[int, float]) -> int:
        """How many evaluations came after the best one."""
        best = self.best(scores)
        return sum(best is not None and step > best for step in scores)

    def record(self, value: float) -> dict[str, Any]:
        """As it is written beside a checkpoint."""
        return {"score": value, "of": self.name, "higher": self.higher}


def read(record: Mapping[str, Any]) -> tuple[Score, float]:
    """What `Score.record` wrote, NaN for what JSON has as null; of runs from before there was a choice, top-1."""
    score, value = Score("top1"), record.get("top1")
    if "score" in record:
        score, value = Score(record["of"], record["higher"]), record["score"]
    return score, math.nan if value is None else value
