"""BERT: bidirectional encoder for masked language modelling or classification of texts.

Embeddings of tokens, positions and types, a norm, bidirectional blocks, and one of two heads. Heads, head dimension,
depth and MLP are independent. The defaults are BERT as published (Devlin et al. 2019), post-norm. Its options include
the BERT of Cramming (Geiping & Goldstein 2023), which Leaner Transformers (Table 1) gives fewer layers and more heads:
pre-norm, gated MLP, no biases, sinusoids with a learned scale, no types, no transform before the tied head.

Weights are initialised normal with 0.02, biases with zero. Dropout also acts on the MLP's hidden layer, unlike in
published models; on attention weights, as in these, by `attention_dropout`.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int, Key

from leanformer.errors import ConfigError
from leanformer.layers.attention import normal
from leanformer.layers.blocks import BlockConfig
from leanformer.layers.context import Context, Tap
from leanformer.layers.dropping import dropout
from leanformer.layers.masks import Mask, mean_pool
from leanformer.layers.mlp import ACTIVATIONS
from leanformer.layers.model_base import Family
from leanformer.layers.positions import check_length, sinusoidal_embeddings, token_positions
from leanformer.layers.stack import Stack


class Model(Family):
    """BERT with token logits as outputs; with `num_classes`, class logits or regression values.

    Args:
        vocabulary: V, one more than the largest token id.
        max_length: maximum number of tokens of a row.
        positions: "learned", one vector for each of `max_length`; "sinusoidal", fixed, times a learned scale, initially
            1/√D; "none", for attention with `rotary`.
        types: number of token types, such as 2 for the first and the second text of a pair; None for none.
        packed: True if rows hold several documents, separated by segments that do not attend to each other.
        transform: True for a dense layer, activation and norm before the token head, which is the token embeddings.
        head_bias: True if the token head has a bias.
        num_classes: number of classes, or 1 for regression, instead of the token head; None for the token head.
        pool: input of the classifier: "first" token, or the "mean" of valid tokens.
        pooler_dim: output dimension of a dense layer with tanh before the classifier; None for none.
        blocks: settings of the blocks; without `post_norm` there is one more norm at the end. All norms have the
            settings of their norms, and the transform their activation. Their dropout also acts on embeddings and on
            the classifier's input.

    Raises:
        ConfigError: a value is unknown, or parts of a head are set that the model does not have.
    """

    # Parameters exempt from weight decay, in addition to biases and norms.
    no_decay = ("pos_embed", "pos_scale", "type_embed", "head_bias", "gamma1", "gamma2")
    classifiers = ("head", "pooler", "transform", "transform_norm", "head_bias")
    takes = MappingProxyType(
        {
            **{"norm": "layernorm", "epsilon": 1e-12, "post_norm": True, "activation": "gelu", "gated": False},
            **{"mlp_bias": True, "mlp_sigma_reparam": None, "layer_scale": None, "qkv_bias": True, "dropout": 0.0},
        }
    )

    @classmethod
    def mask_parts(cls, arguments: Mapping[str, Any]) -> tuple[str, ...]:
        """Return ("segments",) for packed rows, else ("lengths",)."""
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
        self.activation = blocks.mlp_config.activation

        self.embed = nnx.Param(normal(rngs.params(), (vocabulary, width)))
        self.pos_embed = nnx.Param(normal(rngs.params(), (max_length, width))) if positions == "learned" else None
        self.pos_scale = nnx.Param(jnp.full((), width**-0.5)) if positions == "sinusoidal" else None
        self.type_embed = nnx.Param(normal(rngs.params(), (types, width))) if types else None
        self.embed_norm = blocks.make_norm(rngs)
        self.blocks = Stack.from_config(blocks, rngs=rngs)
        self.norm = None if blocks.post_norm else blocks.make_norm(rngs)
        self.transform = blocks.make_linear(width, width, rngs) if transform else None
        self.transform_norm: Any = blocks.make_norm(rngs) if transform else None
        self.head_bias = nnx.Param(jnp.zeros(vocabulary)) if head_bias else None
        self.pooler = blocks.make_linear(width, pooler_dim, rngs) if pooler_dim else None
        self.head: Any = blocks.make_linear(pooler_dim or width, num_classes, rngs) if num_classes else None

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
        """Return token logits (B, T, V) or class logits (B, V), and {"blocks": tap results stacked over layers}.

        Args:
            tokens: token ids, padded at the end to a common length.
            lengths: number of valid tokens of each row, at least 1; all if None.
            types: token types, below `types`; all 0 if None.
            segments: document index of each token of packed rows; positions start from 0 in each document.
            key: random keys, one per example; switch training on, with dropout and drop path.

        Raises:
            ConfigError: rows are longer than `max_length`, the model has no types, or packed rows have lengths: their
                padding is a segment.
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
        """Return the last hidden states (B T D), the input of both heads, and {"blocks": stacked tap results}.

        Arguments and errors are those of a call of the model. Hidden states of padding tokens are not zero.
        """
        check_length(tokens.shape[1], self.max_length)
        if lengths is not None and segments is not None:
            raise ConfigError("Rows with segments must not have lengths: their padding is a separate segment.")
        where = token_positions(tokens, segments)
        x = self._embedded(tokens, types, where)
        if key is not None:
            key, embedding = jnp.moveaxis(jax.vmap(jax.random.split)(key), 1, 0)
            x = dropout(x, self.dropout, embedding)
        mask = Mask(lengths=lengths, segments=segments)
        x, taps = self.blocks(x, Context(key=key, tap=tap, mask=mask, positions=where))
        return x if self.norm is None else self.norm(x), {"blocks": taps}

    def decoded(self, x: Float[Array, "b t d"]) -> Float[Array, "b t d"]:
        """Apply the dense layer, activation and norm before the token head to hidden states, if the model has them.

        Args:
            x: hidden states of any positions, B T D.
        """
        if self.transform is None:
            return x
        return self.transform_norm(ACTIVATIONS[self.activation](self.transform(x)))

    def unembedding(self) -> tuple[Float[Array, "d v"], Float[Array, "v"] | None]:
        """Return the matrix (D, V) and the bias (V, or None) that map the result of `decoded` to token logits."""
        return self.embed[...].T, None if self.head_bias is None else self.head_bias[...]

    def _embedded(
        self, tokens: Int[Array, "b t"], types: Int[Array, "b t"] | None, where: Int[Array, "#b t"]
    ) -> Float[Array, "b t d"]:
        """Return embeddings, in float32 up to the norm, so that gradients of a token are also summed in float32."""
        x = self.embed[...][tokens]
        if self.pos_embed is not None:
            x += self.pos_embed[...][where]
        if self.pos_scale is not None:
            x += self.pos_scale[...] * sinusoidal_embeddings(where, x.shape[2]).astype(x.dtype)
        if self.type_embed is not None:
            x += self.type_embed[...][jnp.zeros_like(tokens) if types is None else types]
        elif types is not None:
            raise ConfigError("Token types are given, but model.types=None. Set model.types, or omit the types.")
        return self.embed_norm(x)

    def _pooled(self, x: Float[Array, "b t d"], lengths: Int[Array, "b"] | None) -> Float[Array, "b d"]:
        """Return one vector per text: the first token, or the mean of valid tokens."""
        return x[:, 0] if self.pool == "first" else mean_pool(x, lengths)


def _check_head(num_classes: int | None, pool: str, **parts: int | bool | None) -> None:
    """Raise ConfigError for parts of the head that the model does not have."""
    if pool not in ("first", "mean"):
        raise ConfigError(f'model.pool="{pool}": unknown value. Choose "first" or "mean".')
    allowed = ("pooler_dim",) if num_classes else ("transform", "head_bias")
    if wrong := [f"model.{name}={value}" for name, value in parts.items() if value and name not in allowed]:
        other = "has only the classifier" if num_classes else "has no classifier"
        raise ConfigError(f"{wrong[0]}: with model.num_classes={num_classes} the model {other}. Leave it unset.")
