"""Training tasks: `build(config)` returns the task that `config.task` names; the others are not imported."""

import importlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from leanformer import config
from leanformer.data import Source, quote
from leanformer.data.images import count_classes
from leanformer.errors import ConfigError, DataError
from leanformer.runtime import timing
from leanformer.tasks import artifacts
from leanformer.tasks.task import Batch, DataModule, Objective, Spec, Task


__all__ = ["KINDS", "Batch", "DataModule", "Objective", "Spec", "Task", "build", "check_names", "class_names"]
__all__ += ["by_split", "open_data", "open_run", "resolve"]


def _from_config(name: str) -> Callable[[Any], Task]:
    return lambda c: importlib.import_module(f"leanformer.tasks.{name}").from_config(c)


# task type, as in config.task, to a function from a config to its task
KINDS = {name: _from_config(name) for name in ("images", "sequences", "points", "language", "sentences", "masked")}


def build(c: Any) -> Task:
    """Return the task of a config: its data module and its objective.

    >>> from leanformer import config
    >>> build(config.points()).data.name
    'nearest'
    """
    if c.task not in KINDS:
        raise ConfigError(f'task="{c.task}": unknown task. Choose one of: {", ".join(KINDS)}.')
    return KINDS[c.task](c)


def _eval_splits(c: Any) -> dict[str, str]:
    """Return the evaluation splits by name: "" for `data.eval_split`, and the names of `eval.more`."""
    return {"": c.data.eval_split} | {name: more.split for name, more in c.eval.more.items()}


def open_data(module: DataModule, c: Any, classes: Sequence[str] | None = None) -> tuple[Source, dict[str, Source]]:
    """Return the training split, and the evaluation splits by name, "" for that of `data.eval_split`.

    `classes` are the class names of a run that has started, in the order of its outputs; None for those of the
    training split. Evaluation splits may lack some of them.
    """
    with timing.announce(f"Reading the data of {c.data.name}"):
        train = module.open(c.data.train_split, classes)
        return train, {name: module.open(split, class_names(train)) for name, split in _eval_splits(c).items()}


def by_split(c: Any, train: Source, held_out: Mapping[str, Source]) -> dict[str, Source]:
    """Return {name of a split in the data, such as "train": the split} for the splits that `open_data` returned."""
    names = _eval_splits(c)
    return {c.data.train_split: train} | {names[name]: source for name, source in held_out.items()}


def open_run(c: Any, workdir: Path) -> tuple[Task, Source, dict[str, Source]]:
    """Return the task and the results of `open_data` for a run, new or resumed, in `workdir`."""
    if artifacts.exported_weights(workdir) is not None:
        raise ConfigError(
            f"--workdir={workdir} holds exported weights. Choose another folder. To start from these weights, set "
            f"--config.init_from.path={workdir}."
        )
    resolve(c)
    task = build(c)
    train, held_out = open_data(task.data, c, artifacts.load_classes(workdir))
    artifacts.check_tokenizer(workdir, getattr(train, "tokenizer", None))
    if not (workdir / "config.json").is_file():
        check_names(c, train)
    return task, train, held_out


def class_names(source: Source) -> Sequence[str] | None:
    """Return the class names of a source in the order of the outputs; None if it has none."""
    return getattr(source, "classes", None)


def resolve(c: Any) -> None:
    """Check the keys of a config, and replace model.num_classes=0, in place, by the classes of the training images."""
    config.check_keys(c)
    if c.task != "images" or c.model.num_classes != 0:
        return
    number = count_classes(c.data.name, c.data.train_split, c.data.dir)
    if not number:
        raise ConfigError(
            f'model.num_classes=0: data.name="{c.data.name}" names no classes (a folder needs images such as .jpg and '
            ".png). Set --config.model.num_classes."
        )
    with c.unlocked():
        c.model.num_classes = number


def check_names(c: Any, source: Source) -> None:
    """Raise DataError if the training split names fewer than two classes, or not one per output of the model."""
    named = class_names(source)
    if named is not None and not 2 <= len(named) == c.model.num_classes:
        raise DataError(
            f'data.name="{c.data.name}", split "{c.data.train_split}" has the classes '
            f"{quote(named)}, but model.num_classes={c.model.num_classes}. At least 2 are needed. Set "
            f"--config.model.num_classes={len(named)}, or, if the names cover more classes, list all in classes.txt "
            "beside the splits."
        )
