"""Kinds of attention by the names that `model.attention` gives them, with what each takes and what it heeds.

A kind is a module like `multihead.MultiHeadAttention`, whose class says it: `options`, the keys of config.model that it
takes and the type of each; and `masks`, the parts of a `masks.Mask` that it heeds.
"""

from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import Any

from flax import nnx

from leanformer.errors import ConfigError
from leanformer.layers.latent import LatentAttention
from leanformer.layers.masks import check_heeded
from leanformer.layers.multihead import MultiHeadAttention
from leanformer.layers.nystrom import NystromAttention


KINDS = MappingProxyType({"softmax": MultiHeadAttention, "latent": LatentAttention, "nystrom": NystromAttention})


def make(
    kind: str,
    width: int,
    num_heads: int,
    head_dim: int,
    value_dim: int | None = None,
    *,
    options: Mapping[str, Any] = MappingProxyType({}),
    kinds: Mapping[str, type[nnx.Module]] = KINDS,
    **common: Any,
) -> nnx.Module:
    """The attention that a model's `attention=` names.

    Args:
        options: of that kind, such as `landmarks`; None leaves an option at its default.
        kinds: by name, those of the family.
        common: what every kind of the family takes, such as `backend` and `rngs`.

    Raises:
        ConfigError: as `options_of`.
    """
    given = options_of(kind, kinds, **options)
    return kinds[kind](width, num_heads, head_dim, value_dim, **common, **given)


def options_of(kind: str, kinds: Mapping[str, type[nnx.Module]] = KINDS, **options: Any) -> dict[str, Any]:
    """Those of the options that are given.

    Raises:
        ConfigError: an unknown kind, or an option that it does not have.
    """
    if kind not in kinds:
        raise ConfigError(f'model.attention="{kind}" is not a kind of attention here. Known: {", ".join(kinds)}.')
    options = {name: value for name, value in options.items() if value is not None}
    known = kinds[kind].options
    if unknown := [name for name in options if name not in known]:
        raise ConfigError(
            f'model.{unknown[0]}={options[unknown[0]]!r}: neither the model nor model.attention="{kind}" takes it; the '
            f"attention takes {', '.join(known) or 'none'}. Leave it out, or choose another attention."
        )
    return options


def check_mask(kind: str, parts: Collection[str], kinds: Mapping[str, type[nnx.Module]] = KINDS) -> None:
    """Raises ConfigError where a family hides keys that a kind of attention would let queries see."""
    check_heeded(f'model.attention="{kind}"', kinds[kind].masks, parts)
