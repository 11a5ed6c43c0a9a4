"""Selection of the checkpoint to read: the newest that is undamaged and fits the model."""

import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from leanformer import pretrained
from leanformer.errors import CheckpointError, WeightsError, first_line
from leanformer.pretrained.checks import check_finite
from leanformer.runtime import integrity, peers
from leanformer.runtime.trees import leaf_names


def steps_in(folder: Path) -> list[int]:
    """Steps on disk, oldest first, without opening anything."""
    return sorted(int(path.name) for path in folder.glob("*") if path.name.isdecimal())


def is_run(path: str) -> bool:
    """Whether a path is the folder of a run, and no file of weights."""
    return (Path(path).expanduser() / "checkpoints").is_dir()


def newest_readable[T](
    folder: Path,
    steps: Sequence[int],
    load: Callable[[int], T],
    step: int | None = None,
    check: Callable[[int, T], None] | None = None,
) -> tuple[int, T, dict[int, str]]:
    """Find the newest checkpoint that can be read. All processes come to the same one.

    Args:
        folder: of the checkpoints, one folder per step.
        steps: checkpoints there, oldest first.
        load: reads the checkpoint of a step; it may raise anything if the files are damaged.
        step: the only one to try.
        check: raises WeightsError for content that is not to be used; in all processes or in none.

    Returns:
        Its step, what `load` returned, and by step why newer ones cannot be read.

    Raises:
        CheckpointError: none can be read; or as `load`.
    """
    unreadable: dict[int, str] = {}
    for candidate in reversed(steps) if step is None else [step]:
        # Process 0 reads all files once over, and its verdict is everybody's.
        reason = peers.same(integrity.damage(folder / str(candidate)) if peers.first() else None)
        try:
            if reason is None:
                content = load(candidate)
        except CheckpointError:
            raise
        except Exception as error:  # whatever the storage library makes of damaged files
            reason = first_line(error)
        reason = next(filter(None, peers.each(reason)), None)
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
    raise CheckpointError(
        f"No checkpoint in {folder} can be read; all are left as they are:\n  {reasons}\n"
        "To start again from scratch, choose another --workdir."
    )


def warn(folder: Path, unreadable: Mapping[int, str], good: int) -> None:
    """Warn of checkpoints that cannot be read, from the process that writes."""
    for step, reason in unreadable.items() if peers.first() else ():
        print(
            f"WARNING: the checkpoint of step {step} in {folder} cannot be read: {reason}. Step {good} is used "
            "instead. It is left in place; `train` moves it aside when it resumes.",
            file=sys.stderr,
            flush=True,
        )


def move(folder: Path, reasons: Mapping[int, str], where: str, then: str) -> None:
    """Move checkpoints to `<folder>_<where>` and report it, from the process that writes."""
    beside = folder.with_name(f"{folder.name}_{where}")
    for step, reason in reasons.items() if peers.first() else ():
        beside.mkdir(exist_ok=True)
        target = beside / str(step)
        while target.exists():
            target = target.with_name(target.name + "_again")
        shutil.move(folder / str(step), target)
        print(
            f"\n*** THE CHECKPOINT OF STEP {step} {reason}\n*** It was moved to {target}. {then}\n",
            file=sys.stderr,
            flush=True,
        )


def check_weights(folder: Path, weights: tuple[Any, Any], ema: tuple[Any, Any] | None) -> None:
    """Raise WeightsError if the weights or the averaged weights of a checkpoint are not finite."""
    tensors = {name: x for tree in weights for name, x in pretrained.named(tree).items()}
    tensors |= {f"ema.{name}": x for tree in ema or () for name, x in pretrained.named(tree).items()}
    check_finite(tensors, str(folder))


def check_shapes(folder: Path, saved: Any, like: Any) -> None:
    """Raise CheckpointError with the leaves whose shapes differ between a checkpoint and a model."""
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
            f"Step {folder.name} in {folder.parent} is of another model:\n  " + "\n  ".join(wrong[:5]) + more + "\n"
            "Use the config it was made with (config.json beside it), or another --workdir."
        )
