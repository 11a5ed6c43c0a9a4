"""The batch of each step, where it grows over the first steps of a run: the keys `batch_ramp_...`."""

import dataclasses
import functools
from typing import Any, NamedTuple


NO_RAMP = {"batch_ramp_start": 0, "batch_ramp_increment": 0, "batch_ramp_steps": 0}  # of a config


class Stage(NamedTuple):
    """Steps whose batches have one size.

    Attributes:
        size: examples of a batch, global.
        step: the first of them.
        first: examples that the steps before it take.
    """

    size: int
    step: int
    first: int


@dataclasses.dataclass(frozen=True)
class Ramp:
    """How many examples each step takes, and which: a function of the step alone.

    Batches of `start`, `start + increment`, ... examples share out the first `steps` steps evenly; from then on each
    has `full`, which the next increment would reach. Megatron-LM's ramp-up (Narayanan et al. 2021) has these sizes too.
    """

    full: int
    start: int = 0  # 0: `full` from the first step on
    increment: int = 0
    steps: int = 0

    @classmethod
    def of(cls, c: Any) -> "Ramp":
        """That of a config; an increment of 0 is the start's size, for whole multiples of it."""
        start = c.batch_ramp_start
        return cls(c.batch_size, start, c.batch_ramp_increment or start, c.batch_ramp_steps)

    @functools.cached_property
    def stages(self) -> tuple[Stage, ...]:
        """In order; the last has no end."""
        sizes = range(self.start, self.full, self.increment) if self.start else ()
        found, first = [], 0
        for i, size in enumerate(sizes):
            step, end = (self.steps * k // len(sizes) for k in (i, i + 1))
            found.append(Stage(size, step, first))
            first += size * (end - step)
        return (*found, Stage(self.full, self.steps, first))

    @property
    def sizes(self) -> list[int]:
        """Of batches, the smallest first."""
        return [stage.size for stage in self.stages]

    def at(self, step: int) -> Stage:
        """The stage that a step is in; the first step is 0."""
        return next(stage for stage in reversed(self.stages) if stage.step <= step)

    def first(self, step: int) -> int:
        """Examples that the steps before this one take: the position of its first in the order of training."""
        stage = self.at(step)
        return stage.first + (step - stage.step) * stage.size

    def steps_for(self, examples: int | float) -> int:
        """How many steps take so many examples, or as nearly as whole steps can."""
        stage = next(stage for stage in reversed(self.stages) if stage.first <= examples)
        return stage.step + round((examples - stage.first) / stage.size)

    def micro_batches(self, size: int, accumulate: int) -> int:
        """Into how many a batch of `size` is cut, where one of `full` is cut into `accumulate`: each is as large as
        there, or the whole of a batch that is smaller. So memory does not grow with the batch."""
        return max(1, size * accumulate // self.full)
