"""Checkpoints with Orbax, saved in the background; the newest ones and the best one by validation score are kept.

Module `restoring` chooses the checkpoint to read if some are damaged, and moves damaged ones.
"""

import concurrent.futures
import functools
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from orbax.checkpoint import v1 as ocp

from leanformer.errors import CheckpointError, first_line
from leanformer.runtime import files, integrity, multihost
from leanformer.tasks import scores
from leanformer.tasks.scores import Score
from leanformer.training import restoring


WEIGHTS = ("params", "statistics")  # parts of the training state
DEFERRED_SCORE_FILE = "score.json"  # score of a checkpoint that was evaluated after it was saved
POLICIES = ocp.training.preservation_policies


class _Best:
    """Preservation policy that keeps the best checkpoint, whose score may be known only after a resume."""

    def __init__(self, saved: "Checkpoints"):
        self.saved = saved

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:
        best = self.saved.best_of([checkpoint.step for checkpoint in checkpoints])
        return [checkpoint.step == best for checkpoint in checkpoints]


class Checkpoints:
    """Checkpoints of one run; a context manager that waits for the last save. All processes must make the same calls.

    Attributes:
        folder: absolute path of the folder of checkpoints.
        scores: score of each evaluation by step, with or without a checkpoint.
        score: metric that selects the best checkpoint; None if no checkpoint was evaluated and none was given.

    Args:
        folder: folder of checkpoints, WORKDIR/checkpoints.
        keep: number of newest checkpoints to keep, in addition to the best by validation score.
        score: metric that selects the best checkpoint; given only by the run that trains. Readers find it with the
            checkpoints. Only a run that trains changes the folder: it deletes the remains of interrupted saves, and
            moves damaged checkpoints to another folder.
    """

    def __init__(self, folder: Path, keep: int = 2, *, score: Score | None = None):
        self.folder = Path(folder).absolute()
        self.scores: dict[int, float] = {}  # by step, of all evaluations, with or without a checkpoint
        self._policy: Any = POLICIES.AnyPreservationPolicy([POLICIES.LatestN(keep), _Best(self)])
        self._trains = score is not None
        try:
            read = self._read_scores()
        except Exception as error:  # the storage library raises errors of many classes for damaged files
            restoring.set_aside_damaged(self.folder, error, move=self._trains)
            if (manager := self.__dict__.pop("_manager", None)) is not None:
                manager.close()
            read = self._read_scores()
        self.score: Any = score or (read[max(read)][0] if read else None)  # the newest if the metric has changed
        self.scores |= {step: value for step, (metric, value) in read.items() if metric == self.score}
        self._written = set(self.scores)
        self._pool = concurrent.futures.ThreadPoolExecutor(1, "checkpoint")
        self._pending: concurrent.futures.Future[Any] | None = None
        self._reported = False  # whether a failed save was reported

    def _read_scores(self) -> dict[int, tuple[Score, float]]:
        """Return the scores of the checkpoints on disk, by step. This reads the metadata of all of them."""
        records = {checkpoint.step: checkpoint.metrics for checkpoint in self._listed if checkpoint.metrics}
        late = {step: self.folder / str(step) / DEFERRED_SCORE_FILE for step in self.steps}
        records |= {step: files.read_json(path) for step, path in late.items() if path.is_file()}
        return {step: scores.read(record) for step, record in records.items()}

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
            except Exception as error:  # `close` raises the error of a failed save again
                if kind is None and not self._reported:
                    raise self._make_error(error) from error

    @property
    def steps(self) -> list[int]:
        """Steps of the checkpoints on disk, in ascending order."""
        return sorted(checkpoint.step for checkpoint in self._listed)

    @functools.cached_property
    def _manager(self) -> Any:
        """Orbax's CheckpointManager of the folder; creates the folder."""
        return ocp.training.Checkpointer(
            str(self.folder), preservation_policy=self._policy, cleanup_tmp_directories=self._trains
        )

    @property
    def _listed(self) -> Sequence[Any]:
        return self._manager.checkpoints if self._trains or self.folder.is_dir() else ()

    def best(self) -> int | None:
        """Return the step of the best checkpoint on disk by validation score; None if none has a finite score."""
        return self.best_of(self.steps)

    def best_of(self, steps: Iterable[int]) -> int | None:
        """Return the one of these steps whose evaluation has the best score, the first of equal ones.

        None if none was evaluated with a finite score.

        Args:
            steps: steps to choose from, with or without a checkpoint.
        """
        evaluated = {step: self.scores[step] for step in steps if step in self.scores}
        return self.score.best(evaluated) if evaluated else None

    def choose(self, step: int | None = None, *, best: bool = False) -> int:
        """Return the step of the requested checkpoint. Whether its files are undamaged is not checked.

        Args:
            step: step of the checkpoint; None for the newest, or with `best` for the best.
            best: True for the best checkpoint by validation score; not with `step`.

        Raises:
            CheckpointError: there is no such checkpoint, or both `step` and `best` are given.
        """
        if best and step is not None:
            raise CheckpointError(f"--best cannot be combined with --step={step}. Remove one of them.")
        steps, chosen = self.steps, self.best() if best else step
        if not steps:
            raise CheckpointError(f"{self.folder} contains no checkpoint. Train the model first.")
        if best and chosen is None:
            raise CheckpointError(f"--best: no checkpoint in {self.folder} was evaluated in training. Remove --best.")
        if chosen is not None and chosen not in steps:
            raise CheckpointError(f"{self.folder} has no checkpoint of step {chosen}. Found: {steps}.")
        return steps[-1] if chosen is None else chosen

    def report(self, step: int, value: float) -> None:
        """Record the score of an evaluation, which `best` and the deletion of older checkpoints then take into account.

        If there is already a checkpoint of this step without a score, process 0 writes the score into its folder.

        Args:
            step: step of the evaluated weights.
            value: value of the metric `score`.
        """
        self.scores[step] = value
        if multihost.is_primary() and step not in self._written and step in self.steps:
            files.write_json(self.folder / str(step) / DEFERRED_SCORE_FILE, self.score.record(value))
        self._written.add(step)

    def save(
        self,
        step: int,
        state: Any,
        *,
        score: float | None = None,
        seconds: Mapping[str, float] | None = None,
        examples: int | None = None,
    ) -> None:
        """Start saving a checkpoint in the background, after the end of an earlier save.

        Args:
            step: step of the checkpoint.
            state: tree of arrays to save, a `TrainState`.
            score: score of an evaluation at this step, if it was not reported before.
            seconds: wall-clock seconds by phase so far, which `restore` returns.
            examples: number of training examples so far, which `restore` returns.

        Raises:
            CheckpointError: an earlier save failed, or this one cannot start. A later failure is raised by the next
                `poll`, `save` or `wait`.
        """
        self.wait()
        if score is not None:
            self.scores[step] = score
        metrics = self.score.record(self.scores[step]) if step in self.scores else None
        try:
            more = {"seconds": dict(seconds or {}), "examples_seen": examples}
            response = self._manager.save_async(step, state, force=True, metrics=metrics, custom_metadata=more)
        except Exception as error:
            raise self._make_error(error) from error
        self._pending = self._pool.submit(self._finish, response, self.folder / str(step))

    def _finish(self, response: Any, folder: Path) -> None:
        """Wait for a save, then write the checksums of its files, so that damage is detected before loading.

        The files are synced to disk before the checksums are written; otherwise a power cut would look like damage.
        """
        response.result()
        if multihost.is_primary():
            for path in (*folder.rglob("*"), folder, folder.parent):
                files.sync(path)
            integrity.write_checksums(folder)

    def poll(self) -> None:
        """Raise CheckpointError if the save in the background has failed; return at once while it is running."""
        if self._pending and self._pending.done():
            self.wait()

    def wait(self) -> None:
        """Wait for the end of the save in the background, if there is one. Raises CheckpointError if it failed."""
        pending, self._pending = self._pending, None
        if pending is None:
            return
        try:
            pending.result()
        except Exception as error:
            raise self._make_error(error) from error

    def _make_error(self, error: Exception) -> CheckpointError:
        self._reported = True
        if not self.folder.is_dir():
            return CheckpointError(
                f"A checkpoint could not be saved: {self.folder} was deleted or moved during training. Pass the run's "
                "present path as --workdir, or start again in a new folder."
            )
        return CheckpointError(
            f"A checkpoint could not be saved in {self.folder}: {first_line(error)}\n"
            f"Complete checkpoints: {self.steps or 'none'}. Remove the cause, then run the same command "
            "to resume."
        )

    def restore(self, like: Any, step: int | None = None) -> restoring.Restored | None:
        """Return the state of the newest readable checkpoint, or of `step`, and what was saved with it.

        If the newest checkpoint cannot be read, an older one is read and a warning is printed. A run that trains also
        moves the unreadable one to `<folder>_damaged`.

        Args:
            like: `TrainState` of shapes, dtypes and shardings.
            step: step of the checkpoint; the newest readable one if None.

        Returns:
            State, {phase: seconds} and number of training examples; None only if there is no checkpoint at all.

        Raises:
            CheckpointError: no checkpoint can be read, `step` does not exist, or the shapes differ from `like`.
            WeightsError: the weights contain NaN or infinity. A run that trains reads an older checkpoint instead.
        """
        steps = multihost.broadcast_from_primary(self.steps)
        if step is not None and step not in steps:
            raise CheckpointError(f"{self.folder} has no checkpoint of step {step}. Found: {steps or 'none'}.")
        if not steps:
            return None

        def load(candidate: int) -> restoring.Restored:
            content = self._manager.metadata(candidate)
            restoring.check_shapes(self.folder / str(candidate), content.metadata, like)
            more = content.custom_metadata or {}
            state = self._manager.load(candidate, like)
            return restoring.Restored(state, more.get("seconds", {}), more.get("examples_seen"))

        def check(candidate: int, content: restoring.Restored) -> None:
            restoring.check_weights(self.folder / str(candidate), content.state.weights, content.state.ema)

        # A run that trains falls back to older finite weights. A reader must not use a checkpoint other than requested.
        fallback = check if self._trains else None
        chosen, content, unreadable = restoring.newest_readable(self.folder, steps, load, step, fallback)
        self._report(unreadable, chosen)
        if not self._trains:
            check(chosen, content)
        return content

    def restore_weights(
        self, like: Any = None, step: int | None = None, *, finite: bool = True
    ) -> restoring.RestoredWeights:
        """Return the weights of the newest readable checkpoint, or of `step`, without the rest of the training state.

        Args:
            like: shapes, dtypes and shardings of (parameters, batch statistics); NumPy arrays as saved if None.
            step: step of the checkpoint; the newest readable one if None, with a warning about unreadable ones.
            finite: True to reject weights that contain NaN or infinity.

        Raises:
            CheckpointError: there is no checkpoint, none can be read, or the shapes differ from `like`.
            WeightsError: the weights are not finite.
        """
        self.choose(step)

        def load(candidate: int) -> restoring.RestoredWeights:
            saved = self._manager.metadata(candidate).metadata
            if like is None:
                expected = jax.tree.map(lambda x: np.empty(x.shape, x.dtype), {name: saved[name] for name in WEIGHTS})
            else:
                expected = dict(zip(WEIGHTS, like, strict=True))
                restoring.check_shapes(self.folder / str(candidate), {name: saved[name] for name in expected}, expected)
            ema = [expected[name] for name in WEIGHTS] if saved["ema"] else saved["ema"]
            skipped = {name: jax.tree.map(lambda _: ocp.PLACEHOLDER, part) for name, part in saved.items()}
            tree = self._manager.load(candidate, skipped | expected | {"ema": ema})
            ema = tuple(tree["ema"]) if tree["ema"] else None
            return restoring.RestoredWeights(candidate, tuple(tree[name] for name in WEIGHTS), ema)

        steps = multihost.broadcast_from_primary(self.steps)
        chosen, restored, unreadable = restoring.newest_readable(self.folder, steps, load, step)
        self._report(unreadable, chosen)
        if finite:
            restoring.check_weights(self.folder / str(chosen), restored.weights, restored.ema)
        return restored

    def _report(self, unreadable: dict[int, str], good: int) -> None:
        """Warn about unreadable checkpoints.

        A run that trains moves them to `<folder>_damaged`, so that their steps can be saved again. A reader leaves
        them in place, because the run may still be training.
        """
        if self._trains:
            reasons = {step: f"cannot be read: {reason}" for step, reason in unreadable.items()}
            self._move(reasons, "damaged", f"Resuming from step {good}.")
        else:
            restoring.warn_unreadable(self.folder, unreadable, good)

    def quarantine(self, since: int) -> int | None:
        """Move the checkpoints of step `since` and later to `<folder>_diverged`, so that no command resumes from them.

        Waits for a save in the background first. Process 0 moves the folders and prints a warning to stderr for each.

        Args:
            since: first step whose checkpoint may contain diverged weights.

        Returns:
            The newest remaining step; None if no checkpoint is left.

        Raises:
            CheckpointError: the save in the background failed.
        """
        self.wait()
        steps = [step for step in multihost.broadcast_from_primary(self.steps) if step >= since]
        self._move(dict.fromkeys(steps, "may contain diverged weights"), "diverged", "")
        return max(self.steps, default=None)

    def _move(self, reasons: dict[int, str], where: str, then: str) -> None:
        """Move checkpoints to `<folder>_<where>`, print the reason for each, and forget their scores."""
        restoring.move_checkpoints(self.folder, reasons, where, then)
        for step in reasons:
            self.scores.pop(step, None)
            self._written.discard(step)
        if multihost.broadcast_from_primary(reasons):  # all processes wait here until process 0 has moved the files
            self._manager.reload()
