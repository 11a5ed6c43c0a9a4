"""Checkpoints with orbax: saved in the background, the latest few and the best kept, nothing lost in silence."""

import concurrent.futures
import functools
import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from orbax.checkpoint import v1 as ocp

from leanformer import pretrained
from leanformer.errors import CheckpointError, first_line
from leanformer.runtime import files, integrity, peers
from leanformer.tasks import scores
from leanformer.tasks.scores import Score
from leanformer.training import restoring


WEIGHTS = ("params", "statistics")  # parts of the training state
LATE = "score.json"  # of a checkpoint that was evaluated after it was saved
POLICIES = ocp.training.preservation_policies


class RestoredWeights(NamedTuple):
    """Weights of a checkpoint: (parameters, batch statistics), and their EMA if the run keeps it."""

    step: int
    weights: Any
    ema: Any | None

    @property
    def tensors(self) -> pretrained.Tensors:
        """EMA weights if the run keeps them, else the raw weights, by name."""
        return {name: x for tree in self.ema or self.weights for name, x in pretrained.named(tree).items()}


class _Best:
    """Preserves the checkpoint with the best score. A score may come later than its checkpoint: a run that is told to
    stop at a step where evaluation is due saves first, and evaluates when it goes on."""

    def __init__(self, saved: "Checkpoints"):
        self.saved = saved

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:
        best = self.saved.best_of([found.step for found in checkpoints])
        return [found.step == best for found in checkpoints]


class Checkpoints:
    """The checkpoints of one run; a context manager that waits for the last save. All processes do the same with it.

    Args:
        folder: where they are, one folder a step.
        keep: the latest so many, besides the best by evaluation.
        score: metric that selects the best checkpoint, given by the run that trains; readers find it with the
            checkpoints. Only a run that trains changes the folder: it deletes what interrupted saves have left, and
            moves damaged checkpoints aside.
    """

    def __init__(self, folder: Path, keep: int = 2, *, score: Score | None = None):
        self.folder = Path(folder).absolute()
        self.scores: dict[int, float] = {}  # by step, of checkpoints and of whatever else was evaluated
        self._policy = POLICIES.AnyPreservationPolicy([POLICIES.LatestN(keep), _Best(self)])
        self._trains = score is not None
        found = {found.step: found.metrics for found in self._listed if found.metrics}
        late = {step: self.folder / str(step) / LATE for step in self.steps}
        found |= {step: files.read_json(path) for step, path in late.items() if path.is_file()}
        read = {step: scores.read(record) for step, record in found.items()}
        self.score = score or (read[max(read)][0] if read else None)  # of one that changed, the newest
        self.scores |= {step: value for step, (known, value) in read.items() if known == self.score}
        self._written = set(self.scores)
        self._pool = concurrent.futures.ThreadPoolExecutor(1, "checkpoint")
        self._pending: concurrent.futures.Future | None = None
        self._told = False  # whether a failed save was reported

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                self.wait()
        finally:
            self._pool.shutdown()
            try:
                if "_manager" in self.__dict__:
                    self._manager.close()
            except Exception as error:  # it raises a failed save's error once more
                if kind is None and not self._told:
                    raise self._failed(error) from error

    @property
    def steps(self) -> list[int]:
        """Steps on disk, oldest first."""
        return sorted(found.step for found in self._listed)

    @functools.cached_property
    def _manager(self) -> Any:
        """The manager of the folder, which it makes."""
        return ocp.training.Checkpointer(
            self.folder, preservation_policy=self._policy, cleanup_tmp_directories=self._trains
        )

    @property
    def _listed(self) -> Sequence[Any]:
        return self._manager.checkpoints if self._trains or self.folder.is_dir() else ()

    def best(self) -> int | None:
        """The step of the best checkpoint by evaluation, if any was evaluated."""
        return self.best_of(self.steps)

    def best_of(self, steps: Iterable[int]) -> int | None:
        """The best of some steps, of those that were evaluated."""
        known = {step: self.scores[step] for step in steps if step in self.scores}
        return self.score.best(known) if known else None

    def choose(self, step: int | None = None, *, best: bool = False) -> int:
        """The step asked for, the best by evaluation, or the newest. Raises CheckpointError where there is none."""
        if best and step is not None:
            raise CheckpointError(f"--best and --step={step} exclude each other.")
        steps, found = self.steps, self.best() if best else step
        if not steps:
            raise CheckpointError(f"{self.folder} holds no checkpoint yet. Train first.")
        if best and found is None:
            raise CheckpointError(f"No checkpoint in {self.folder} was evaluated during training; leave out --best.")
        if found is not None and found not in steps:
            raise CheckpointError(f"{self.folder} has no checkpoint of step {found}. Found: {steps}.")
        return steps[-1] if found is None else found

    def report(self, step: int, value: float) -> None:
        """Takes the score of an evaluation; of a checkpoint that is there without one, it is written beside it, for
        whoever opens the checkpoints next."""
        self.scores[step] = value
        if peers.first() and step not in self._written and step in self.steps:
            files.write_json(self.folder / str(step) / LATE, self.score.record(value))
        self._written.add(step)

    def save(
        self, step: int, state: Any, *, score: float | None = None, seconds: Mapping[str, float] | None = None
    ) -> None:
        """Starts saving in the background; an error of it is raised by the next `poll`, `save` or `wait`.

        Args:
            score: of an evaluation at this step, if it was not reported; it decides which checkpoint is the best.
            seconds: wall-clock seconds by phase up to here; `restore` returns them.
        """
        self.wait()
        if score is not None:
            self.scores[step] = score
        metrics = self.score.record(self.scores[step]) if step in self.scores else None
        try:
            response = self._manager.save_async(
                step, state, force=True, metrics=metrics, custom_metadata={"seconds": dict(seconds or {})}
            )
        except Exception as error:
            raise self._failed(error) from error
        self._pending = self._pool.submit(self._finish, response, self.folder / str(step))

    def _finish(self, response: Any, folder: Path) -> None:
        """Waits for a save, then writes down what its files are, so that damage is found before it is loaded. What is
        written down is on disk by then, or a power cut would make damage of it."""
        response.result()
        if peers.first():
            for path in (*folder.rglob("*"), folder, folder.parent):
                files.sync(path)
            integrity.note(folder)

    def poll(self) -> None:
        """Raises CheckpointError if the save in the background has failed; returns at once."""
        if self._pending and self._pending.done():
            self.wait()

    def wait(self) -> None:
        """Waits for the save in the background. Raises CheckpointError if it failed."""
        pending, self._pending = self._pending, None
        if pending is None:
            return
        try:
            pending.result()
        except Exception as error:
            raise self._failed(error) from error

    def _failed(self, error: Exception) -> CheckpointError:
        self._told = True
        free = shutil.disk_usage(self.folder).free / 2**20
        return CheckpointError(
            f"A checkpoint could not be saved in {self.folder} ({free:.0f} MiB free there): {first_line(error)}\n"
            f"Whole checkpoints at steps {self.steps or 'none'}. Make room, then run the same command to go on."
        )

    def restore(
        self, like: Any, step: int | None = None, *, finite: bool = True
    ) -> tuple[Any, dict[str, float]] | None:
        """The newest readable checkpoint, or that of `step`, placed as `like`, and its wall-clock seconds by phase.

        A newest checkpoint that cannot be read is reported once an older one was read; a run that trains also moves it
        to `<folder>_damaged`. None only where no checkpoint exists at all.

        Args:
            finite: whether to refuse weights with a NaN or an infinity.

        Raises:
            CheckpointError: none can be read, `step` is not there, or the shapes are another model's.
            WeightsError: its weights are not finite.
        """
        steps = peers.same(self.steps)
        if step is not None and step not in steps:
            raise CheckpointError(f"{self.folder} has no checkpoint of step {step}. Found: {steps or 'none'}.")
        if not steps:
            return None

        def load(candidate: int) -> tuple[Any, dict[str, float]]:
            content = self._manager.metadata(candidate)
            restoring.check_shapes(self.folder / str(candidate), content.metadata, like)
            return self._manager.load(candidate, like), (content.custom_metadata or {}).get("seconds", {})

        def check(candidate: int, content: tuple[Any, dict[str, float]]) -> None:
            restoring.check_weights(self.folder / str(candidate), content[0].weights, content[0].ema)

        # A run that trains goes back to sound weights. A reader must not answer for weights that nobody asked for.
        back = check if finite and self._trains else None
        chosen, content, unreadable = restoring.newest_readable(self.folder, steps, load, step, back)
        self._report(unreadable, chosen)
        if finite and not self._trains:
            check(chosen, content)
        return content

    def restore_weights(self, like: Any = None, step: int | None = None, *, finite: bool = True) -> RestoredWeights:
        """Return the weights of the newest readable checkpoint, or that of `step`; nothing else of the training state
        is read. A newest checkpoint that cannot be read is reported.

        Args:
            like: shapes, dtypes and shardings of (parameters, batch statistics); NumPy arrays as saved if None.
            finite: whether to refuse weights with a NaN or an infinity.

        Raises:
            CheckpointError: there is no checkpoint, none can be read, or the shapes are another model's.
            WeightsError: its weights are not finite.
        """
        self.choose(step)

        def load(candidate: int) -> RestoredWeights:
            saved = self._manager.metadata(candidate).metadata
            if like is None:
                wanted = jax.tree.map(lambda x: np.empty(x.shape, x.dtype), {name: saved[name] for name in WEIGHTS})
            else:
                wanted = dict(zip(WEIGHTS, like, strict=True))
                restoring.check_shapes(self.folder / str(candidate), {name: saved[name] for name in wanted}, wanted)
            ema = [wanted[name] for name in WEIGHTS] if saved["ema"] else saved["ema"]
            skipped = {name: jax.tree.map(lambda _: ocp.PLACEHOLDER, part) for name, part in saved.items()}
            tree = self._manager.load(candidate, skipped | wanted | {"ema": ema})
            ema = tuple(tree["ema"]) if tree["ema"] else None
            return RestoredWeights(candidate, tuple(tree[name] for name in WEIGHTS), ema)

        chosen, restored, unreadable = restoring.newest_readable(self.folder, peers.same(self.steps), load, step)
        self._report(unreadable, chosen)
        if finite:
            restoring.check_weights(self.folder / str(chosen), restored.weights, restored.ema)
        return restored

    def _report(self, unreadable: dict[int, str], good: int) -> None:
        """Warn of unreadable checkpoints. A run that trains moves them to `<folder>_damaged`, so that their steps can
        be saved again; a reader leaves them, since the run may still be training."""
        if self._trains:
            said = {step: f"CANNOT BE READ: {reason}" for step, reason in unreadable.items()}
            self._move(said, "damaged", f"GOING BACK TO STEP {good}.")
        else:
            restoring.warn(self.folder, unreadable, good)

    def quarantine(self, since: int) -> int | None:
        """Move the checkpoints of step `since` and later to `<folder>_diverged`, with a warning: the next command must
        not resume from them. Returns the newest step that is left."""
        self.wait()
        said = {step: "MAY HOLD DIVERGED WEIGHTS." for step in peers.same(self.steps) if step >= since}
        self._move(said, "diverged", "")
        return max(self.steps, default=None)

    def _move(self, said: dict[int, str], where: str, then: str) -> None:
        """Moves checkpoints to `<folder>_<where>` with a word about each."""
        restoring.move(self.folder, said, where, then)
        if peers.same(said):  # all wait here for process 0 to have moved them
            self._manager.reload()
