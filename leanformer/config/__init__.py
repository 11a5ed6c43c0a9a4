"""Configs: defaults with help texts, and static validation by `check` before devices are initialised.

A config consists of `common()`, the keys of all tasks, and the keys of one task. A file in `configs/` overrides the
defaults of a task: `base()` for images, `sequences()`, ... Every key can be set on the command line:
`--config.model.num_heads=16`. Library code takes plain keyword arguments instead of a whole config.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

from ml_collections import ConfigDict

from leanformer.config import images, rules
from leanformer.config import language as language_module
from leanformer.config import points as points_module
from leanformer.config import sentences as sentences_module
from leanformer.config import sequences as sequences_module
from leanformer.config.common import common, interventions, optimizer, section, softmax
from leanformer.config.images import FAMILIES, IMAGENET_MEAN, IMAGENET_STD, base, model
from leanformer.config.language import bert, language, masked, texts
from leanformer.config.loading import load, load_sibling
from leanformer.config.points import heads_of_rank, points
from leanformer.config.rules import WHOLE_NUMBER
from leanformer.config.sentences import glue, sentences
from leanformer.config.sequences import landmarks, sequences
from leanformer.errors import ConfigError


__all__ = [
    "FAMILIES",
    "IMAGENET_MEAN",
    "IMAGENET_STD",
    "KINDS",
    "Kind",
    "arguments",
    "base",
    "bert",
    "check",
    "common",
    "glue",
    "heads_of_rank",
    "interventions",
    "landmarks",
    "language",
    "load",
    "load_sibling",
    "masked",
    "model",
    "optimizer",
    "points",
    "section",
    "sentences",
    "sequences",
    "softmax",
    "texts",
    "total_steps",
]


@dataclasses.dataclass(frozen=True)
class Kind:
    """Task type: defaults and validation of its configs.

    Attributes:
        name: description of the examples.
        defaults: function of this package that returns a locked config.
        check: validation of the task's keys; raises ConfigError at the first invalid one.
        parts: functions that set the keys, from general to specific; their comments are the help texts.
    """

    name: str
    defaults: Callable[[], ConfigDict]
    check: Callable[[Any], None]
    parts: tuple[Callable[..., ConfigDict], ...] = ()


KINDS = {  # task type, as in config.task
    "images": Kind("images", base, images.check),
    "sequences": Kind("labelled token sequences", sequences, sequences_module.check, (sequences,)),
    "points": Kind("point sets", points, points_module.check, (points,)),
    "language": Kind("texts", language, language_module.check, (texts, language)),
    "masked": Kind("texts with masked tokens", masked, language_module.check_masked, (texts, language, bert, masked)),
    "sentences": Kind(
        "labelled sentences", sentences, sentences_module.check, (texts, language, bert, masked, sentences)
    ),
}


def check(c: Any) -> None:
    """Raise ConfigError at the first invalid key of a config: its value, the problem, the fix."""
    rules.check(c)
    if c.task in KINDS:  # unknown task types are rejected by `tasks.build`
        KINDS[c.task].check(c)
    rules.check_mesh(c)


def total_steps(c: ConfigDict, examples: int | None) -> int:
    """Return the optimizer steps of a whole run over a training split of `examples`; None if the split is infinite.

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


def interval(c: ConfigDict, section: str, examples: int | None) -> int:
    """Return the steps between evaluations, measurements or checkpoints, from `every` or `every_epochs` of a section.

    Args:
        c: config.
        section: "eval", "probe" or "checkpoint".
        examples: number of training examples; None if they are infinite.

    Returns:
        Steps, at least 1 for an interval in epochs; 0 if the config sets neither key.

    Raises:
        ConfigError: the interval is in epochs, and the training data are infinite.
    """
    steps, epochs = c[section].every, c[section].every_epochs
    if not epochs:
        return int(steps)
    if examples is None:
        key = f"{section}.every_epochs"
        raise ConfigError(
            f"{key}={epochs}: the training data are infinite and have no epochs. Set --config.{key}=0 and "
            f"--config.{section}.every."
        )
    return max(1, round(epochs * examples / c.batch_size))


def arguments(text: str, **defaults: Any) -> dict[str, Any]:
    """Parse the argument of a config file, `--config=FILE:depth=8,heads=14`, by the names and types of the defaults.

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
