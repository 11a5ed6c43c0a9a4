"""Divergence detection: a run that diverged ends, and names the checkpoint to resume from."""

import collections
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from ml_collections import ConfigDict

from leanformer.errors import TrainingError
from leanformer.training.checkpoint import Checkpoints
from leanformer.training.step import IN_FLIGHT


class DivergenceMonitor:
    """Check of every step and evaluation of a run, which raises TrainingError on divergence.

    The step reports that it was skipped (`step.make_train_step`) only when the device has executed it.

    Attributes:
        skipped: number of consecutive skipped steps up to the last checked step.

    Args:
        optim: section `optim` of the config, of which `max_skipped` and `lr` are read.
        ceiling: divergence threshold of the loss.
        names: names of the parameters, in the order of the tree.
        checkpoints: checkpoints of the run, for the message.
        write_record: function (step, kind, values) that writes a record.
    """

    def __init__(
        self,
        optim: ConfigDict,
        ceiling: float,
        names: Sequence[str],
        checkpoints: Checkpoints,
        write_record: Callable[[int, str, dict[str, Any]], None],
    ):
        self.skipped = 0
        self._optim, self._ceiling, self._names = optim, ceiling, names
        self._checkpoints, self._write_record = checkpoints, write_record
        self._pending: collections.deque[tuple[int, Mapping[str, Any]]] = collections.deque()

    def on_step(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Store the metrics of a dispatched step, and check the step IN_FLIGHT steps before it, which is executed.

        Raises TrainingError if `optim.max_skipped` consecutive steps were skipped.
        """
        self._pending.append((step, metrics))
        while len(self._pending) > IN_FLIGHT:
            self._check_step(*self._pending.popleft(), self._optim.max_skipped)

    def check_pending_steps(self, limit: int | None = None) -> None:
        """Wait for all dispatched steps and check them.

        Args:
            limit: number of consecutive skipped steps that ends the run, if less than optim.max_skipped: at the end of
                a run its length, so that one whose steps were all skipped has diverged.

        Raises:
            TrainingError: that many consecutive steps were skipped.
        """
        while self._pending:
            self._check_step(*self._pending.popleft(), min(limit or self._optim.max_skipped, self._optim.max_skipped))

    def on_evaluation(self, step: int, values: Mapping[str, Any]) -> None:
        """Check the losses of an evaluation, the values whose names end in "loss", after all dispatched steps.

        Raises TrainingError if a loss is NaN or above the divergence threshold.
        """
        self.check_pending_steps()
        for name, loss in values.items():
            if name.endswith("loss") and not loss <= self._ceiling:
                problem = f"The evaluation at step {step} has {name}={loss:.3g}, above the divergence threshold"
                self._end(step, step - self.skipped + 1, f"{problem} {self._ceiling:.3g}.", {name: loss})

    def _check_step(self, step: int, metrics: Mapping[str, Any], limit: int) -> None:
        self.skipped = int(metrics["skipped_in_row"])
        if not self.skipped:
            return
        loss, bad = float(metrics["last_loss"]), int(metrics["bad_leaf"])
        leaf = self._names[bad] if bad >= 0 else None
        not_finite = leaf or not math.isfinite(loss)
        problem = "not finite" if not_finite else f"above the divergence threshold (loss over {self._ceiling:.3g})"
        where = f"first bad gradient: {leaf}" if leaf else f"loss: {loss:.3g}"
        if self.skipped == 1:
            print(f"WARNING: step {step} is {problem} and was skipped; {where}", file=sys.stderr, flush=True)
        if self.skipped >= limit:
            first = step - self.skipped + 1
            message = f"{self.skipped} consecutive steps were {problem}, from step {first}; {where}."
            self._end(step, first, message, {"leaf": leaf, "skipped_in_row": self.skipped})

    def _end(self, step: int, first: int, message: str, facts: Mapping[str, Any]) -> NoReturn:
        """Raise TrainingError; the weights before step `first` are the earliest that may have diverged."""
        self._checkpoints.wait()
        steps = self._checkpoints.steps
        good, doubtful = [at for at in steps if at < first - 1], [str(at) for at in steps if at >= first - 1]
        self._write_record(step, "abort", {"first_bad_step": first, **facts})
        resume = f"The same command resumes from step {max(steps)}." if steps else "The same command starts again."
        if doubtful:
            before = f"step {max(good)}" if good else "the start"
            resume += f" Its weights may have diverged: delete {', '.join(doubtful)} in {self._checkpoints.folder} to "
            resume += f"resume from {before}."
        raise TrainingError(
            f"{message} {resume} Lower optim.lr (it was {self._optim.lr:g}), set optim.clip_norm, lengthen the warm-up "
            '(optim.warmup_steps), or train with dtype="float32".'
        )
