"""BERT: an encoder that tells masked tokens, or a classifier of texts, with heads, head width, depth and MLP free.

Embeddings of tokens, positions and types, a norm, blocks that see the whole text, and on top one of two heads. By its
defaults it is BERT as published (Devlin et al. 2019), post-norm; by its options the one of Cramming (Geiping &
Goldstein 2023), which Leaner Transformers (Table 1) trades layers of for heads: pre-norm, a gated MLP, no biases, fixed
sinusoids of a learned size, no types, no transform before the tied head.

Weights start normal with 0.02, biases from zero. Dropout is in the MLP's hidden layer too, where published ones have
none, and in attention weights, where these have it, by `attention_dropout`.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int, Key

from leanformer.errors import ConfigError
from leanformer.layers.attention import normal, times_weights
from leanformer.layers.blocks import BlockConfig
from leanformer.layers.context import Context, Tap
from leanformer.layers.dropping import dropout
from leanformer.layers.families import Family
from leanformer.layers.masks import Mask
from leanformer.layers.mlp import ACTIVATIONS
from leanformer.layers.pooling import mean_pool
from leanformer.layers.positions import check_length, places, sinusoids
from leanformer.layers.stack import Stack


class Model(Family):
    """BERT: without `num_classes` its outputs are logits of tokens, else of classes, or numbers of a regression.

    Args:
        vocabulary: V, one more than the largest token.
        max_length: most tokens of a row.
        positions: "learned", one vector each of `max_length`; "sinusoidal", fixed, times one learned number that starts
            from 1/√D; "none", where the attention's `rotary` tells them apart.
        types: of tokens, such as 2 for the first and the second text of a pair; None for none.
        packed: whether rows hold several documents, told apart by segments, none of which sees another.
        transform: whether a dense layer, the activation and a norm come before the head that tells tokens, which is the
            token embeddings.
        head_bias: of that head.
        num_classes: outputs of a classifier, 1 of a regression, instead of the head that tells tokens.
        pool: what a classifier reads: "first" token, or the "mean" of the real ones.
        pooler_dim: width of a dense layer with tanh between that and the classifier; None for none.
        blocks: settings of the blocks, "post_norm" among them: without it there is one more norm at the end. All norms
            are as theirs, the transform has their activation; embeddings and what the classifier reads their dropout.

    Raises:
        ConfigError: words that are not known, or parts of a head that the model has not.
    """

    # Exempt from weight decay, besides biases and norms.
    no_decay = ("pos_embed", "pos_scale", "type_embed", "head_bias", "gamma1", "gamma2")
    classifiers = ("head", "pooler", "transform", "transform_norm", "head_bias")
    bottom_up = (("embed", "pos_embed", "pos_scale", "type_embed", "embed_norm"), ("blocks",))  # see rates.BottomUp
    takes = MappingProxyType(
        {
            **{"norm": "layernorm", "epsilon": 1e-12, "post_norm": True, "activation": "gelu", "gated": False},
            **{
                "mlp_bias": True,
                "mlp_sigma_reparam": None,
                "layer_scale": None,
            },
            **{"qkv_bias": True, "dropout": 0.0},
        }
    )

    @classmethod
    def mask_parts(cls, arguments: Mapping[str, Any]) -> tuple[str, ...]:
        """See `families.Family`."""
        return ("segments",) if arguments.get("packed", False) else ("lengths",)

    def __init__(
        self,
        *,
        vocabulary: int,
        max_length: int,
        positions: str = "learned",
        types: int | None = None,
        packed: bool = False,
        transform: bool = False,
        head_bias: bool = False,
        num_classes: int | None = None,
        pool: str = "first",
        pooler_dim: int | None = None,
        blocks: BlockConfig,
        rngs: nnx.Rngs,
    ):
        _check_head(num_classes, pool, pooler_dim=pooler_dim, transform=transform, head_bias=head_bias)
        if positions not in ("learned", "sinusoidal", "none"):
            raise ConfigError(
                f'model.positions="{positions}": choose "learned", "sinusoidal", or "none" with model.rotary.'
            )
        self.max_length, self.types, self.packed, self.pool = max_length, types, packed, pool
        self.num_classes, self.dropout, self.dtype, width = num_classes, blocks.dropout, blocks.dtype, blocks.width
        self.activation = blocks.mlp.activation

        def linear(inputs: int, outputs: int) -> nnx.Linear:
            common = {"kernel_init": normal, "dot_general": times_weights, "dtype": blocks.dtype, "rngs": rngs}
            return nnx.Linear(inputs, outputs, **common)

        self.embed = nnx.Param(normal(rngs.params(), (vocabulary, width)))
        self.pos_embed = nnx.Param(normal(rngs.params(), (max_length, width))) if positions == "learned" else None
        self.pos_scale = nnx.Param(jnp.full((), width**-0.5)) if positions == "sinusoidal" else None
        self.type_embed = nnx.Param(normal(rngs.params(), (types, width))) if types else None
        self.embed_norm = blocks.make_norm(rngs)
        self.blocks = Stack.from_config(blocks, rngs=rngs)
        self.norm = None if blocks.post_norm else blocks.make_norm(rngs)
        self.transform, self.transform_norm = (
            (linear(width, width), blocks.make_norm(rngs)) if transform else (None, None)
        )
        self.head_bias = nnx.Param(jnp.zeros(vocabulary)) if head_bias else None
        self.pooler = linear(width, pooler_dim) if pooler_dim else None
        self.head = linear(pooler_dim or width, num_classes) if num_classes else None

    def __call__(
        self,
        tokens: Int[Array, "b t"],
        lengths: Int[Array, "b"] | None = None,
        types: Int[Array, "b t"] | None = None,
        segments: Int[Array, "b t"] | None = None,
        *,
        key: Key[Array, "b"] | None = None,
        tap: Tap | None = None,
    ) -> tuple[Float[Array, "b *t v"], Any]:
        """Logits (B, T, V), or of classes (B, V), and {"blocks": the tap's results stacked over layers}.

        Args:
            tokens: padded at the end to a common length.
            lengths: real tokens of each row, at least 1; all if None.
            types: of tokens, under `types`; all 0 if None.
            segments: of packed rows, which document each token is of; positions start from 0 in each.
            key: one an example; means training and switches dropout and drop path on.

        Raises:
            ConfigError: longer rows than the model has positions for, types where it has none, or lengths of packed
                rows, whose padding is a segment.
        """
        last = None
        if key is not None and self.num_classes:
            key, last = jnp.moveaxis(jax.vmap(jax.random.split)(key), 1, 0)
        x, taps = self.hidden(tokens, lengths, types, segments, key=key, tap=tap)
        if self.num_classes:
            x = self._pooled(x, lengths)
            x = x if self.pooler is None else jnp.tanh(self.pooler(x))
            return self.head(dropout(x, self.dropout, last)), taps
        kernel, bias = self.unembedding()
        logits = jnp.einsum("btd,dv->btv", self.decoded(x), kernel.astype(x.dtype))
        return logits if bias is None else logits + bias.astype(x.dtype)[None, None], taps

    def hidden(
        self,
        tokens: Int[Array, "b t"],
        lengths: Int[Array, "b"] | None = None,
        types: Int[Array, "b t"] | None = None,
        segments: Int[Array, "b t"] | None = None,
        *,
        key: Key[Array, "b"] | None = None,
        tap: Tap | None = None,
    ) -> tuple[Float[Array, "b t d"], Any]:
        """What both heads read, and the taps, as `__call__`. It is no zero where tokens are padding."""
        check_length(tokens.shape[1], self.max_length)
        if lengths is not None and segments is not None:
            raise ConfigError("Rows with segments have no lengths: their padding is a segment of its own.")
        where = places(tokens, segments)
        x = self._embedded(tokens, types, where)
        if key is not None:
            key, embedding = jnp.moveaxis(jax.vmap(jax.random.split)(key), 1, 0)
            x = dropout(x, self.dropout, embedding)
        mask = Mask(lengths=lengths, segments=segments)
        x, taps = self.blocks(x, Context(key=key, tap=tap, mask=mask, positions=where))
        return x if self.norm is None else self.norm(x), {"blocks": taps}

    def decoded(self, x: Float[Array, "b t d"]) -> Float[Array, "b t d"]:
        """What logits of tokens are products with, of any of the places in `hidden`."""
        if self.transform is None:
            return x
        return self.transform_norm(ACTIVATIONS[self.activation](self.transform(x)))

    def unembedding(self) -> tuple[Float[Array, "d v"], Float[Array, "v"] | None]:
        """The matrix and the bias between `decoded` and logits of tokens."""
        return self.embed[...].T, None if self.head_bias is None else self.head_bias[...]

    def _embedded(
        self, tokens: Int[Array, "b t"], types: Int[Array, "b t"] | None, where: Int[Array, "#b t"]
    ) -> Float[Array, "b t d"]:
        """In float32 up to the norm: a token's gradients add up in it too."""
        x = self.embed[...][tokens]
        if self.pos_embed is not None:
            x += self.pos_embed[...][where]
        if self.pos_scale is not None:
            x += self.pos_scale[...] * sinusoids(where, x.shape[2]).astype(x.dtype)
        if self.type_embed is not None:
            x += self.type_embed[...][jnp.zeros_like(tokens) if types is None else types]
        elif types is not None:
            raise ConfigError("Tokens are given types, and the model has none. Set model.types, or leave them out.")
        return self.embed_norm(x)

    def _pooled(self, x: Float[Array, "b t d"], lengths: Int[Array, "b"] | None) -> Float[Array, "b d"]:
        """One vector a text: of its first token, or the mean of the real ones."""
        return x[:, 0] if self.pool == "first" else mean_pool(x, lengths)


def _check_head(num_classes: int | None, pool: str, **parts: int | bool | None) -> None:
    """Raises ConfigError for parts of the one head where the model has the other."""
    if pool not in ("first", "mean"):
        raise ConfigError(f'model.pool="{pool}": choose "first" or "mean".')
    own = ("pooler_dim",) if num_classes else ("transform", "head_bias")
    if wrong := [f"model.{name}={value}" for name, value in parts.items() if value and name not in own]:
        other = "has the classifier alone" if num_classes else "is no classifier"
        raise ConfigError(f"{wrong[0]}, and with model.num_classes={num_classes} the model {other}. Leave it out.")
