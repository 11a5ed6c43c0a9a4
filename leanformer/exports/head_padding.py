"""Models with heads padded by zeros to fill the width, for layouts in which num_heads x head_dim is the width."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from ml_collections import ConfigDict

from leanformer.errors import ConfigError
from leanformer.runtime.trees import leaf_names
from leanformer.training import model_setup
from leanformer.training.model_setup import ModelSetup


PADDED = ("query", "key", "value")  # kernels (D, N, H) and biases (N, H); `out` is (N, H, D)


def padded_sizes(m: Mapping[str, Any]) -> tuple[int, int]:
    """Return the smallest number of heads, and their dimension, to which the heads of a model can be padded.

    Neither is below the model's, and their product is its width.

    Args:
        m: section config.model.

    Raises:
        ConfigError: there are none, or the model has other attention.
    """
    heads, head_dim, width = m["num_heads"], m["head_dim"], m["width"]
    unset = ("value_dim", "num_kv_heads", "qk_norm", "rotary", "logit_scale", "temperature")
    plain = m["name"] in ("bert", "gpt", "vit") and m.get("attention", "softmax") == "softmax"
    fitting = (n for n in range(heads, width + 1) if width % n == 0 and width // n >= head_dim) if plain else ()
    number = next(iter(fitting), None)
    if number is None or any(m.get(key) for key in unset):
        raise ConfigError(
            f"--pad_heads: model.num_heads={heads}, model.head_dim={head_dim} cannot be padded to model.width={width}. "
            "It needs softmax attention in a bert, gpt or vit, without further options, that is narrower than the "
            "model. Choose another target: --to=stablehlo or --to=own."
        )
    return number, width // number


def padded_config(c: ConfigDict) -> ConfigDict:
    """Return a copy of a config with num_heads and head_dim from `padded_sizes`. Raises its errors."""
    c = c.copy_and_resolve_references()
    c.unlock()
    c.model.num_heads, c.model.head_dim = padded_sizes(c.model.to_dict())
    return c


def pad_heads(model: ModelSetup, weights: Any) -> tuple[ModelSetup, Any]:
    """Return a model with heads and channels of zeros, so that num_heads x head_dim is the width, and its weights.

    Weights are pairs (parameters, batch statistics), of which the statistics are unchanged.

    It computes the same: added heads have zero values, added channels add nothing to logits, and queries are scaled for
    the other dimension in 1/√head_dim.

    Raises:
        ConfigError: as in `padded_sizes`.
    """
    c, m = padded_config(model.config), model.config.model
    more = (c.model.num_heads - m.num_heads, c.model.head_dim - m.head_dim)
    scale = (c.model.head_dim / m.head_dim) ** 0.5

    def pad(name: str, x: jax.Array) -> jax.Array:
        *parents, part, leaf = ["", *name.split(".")]
        padded = part in PADDED or (part == "out" and leaf == "kernel")
        if not padded or parents[-1:] != ["attention"]:
            return x
        axis = x.ndim - (3 if part == "out" else 2)
        widths = [(0, 0)] * axis + [(0, n) for n in more] + [(0, 0)] * (x.ndim - axis - 2)
        return jnp.pad(x * scale if part == "query" else x, widths)

    params, statistics = weights
    leaves = [pad(name, x) for name, x in zip(leaf_names(params), jax.tree.leaves(params), strict=True)]
    return model_setup.build(c), (jax.tree.unflatten(jax.tree.structure(params), leaves), statistics)
