"""What is asked of a model, by kind: `of(config)` is the task that `config.task` names."""

from collections.abc import Callable, Sequence
from typing import Any

from leanformer.data import Source, shown
from leanformer.errors import ConfigError, DataError
from leanformer.tasks import sentences
from leanformer.tasks.images import Images
from leanformer.tasks.language import Language
from leanformer.tasks.masked import Masked
from leanformer.tasks.points import Points
from leanformer.tasks.sequences import Sequences
from leanformer.tasks.task import Batch, Leaf, Task


__all__ = [
    "KINDS",
    "Batch",
    "Images",
    "Language",
    "Leaf",
    "Masked",
    "Points",
    "Sequences",
    "Task",
    "check_names",
    "of",
    "open_data",
]

KINDS: dict[str, Callable[[Any], Task]] = {  # by the word of config.task: from a whole config to its task
    "images": Images.of,
    "sequences": Sequences.of,
    "points": Points.of,
    "language": Language.of,
    "sentences": sentences.of,
    "masked": Masked.of,
}


def of(c: Any) -> Task:
    """The task of a config. Raises ConfigError for one of no known kind, and whatever its kind refuses."""
    if c.task not in KINDS:
        raise ConfigError(f'task="{c.task}" is not known: choose one of {", ".join(KINDS)}.')
    return KINDS[c.task](c)


def open_data(task: Task, c: Any, classes: Sequence[str] | None = None) -> tuple[Source, dict[str, Source]]:
    """The training source of a config, and what it is evaluated on by name: "" is `data.eval_split`, the others are
    those of `eval.more`.

    Args:
        classes: by name, in the order of the outputs of a run that was begun; those of the training split else. Other
            splits have no others, and may lack some.

    Raises:
        DataError: a split is missing or not whole, or has classes by other names.
    """
    train = task.open(c.data.train_split, classes)
    splits = {"": c.data.eval_split} | {name: more.split for name, more in c.eval.more.items()}
    return train, {name: task.open(split, names(train)) for name, split in splits.items()}


def names(source: Source) -> Sequence[str] | None:
    """What each output of a model trained on this source stands for; None where the source has no names."""
    return getattr(source, "classes", None)


def check_names(c: Any, source: Source) -> None:
    """Raises DataError where a new model would have outputs that no class of its training split gives a meaning."""
    named = names(source)
    if named is not None and len(named) != c.model.num_classes:
        raise DataError(
            f'data.name="{c.data.name}", split "{c.data.train_split}" has the classes '
            f"{shown(named)}, model.num_classes={c.model.num_classes}. Set --config.model.num_classes="
            f"{len(named)}, or, where files have names for more, list all in classes.txt beside the splits."
        )
