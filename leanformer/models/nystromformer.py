"""Nyströmformer for the Long Range Arena: classifier of token sequences or pairs of sequences.

Token and learned position embeddings, pre-norm blocks, final norm, pooling over valid tokens, a hidden layer of the
MLP's dimension with ReLU, logits (Xiong et al. 2021; the released LRA models). Leaner Transformers (Table 3) uses fewer
layers and more heads. Any attention type can be used; `attention="softmax"` is the exact baseline.

Weights are initialised uniform in ±1/√inputs, embeddings normal with 0.02, as in the original; with 0.02 everywhere
ListOps needs several times as many examples (study/LOG.md). Biases are zero; in the original they are random.

Options reproduce the original, except for the batch-wide scale of pairs, which it computes per tower:
`zero_is_padding=True, padding="zeros", scale="batch", pool="padded_mean", dropout=0.1`.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int, Key

from leanformer.config.architectures import NystromformerKeys
from leanformer.layers.attention import dropout_embeddings, fan_in, normal
from leanformer.layers.blocks import BlockConfig
from leanformer.layers.masks import Context, Mask, Tap
from leanformer.layers.model_base import Family
from leanformer.layers.positions import check_length, prepend
from leanformer.layers.stack import Stack


EPSILON = 1e-5  # of every norm, PyTorch's default


class Model(Family):
    """Nyströmformer for classification of token sequences, or of pairs of sequences.

    With two towers, a pair (a, b) goes through one encoder, and the classifier reads [a, b, a·b, a − b]. Pairs are one
    batch of 2B, also for the attention's `scale="batch"`.
    """

    keys = NystromformerKeys
    no_decay = ("cls_token", "pos_embed", "gamma1", "gamma2")
    fixed = MappingProxyType({"epsilon": EPSILON, "kernel_init": fan_in})

    @classmethod
    def mask_parts(cls, arguments: Mapping[str, Any]) -> tuple[str, ...]:
        return ("lengths", "keep") if arguments.get("zero_is_padding", False) else ("lengths",)

    def __init__(self, keys: NystromformerKeys, blocks: BlockConfig, *, rngs: nnx.Rngs):
        self.towers, self.pool, self.zero_is_padding = keys.towers, keys.pool, keys.zero_is_padding
        self.max_length, self.dropout, self.dtype = keys.max_length, blocks.dropout, blocks.dtype
        width, mlp_dim = blocks.width, blocks.mlp.mlp_dim

        extra = int(keys.pool == "token")
        if extra:
            self.cls_token = nnx.Param(normal(rngs.params(), (1, 1, width)))
        self.embed = nnx.Param(normal(rngs.params(), (keys.vocabulary, width)))
        self.pos_embed = nnx.Param(normal(rngs.params(), (keys.max_length + extra, width)))
        self.blocks = Stack.from_config(blocks, rngs=rngs)
        self.norm = blocks.make_norm(rngs)
        self.hidden = blocks.make_linear(width if keys.towers == 1 else 4 * width, mlp_dim, rngs)
        self.head = blocks.make_linear(mlp_dim, keys.num_classes, rngs)

    def __call__(
        self,
        tokens: Int[Array, "b t"] | Int[Array, "b 2 t"],
        lengths: Int[Array, "b"] | Int[Array, "b 2"] | None = None,
        *,
        key: Key[Array, "b"] | None = None,
        tap: Tap | None = None,
    ) -> tuple[Float[Array, "b v"], Any]:
        """Return logits (B, V) and {"blocks": tap results stacked over layers}.

        `tokens` are padded at the end to a common length, and have `lengths` valid ones each, all if None. With two
        towers both have an axis of 2 behind B, and the tap receives 2B examples, a₀ b₀ a₁ b₁ ...
        """
        if self.towers == 1:
            x, taps = self._encode(tokens, lengths, key, tap)
        else:
            keys = key if key is None else jax.vmap(jax.random.split)(key).reshape(-1)
            rows = tokens.reshape(-1, tokens.shape[-1])
            x, taps = self._encode(rows, lengths if lengths is None else lengths.reshape(-1), keys, tap)
            a, b = x[::2], x[1::2]
            x = jnp.concatenate([a, b, a * b, a - b], axis=-1)
        return self.head(jax.nn.relu(self.hidden(x))), {"blocks": taps}

    def _encode(
        self, tokens: Int[Array, "b t"], lengths: Int[Array, "b"] | None, key: Key[Array, "b"] | None, tap: Tap | None
    ) -> tuple[Float[Array, "b d"], Any]:
        check_length(tokens.shape[1], self.max_length)
        keep = tokens != 0 if self.zero_is_padding else None
        x = self.embed[...][tokens].astype(self.dtype)  # cast last: gradients of a token are summed in float32
        if self.pool == "token":
            x = prepend(self.cls_token, x)
            lengths = None if lengths is None else lengths + 1
            keep = None if keep is None else jnp.pad(keep, ((0, 0), (1, 0)), constant_values=True)
        x += self.pos_embed[...].astype(self.dtype)[None, : x.shape[1]]
        x, key = dropout_embeddings(x, self.dropout, key)
        mask = Mask(lengths=lengths, keep=keep)
        x, taps = self.blocks(x, Context(key=key, tap=tap, mask=mask))
        return self._pool(self.norm(x), mask), taps

    def _pool(self, x: Float[Array, "b t d"], mask: Mask) -> Float[Array, "b d"]:
        if self.pool == "token":
            return x[:, 0]
        real = mask.valid_tokens(x.shape[1])
        if real is None:
            return x.mean(axis=1)
        valid = real[..., None]
        total = jnp.where(valid, x, 0).sum(axis=1)
        return total / (x.shape[1] if self.pool == "padded_mean" else jnp.maximum(valid.sum(axis=1), 1))
