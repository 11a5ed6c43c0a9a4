"""Model architectures by name: `build("vit", ...)` returns a `leanformer.models.vit.Model`."""

import importlib
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from leanformer.config.architectures import keys_of
from leanformer.layers.model_base import Family


def find_class(name: str) -> type[Family]:
    """Return the `Model` class of an architecture, such as "vit". Raises ConfigError if the name is unknown."""
    keys_of(name)
    return importlib.import_module(f"{__name__}.{name}").Model


def check(name: str, **arguments: Any) -> None:
    """Raise ConfigError if keys of config.model are missing, unknown, of another type, or sizes below 1."""
    find_class(name).parse(arguments)


def build(name: str, *, rngs: nnx.Rngs, dtype: DTypeLike = jnp.float32, **arguments: Any) -> Family:
    """Build a model from the name of its architecture and the keys of config.model, with random weights.

    Raises ConfigError if the name is unknown, or an argument is missing or invalid.

    Args:
        name: architecture, a module of leanformer/models.
        rngs: keys of the weights.
        dtype: dtype of the activations.
        arguments: values of keys of config.model.

    >>> sizes = {"width": 8, "depth": 2, "num_heads": 4, "head_dim": 3, "mlp_dim": 16}
    >>> images = {"image_size": 8, "patch_size": 4, "num_classes": 5, "channels": 3}
    >>> model = build("vit", **sizes, **images, rngs=nnx.Rngs(0))
    >>> model(jnp.zeros((1, 8, 8, 3)))[0].shape
    (1, 5)
    """
    return find_class(name).from_section(arguments, dtype=dtype, rngs=rngs)
