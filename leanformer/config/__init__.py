"""Configs: every key documented where its default stands, and `check`, which refuses what cannot work before any device
is touched.

A config is put together from `common()`, the keys of all tasks, and what a task adds; a file in `configs/` is a
difference against the defaults of a task: `base()` for images, `sequences()`, ... On the command line every key can be
set: `--config.model.num_heads=16`. Library code never sees this tree whole; it gets plain keyword arguments.
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
from leanformer.config.common import common, levers, section, softmax
from leanformer.config.images import FAMILIES, IMAGENET_MEAN, IMAGENET_STD, base, model
from leanformer.config.language import bert, language, masked, texts
from leanformer.config.loading import beside, load
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
    "beside",
    "check",
    "common",
    "glue",
    "heads_of_rank",
    "landmarks",
    "language",
    "levers",
    "load",
    "masked",
    "model",
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
    """What the configs of a kind of task start from, and the rules that they keep.

    Attributes:
        name: of its examples, in words.
        defaults: a function of this package that returns a locked config.
        check: raises ConfigError on the first rule that a config breaks, besides those of all.
        parts: the functions that set its keys, later ones the more special; their comments say what keys mean.
    """

    name: str
    defaults: Callable[[], ConfigDict]
    check: Callable[[Any], None]
    parts: tuple[Callable[..., ConfigDict], ...] = ()


KINDS = {  # by the word of config.task
    "images": Kind("images", base, images.check),
    "sequences": Kind("token sequences with a label", sequences, sequences_module.check, (sequences,)),
    "points": Kind("sets of points", points, points_module.check, (points,)),
    "language": Kind("texts", language, language_module.check, (texts, language)),
    "masked": Kind("texts with masked tokens", masked, language_module.check_masked, (texts, language, bert, masked)),
    "sentences": Kind(
        "sentences with a label", sentences, sentences_module.check, (texts, language, bert, masked, sentences)
    ),
}


def check(c: Any) -> None:
    """Raises ConfigError on the first rule that `c` breaks: what was asked, what was found, what to do."""
    rules.check(c)
    if c.task in KINDS:  # a kind that is not known here refuses for itself
        KINDS[c.task].check(c)
    rules.check_mesh(c)


def total_steps(c: ConfigDict, examples: int | None) -> int:
    """Optimizer steps of the whole run over a training split of `examples`, None of one without an end.

    Raises:
        ConfigError: the run is measured in epochs, and there are none; or they are more than an int32 counts.
    """
    tokens = c.get("total_tokens", 0)
    if examples is None and not (c.total_steps or tokens):
        raise ConfigError(
            f"total_epochs={c.total_epochs}, and the training data have no end. Set --config.total_epochs=0 and "
            "--config.total_steps."
        )
    wanted = tokens / c.model.max_length if tokens else c.total_epochs * (examples or 0)
    steps = c.total_steps or max(1, round(wanted / c.batch_size))
    if steps > WHOLE_NUMBER:
        said = f"total_tokens={tokens}" if tokens else f"total_epochs={c.total_epochs} of {examples:,} examples"
        raise ConfigError(f"{said} are {steps:.2g} steps: too many.")
    return steps


def arguments(text: str, **defaults: Any) -> dict[str, Any]:
    """Parses a config file's argument, `--config=FILE:depth=8,heads=14`, with the defaults' names and types, of numbers
    or words.

    Raises:
        ConfigError: a name that is not among the defaults, or a value of another type.
    """
    found = dict(defaults)
    for part in filter(None, text.split(",")):
        name, _, value = part.partition("=")
        if name not in defaults:
            raise ConfigError(f"The config takes {', '.join(defaults)} as arguments, found {name!r} in {text!r}.")
        kind = type(defaults[name])
        try:
            found[name] = kind(value)
        except ValueError as error:
            raise ConfigError(f"{name}={value!r} in {text!r} is not of the type {kind.__name__}.") from error
    return found
