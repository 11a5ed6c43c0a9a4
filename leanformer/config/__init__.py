"""Configs: keys with their defaults, types and meanings, and rules on their values.

A config has the keys of all tasks (`common.Common`), the keys of its task, and the section `model`, whose keys an
architecture declares in its own file. A file in `configs/` overrides the defaults of a task; so can the command line.
"""

import ast
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from ml_collections import ConfigDict

from leanformer.config import arrays, common, declare, rules, texts
from leanformer.config.arrays import IMAGENET_MEAN, IMAGENET_STD, base, heads_of_rank, model, points, sequences
from leanformer.config.attention import landmarks
from leanformer.config.declare import iterate_keys
from leanformer.config.texts import glue, language, masked, sentences
from leanformer.errors import ConfigError


__all__ = ["IMAGENET_MEAN", "IMAGENET_STD", "KINDS", "ConfigDict", "Intervals", "Kind", "arguments", "base", "check"]
__all__ += ["check_keys", "find_file", "glue", "heads_of_rank", "intervals", "is_run_only"]
__all__ += ["iterate_keys", "landmarks", "language", "load", "load_sibling", "masked", "model"]
__all__ += ["points", "run_file", "sentences", "sequences", "total_steps"]

PACKAGE = Path(__file__).parents[1]
SHIPPED = next(filter(Path.is_dir, (PACKAGE / "configs", PACKAGE.parent / "configs")), PACKAGE / "configs")
RUN_ONLY_KEYS = ("log_every", "loggers", "hang_seconds", "deterministic", "data.workers", "data.prefetch")
RUN_ONLY_KEYS += ("model.remat", "model.unroll", "logits_at_once")
RUN_ONLY_SECTIONS = ("checkpoint.", "probe.", "mesh.", "eval.every", "eval.batch_size", "eval.more")


class Kind(NamedTuple):
    """Task type: keys, defaults and rules of its configs."""

    name: str  # description of the examples
    defaults: Callable[[], ConfigDict]
    keys: Any  # declaration of the keys
    check: Callable[[Any], None] = lambda c: None  # raises ConfigError at the first value against the task's rules


KINDS = {  # task type, as in config.task
    "images": Kind("images", base, arrays.Images, arrays.check_images),
    "sequences": Kind("labelled token sequences", sequences, arrays.Sequences, arrays.check_sequences),
    "points": Kind("point sets", points, arrays.Points, arrays.check_points),
    "language": Kind("texts", language, texts.Language),
    "masked": Kind("texts with masked tokens", masked, texts.Masked),
    "sentences": Kind("labelled sentences", sentences, texts.Sentences, texts.check_sentences),
}


def check_keys(c: Any) -> None:
    """Raise ConfigError if a key of the task is missing or has another type; `models.check` checks `model`."""
    declare.check(c, KINDS[c.task].keys if c.task in KINDS else common.Common)  # `build_task` rejects unknown tasks


def check(c: Any) -> None:
    """Raise ConfigError at the first value against the rules: those that need neither model nor data nor devices."""
    rules.check(c)
    if c.task in KINDS:
        KINDS[c.task].check(c)


class Intervals(NamedTuple):
    """Length of a run, and intervals of its events, in optimizer steps."""

    total: int  # length of the run
    log: int  # between training records
    eval: dict[str, int]  # by name in `eval.more`, "" for `data.eval_split`; 0: only at the end
    probe: int  # between measurements of conditioning; 0: never
    checkpoint: int  # 0: only at the end


def total_steps(c: ConfigDict, examples: int | None) -> int:
    """Return the steps of a whole run, from the number of training examples; None if they are infinite."""
    tokens = c.get("total_tokens", 0)
    rules.require(
        examples is not None or bool(c.total_steps or tokens),
        f"total_epochs={c.total_epochs}: the training data are infinite. Pass --config.total_steps=N and "
        "--config.total_epochs=0.",
    )
    batches = tokens / c.model.max_length if tokens else c.total_epochs * (examples or 0)
    return c.total_steps or max(1, round(batches / c.batch_size))


def intervals(c: ConfigDict, examples: int | None) -> Intervals:
    """Return the length and the intervals of a run; `every_epochs` becomes at least one step."""
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


def find_file(name: str) -> Path:
    """Return the file of a config: a path, or NAME.py in this folder, in configs/, or among the shipped configs."""
    path = Path(name).expanduser()
    for file in (path, *(folder / f"{name}.py" for folder in (Path(), Path("configs"), SHIPPED))):
        if file.is_file():
            return file
    raise ConfigError(f"{name}: no such config in {Path.cwd()}, and leanformer has none of this name.")


def load(name: str) -> ConfigDict:
    """Return the config that the function `get_config` of a config file returns.

    Args:
        name: path of the file, or its name without .py, looked up in the current folder, in `configs/`, and among the
            configs that ship with leanformer; then optionally a colon and the argument of `get_config`.

    Raises:
        ConfigError: there is no such file. Errors of its code are not caught.

    >>> c = load("vit_b:depth=7,heads=16")
    >>> c.model.depth, c.model.num_heads
    (7, 16)
    """
    _, colon, argument = name.partition(":")
    return run_file(name)["get_config"](*([argument] if colon else []))


def run_file(name: str) -> dict[str, Any]:
    """Return what a config file defines, by name; the argument after a colon is ignored."""
    return runpy.run_path(str(find_file(name.partition(":")[0])))


def load_sibling(file: str, name: str, *arguments: str) -> ConfigDict:
    """Return the config NAME.py beside `file`, the `__file__` of a config file that overrides it."""
    return load(":".join([str(Path(file).with_name(f"{name}.py")), *arguments]))


def is_run_only(key: str) -> bool:
    """Return True if a dotted key changes only speed, memory, rounding and saved files of a run, no result."""
    return key in RUN_ONLY_KEYS or key.startswith(RUN_ONLY_SECTIONS)
