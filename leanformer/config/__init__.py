"""Configs: keys with their defaults, types and meanings, and rules on their values.

A config consists of `common.Common`, the keys of all tasks, those that a task declares, and the section `model`, whose
keys an architecture declares in its own file (`Keys` in `leanformer/models/vit.py`). A file in `configs/` overrides the
defaults of a task: `base()` for images, `sequences()`, ... Every key can be set on the command line:
`--config.model.num_heads=16`. Library code takes plain keyword arguments instead of a whole config.
"""

import ast
import re
import runpy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from ml_collections import ConfigDict

from leanformer.config import common, declare, rules
from leanformer.config.classification import (
    IMAGENET_MEAN,
    IMAGENET_STD,
    Images,
    Sequences,
    base,
    check_images,
    check_sequences,
    landmarks,
    model,
    sequences,
)
from leanformer.config.points import Points, check_points, heads_of_rank, points
from leanformer.config.texts import (
    Language,
    Masked,
    Sentences,
    check_language,
    check_masked,
    check_sentences,
    glue,
    language,
    masked,
    sentences,
)
from leanformer.errors import ConfigError, LeanformerError


__all__ = ["IMAGENET_MEAN", "IMAGENET_STD", "KINDS", "ConfigDict", "Intervals", "Kind", "arguments", "base", "check"]
__all__ += ["check_keys", "find_file", "format_error", "glue", "heads_of_rank", "intervals", "is_run_only"]
__all__ += ["iterate_keys", "landmarks", "language", "load", "load_function", "load_sibling", "masked", "model"]
__all__ += ["points", "sentences", "sequences", "total_steps"]

PACKAGE = Path(__file__).parents[1]
SHIPPED = next(filter(Path.is_dir, (PACKAGE / "configs", PACKAGE.parent / "configs")), PACKAGE / "configs")
RUN_ONLY_KEYS = ("log_every", "loggers", "hang_seconds", "deterministic", "data.workers", "data.prefetch")
RUN_ONLY_SECTIONS = ("checkpoint.", "probe.", "mesh.", "eval.every", "eval.batch_size")


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


def find_file(name: str, flag: str = "config") -> Path:
    """Return the file of a config: the path `name`, or NAME.py in the current folder, in configs/, or in leanformer.

    Args:
        name: name or path of the config.
        flag: command-line flag whose value is `name`, for messages.

    Raises:
        ConfigError: there is no such file.
    """
    path = Path(name).expanduser()
    for file in (path, *(folder / f"{name}.py" for folder in (Path(), Path("configs"), SHIPPED))):
        if file.is_file():
            return file
    raise ConfigError(f"--{flag}={name}: no such file in {Path.cwd()}, and no config of leanformer has this name.")


def load(name: str, flag: str = "config") -> ConfigDict:
    """Return the config that the function `get_config` of a config file returns.

    Args:
        name: name or path of the file, see `find_file`; or `FILE:ARGUMENT`, with the argument of `get_config`.
        flag: command-line flag whose value is `name`, for messages.

    Raises:
        ConfigError: the file is missing, raises an error, or returns no config.

    >>> c = load("vit_b:depth=7,heads=16")
    >>> c.model.depth, c.model.num_heads
    (7, 16)
    """
    name, colon, argument = name.partition(":")
    file = str(find_file(name, flag))
    try:
        config = runpy.run_path(file)["get_config"](*([argument] if colon else []))
    except LeanformerError:
        raise
    except Exception as error:  # the code of a config file can raise anything
        raise ConfigError(f"The config {file} has an error. {format_error(error)}") from error
    if not isinstance(config, ConfigDict):
        raise ConfigError(f"get_config() of {file} returned {type(config).__name__}, expected a ConfigDict.")
    return config


def load_function(name: str, function: str) -> Callable[..., Any] | None:
    """Return a function of a config file beside `get_config`, such as `make_loggers`; None if it has none.

    Args:
        name: name or path of the file, see `find_file`; or `FILE:ARGUMENT`.
        function: name of the function.
    """
    return runpy.run_path(str(find_file(name.partition(":")[0]))).get(function)


def format_error(error: BaseException) -> str:
    """Return an error of ConfigDict, such as an unknown key, or of a config file, as one line of text."""
    while error.args and isinstance(error.args[0], BaseException):
        error = error.args[0]
    text = " ".join(str(error.args[0] if isinstance(error, KeyError) and error.args else error).split())
    if typo := re.search(r'Did you mean "(.+)" instead of "(.+)"\?', text):
        return f'There is no key "{typo[2]}". Did you mean "{typo[1]}"?'
    if key := re.match(r'Key "(.+?)" does not exist|.*Attempting to lookup: (\S+)', text):
        return f'There is no key "{key[1] or key[2]}".'
    if isinstance(error, KeyError):
        return f"There is no key {text}."
    return f"{type(error).__name__}: {text}"


def load_sibling(file: str, name: str, *arguments: str) -> ConfigDict:
    """Return the config of another file in the same folder, for config files that override it.

    Args:
        file: path of the calling config file, `__file__`.
        name: name of the other file without .py.
        arguments: argument of its `get_config`; at most one.

    Raises:
        ConfigError: the file is missing, raises an error, or returns no config.
    """
    return load(":".join([str(Path(file).with_name(f"{name}.py")), *arguments]))


def is_run_only(key: str) -> bool:
    """Return True if a dotted key changes only the speed of a run and its saved files, no result."""
    return key in RUN_ONLY_KEYS or key.startswith(RUN_ONLY_SECTIONS)


def iterate_keys(tree: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield pairs (dotted key, value) of a config, with `prefix` before each key; an empty section is a value."""
    for name, value in tree.items():
        if isinstance(value, ConfigDict) and len(value):
            yield from iterate_keys(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
