"""Selection of the checkpoint to read: the newest that is undamaged and fits the model."""

import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax

from leanformer.errors import CheckpointError, WeightsError, first_line
from leanformer.runtime import integrity, multihost
from leanformer.runtime.trees import flatten_names, leaf_names


RESTART = "To start from scratch, choose another --workdir."


class Restored(NamedTuple):
    """Training state of a checkpoint, and what was saved with it.

    Attributes:
        state: the `TrainState`.
        seconds: wall-clock seconds by phase until then.
        examples: number of training examples until then; None in checkpoints that do not say it.
    """

    state: Any
    seconds: dict[str, float]
    examples: int | None


class RestoredWeights(NamedTuple):
    """Weights of a checkpoint.

    Attributes:
        step: step of the checkpoint.
        weights: (parameters, batch statistics).
        ema: EMA of (parameters, batch statistics); None if the run does not keep it.
    """

    step: int
    weights: Any
    ema: Any | None

    @property
    def tensors(self) -> dict[str, Any]:
        """Parameters and statistics, {dotted name: array}, of `ema` if the run keeps it, else of `weights`."""
        return {name: x for tree in self.ema or self.weights for name, x in flatten_names(tree).items()}


def steps_in(folder: Path) -> list[int]:
    """Return the steps of the checkpoints in a folder, ascending, from the names of its subfolders; [] without any."""
    return sorted(int(path.name) for path in folder.glob("*") if path.name.isdecimal())


def is_run(path: str) -> bool:
    """Return whether a path is the folder of a run, with a subfolder `checkpoints`, and not weights or an export."""
    return (Path(path).expanduser() / "checkpoints").is_dir()


def newest_readable[T](
    folder: Path,
    steps: Sequence[int],
    load: Callable[[int], T],
    step: int | None = None,
    check: Callable[[int, T], None] | None = None,
) -> tuple[int, T, dict[int, str]]:
    """Load the newest readable checkpoint. All processes load the same one.

    Args:
        folder: folder of checkpoints.
        steps: steps of its checkpoints, oldest first.
        load: function that reads the checkpoint of a step; it may raise any error if the files are damaged.
        step: only step to try; all steps if None.
        check: function that raises WeightsError for unusable content, in all processes or in none.

    Returns:
        The step, the result of `load`, and the reasons by step why newer checkpoints cannot be read.

    Raises:
        CheckpointError: no checkpoint can be read, or `load` raises it.
    """
    unreadable: dict[int, str] = {}
    for candidate in reversed(steps) if step is None else [step]:
        # Process 0 verifies all files; the other processes use its result.
        reason = multihost.broadcast_from_primary(
            integrity.find_corruption(folder / str(candidate)) if multihost.is_primary() else None
        )
        content: Any = None
        try:
            if reason is None:
                content = load(candidate)
        except CheckpointError:
            raise
        except Exception as error:  # the storage library raises errors of many classes for damaged files
            reason = first_line(error)
        reason = next(filter(None, multihost.all_gather_host(reason)), None)
        try:
            if reason is None and check is not None:
                check(candidate, content)
        except WeightsError as error:
            reason = str(error)
        if reason is None:
            return candidate, content, unreadable
        unreadable[candidate] = reason
    if step is not None:
        raise CheckpointError(
            f"The checkpoint of step {step} in {folder} cannot be read: {unreadable[step]}. Choose another with "
            f"--step=N: {', '.join(map(str, steps))}."
        )
    reasons = "\n  ".join(f"step {candidate}: {reason}" for candidate, reason in unreadable.items())
    raise CheckpointError(f"No checkpoint in {folder} can be read; all are left in place:\n  {reasons}\n{RESTART}")


def warn_unreadable(folder: Path, unreadable: Mapping[int, str], good: int) -> None:
    """Warn about checkpoints that cannot be read, in process 0.

    Args:
        folder: folder of checkpoints.
        unreadable: reasons by step.
        good: step of the checkpoint that is used instead.
    """
    for step, reason in unreadable.items() if multihost.is_primary() else ():
        print(
            f"WARNING: the checkpoint of step {step} in {folder} cannot be read: {reason}. Step {good} is used "
            "instead. The files are left in place; `train` moves them when it resumes.",
            file=sys.stderr,
            flush=True,
        )


def move_checkpoints(folder: Path, reasons: Mapping[int, str], where: str, then: str) -> None:
    """Move checkpoints to `<folder>_<where>` and print a warning for each, in process 0.

    Args:
        folder: folder of checkpoints.
        reasons: end of the warning "the checkpoint of step N ...", by step to move.
        where: suffix of the destination, such as "damaged".
        then: sentence that ends the warnings.
    """
    destination = folder.with_name(f"{folder.name}_{where}")
    for step, reason in reasons.items() if multihost.is_primary() else ():
        destination.mkdir(exist_ok=True)
        target = destination / str(step)
        while target.exists():
            target = target.with_name(target.name + "_again")
        shutil.move(folder / str(step), target)
        print(
            f"\nWARNING: the checkpoint of step {step} {reason}. It was moved to {target}. {then}".rstrip() + "\n",
            file=sys.stderr,
            flush=True,
        )


def set_aside_damaged(folder: Path, error: Exception, *, move: bool) -> None:
    """Move damaged checkpoints, which make the others unreadable, to `<folder>_damaged`. All processes must call this.

    Args:
        folder: folder of checkpoints.
        error: error of reading them; raised again if no checkpoint is damaged.
        move: False for commands that only read, which must not move anything.

    Raises:
        CheckpointError: all checkpoints are damaged, or some are and `move` is False.
    """
    reasons: dict[int, str] = {}
    if multihost.is_primary():
        corrupt = {step: integrity.find_corruption(folder / str(step)) for step in steps_in(folder)}
        reasons = {step: reason for step, reason in corrupt.items() if reason}
    reasons = dict(multihost.broadcast_from_primary([*reasons.items()]))  # pairs, so that steps stay integers in JSON
    if not reasons:
        raise error
    shown = "".join(f"\n  step {step}: {reason}" for step, reason in reasons.items())
    if reasons.keys() == {*steps_in(folder)}:
        raise CheckpointError(
            f"No checkpoint in {folder} can be read; all are left in place:{shown}\n{RESTART}"
        ) from error
    if not move:
        raise CheckpointError(
            f"{folder} has damaged checkpoints:{shown}\nRun the command that trained them: it moves them to another "
            "folder and resumes from an older one. Or move them yourself."
        ) from error
    move_checkpoints(folder, {step: f"cannot be read: {reason}" for step, reason in reasons.items()}, "damaged", "")
    multihost.broadcast_from_primary(None)  # all processes wait here until process 0 has moved the files


def check_weights(folder: Path, weights: tuple[Any, Any], ema: tuple[Any, Any] | None) -> None:
    """Raise WeightsError if the weights or the EMA weights of a checkpoint contain NaN or infinity.

    Args:
        folder: folder of the checkpoint, for the message.
        weights: (parameters, batch statistics).
        ema: EMA weights; None if there are none.
    """
    from leanformer.pretrained.checks import check_finite  # not needed by a new run

    tensors = {name: x for tree in weights for name, x in flatten_names(tree).items()}
    tensors |= {f"ema.{name}": x for tree in ema or () for name, x in flatten_names(tree).items()}
    check_finite(tensors, str(folder))


def check_shapes(folder: Path, saved: Any, like: Any) -> None:
    """Raise CheckpointError, naming the differing leaves, if the shapes of a checkpoint and of a model differ.

    Args:
        folder: folder of the checkpoint, for the message.
        saved: tree of the checkpoint's metadata, with shapes.
        like: tree of arrays or shapes that the model has.
    """
    actual = {name: tuple(leaf.shape) for name, leaf in zip(leaf_names(saved), jax.tree.leaves(saved), strict=True)}
    expected = {name: tuple(leaf.shape) for name, leaf in zip(leaf_names(like), jax.tree.leaves(like), strict=True)}
    wrong = [
        f"{name}: saved {actual.get(name, 'nothing')}, expected {expected.get(name, 'nothing')}"
        for name in sorted(actual.keys() | expected.keys())
        if actual.get(name) != expected.get(name)
    ]
    if wrong:
        more = f"\n  and {len(wrong) - 5} more" if len(wrong) > 5 else ""
        raise CheckpointError(
            f"The checkpoint of step {folder.name} in {folder.parent} belongs to a different model:\n  "
            + "\n  ".join(wrong[:5])
            + f"{more}\nUse the config of this run (config.json in its folder), or another --workdir."
        )
