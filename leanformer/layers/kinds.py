"""Kinds of attention by the names that `model.attention` gives them, with what each takes and what it heeds.

A kind is a module like `multihead.MultiHeadAttention`, whose class says it: `options`, the keys of config.model that it
takes and the type of each; and `masks`, the parts of a `masks.Mask` that it heeds.
"""

import dataclasses
from collections.abc import Callable, Collection, Mapping
from types import MappingProxyType
from typing import Any

from flax import nnx

from leanformer.errors import ConfigError
from leanformer.layers.latent import LatentAttention
from leanformer.layers.masks import check_heeded
from leanformer.layers.multihead import MultiHeadAttention
from leanformer.layers.nystrom import NystromAttention


KINDS = MappingProxyType({"softmax": MultiHeadAttention, "latent": LatentAttention, "nystrom": NystromAttention})


@dataclasses.dataclass(frozen=True)
class AttentionConfig:
    """Settings of the attention in a block.

    Attributes:
        num_heads: N. head_dim: H of queries and keys.
        value_dim: H of values; `head_dim` if None.
        kind: class of the module, one of a family's `attentions`.
        qkv_bias: whether queries, keys and values have biases.
        backend: already resolved ("xla", "cudnn" or "naive").
        options: of the kind, such as `landmarks` for NystromAttention, by name.
    """

    num_heads: int
    head_dim: int
    value_dim: int | None = None
    kind: Callable[..., nnx.Module] = MultiHeadAttention
    qkv_bias: bool = True
    backend: str = "xla"
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def make(self, width: int, **common: Any) -> nnx.Module:
        """Return the module for tokens of a width. `common`: kernel_init, dtype and rngs."""
        sizes = (width, self.num_heads, self.head_dim, self.value_dim)
        return self.kind(*sizes, qkv_bias=self.qkv_bias, backend=self.backend, **common, **self.options)


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
