"""Configs: keys with their defaults, types and meanings, and rules on their values.

A config consists of `common.Common`, the keys of all tasks, those that a task declares, and the section `model`, whose
keys an architecture declares in its own file (`Keys` in `leanformer/models/vit.py`). A file in `configs/` overrides the
defaults of a task: `base()` for images, `sequences()`, ... Every key can be set on the command line:
`--config.model.num_heads=16`. Library code takes plain keyword arguments instead of a whole config.
"""

import ast
from collections.abc import Callable
from typing import Any, NamedTuple

from ml_collections import ConfigDict

from leanformer.config import common, declare, rules
from leanformer.config.images import IMAGENET_MEAN, IMAGENET_STD, Images, base, check_images, model
from leanformer.config.language import Language, Masked, check_language, check_masked, language, masked
from leanformer.config.loading import load, load_sibling
from leanformer.config.points import Points, check_points, heads_of_rank, points
from leanformer.config.sentences import Sentences, check_sentences, glue, sentences
from leanformer.config.sequences import Sequences, check_sequences, landmarks, sequences


__all__ = ["IMAGENET_MEAN", "IMAGENET_STD", "KINDS", "ConfigDict", "Intervals", "Kind", "arguments", "base", "check"]
__all__ += ["check_keys", "glue", "heads_of_rank", "intervals", "landmarks", "language", "load", "load_sibling"]
__all__ += ["masked", "model", "points", "sentences", "sequences", "total_steps"]


class Kind(NamedTuple):
    """Task type: keys, defaults and rules of its configs.

    Attributes:
        name: description of the examples.
        defaults: function of this package that returns the locked config with the default of each key.
        keys: declaration of the keys.
        check: function that raises ConfigError at the first invalid value of the task's keys in a config.
    """

    name: str
    defaults: Callable[[], ConfigDict]
    keys: Any
    check: Callable[[Any], None]


KINDS = {  # task type, as in config.task
    "images": Kind("images", base, Images, check_images),
    "sequences": Kind("labelled token sequences", sequences, Sequences, check_sequences),
    "points": Kind("point sets", points, Points, check_points),
    "language": Kind("texts", language, Language, check_language),
    "masked": Kind("texts with masked tokens", masked, Masked, check_masked),
    "sentences": Kind("labelled sentences", sentences, Sentences, check_sentences),
}


def check_keys(c: Any) -> None:
    """Raise ConfigError if a config lacks a key of its task, or a value has another type than declared.

    The keys of `model` are checked by the architecture, `models.check`. For an unknown task (rejected later by
    `tasks.build`), only the keys common to all tasks are checked.
    """
    declare.check(c, KINDS[c.task].keys if c.task in KINDS else common.Common)


def check(c: Any) -> None:
    """Raise ConfigError at the first value against the rules: those that need neither model nor data nor devices."""
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
    rules.require(
        examples is not None or bool(c.total_steps or tokens),
        f"total_epochs={c.total_epochs}: the training data are infinite. Set total_steps instead, and total_epochs=0.",
    )
    batches = tokens / c.model.max_length if tokens else c.total_epochs * (examples or 0)
    steps = c.total_steps or max(1, round(batches / c.batch_size))
    rules.require(steps <= rules.WHOLE_NUMBER, f"{steps:.2g} steps exceed the limit of {rules.WHOLE_NUMBER:,}.")
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
        epochs = c[section].every_epochs
        rules.require(
            not epochs or examples is not None,
            f"{section}.every_epochs={epochs}: the training data are infinite. Set {section}.every instead.",
        )
        steps[section] = max(1, round(epochs * (examples or 0) / c.batch_size)) if epochs else int(c[section].every)
    splits = {"": steps["eval"]} | {name: more.every for name, more in c.eval.more.items()}
    return Intervals(total, c.log_every, splits, steps["probe"], steps["checkpoint"])


def arguments(text: str, **defaults: Any) -> dict[str, Any]:
    """Return `defaults` with the values that a config file's argument sets, as in `--config=FILE:depth=8,heads=14`.

    Args:
        text: argument after the colon; "" sets nothing.
        defaults: name and default of each value, a number, True, False, None or a text. The result has its type; a
            value without a default (None) is read as a Python literal.

    Raises:
        ConfigError: a name is not among the defaults, or a value has another type.

    >>> arguments("depth=8,heads=14,tied=False", depth=12, heads=12, tied=True)
    {'depth': 8, 'heads': 14, 'tied': False}
    """
    values = dict(defaults)
    for name, _, value in (part.partition("=") for part in text.split(",") if part):
        rules.require(name in defaults, f"Unknown argument {name!r} in {text!r}. Choose from: {', '.join(defaults)}.")
        kind = type(defaults[name])
        try:
            values[name] = value if kind is str else ast.literal_eval(value)
        except (ValueError, SyntaxError):
            values[name] = value
        fits = defaults[name] is None or declare.fits(values[name], kind)
        rules.require(fits, f"{name}={value!r} in {text!r} is not of type {kind.__name__}.")
    return values
