"""GPT: a decoder that says which token comes next, with heads, head width, depth and MLP free of one another.

Token embeddings and learned positions, pre-norm blocks that see what came before, a final norm, logits over the
vocabulary (Radford et al. 2019). By its options it is also Llama (rotary positions, RMSNorm, a gated SiLU, no biases),
DeepSeek without experts (Llama with latent attention) and nanochat (norms of queries and keys, squared ReLU, a soft
cap), and the GPT-2 of Leaner Transformers (Table 2).

Weights start normal with 0.02, biases from zero. Published GPT-2 starts the projections before each skip lower.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int, Key

from leanformer.errors import ConfigError
from leanformer.layers import norms
from leanformer.layers.attention import normal, times_weights
from leanformer.layers.blocks import Block, Stack
from leanformer.layers.context import Context, Tap
from leanformer.layers.dropping import dropout
from leanformer.layers.families import Family
from leanformer.layers.kinds import make
from leanformer.layers.masks import Mask, capped
from leanformer.layers.positions import check_length, places


class Model(Family):
    """GPT.

    Args:
        vocabulary: V, one more than the largest token.
        max_length: most tokens of a row.
        width: D. depth: L. num_heads: N. head_dim: H of queries and keys. mlp_dim: F.
        value_dim: H of values; `head_dim` if None.
        positions: "learned", one vector each of `max_length`; "none", where the attention's `rotary` tells them apart.
        packed: whether rows hold several documents, told apart by segments, none of which sees another.
        attention: its kind, "softmax" (see `kinds.KINDS`), of those that heed a causal mask.
        norm: of `norms.NORMS`. epsilon: of every norm but those of queries, keys and latents.
        activation, gated, mlp_bias, mlp_sigma_reparam: of the MLP, see `mlp.Mlp`.
        layer_scale, norm_scaling: of the blocks, see `blocks.Block`.
        qkv_bias: whether queries, keys and values have biases.
        tied: whether logits are products with the token embeddings; else there is a head.
        head_bias: of the head.
        head_cap: c of logits that are c tanh(logits / c); None for none.
        dropout: of embeddings, of both branches and of the MLP's hidden layer.
        drop_path: stochastic depth rate of the last block, linear from 0.
        remat: what the backward pass computes again: "none", "light" or "block" (see `remat.REMAT`).
        unroll: layers that one turn of the loop over a stack holds; 1 if None.
        backend: of attention, already resolved ("xla", "cudnn" or "naive").
        dtype: of activations; parameters are float32.
        options: of the attention, such as `num_kv_heads` or `rotary`; None leaves one at its default.

    Raises:
        ConfigError: words that are not known, or a bias of a head that is not there.
    """

    no_decay = ("pos_embed", "gamma1", "gamma2")  # exempt from weight decay, besides biases and norms
    bottom_up = (("embed", "pos_embed"), ("blocks",))  # see rates.BottomUp

    @classmethod
    def mask_parts(cls, arguments: Mapping[str, Any]) -> tuple[str, ...]:
        """See `families.Family`."""
        return ("causal", "segments") if arguments.get("packed", False) else ("causal",)

    def __init__(
        self,
        *,
        vocabulary: int,
        max_length: int,
        width: int,
        depth: int,
        num_heads: int,
        head_dim: int,
        mlp_dim: int,
        value_dim: int | None = None,
        positions: str = "learned",
        packed: bool = False,
        attention: str = "softmax",
        norm: str = "layernorm",
        epsilon: float = 1e-5,
        activation: str = "gelu_tanh",
        gated: bool = False,
        mlp_bias: bool = True,
        mlp_sigma_reparam: bool | None = None,
        layer_scale: float | None = None,
        norm_scaling: bool | None = None,
        qkv_bias: bool = True,
        tied: bool = True,
        head_bias: bool = False,
        head_cap: float | None = None,
        dropout: float = 0.0,
        drop_path: float = 0.0,
        remat: str = "light",
        unroll: int | None = None,
        backend: str = "xla",
        dtype: Any = jnp.float32,
        rngs: nnx.Rngs,
        **options: Any,
    ):
        if positions not in ("learned", "none"):
            raise ConfigError(f'model.positions="{positions}": choose "learned", or "none" with model.rotary.')
        if tied and head_bias:
            raise ConfigError("model.head_bias=True and model.tied=True: with tied embeddings there is no head.")
        self.max_length, self.packed, self.head_cap = max_length, packed, head_cap
        self.dropout, self.dtype = dropout, dtype

        def block(rngs: nnx.Rngs) -> Block:
            common = {"dtype": dtype, "rngs": rngs}
            sizes = (width, num_heads, head_dim, value_dim)
            heads = make(attention, *sizes, options=options, backend=backend, qkv_bias=qkv_bias, **common)
            mlp = {
                "activation": activation,
                "gated": gated,
                "mlp_bias": mlp_bias,
                "mlp_sigma_reparam": mlp_sigma_reparam,
            }
            kind = {"norm": norm, "epsilon": epsilon, "norm_scaling": norm_scaling, "layer_scale": layer_scale}
            return Block(heads, width, mlp_dim, dropout=dropout, **kind, **mlp, **common)

        self.embed = nnx.Param(normal(rngs.params(), (vocabulary, width)))
        self.pos_embed = nnx.Param(normal(rngs.params(), (max_length, width))) if positions == "learned" else None
        self.blocks = Stack(block, depth, drop_path=drop_path, remat=remat, unroll=unroll, rngs=rngs)
        self.norm = norms.make(norm, width, epsilon=epsilon, dtype=dtype, rngs=rngs)
        if not tied:
            common = {"kernel_init": normal, "dot_general": times_weights, "dtype": dtype, "rngs": rngs}
            self.head = nnx.Linear(width, vocabulary, use_bias=head_bias, **common)

    def __call__(
        self,
        tokens: Int[Array, "b t"],
        segments: Int[Array, "b t"] | None = None,
        *,
        key: Key[Array, "b"] | None = None,
        tap: Tap | None = None,
    ) -> tuple[Float[Array, "b t v"], Any]:
        """Logits of the token after each one (B, T, V), and {"blocks": the tap's results stacked over layers}.

        Args:
            segments: of packed rows, which document each token is of; positions start from 0 in each.
            key: one an example; means training and switches dropout and drop path on.

        Raises:
            ConfigError: longer rows than the model has positions for.
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
        """What the logits are made of, and the taps, as `__call__`: for losses that never see all logits."""
        check_length(tokens.shape[1], self.max_length)
        where = places(tokens, segments)
        x = self._embedded(tokens, where)
        if key is not None:
            key, embedding = jnp.moveaxis(jax.vmap(jax.random.split)(key), 1, 0)
            x = dropout(x, self.dropout, embedding)
        mask = Mask(causal=True, segments=segments)
        x, taps = self.blocks(x, Context(key=key, tap=tap, mask=mask, positions=where))
        return self.norm(x), {"blocks": taps}

    def unembedding(self) -> tuple[Float[Array, "d v"], Float[Array, "v"] | None]:
        """The matrix and the bias between `hidden` and logits."""
        if not hasattr(self, "head"):
            return self.embed[...].T, None
        return self.head.kernel[...], None if self.head.bias is None else self.head.bias[...]

    def extend(self, tokens: Int[Array, "b t"], cache: Any, offset: Int[Array, ""]) -> tuple[Float[Array, "b v"], Any]:
        """Logits of the token after the last of these, and the cache with them in it.

        Args:
            tokens: that follow those in the cache.
            cache: of `empty_cache`, or returned from here.
            offset: how many tokens are in it. Nobody checks that there is room for more.
        """
        x = self._embedded(tokens, offset + jnp.arange(tokens.shape[1])[None])
        x, _, cache = self.blocks(x, Context(mask=Mask(causal=True, offset=offset), cache=cache))
        return self._logits(self.norm(x[:, -1:]))[:, 0], cache

    def empty_cache(self, batch: int, size: int) -> Any:
        """Room for `size` tokens of each row. Raises ConfigError where the model has no positions for so many."""
        check_length(size, self.max_length)
        return self.blocks.empty_cache(batch, size)

    def _embedded(self, tokens: Int[Array, "b t"], places: Int[Array, "#b t"]) -> Float[Array, "b t d"]:
        x = self.embed[...][tokens]
        if self.pos_embed is not None:
            x += self.pos_embed[...][places]
        return x.astype(self.dtype)  # cast last: a token's gradients add up in float32

    def _logits(self, x: Float[Array, "b t d"]) -> Float[Array, "b t v"]:
        kernel, bias = self.unembedding()
        logits = jnp.einsum("btd,dv->btv", x, kernel.astype(x.dtype))
        return capped(logits if bias is None else logits + bias.astype(x.dtype)[None, None], self.head_cap)
