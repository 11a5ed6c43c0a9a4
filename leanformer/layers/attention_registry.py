"""Registry of attention types by the names of `model.attention`, with their options and supported masks.

A type is a module like `multihead.MultiHeadAttention` with two class attributes: `options`, its keys of config.model
with their types, and `masks`, the parts of a `masks.Mask` that it supports.
"""

import dataclasses
from collections.abc import Callable, Collection, Mapping
from types import MappingProxyType
from typing import Any

from leanformer.errors import ConfigError
from leanformer.layers.latent import LatentAttention
from leanformer.layers.masks import check_supported
from leanformer.layers.multihead import MultiHeadAttention
from leanformer.layers.nystrom import NystromAttention


ATTENTIONS = MappingProxyType({"softmax": MultiHeadAttention, "latent": LatentAttention, "nystrom": NystromAttention})


@dataclasses.dataclass(frozen=True)
class AttentionConfig:
    """Settings of the attention in a block.

    Attributes:
        num_heads: N, number of query heads.
        head_dim: H, dimension of a query and of a key of a head.
        value_dim: H', dimension of a value of a head; `head_dim` if None.
        kind: class of the attention, one of `Family.attentions` of an architecture.
        qkv_bias: True for biases in the query, key and value projections.
        backend: resolved attention backend, "xla", "cudnn" or "naive".
        options: keyword arguments that only this `kind` takes, such as `landmarks` of Nyström attention.
    """

    num_heads: int
    head_dim: int
    value_dim: int | None = None
    kind: Callable[..., MultiHeadAttention] = MultiHeadAttention
    qkv_bias: bool = True
    backend: str = "xla"
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def make(self, width: int, **common: Any) -> MultiHeadAttention:
        """Return a new attention module for tokens of dimension `width`.

        Args:
            width: D, embedding dimension.
            common: further arguments of the module: kernel_init, dtype and rngs.
        """
        sizes = (width, self.num_heads, self.head_dim, self.value_dim)
        return self.kind(*sizes, qkv_bias=self.qkv_bias, backend=self.backend, **common, **self.options)


def options_of(kind: str, kinds: Mapping[str, type[MultiHeadAttention]] = ATTENTIONS, **options: Any) -> dict[str, Any]:
    """Check the options of an attention type, and return those that are set.

    Args:
        kind: name of the attention type.
        kinds: attention types by name.
        options: options by name; None if unset.

    Raises:
        ConfigError: the attention type is unknown, or does not have one of the options.
    """
    if kind not in kinds:
        raise ConfigError(f'model.attention="{kind}": unknown type. Choose one of: {", ".join(kinds)}.')
    options = {name: value for name, value in options.items() if value is not None}
    allowed = kinds[kind].options
    if unknown := [name for name in options if name not in allowed]:
        raise ConfigError(
            f'model.{unknown[0]}={options[unknown[0]]!r}: not supported by the model or model.attention="{kind}"; its '
            f"options are: {', '.join(allowed) or 'none'}. Leave it unset, or choose another attention."
        )
    return options


def check_mask(kind: str, parts: Collection[str], kinds: Mapping[str, type[MultiHeadAttention]] = ATTENTIONS) -> None:
    """Raise ConfigError if the attention type `kinds[kind]` does not support one of these `parts` of a `masks.Mask`."""
    check_supported(f'model.attention="{kind}"', kinds[kind].masks, parts)
