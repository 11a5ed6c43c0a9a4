"""Sizes that may differ by layer: one number, or one number per layer."""

import re
from collections.abc import Mapping
from typing import Any


PER_LAYER = ("num_heads", "head_dim", "value_dim", "mlp_dim", "num_kv_heads")  # keys of the section model


def split_values(text: str) -> list[str]:
    """Return values, separated by commas outside of parentheses: "4,(4,8)" are two."""
    return re.split(r",(?![^(]*\))", text)


def listed_per_layer(m: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return {key: numbers} of a section `model` for sizes given per layer; {} for an architecture with stages."""
    several = {name: m[name] for name in PER_LAYER if isinstance(m.get(name), tuple | list)}
    return {name: tuple(sizes) for name, sizes in several.items()} if isinstance(m.get("depth"), int) else {}
