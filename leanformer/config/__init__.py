"""Configs: defaults with help texts, and static validation by `check` before devices are initialised.

A config consists of `common()`, the keys of all tasks, and the keys of one task. A file in `configs/` overrides the
defaults of a task: `base()` for images, `sequences()`, ... Every key can be set on the command line:
`--config.model.num_heads=16`. Library code takes plain keyword arguments instead of a whole config.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from ml_collections import ConfigDict

from leanformer.config import common, images, rules
from leanformer.config import language as language_module
from leanformer.config import points as points_module
from leanformer.config import sentences as sentences_module
from leanformer.config import sequences as sequences_module
from leanformer.config.images import FAMILIES, IMAGENET_MEAN, IMAGENET_STD, base, model
from leanformer.config.language import bert, language, masked, texts
from leanformer.config.loading import load, load_sibling
from leanformer.config.points import heads_of_rank, points
from leanformer.config.rules import WHOLE_NUMBER
from leanformer.config.sentences import glue, sentences
from leanformer.config.sequences import landmarks, sequences
from leanformer.errors import ConfigError


__all__ = ["FAMILIES", "IMAGENET_MEAN", "IMAGENET_STD", "glue", "heads_of_rank", "landmarks", "load", "load_sibling"]
__all__ += ["KINDS", "Intervals", "Kind", "arguments", "base", "check", "check_keys", "intervals", "language"]
__all__ += ["masked", "model", "points", "sentences", "sequences", "total_steps"]


class Kind(NamedTuple):
    """Task type: defaults and validation of its configs.

    Attributes:
        name: description of the examples.
        defaults: function of this package that returns the locked config with the default of each key.
        check: function that raises ConfigError at the first invalid key of the task in a config.
        parts: functions that set the keys, whose comments are the help texts; those of images are always included.
    """

    name: str
    defaults: Callable[[], ConfigDict]
    check: Callable[[Any], None]
    parts: tuple[Callable[..., ConfigDict], ...] = ()


LISTED = 4  # missing keys that a message lists
TEXTS = (texts, language, bert, masked)
KINDS = {  # task type, as in config.task
    "images": Kind("images", base, images.check),
    "sequences": Kind("labelled token sequences", sequences, sequences_module.check, (sequences,)),
    "points": Kind("point sets", points, points_module.check, (points,)),
    "language": Kind("texts", language, language_module.check, (texts, language)),
    "masked": Kind("texts with masked tokens", masked, language_module.check_masked, TEXTS),
    "sentences": Kind("labelled sentences", sentences, sentences_module.check, (*TEXTS, sentences)),
}


def check_keys(c: Any) -> None:
    """Raise ConfigError if a config lacks keys or sections of its task, except those of `model`.

    Of an unknown `task`, which is rejected by `tasks.build`, the keys of all tasks are required.
    """
    task = str(c.get("task"))
    expected = KINDS[task].defaults() if task in KINDS else common.common(task)
    missing = [*_missing(expected, c)]
    if "model" not in expected and not isinstance(c.get("model"), ConfigDict):
        missing.append("model")
    if missing:
        more = f" and {len(missing) - LISTED} more" if len(missing) > LISTED else ""
        raise ConfigError(
            f'task="{task}" needs {", ".join(missing[:LISTED])}{more} as well. Start from a config of this task, as in '
            f"leanformer.config.{'base' if task not in KINDS or task == 'images' else task}()."
        )


def _missing(expected: ConfigDict, c: Any, prefix: str = "") -> Iterator[str]:
    """Yield the keys of `expected` that `c` lacks; for a missing section only its name."""
    for name, value in expected.items():
        section = isinstance(value, ConfigDict) and len(value) > 0  # an empty one is a value
        if name not in c or (section and not isinstance(c[name], ConfigDict)):
            yield f"{prefix}{name}"
        elif section and f"{prefix}{name}" != "model":
            yield from _missing(value, c[name], f"{prefix}{name}.")


def check(c: Any) -> None:
    """Raise ConfigError at the first invalid key of a config that needs neither model nor data: value, problem, fix.

    `training.checks.check` also checks types, names of other registries, and what the model accepts. An unknown `task`
    is not an error here, but in `tasks.build`.
    """
    rules.check(c)
    if c.task in KINDS:  # unknown task types are rejected by `tasks.build`
        KINDS[c.task].check(c)
    rules.check_mesh(c)


def total_steps(c: ConfigDict, examples: int | None) -> int:
    """Return the number of optimizer steps of a whole run.

    Args:
        c: config.
        examples: number of examples of the training split; None if it is infinite.

    Raises:
        ConfigError: the length is in epochs of an infinite split, or exceeds the range of int32.
    """
    tokens = c.get("total_tokens", 0)
    if examples is None and not (c.total_steps or tokens):
        raise ConfigError(
            f"total_epochs={c.total_epochs}: the training data are infinite. Set --config.total_epochs=0 and "
            "--config.total_steps."
        )
    batches = tokens / c.model.max_length if tokens else c.total_epochs * (examples or 0)
    steps = c.total_steps or max(1, round(batches / c.batch_size))
    if steps > WHOLE_NUMBER:
        length = f"total_tokens={tokens}" if tokens else f"total_epochs={c.total_epochs} of {examples:,} examples"
        raise ConfigError(f"{length}: {steps:.2g} steps exceed the limit of {WHOLE_NUMBER:,}.")
    return steps


class Intervals(NamedTuple):
    """Length of a run, and intervals of its events, in optimizer steps.

    Attributes:
        total: length of the run.
        log: interval of training records.
        eval: interval of evaluations of each split, by its name in `eval.more`; "" is `data.eval_split`; 0 for only at
            the end.
        probe: interval of measurements of conditioning; 0 for never.
        checkpoint: interval of checkpoints; 0 for only at the end.
    """

    total: int
    log: int
    eval: dict[str, int]
    probe: int
    checkpoint: int


def intervals(c: ConfigDict, examples: int | None) -> Intervals:
    """Return the length and the intervals of a run in optimizer steps.

    Intervals in epochs (`every_epochs`) become at least one step.

    Args:
        c: config.
        examples: number of examples of the training split; None if it is infinite.

    Raises:
        ConfigError: the length or an interval is in epochs of an infinite split, or the length exceeds int32.
    """
    total, steps = total_steps(c, examples), {}
    for section in rules.SECTIONS_WITH_INTERVALS:
        key, epochs = f"{section}.every_epochs", c[section].every_epochs
        if epochs and examples is None:
            raise ConfigError(
                f"{key}={epochs}: the training data are infinite and have no epochs. Set --config.{key}=0 and "
                f"--config.{section}.every."
            )
        steps[section] = max(1, round(epochs * (examples or 0) / c.batch_size)) if epochs else int(c[section].every)
    splits = {"": steps["eval"]} | {name: more.every for name, more in c.eval.more.items()}
    return Intervals(total, c.log_every, splits, steps["probe"], steps["checkpoint"])


def arguments(text: str, **defaults: Any) -> dict[str, Any]:
    """Return `defaults` with the values that a config file's argument sets, as in `--config=FILE:depth=8,heads=14`.

    Args:
        text: argument after the colon; "" sets nothing.
        defaults: name and default of each value, whose type is that of the result.

    Raises:
        ConfigError: a name is not among the defaults, or a value has another type.

    >>> arguments("depth=8,heads=14", depth=12, heads=12)
    {'depth': 8, 'heads': 14}
    """
    values = dict(defaults)
    for part in filter(None, text.split(",")):
        name, _, value = part.partition("=")
        if name not in defaults:
            raise ConfigError(f"Unknown argument {name!r} in {text!r}. The config accepts: {', '.join(defaults)}.")
        kind = type(defaults[name])
        try:
            values[name] = kind(value)
        except ValueError as error:
            raise ConfigError(f"{name}={value!r} in {text!r} is not of type {kind.__name__}.") from error
    return values
