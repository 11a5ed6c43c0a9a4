"""BERT: bidirectional encoder for masked language modelling or classification of texts.

Embeddings of tokens, positions and types, a norm, bidirectional blocks, and one of two heads. Heads, head dimension,
depth and MLP are independent. The defaults are BERT as published (Devlin et al. 2019), post-norm. Its options include
the BERT of Cramming (Geiping & Goldstein 2023), which Leaner Transformers (Table 1) gives fewer layers and more heads:
pre-norm, gated MLP, no biases, sinusoids with a learned scale, no types, no transform before the tied head.

Weights are initialised normal with 0.02, biases with zero. Dropout also acts on the MLP's hidden layer, unlike in
published models; on attention weights, as in these, by `attention_dropout`.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int, Key

from leanformer.config.architectures import BertKeys
from leanformer.config.rules import require
from leanformer.layers.attention import dropout, dropout_embeddings, normal
from leanformer.layers.blocks import ACTIVATIONS, BlockConfig
from leanformer.layers.masks import Context, Mask, Tap, mean_pool
from leanformer.layers.model_base import Family
from leanformer.layers.positions import check_length, sinusoidal_embeddings, token_positions
from leanformer.layers.stack import Stack


class Model(Family):
    """BERT with token logits as outputs; with `num_classes`, class logits or regression values.

    Without `post_norm` there is one more norm at the end. Dropout also acts on embeddings and on the classifier's
    input.
    """

    keys = BertKeys
    no_decay = ("pos_embed", "pos_scale", "type_embed", "head_bias", "gamma1", "gamma2")
    classifiers = ("head", "pooler", "transform", "transform_norm", "head_bias")

    @classmethod
    def mask_parts(cls, arguments: Mapping[str, Any]) -> tuple[str, ...]:
        return ("segments",) if arguments.get("packed", False) else ("lengths",)

    def __init__(self, keys: BertKeys, blocks: BlockConfig, *, rngs: nnx.Rngs):
        num_classes, pooler_dim, width = keys.num_classes, keys.pooler_dim, blocks.width
        for name in ("transform", "head_bias") if num_classes else ("pooler_dim",):
            value = getattr(keys, name)
            require(not value, f"model.{name}={value}: no such part with model.num_classes={num_classes}. Unset it.")
        self.num_classes, self.max_length, self.pool = num_classes, keys.max_length, keys.pool
        self.dropout, self.activation = blocks.dropout, blocks.mlp.activation

        self.embed = nnx.Param(normal(rngs.params(), (keys.vocabulary, width)))
        learned = keys.positions == "learned"
        self.pos_embed = nnx.Param(normal(rngs.params(), (keys.max_length, width))) if learned else None
        self.pos_scale = nnx.Param(jnp.full((), width**-0.5)) if keys.positions == "sinusoidal" else None
        self.type_embed = nnx.Param(normal(rngs.params(), (keys.types, width))) if keys.types else None
        self.embed_norm = blocks.make_norm(rngs)
        self.blocks = Stack.from_config(blocks, rngs=rngs)
        self.norm = None if blocks.post_norm else blocks.make_norm(rngs)
        self.transform = blocks.make_linear(width, width, rngs) if keys.transform else None
        self.transform_norm: Any = blocks.make_norm(rngs) if keys.transform else None
        self.head_bias = nnx.Param(jnp.zeros(keys.vocabulary)) if keys.head_bias else None
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
            segments: document index of each token of packed rows, without lengths; positions restart in each document.
            key, tap: see `Family`.
        """
        last = None
        if key is not None and self.num_classes:
            key, last = jnp.moveaxis(jax.vmap(jax.random.split)(key), 1, 0)
        x, taps = self.hidden(tokens, lengths, types, segments, key=key, tap=tap)
        if self.num_classes:
            x = x[:, 0] if self.pool == "first" else mean_pool(x, lengths)
            x = x if self.pooler is None else jnp.tanh(self.pooler(x))
            return self.head(dropout(x, self.dropout, last)), taps
        kernel, bias = self.unembedding()
        x, wide = self.decoded(x), jnp.promote_types(x.dtype, jnp.float32)
        logits = jnp.einsum("btd,dv->btv", x, kernel.astype(x.dtype), preferred_element_type=wide)
        return logits if bias is None else logits + bias[None, None], taps

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
        """Return the last hidden states (B T D), not zero at padding, and {"blocks": stacked tap results}."""
        check_length(tokens.shape[1], self.max_length)
        where = token_positions(tokens, segments)
        x, key = dropout_embeddings(self._embedded(tokens, types, where), self.dropout, key)
        mask = Mask(lengths=lengths, segments=segments)
        x, taps = self.blocks(x, Context(key=key, tap=tap, mask=mask, positions=where))
        return x if self.norm is None else self.norm(x), {"blocks": taps}

    def decoded(self, x: Float[Array, "b t d"]) -> Float[Array, "b t d"]:
        """Apply the dense layer, activation and norm before the token head to hidden states, if the model has them."""
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
        else:
            require(types is None, "Token types are given, but model.types=None. Set model.types.")
        return self.embed_norm(x)
