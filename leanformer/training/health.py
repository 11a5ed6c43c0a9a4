"""Whether a run can still learn; where it cannot, it ends and says from which checkpoint to go on, and how."""

import collections
import math
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from ml_collections import ConfigDict

from leanformer.errors import TrainingError
from leanformer.training import report
from leanformer.training.checkpoint import Checkpoints
from leanformer.training.step import IN_FLIGHT


class Health:
    """Looks at every step and evaluation of a run, and raises TrainingError where nothing can come of it any more.

    A step says of itself whether it was skipped (`step.make_train_step`), which is known once the device has done it.
    By then the checkpoint of the step before may hold what went wrong, so with the run ends that checkpoint's use: it
    is moved away, and the same command goes on from the one before.

    Args:
        c: the run's config.
        ceiling: of its task.
        names: of its parameters, in order.
        run: its name, told with what ends it, where it is one of several.
    """

    def __init__(
        self,
        c: ConfigDict,
        ceiling: float,
        names: Sequence[str],
        saved: Checkpoints,
        record: report.Recorder,
        run: str = "",
    ):
        self.skipped = 0  # in a row, up to the last step that was looked at
        self._optim, self._ceiling = c.optim, ceiling
        self._names, self._saved, self._record = names, saved, record
        self._run = run and f"{run}: "
        self._sent: collections.deque[tuple[int, Mapping[str, Any]]] = collections.deque()

    def sent(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Takes what a step that was sent to the device will say; waits for the one IN_FLIGHT steps before."""
        self._sent.append((step, metrics))
        while len(self._sent) > IN_FLIGHT:
            self._look(*self._sent.popleft(), self._optim.max_skipped)

    def settle(self, limit: int | None = None) -> None:
        """Waits for all steps; `limit` is how many of them may be skipped in a row, if not optim.max_skipped."""
        while self._sent:
            self._look(*self._sent.popleft(), min(limit or self._optim.max_skipped, self._optim.max_skipped))

    def evaluated(self, step: int, values: Mapping[str, Any]) -> None:
        """Takes an evaluation of the weights at `step`."""
        self.settle()
        for name, loss in values.items():
            if name.endswith("loss") and not loss <= self._ceiling:
                said = f"The evaluation at step {step} has {name} {loss:.3g}; over {self._ceiling:.3g} nothing learns."
                self._end(step, step - self.skipped + 1, said, {name: loss})

    def _look(self, step: int, metrics: Mapping[str, Any], limit: int) -> None:
        self.skipped = int(metrics["skipped_in_row"])
        if not self.skipped:
            return
        loss, bad = float(metrics["last_loss"]), int(metrics["bad_leaf"])
        leaf = self._names[bad] if bad >= 0 else None
        what = "not finite" if leaf or not math.isfinite(loss) else f"past learning (loss over {self._ceiling:.3g})"
        where = f"first bad gradient: {leaf}" if leaf else f"loss: {loss:.3g}"
        if self.skipped == 1:
            print(f"*** STEP {step} IS {what.upper()}, SKIPPED; {where}", file=sys.stderr, flush=True)
        if self.skipped >= limit:
            first = step - self.skipped + 1
            said = f"{self.skipped} steps in a row were {what}, from step {first} on; {where}."
            self._end(step, first, said, {"leaf": leaf, "skipped_in_row": self.skipped})

    def _end(self, step: int, first: int, said: str, facts: Mapping[str, Any]) -> None:
        """Ends a run; the weights that step `first` started from are the earliest that may be to blame."""
        back = self._saved.withdraw(first - 1)
        self._record.write(step, "abort", {"first_bad_step": first, **facts, "go_on_from": back})
        who = "A sweep trains it apart from those beside it and" if self._run else "The same command"
        way = f"No checkpoint from before is left. {who} starts again"
        if back is not None:
            way = f"{who} goes on from step {back}, the newest checkpoint from before"
        raise TrainingError(
            f"{self._run}{said} {way}. Give it a lower optim.lr (it was {self._optim.lr:g}), set optim.clip_norm, "
            'lengthen optim.warmup_epochs, or train with dtype="float32".'
        )
