"""Configs: every key documented where its default stands, and `check`, which refuses what cannot work before any device
is touched.

A file in `configs/` is a difference against the defaults of a kind of task: `base()` for images, `sequences()`, ... On
the command line every key can be set: `--config.model.num_heads=16`. Library code never sees this tree whole; it gets
plain keyword arguments.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

from ml_collections import ConfigDict

from leanformer.config import images, rules
from leanformer.config import language as texts
from leanformer.config import masked as of_masked
from leanformer.config import points as of_points
from leanformer.config import sentences as of_sentences
from leanformer.config import sequences as labelled
from leanformer.config.images import FAMILIES, IMAGENET_MEAN, IMAGENET_STD, base, model, softmax
from leanformer.config.language import language
from leanformer.config.levers import levers
from leanformer.config.loading import beside, load
from leanformer.config.masked import masked
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
    "beside",
    "check",
    "glue",
    "heads_of_rank",
    "landmarks",
    "language",
    "levers",
    "load",
    "masked",
    "model",
    "points",
    "sentences",
    "sequences",
    "softmax",
    "total_steps",
]


@dataclasses.dataclass(frozen=True)
class Kind:
    """What the configs of a kind of task start from, and the rules that they keep.

    Attributes:
        name: of its examples, in words.
        defaults: a locked config; a function of this package, in which comments say what keys mean.
        check: raises ConfigError on the first rule that a config breaks, besides those of all.
        on: the defaults that these begin from, where they are of another kind.
    """

    name: str
    defaults: Callable[[], ConfigDict]
    check: Callable[[Any], None]
    on: tuple[Callable[[], ConfigDict], ...] = ()


KINDS = {  # by the word of config.task
    "images": Kind("images", base, images.check),
    "sequences": Kind("token sequences with a label", sequences, labelled.check),
    "points": Kind("sets of points", points, of_points.check),
    "language": Kind("texts", language, texts.check),
    "masked": Kind("texts with masked tokens", masked, of_masked.check, on=(language,)),
    "sentences": Kind("sentences with a label", sentences, of_sentences.check, on=(language, masked)),
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
