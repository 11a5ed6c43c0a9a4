"""Checkpoints of a run, WORKDIR/checkpoints/STEP, written by Orbax in the background: the newest ones and the best one.

A checkpoint that is damaged, for example by a power cut, is never deleted: training resumes from the one before.
"""

import concurrent.futures
import shutil
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from orbax.checkpoint import v1 as ocp

from leanformer.errors import CheckpointError, WeightsError, first_line
from leanformer.runtime import files, multihost
from leanformer.runtime.mesh import flatten_names
from leanformer.tasks import Score
from leanformer.training import run_files


WEIGHTS = ("params", "statistics")  # parts of the training state


class Restored(NamedTuple):
    """Training state of a checkpoint, and what was saved with it."""

    state: Any
    seconds: dict[str, float]  # wall-clock seconds by phase until then
    examples: int  # training examples until then


class RestoredWeights(NamedTuple):
    """Weights of a checkpoint."""

    step: int
    weights: Any  # (parameters, batch statistics)
    ema: Any | None  # EMA of (parameters, batch statistics); None if the run does not keep it

    @property
    def tensors(self) -> dict[str, Any]:
        """Parameters and statistics by dotted name, of `ema` if the run keeps it, else of `weights`."""
        return {name: x for tree in self.ema or self.weights for name, x in flatten_names(tree).items()}


def steps_in(folder: Path) -> list[int]:
    """Return the steps of the checkpoints in a folder, ascending; [] without any."""
    return sorted(int(path.name) for path in folder.glob("*") if path.name.isdecimal())


def is_run(path: str) -> bool:
    """Return whether a path is the folder of a run, with a subfolder `checkpoints`, and not weights or an export."""
    return (Path(path).expanduser() / "checkpoints").is_dir()


class Checkpoints:
    """Checkpoints of one run; a context manager that waits for the last save. All processes must make the same calls.

    `keep` newest checkpoints are kept, and the best by `score`, which only the run that trains passes; others read it.
    """

    def __init__(self, folder: Path, keep: int = 2, *, score: Score | None = None):
        self.folder = Path(folder).absolute()
        self._keep, self._trains = keep, score is not None
        self.score: Any = score or self._read_score()  # None if there is no checkpoint and none was given
        self.scores: dict[int, float] = {}  # of all evaluations by step, from metrics.jsonl beside the folder
        if self.score is not None:
            scores = [*run_files.read_scores(self.folder.parent, self.score.name).items()]
            self.scores = dict(map(tuple, multihost.broadcast_from_primary(scores)))
        self._unreadable: set[int] = set()
        self._pool = concurrent.futures.ThreadPoolExecutor(1, "checkpoint")
        self._pending: concurrent.futures.Future[None] | None = None

    def _read_score(self) -> Score | None:
        """Return the metric that the newest readable checkpoint names."""
        for step in reversed(self.steps):
            try:
                saved: Any = ocp.metadata(str(self.folder / str(step))).custom_metadata
                return Score(**saved["score"])
            except Exception:
                continue
        return None

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                self.wait()
        finally:
            self._pool.shutdown()

    @property
    def steps(self) -> list[int]:
        """Steps of the checkpoints on disk, in ascending order."""
        return steps_in(self.folder)

    def best(self) -> int | None:
        """Return the step of the best checkpoint on disk, the first of equal ones; None if none was evaluated."""
        evaluated = {step: self.scores[step] for step in self.steps if step in self.scores}
        return self.score.best(evaluated) if evaluated else None

    def choose(self, step: int | None = None, *, best: bool = False) -> int:
        """Return the step of the requested checkpoint, by default the newest, damaged or not."""
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

    def save(self, step: int, state: Any, *, seconds: Mapping[str, float] | None = None, examples: int = 0) -> None:
        """Start saving a checkpoint in the background; the next `poll`, `save` or `wait` raises a later failure."""
        self.wait()
        self._unreadable.discard(step)
        steps = sorted({*self.steps, step} - self._unreadable)
        kept = {*steps[-self._keep :], self.score.best({at: self.scores[at] for at in steps if at in self.scores})}
        metadata = {"seconds": dict(seconds or {}), "examples_seen": examples, "score": vars(self.score)}
        path = self.folder / str(step)
        try:
            response = ocp.save_async(str(path), state, overwrite=True, custom_metadata=metadata)
        except Exception as error:
            raise self._make_error(error) from error
        self._pending = self._pool.submit(self._finish, response, path, {*steps} - kept)

    def _finish(self, response: Any, path: Path, old: set[int]) -> None:
        """Wait for a save, write the checksums of its files, and delete older checkpoints.

        The files are synced to disk before the checksums are written; otherwise a power cut would look like damage.
        """
        response.result()
        if multihost.is_primary():
            for file in (*path.rglob("*"), path, path.parent):
                files.sync(file)
            files.write_checksums(path)
            for step in old:
                deleted = (self.folder / str(step)).rename(self.folder / f"deleted-{step}")  # so that no half is left
                shutil.rmtree(deleted)

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
        return CheckpointError(
            f"A checkpoint could not be saved in {self.folder}: {first_line(error)}\n"
            f"Complete checkpoints: {self.steps or 'none'}. Remove the cause, then run the same command to resume."
        )

    def restore(self, like: Any) -> Restored | None:
        """Return the state of the newest readable checkpoint; None only if there is no checkpoint at all.

        `like` is a `TrainState` of shapes, dtypes and shardings. If the newest checkpoint cannot be read, an older one
        is read and a warning is printed. A run that trains also passes over weights that contain NaN or infinity.
        Raises CheckpointError if no checkpoint can be read or the shapes differ, WeightsError if they are not finite.
        """
        if self._trains and multihost.is_primary():
            for path in (*self.folder.glob("*.orbax-checkpoint-tmp*"), *self.folder.glob("deleted-*")):
                shutil.rmtree(path)  # of a save or a deletion that was killed
        if not multihost.broadcast_from_primary(self.steps):
            return None

        def load(path: Path) -> Restored:
            content = ocp.metadata(str(path))
            check_shapes(path, content.metadata, like)
            saved: Any = content.custom_metadata
            return Restored(ocp.load(str(path), like), saved["seconds"], saved["examples_seen"])

        return self._load_newest(load)

    def restore_weights(self, like: Any = None, step: int | None = None) -> RestoredWeights:
        """Return the weights of the newest readable checkpoint, or of `step`, without the rest of the training state.

        `like` has shapes, dtypes and shardings of (parameters, batch statistics); without it, arrays are NumPy's as
        saved. Errors are as in `restore`.
        """

        def load(path: Path) -> RestoredWeights:
            saved = ocp.metadata(str(path)).metadata
            if like is None:
                expected = jax.tree.map(lambda x: np.empty(x.shape, x.dtype), {name: saved[name] for name in WEIGHTS})
            else:
                expected = dict(zip(WEIGHTS, like, strict=True))
                check_shapes(path, {name: saved[name] for name in expected}, expected)
            ema = [expected[name] for name in WEIGHTS] if saved["ema"] else saved["ema"]
            skipped = {name: jax.tree.map(lambda _: ocp.PLACEHOLDER, part) for name, part in saved.items()}
            tree = ocp.load(str(path), skipped | expected | {"ema": ema})
            ema = tuple(tree["ema"]) if tree["ema"] else None
            return RestoredWeights(int(path.name), tuple(tree[name] for name in WEIGHTS), ema)

        return self._load_newest(load, step)

    def _load_newest[T: Restored | RestoredWeights](self, load: Callable[[Path], T], step: int | None = None) -> T:
        """Return the content of the newest checkpoint that every process can load, with finite weights."""
        self.choose(step)
        unreadable: dict[int, str] = {}
        steps = multihost.broadcast_from_primary(self.steps)
        for candidate in reversed(steps) if step is None else [step]:
            path, content = self.folder / str(candidate), None
            reason = multihost.broadcast_from_primary(files.find_corruption(path) if multihost.is_primary() else None)
            try:
                if reason is None:
                    content = load(path)
            except CheckpointError:
                raise
            except Exception as error:  # Orbax raises errors of many classes for damaged files
                reason = first_line(error)
            reason = next(filter(None, multihost.all_gather_host(reason)), None)
            if content is not None and reason is None:
                try:
                    weights = content.state if isinstance(content, Restored) else content
                    _check_finite(path, weights.weights, weights.ema)
                except WeightsError as error:
                    if not self._trains:
                        raise
                    reason = str(error)
                else:
                    self._warn_unreadable(unreadable, candidate)
                    return content
            unreadable[candidate] = str(reason)
        reasons = "\n  ".join(f"step {candidate}: {reason}" for candidate, reason in unreadable.items())
        remedy = (
            f"Choose another with --step=N: {steps}." if step else "To start from scratch, choose another --workdir."
        )
        raise CheckpointError(f"No checkpoint in {self.folder} can be read:\n  {reasons}\n{remedy}")

    def _warn_unreadable(self, unreadable: Mapping[int, str], chosen: int) -> None:
        self._unreadable = {*unreadable}
        for step, reason in unreadable.items() if multihost.is_primary() else ():
            warning = f"the checkpoint of step {step} in {self.folder} cannot be read: {reason}"
            print(f"\nWARNING: {warning}. Step {chosen} is used instead.\n", file=sys.stderr, flush=True)


def _check_finite(path: Path, weights: Any, ema: Any | None) -> None:
    """Raise WeightsError if the weights or the EMA weights of a checkpoint contain NaN or infinity."""
    from leanformer.pretrained.storage import check_finite  # not needed by a new run

    tensors = {name: x for tree in weights for name, x in flatten_names(tree).items()}
    tensors |= {f"ema.{name}": x for tree in ema or () for name, x in flatten_names(tree).items()}
    check_finite(tensors, str(path))


def check_shapes(path: Path, saved: Any, like: Any) -> None:
    """Raise CheckpointError, naming the differing leaves, if the shapes of a checkpoint and of a model differ."""
    actual, expected = ({name: tuple(x.shape) for name, x in flatten_names(tree).items()} for tree in (saved, like))
    wrong = [
        f"{name}: saved {actual.get(name, 'nothing')}, expected {expected.get(name, 'nothing')}"
        for name in sorted(actual.keys() | expected.keys())
        if actual.get(name) != expected.get(name)
    ]
    if wrong:
        more = f"\n  and {len(wrong) - 5} more" if len(wrong) > 5 else ""
        leaves, remedy = "\n  ".join(wrong[:5]) + more, "Use the config of this run, or another --workdir."
        raise CheckpointError(f"{path} belongs to a different model or optimizer:\n  {leaves}\n{remedy}")
