"""Training tasks: `build(config)` returns the task that `config.task` names; the others are not imported."""

import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from leanformer import config
from leanformer.data import Source, fingerprints, open_images, quote
from leanformer.errors import ConfigError, DataError
from leanformer.runtime import multihost, phases
from leanformer.tasks import artifacts
from leanformer.tasks.task import Batch, DataModule, Objective, Spec, Task


__all__ = ["KINDS", "Batch", "DataModule", "Objective", "Spec", "Task", "build", "check_names", "class_names"]
__all__ += ["fill_num_classes", "fingerprint", "open_data", "open_run", "resolve"]


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
    with phases.announce(f"Reading the data of {c.data.name}"):
        train = module.open(c.data.train_split, classes)
        splits = {"": c.data.eval_split} | {name: more.split for name, more in c.eval.more.items()}
        return train, {name: module.open(split, class_names(train)) for name, split in splits.items()}


def fingerprint(c: Any, train: Source, held_out: Mapping[str, Source]) -> dict[str, dict[str, Any]]:
    """Return {name of a split in the data, such as "train": its fingerprint}; {} except in process 0.

    A fingerprint has `examples`, their number, and digests of the content, see `fingerprints.compute`.

    Args:
        c: config.
        train, held_out: training split and evaluation splits, as `open_data` returns them.
    """
    splits = {c.data.train_split: train, **_by_split(c, held_out)} if multihost.is_primary() else {}
    return {split: fingerprints.compute(source) for split, source in splits.items()}


def warn_repeats(c: Any, train: Source, held_out: Mapping[str, Source]) -> None:
    """Warn of files that a split lists twice, and of data that the training split shares with another split.

    Also warns of an evaluation split that is the training split. Process 0 prints the warnings to the standard error.

    Args:
        c: config.
        train, held_out: training split and evaluation splits, as `open_data` returns them.
    """
    others = _by_split(c, held_out)
    same = [split for split in others if split == c.data.train_split]
    sentences = [
        f"split {split} is the training split, so scores on it are those of training examples" for split in same
    ]
    sentences += fingerprints.describe_repeats(train, {key: x for key, x in others.items() if key not in same})
    for sentence in sentences if multihost.is_primary() else ():
        print(f"WARNING: {c.data.name}: {sentence}.", file=sys.stderr, flush=True)


def _by_split(c: Any, held_out: Mapping[str, Source]) -> dict[str, Source]:
    """Return the evaluation splits that `open_data` returned, by their names in the config."""
    return {c.eval.more[name].split if name else c.data.eval_split: source for name, source in held_out.items()}


def open_run(c: Any, workdir: Path) -> tuple[Task, Source, dict[str, Source]]:
    """Return the task of a config, its training split, and its evaluation splits by name, for a run in `workdir`.

    model.num_classes=0 of the config is replaced in place, see `resolve`. Repeated data are warned of,
    see `warn_repeats`.

    Args:
        c: config.
        workdir: folder of the run, new or to be resumed. Its classes and tokenizer must be those of the data.

    Raises:
        ConfigError, DataError: the data do not fit the config or the run, or `workdir` has exported weights.
        WorkdirError: files of the run are damaged.
    """
    artifacts.check_not_exported(workdir)
    resolve(c)
    task = build(c)
    train, held_out = open_data(task.data, c, artifacts.load_classes(workdir))
    artifacts.check_tokenizer(workdir, train)
    if not (workdir / "config.json").is_file():
        check_names(c, train)
    warn_repeats(c, train, held_out)
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
    shape = {"image_size": c.model.image_size, "channels": c.model.channels, "num_classes": None}
    number = open_images(c.data.name, c.data.train_split, dir=c.data.dir, **shape).num_classes
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
