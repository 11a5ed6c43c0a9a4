"""Sizes that may differ by layer: one number, one number per layer, or a schedule such as "linear:4-12"."""

import re
from collections.abc import Mapping
from typing import Any

from ml_collections import ConfigDict, FieldReference

from leanformer.errors import ConfigError


PER_LAYER = ("num_heads", "head_dim", "value_dim", "mlp_dim", "num_kv_heads")  # keys of the section model


def split_values(text: str) -> list[str]:
    """Return values, separated by commas outside of parentheses: "4,(4,8)" are two."""
    return re.split(r",(?![^(]*\))", text)


def allow_per_layer(m: ConfigDict) -> ConfigDict:
    """Let the keys PER_LAYER of a section `model` take one number per layer, or a schedule, such as "linear:4-12".

    The section is changed in place and returned. The keys are num_heads, head_dim, value_dim, mlp_dim and num_kv_heads.
    """
    for name in PER_LAYER:
        if name in m:
            _set(m, name, m[name])
    return m


def _set(m: ConfigDict, name: str, value: Any) -> None:
    """Set a key that then takes values of any type."""
    del m[name]  # with the type of its first value
    m[name] = FieldReference(value, field_type=object)


def resolve_schedules(c: ConfigDict) -> None:
    """Replace schedules over layers in a config's section `model`, in place, by one number per layer, or one for all.

    A list of equal numbers, one per layer, also becomes one number. Raises ConfigError if a schedule is invalid, or the
    model has stages.
    """
    depth = c.model.get("depth")
    for name in PER_LAYER:
        sizes = c.model.get(name)
        if isinstance(sizes, str):
            if type(depth) is not int:
                raise ConfigError(
                    f"model.{name}={sizes}: a schedule is over layers, but model.depth={depth}. Set one number per "
                    "stage."
                )
            sizes = expand_schedule(sizes, depth, name)
        if isinstance(sizes, tuple | list) and len(sizes) == depth and len({*sizes}) == 1:
            sizes = sizes[0]
        if sizes != c.model.get(name):
            with c.unlocked():
                _set(c.model, name, sizes)


def listed_per_layer(m: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return {key: numbers} of a section `model` for sizes given per layer; {} for an architecture with stages."""
    several = {name: m[name] for name in PER_LAYER if isinstance(m.get(name), tuple | list)}
    return {name: tuple(sizes) for name, sizes in several.items()} if isinstance(m.get("depth"), int) else {}


def expand_schedule(text: str, depth: int, name: str = "num_heads") -> tuple[int, ...]:
    """Return the numbers of a schedule "linear:FIRST-LAST" over `depth` layers, each rounded to the nearest integer.

    Raises ConfigError, which names the key model.`name`, if the text is no schedule.

    >>> expand_schedule("linear:4-12", 5)
    (4, 6, 8, 10, 12)
    """
    match = re.fullmatch(r"linear:(\d+)-(\d+)", text)
    if match is None or "0" in match.groups():
        raise ConfigError(
            f'model.{name}={text!r}: expected an integer from 1, one per layer such as "(4,8)", or a schedule such as '
            "linear:4-12."
        )
    first, last = map(int, match.groups())
    gaps = max(1, depth - 1)
    return tuple((2 * (first * gaps + (last - first) * i) + gaps) // (2 * gaps) for i in range(depth))
