"""A run that is as long as its seconds last: how much of them is used, which the learning rate follows.

Izsak, Berchansky & Levy 2021, How to Train BERT with an Academic Budget; Geiping & Goldstein 2023, Cramming. What
counts is what the books of `goodput` have under COUNTED, over all attempts: one goes on with what was used when the
checkpoint was written that it goes on from. How many steps there is time for is nobody's choice, so no two runs are the
same bits.
"""

from collections.abc import Mapping

from leanformer.runtime import peers


COUNTED = ("steps", "data wait")  # not start-up with the first batch, compiling, evaluation, the probe and saving


class Budget:
    """The seconds of a run, and the share of them that is used, as it was read last.

    Args:
        seconds: of the whole run.
        books: those of the checkpoint that it goes on from: seconds by name.
        every: steps between two readings where there are several processes; one process reads after every step.

    Attributes:
        used: 0 to 1, the same in all processes.
    """

    def __init__(self, seconds: float, books: Mapping[str, float], *, every: int):
        self.seconds, self._every = seconds, every
        self.used = peers.same(self._share(books))

    def read(self, step: int, books: Mapping[str, float]) -> None:
        """Takes the books after a step. All processes must call it after every step; the clock is process 0's."""
        if peers.count() == 1 or step % self._every == 0:
            self.used = peers.same(self._share(books))

    @property
    def spent(self) -> bool:
        """Whether the run has no more seconds."""
        return self.used >= 1

    def __str__(self) -> str:
        return f"{100 * self.used:.1f} % of {self.seconds:g} s used"

    def _share(self, books: Mapping[str, float]) -> float:
        return min(1.0, sum(books.get(name, 0.0) for name in COUNTED) / self.seconds)
