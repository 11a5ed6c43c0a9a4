"""Sizes of an architecture, per layer."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from leanformer.config.common import listed_per_layer
from leanformer.errors import ConfigError


AXES = ("depth", "width", "num_heads", "head_dim", "mlp_dim")


@dataclasses.dataclass(frozen=True)
class Dimensions:
    """Sizes of an architecture.

    Attributes:
        width: embedding dimension.
        heads: number of heads of each layer.
        head_dim: head dimension of each layer.
        mlp: hidden dimension of the MLP of each layer.
        params: number of parameters, including embeddings and head.
        flops: forward FLOPs per example; None if not known.
    """

    width: int
    heads: tuple[int, ...]
    head_dim: tuple[int, ...]
    mlp: tuple[int, ...]
    params: int
    flops: int | None = None

    @property
    def depth(self) -> int:
        """Number of layers."""
        return len(self.heads)


def model_dimensions(model: Mapping[str, Any], params: int, flops: int | None = None) -> Dimensions:
    """Return the sizes of an architecture by layer.

    Args:
        model: section `model` of a config, with the keys depth, width, num_heads, head_dim and mlp_dim. The last three
            are one number for all layers, or a tuple with one per layer.
        params: number of parameters, for the result.
        flops: forward FLOPs per example, for the result; None if not known.

    Raises:
        ConfigError: a size, or value_dim, has another form, as in a model with stages, or is not set.
    """
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
