"""GPT: causal decoder for language modelling, with independent heads, head dimension, depth and MLP.

Token embeddings and learned positions, causal pre-norm blocks, a final norm, logits over the vocabulary (Radford et al.
2019). Its options also give Llama (rotary positions, RMSNorm, a gated SiLU, no biases), DeepSeek without experts (Llama
with latent attention) and nanochat (norms of queries and keys, squared ReLU, a soft cap), and the GPT-2 of Leaner
Transformers (Table 2).

Weights are initialised normal with 0.02, biases with zero. Published GPT-2 initialises the projections before each
residual sum with smaller weights.
"""

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int, Key

from leanformer.config.architectures import GptKeys
from leanformer.config.rules import require
from leanformer.layers.attention import dropout_embeddings, normal
from leanformer.layers.blocks import BlockConfig
from leanformer.layers.masks import Context, Mask, Tap, apply_soft_cap
from leanformer.layers.model_base import Family
from leanformer.layers.positions import check_length, token_positions
from leanformer.layers.stack import Stack


class Model(Family):
    """GPT language model."""

    keys = GptKeys
    no_decay = ("pos_embed", "gamma1", "gamma2")  # parameters exempt from weight decay, in addition to biases and norms

    @classmethod
    def mask_parts(cls, arguments: Mapping[str, Any]) -> tuple[str, ...]:
        return ("causal", "segments") if arguments.get("packed", False) else ("causal",)

    def __init__(self, keys: GptKeys, blocks: BlockConfig, *, rngs: nnx.Rngs):
        unused = keys.tied and keys.head_bias
        require(not unused, "model.head_bias=True: model.tied=True has no separate head. Unset one.")
        require(keys.head_cap is None or keys.head_cap > 0, f"model.head_cap={keys.head_cap} must be positive.")
        self.max_length, self.head_cap = keys.max_length, keys.head_cap
        self.dropout, self.dtype, width = blocks.dropout, blocks.dtype, blocks.width
        self.embed = nnx.Param(normal(rngs.params(), (keys.vocabulary, width)))
        learned = keys.positions == "learned"
        self.pos_embed = nnx.Param(normal(rngs.params(), (keys.max_length, width))) if learned else None
        self.blocks = Stack.from_config(blocks, rngs=rngs)
        self.norm = blocks.make_norm(rngs)
        if not keys.tied:
            self.head = blocks.make_linear(width, keys.vocabulary, rngs, use_bias=keys.head_bias)

    def __call__(
        self,
        tokens: Int[Array, "b t"],
        segments: Int[Array, "b t"] | None = None,
        *,
        key: Key[Array, "b"] | None = None,
        tap: Tap | None = None,
    ) -> tuple[Float[Array, "b t v"], Any]:
        """Return logits of the next token at each position (B, T, V), and {"blocks": stacked tap results}.

        `segments` has the document index of each token of packed rows; positions start from 0 in each document.
        """
        x, taps = self.hidden(tokens, segments, key=key, tap=tap)
        return self._logits(x), taps

    def hidden(
        self,
        tokens: Int[Array, "b t"],
        segments: Int[Array, "b t"] | None = None,
        *,
        key: Key[Array, "b"] | None = None,
        tap: Tap | None = None,
    ) -> tuple[Float[Array, "b t d"], Any]:
        """Return the final hidden states (B T D), for losses that do not need all logits at once, and taps."""
        check_length(tokens.shape[1], self.max_length)
        where = token_positions(tokens, segments)
        x, key = dropout_embeddings(self._embedded(tokens, where), self.dropout, key)
        mask = Mask(causal=True, segments=segments)
        x, taps = self.blocks(x, Context(key=key, tap=tap, mask=mask, positions=where))
        return self.norm(x), {"blocks": taps}

    def unembedding(self) -> tuple[Float[Array, "d v"], Float[Array, "v"] | None]:
        """Return the matrix (D, V) and the bias (V, or None) that map the result of `hidden` to uncapped logits."""
        if not hasattr(self, "head"):
            return self.embed[...].T, None
        return self.head.kernel[...], None if self.head.bias is None else self.head.bias[...]

    def extend(self, tokens: Int[Array, "b t"], cache: Any, offset: Int[Array, ""]) -> tuple[Float[Array, "b v"], Any]:
        """Return logits after the last token (B V), and the cache of `offset` tokens with the new ones."""
        x = self._embedded(tokens, offset + jnp.arange(tokens.shape[1])[None])
        x, _, cache = self.blocks(x, Context(mask=Mask(causal=True, offset=offset), cache=cache))
        return self._logits(self.norm(x[:, -1:]))[:, 0], cache

    def empty_cache(self, batch: int, size: int) -> Any:
        """Return a cache of zeros for B = `batch` rows of up to S = `size` tokens, see `Stack.empty_cache`."""
        check_length(size, self.max_length)
        return self.blocks.empty_cache(batch, size)

    def _embedded(self, tokens: Int[Array, "b t"], places: Int[Array, "#b t"]) -> Float[Array, "b t d"]:
        x = self.embed[...][tokens]
        if self.pos_embed is not None:
            x += self.pos_embed[...][places]
        return x.astype(self.dtype)  # cast last: gradients of a token are summed in float32

    def _logits(self, x: Float[Array, "b t d"]) -> Float[Array, "b t v"]:
        kernel, bias = self.unembedding()
        wide = jnp.promote_types(x.dtype, jnp.float32)
        logits = jnp.einsum("btd,dv->btv", x, kernel.astype(x.dtype), preferred_element_type=wide)
        return apply_soft_cap(logits if bias is None else logits + bias[None, None], self.head_cap)
