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
__all__ += ["by_split", "fill_num_classes", "open_data", "open_run", "resolve"]


def _from_config(name: str) -> Callable[[Any], Task]:
    """Return the function `from_config` of a module of this package, which is imported at the first call."""
    return lambda c: importlib.import_module(f"leanformer.tasks.{name}").from_config(c)


# task type, as in config.task, to a function from a config to its task
KINDS = {name: _from_config(name) for name in ("images", "sequences", "points", "language", "sentences", "masked")}


def build(c: Any) -> Task:
    """Return the task of a config: its data module and its objective.

    Raises ConfigError if the task type is unknown, or a key is invalid for the task.

    >>> from leanformer import config
    >>> build(config.points()).data.name
    'nearest'
    """
    if c.task not in KINDS:
        raise ConfigError(f'task="{c.task}": unknown task. Choose one of: {", ".join(KINDS)}.')
    return KINDS[c.task](c)


def open_data(module: DataModule, c: Any, classes: Sequence[str] | None = None) -> tuple[Source, dict[str, Source]]:
    """Return the training split of a config, and a dict of its evaluation splits by name.

    The name of `data.eval_split` is "", the others are those of `eval.more`. A line on the standard error tells if it
    takes long.

    Args:
        module: data module of the config's task.
        c: config.
        classes: class names in the order of the outputs, for a run that has started; None for those of the training
            split. Evaluation splits may lack some of these, but have no other ones.

    Raises:
        ConfigError: `data.name` is unknown or incomplete.
        DataError: a split is missing or incomplete, or has classes by other names.
    """
    with timing.announce(f"Reading the data of {c.data.name}"):
        train = module.open(c.data.train_split, classes)
        splits = {"": c.data.eval_split} | {name: more.split for name, more in c.eval.more.items()}
        return train, {name: module.open(split, class_names(train)) for name, split in splits.items()}


def by_split(c: Any, train: Source, held_out: Mapping[str, Source]) -> dict[str, Source]:
    """Return {name of a split in the data, such as "train": the split} for the splits that `open_data` returned."""
    names = {"": c.data.eval_split} | {name: more.split for name, more in c.eval.more.items()}
    return {c.data.train_split: train} | {names[name]: source for name, source in held_out.items()}


def open_run(c: Any, workdir: Path) -> tuple[Task, Source, dict[str, Source]]:
    """Return the task of a config, its training split, and its evaluation splits by name, for a run in `workdir`.

    model.num_classes=0 of the config is replaced in place, see `resolve`.

    Args:
        c: config.
        workdir: folder of the run, new or to be resumed. Its classes and tokenizer must be those of the data.

    Raises:
        ConfigError, DataError: the data do not fit the config or the run, or `workdir` has exported weights.
        WorkdirError: files of the run are damaged.
    """
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
    """Replace model.num_classes=0 in place, see `fill_num_classes`.

    Raises the errors of `config.check_keys` and `fill_num_classes`.
    """
    config.check_keys(c)
    fill_num_classes(c)


def fill_num_classes(c: Any) -> None:
    """Set model.num_classes=0 of a config for images, in place, to the number of classes of its training split.

    Other configs are not changed.

    Raises:
        ConfigError: the training split does not say how many classes it has, or `data.name` is unknown.
        DataError: the training split is missing or incomplete.
    """
    if c.task != "images" or c.model.num_classes != 0:
        return
    number = count_classes(c.data.name, c.data.train_split, c.data.dir)
    if not number:
        raise ConfigError(
            f'model.num_classes=0: data.name="{c.data.name}" does not name its classes. Set --config.model.num_classes.'
        )
    with c.unlocked():
        c.model.num_classes = number


def check_names(c: Any, source: Source) -> None:
    """Raise DataError if the training split of a new model names fewer than two classes, or not one per output.

    Args:
        c: config, whose model.num_classes is the number of outputs.
        source: training split; one without class names is not checked.
    """
    named = class_names(source)
    if named is not None and len(named) < 2:
        raise DataError(
            f'data.name="{c.data.name}", split "{c.data.train_split}": found classes: {quote(named)}. A classifier '
            "needs at least 2. Check the names of the class folders, or the labels."
        )
    if named is not None and len(named) != c.model.num_classes:
        raise DataError(
            f'data.name="{c.data.name}", split "{c.data.train_split}" has the classes '
            f"{quote(named)}, but model.num_classes={c.model.num_classes}. Set --config.model.num_classes="
            f"{len(named)}, or, if the names cover more classes, list all in classes.txt beside the splits."
        )
