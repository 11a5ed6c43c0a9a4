"""What a family of models takes, read from the signature of its constructor: keys of config.model, their kinds, sizes.

Of attention it takes the kinds in its `attentions` (see `kinds`), and what these take besides.
"""

import inspect
import math
import types
from collections.abc import Mapping, Sequence
from typing import Any, get_args, get_origin

from leanformer.errors import ConfigError
from leanformer.layers.kinds import check_mask, options_of


GIVEN = ("self", "rngs", "dtype")  # by whoever builds a model, not by config.model
WORDS = {
    int: "a whole number from 1",
    float: "a finite number",
    bool: "True or False",
    str: "a word",
    types.NoneType: "None",
    Sequence: "a tuple of whole numbers from 1, one a stage",
    tuple: "a pair of whole numbers from 1",
}


def check(name: str, model: type, given: Mapping[str, Any]) -> None:
    """Raises ConfigError on the first argument of the family `name` that is missing, unknown, or not of its kind."""
    takes = _keywords(model)
    missing = [key for key, p in takes.items() if p.default is p.empty and key not in given]
    if missing:
        raise ConfigError(
            f'model.name="{name}" needs model.{", model.".join(missing)} as well. Start from a config of that family.'
        )
    for key in given.keys() & takes.keys():
        _check_kind(key, given[key], takes[key].annotation)
    others = {key: value for key, value in given.items() if key not in takes}
    kind = given.get("attention", takes["attention"].default)
    for key, value in options_of(kind, model.attentions, **others).items():
        _check_kind(key, value, model.attentions[kind].options[key], least=0)
    check_mask(kind, model.mask_parts(given), model.attentions)


def _keywords(model: type) -> dict[str, inspect.Parameter]:
    parameters = inspect.signature(model.__init__).parameters.values()
    return {p.name: p for p in parameters if p.kind is not p.VAR_KEYWORD and p.name not in GIVEN}


def _check_kind(key: str, value: Any, annotation: Any, least: int = 1) -> None:
    wanted = _alternatives(annotation)
    if any(_fits(value, kind, least) for kind in wanted):
        return
    if isinstance(value, int) and not isinstance(value, bool) and int in wanted:
        raise ConfigError(f"model.{key}={value} must be at least {least}.")
    words = " or ".join(WORDS[get_origin(kind) or kind] for kind in wanted)
    raise ConfigError(f"model.{key}={value!r}: wanted {words}.")


def _alternatives(annotation: Any) -> tuple[Any, ...]:
    return get_args(annotation) if isinstance(annotation, types.UnionType) else (annotation,)


def _fits(value: Any, kind: Any, least: int) -> bool:
    if kind is int:
        return isinstance(value, int) and not isinstance(value, bool) and value >= least
    if kind is float:
        return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if get_origin(kind) in (Sequence, tuple):
        several = isinstance(value, tuple | list) and len(value) > 0 and all(_fits(x, int, least) for x in value)
        return several and (get_origin(kind) is Sequence or len(value) == len(get_args(kind)))
    return isinstance(value, kind)
