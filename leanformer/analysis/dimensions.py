"""Sizes of an architecture, per layer."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from leanformer.config.per_layer import listed_per_layer
from leanformer.errors import ConfigError


AXES = ("depth", "width", "num_heads", "head_dim", "mlp_dim")


@dataclasses.dataclass(frozen=True)
class Dimensions:
    """Sizes of an architecture."""

    width: int  # embedding dimension
    heads: tuple[int, ...]  # number of heads of each layer
    head_dim: tuple[int, ...]  # head dimension of each layer
    mlp: tuple[int, ...]  # hidden dimension of the MLP of each layer
    params: int
    flops: int | None = None  # forward FLOPs per example, None if not known

    @property
    def depth(self) -> int:
        return len(self.heads)


def model_dimensions(model: Mapping[str, Any], params: int, flops: int | None = None) -> Dimensions:
    """Return the sizes of a config's `model` by layer. Raises ConfigError if it has stages, or a size is unset."""
    several = listed_per_layer(model)
    uneven = [axis for axis in AXES if axis not in several and type(model.get(axis)) is not int]
    if uneven or (type(model.get("value_dim") or 1) is not int and "value_dim" not in several):
        values = ", ".join(f"{axis}={model.get(axis)}" for axis in uneven or ["value_dim"])
        raise ConfigError(
            f"The model {model.get('name')} has {values}. It must be one number, or a size of layers one per layer."
        )
    depth, width = model["depth"], model["width"]
    heads, head_dim, mlp = (several.get(axis) or (model[axis],) * depth for axis in AXES[2:])
    return Dimensions(width, heads, head_dim, mlp, params, flops)
