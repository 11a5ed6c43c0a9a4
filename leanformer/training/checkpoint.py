"""Checkpoints with orbax: saved in the background, the latest few and the best kept, nothing lost in silence."""

import concurrent.futures
import itertools
import shutil
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from orbax.checkpoint import v1 as ocp

from leanformer import pretrained
from leanformer.errors import CheckpointError, ConfigError, first_line
from leanformer.runtime import files, integrity, peers
from leanformer.training import scores
from leanformer.training.optim import leaf_names
from leanformer.training.scores import Score


LATE = "score.json"  # of a checkpoint that was evaluated after it was saved
POLICIES = ocp.training.preservation_policies


def steps_in(folder: Path) -> list[int]:
    """Steps on disk, oldest first, without opening anything."""
    return sorted(int(path.name) for path in folder.glob("*") if path.name.isdecimal())


def is_run(path: str) -> bool:
    """Whether a path is the folder of a run, and no file of weights."""
    return (Path(path).expanduser() / "checkpoints").is_dir()


def read_weights(path: str, layout: str, *, step: int | None = None, best: bool | None = None) -> pretrained.Tensors:
    """The weights in a file, or in the folder of a run, by the names that they have there.

    Args:
        step, best: of a run, which checkpoint, as `Checkpoints.choose` has it; `best` is True by default where any
            was evaluated.

    Raises:
        ConfigError: a run, and a layout that is not its own.
        WeightsError, CheckpointError: they cannot be read.
    """
    if not is_run(path):
        return pretrained.read(path)
    if layout != "own":
        raise ConfigError(f'The layout of weights "{layout}": {path} is the folder of a run, whose layout is "own".')
    with Checkpoints(Path(path).expanduser() / "checkpoints") as saved:
        return saved.tensors(saved.choose(step, best=saved.best() is not None if best is None else best))


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
        score: by which the best is chosen, of the run itself; others find it with the checkpoints. The run clears away
            what saves that were cut off have left.
    """

    def __init__(self, folder: Path, keep: int = 2, *, score: Score | None = None):
        self.folder = Path(folder).absolute()
        self.scores: dict[int, float] = {}  # by step, of checkpoints and of whatever else was evaluated
        policy = POLICIES.AnyPreservationPolicy([POLICIES.LatestN(keep), _Best(self)])
        self._manager = ocp.training.Checkpointer(
            self.folder, preservation_policy=policy, cleanup_tmp_directories=score is not None
        )
        found = {found.step: found.metrics for found in self._manager.checkpoints if found.metrics}
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
                self._manager.close()
            except Exception as error:  # it raises a failed save's error once more
                if kind is None and not self._told:
                    raise self._failed(error) from error

    @property
    def steps(self) -> list[int]:
        """Steps on disk, oldest first."""
        return sorted(found.step for found in self._manager.checkpoints)

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

    def tensors(self, step: int) -> dict[str, np.ndarray]:
        """The weights of a checkpoint by name, whatever model they are of; the averaged ones where the run keeps them.

        Raises:
            CheckpointError: it is damaged.
        """
        if reason := integrity.damage(self.folder / str(step)):
            raise CheckpointError(f"The checkpoint of step {step} in {self.folder} cannot be read: {reason}.")
        shapes = self._manager.metadata(step).metadata
        tree = self._manager.load(step, jax.tree.map(lambda leaf: np.empty(leaf.shape, leaf.dtype), shapes))
        weights = tree["ema"] or (tree["params"], tree["statistics"])
        parts = (zip(leaf_names(part), jax.tree.leaves(part), strict=True) for part in weights)
        return dict(itertools.chain.from_iterable(parts))

    def evaluated(self, step: int, value: float) -> None:
        """Takes the score of an evaluation; of a checkpoint that is there without one, it is written beside it, for
        whoever opens the checkpoints next."""
        self.scores[step] = value
        if peers.first() and step not in self._written and step in self.steps:
            files.write_json(self.folder / str(step) / LATE, self.score.record(value))
        self._written.add(step)

    def save(self, step: int, state: Any, *, score: float | None = None, books: dict[str, float] | None = None) -> None:
        """Starts saving in the background; an error of it is raised by the next `poll`, `save` or `wait`.

        Args:
            score: of an evaluation at this step, if `evaluated` was not told; it decides which checkpoint is the best.
            books: seconds by what they went to, up to here; `restore` hands them back.
        """
        self.wait()
        if score is not None:
            self.scores[step] = score
        metrics = self.score.record(self.scores[step]) if step in self.scores else None
        try:
            response = self._manager.save_async(
                step, state, force=True, metrics=metrics, custom_metadata={"seconds": books or {}}
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

    def restore(self, like: Any, step: int | None = None) -> tuple[Any, dict[str, float]] | None:
        """The newest readable checkpoint, or that of `step`, laid out as `like` says, and its books of seconds.

        A newest checkpoint that cannot be read is moved to `<folder>_damaged`, loudly, once an older one was read.
        None only where no checkpoint exists at all.

        Raises:
            CheckpointError: none can be read, `step` is not there, or the shapes are another model's.
        """
        steps = peers.same(self.steps)
        if step is not None and step not in steps:
            raise CheckpointError(f"{self.folder} has no checkpoint of step {step}. Found: {steps or 'none'}.")
        unreadable: dict[int, str] = {}
        for candidate in reversed(steps) if step is None else [step]:
            # Process 0 reads all files once over, and its verdict is everybody's.
            reason = peers.same(integrity.damage(self.folder / str(candidate)) if peers.first() else None)
            try:
                if reason is None:
                    found = self._manager.metadata(candidate)
                    self._check_shapes(candidate, found.metadata, like)
                    state = self._manager.load(candidate, like)
            except CheckpointError:
                raise
            except Exception as error:  # whatever the storage library makes of damaged files
                reason = first_line(error)
            reason = next(filter(None, peers.each(reason)), None)
            if reason is not None:
                unreadable[candidate] = reason
                continue
            self._set_aside(unreadable, candidate)
            return state, (found.custom_metadata or {}).get("seconds", {})
        if unreadable:
            reasons = "\n  ".join(f"step {s}: {reason}" for s, reason in unreadable.items())
            raise CheckpointError(
                f"No checkpoint in {self.folder} can be read; all are left as they are:\n  {reasons}\n"
                "To start again from scratch, choose another --workdir."
            )
        return None

    def _check_shapes(self, step: int, saved: Any, like: Any) -> None:
        """Raises CheckpointError naming the leaves that differ."""
        have = {name: tuple(leaf.shape) for name, leaf in zip(leaf_names(saved), jax.tree.leaves(saved), strict=True)}
        want = {name: tuple(leaf.shape) for name, leaf in zip(leaf_names(like), jax.tree.leaves(like), strict=True)}
        wrong = [
            f"{name}: saved {have.get(name, 'nothing')}, wanted {want.get(name, 'nothing')}"
            for name in sorted(have.keys() | want.keys())
            if have.get(name) != want.get(name)
        ]
        if wrong:
            more = f"\n  and {len(wrong) - 5} more" if len(wrong) > 5 else ""
            raise CheckpointError(
                f"Step {step} in {self.folder} is of another model:\n  " + "\n  ".join(wrong[:5]) + more + "\n"
                "Use the config it was made with (config.json beside it), or another --workdir."
            )

    def _set_aside(self, unreadable: dict[int, str], good: int) -> None:
        """Moves unreadable checkpoints to `<folder>_damaged`, so that their steps can be saved again, and says so."""
        said = {step: f"CANNOT BE READ: {reason}" for step, reason in unreadable.items()}
        self._move(said, "damaged", f"GOING BACK TO STEP {good}.")

    def withdraw(self, since: int) -> int | None:
        """Moves the checkpoints of step `since` and later to `<folder>_astray`, and says so: the next command must not
        go on from them. Returns the newest that is left."""
        self.wait()
        said = {step: "MAY BE OF WEIGHTS THAT WENT ASTRAY." for step in peers.same(self.steps) if step >= since}
        self._move(said, "astray", "")
        return max(self.steps, default=None)

    def _move(self, said: dict[int, str], where: str, then: str) -> None:
        """Moves checkpoints to `<folder>_<where>` with a word about each."""
        beside = self.folder.with_name(f"{self.folder.name}_{where}")
        for step, reason in said.items() if peers.first() else ():
            beside.mkdir(exist_ok=True)
            target = beside / str(step)
            while target.exists():
                target = target.with_name(target.name + "_again")
            shutil.move(self.folder / str(step), target)
            print(
                f"\n*** THE CHECKPOINT OF STEP {step} {reason}\n*** It was moved to {target}. {then}\n",
                file=sys.stderr,
                flush=True,
            )
        if peers.same(said):  # all wait here for process 0 to have moved them
            self._manager.reload()
