"""Residual block shared by the model architectures, and its settings."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from leanformer.layers import interventions, norms
from leanformer.layers.attention import normal, times_weights
from leanformer.layers.attention_registry import AttentionConfig
from leanformer.layers.context import PLAIN, Context
from leanformer.layers.dropping import drop_path, dropout
from leanformer.layers.masks import Mask, check_supported
from leanformer.layers.mlp import Mlp, MlpConfig
from leanformer.layers.multihead import MultiHeadAttention


@dataclasses.dataclass(frozen=True)
class BlockConfig:
    """Settings of a stack of blocks. If not all are equal, `groups` has those of each group of consecutive equal ones,
    and `attention` and `mlp` are those of the last group."""

    width: int  # D
    depth: int = 1  # L
    attention: AttentionConfig | None = None  # None for blocks that are given their attention
    mlp: MlpConfig | None = None  # None for blocks without one
    norm: str = "layernorm"  # of `norms.NORMS`
    epsilon: float = 1e-6  # of both norms
    post_norm: bool = False  # norms after the residual sums, instead of before the branches
    layer_scale: float | None = None  # initial learned scale of each branch (Touvron et al. 2021b); None for no scales
    dropout: float = 0.0  # rate of both branches and of the MLP's hidden layer
    drop_path: float = 0.0  # stochastic-depth rate of the last block, rising linearly from 0
    remat: str = "light"  # recomputation policy of the backward pass, a key of `stack.REMAT`
    unroll: int | None = None  # layers per iteration of the scan over layers; 1 if None
    graying: float | None = None  # token graying before the first block, see `interventions.flatten_token_spectrum`
    graying_by: str | None = None
    kernel_init: nnx.Initializer = normal
    dtype: Any = jnp.float32  # of activations; parameters are float32
    groups: tuple["BlockConfig", ...] = ()  # empty if all blocks are equal

    @property
    def attention_config(self) -> AttentionConfig:
        """Settings of the attention. Raises ValueError without them."""
        if self.attention is None:
            raise ValueError("These blocks have no settings of an attention.")
        return self.attention

    @property
    def mlp_config(self) -> MlpConfig:
        """Settings of the MLP. Raises ValueError without one."""
        if self.mlp is None:
            raise ValueError("These blocks have no MLP.")
        return self.mlp

    def make_attention(self, rngs: nnx.Rngs) -> MultiHeadAttention:
        """Return the attention of one block."""
        return self.attention_config.make(self.width, kernel_init=self.kernel_init, dtype=self.dtype, rngs=rngs)

    def make_norm(self, rngs: nnx.Rngs) -> nnx.Module:
        """Return a new norm with the settings of the blocks' norms."""
        return norms.make(self.norm, self.width, epsilon=self.epsilon, dtype=self.dtype, rngs=rngs)

    def make_linear(self, inputs: int, outputs: int, rngs: nnx.Rngs, **options: Any) -> nnx.Linear:
        """Return a linear layer outside the blocks, such as a head, initialised as their matrices are."""
        common: dict[str, Any] = {
            "kernel_init": self.kernel_init,
            "dot_general": times_weights,
            "dtype": self.dtype,
            "rngs": rngs,
        }
        return nnx.Linear(inputs, outputs, **common | options)


class Block(nnx.Module):
    """Transformer block: x + attention(norm(x)), then x + MLP(norm(x)); or, with `post_norm`, norm(x + attention(x)),
    then norm(x + MLP(x)), as in Vaswani et al. 2017. Without an MLP there is only the attention branch.

    A tap (hook) receives the block's arrays by name and returns a small pytree. It reduces inside the layer, so no
    array of size L B T D is stored:

        tokens     B T D     input of the block
        normed     B T D     input of attention: norm(tokens), or with `post_norm` the tokens
        q          B T N H   queries
        k, v       B T K H   and B T K H', keys and values of K key-value heads
        out        B T N H'  head outputs before the output projection
        attention  B T D     output of the attention sub-layer, before the residual sum
        middle     B T D     tokens + attention, before a norm
        hidden     B T F     hidden layer of the MLP after its activation; only with an MLP
        block      B T D     output of the block
        mask                 visible keys of each query, a `masks.Mask`; only if some are hidden
        soft_cap             soft cap of the attention logits; only if there is one

    Padding is zero in all arrays with an axis T: such rows change no singular value as long as there are at least as
    many valid tokens as columns.

    Raises:
        ConfigError: the norm or the graying is invalid.
    """

    branches = 2  # residual branches, each with its own stochastic depth

    def __init__(self, attention: Any, config: BlockConfig, *, rngs: nnx.Rngs):
        interventions.check_flattening(config.graying, config.graying_by)
        self.dropout, self.post_norm = config.dropout, config.post_norm
        self.graying = (config.graying, config.graying_by)
        mlp = config.mlp
        self.norm1 = config.make_norm(rngs)
        self.attention = attention
        self.norm2: Any = config.make_norm(rngs) if mlp else None
        self.mlp: Any = (
            Mlp(config.width, mlp, kernel_init=config.kernel_init, dtype=config.dtype, rngs=rngs) if mlp else None
        )
        scales = (config.layer_scale, config.layer_scale if mlp else None)
        self.gamma1, self.gamma2 = (None if s is None else nnx.Param(jnp.full(config.width, s)) for s in scales)

    def __call__(self, x: Float[Array, "b t d"], context: Context = PLAIN) -> tuple[Float[Array, "b t d"], Any, Any]:
        """Return the output, the tap's result (None without a tap) and the cache.

        `context.scales` are the stochastic-depth factors of the attention branch and of the MLP branch.
        """
        first, second = (None, None) if context.scales is None else context.scales
        tokens, normed = x, x if self.post_norm else self.norm1(x)
        attention, arrays, cache = self.attend(normed, context)
        key = context.key
        keys = (None,) * 3 if key is None else jax.vmap(functools.partial(jax.random.split, num=3), out_axes=1)(key)
        attention = dropout(scaled(attention, self.gamma1), self.dropout, keys[0])
        middle = tokens + drop_path(attention, first)
        inner = {"tokens": tokens, "normed": normed, "attention": attention, "middle": middle}
        block = self.norm1(middle) if self.post_norm else middle
        if self.mlp is not None:
            read = block if self.post_norm else self.norm2(block)
            branch, inner["hidden"] = self.mlp(read, rate=self.dropout, key=keys[1])
            branch = dropout(scaled(branch, self.gamma2), self.dropout, keys[2])
            block = block + drop_path(branch, second)
            block = self.norm2(block) if self.post_norm else block
        if context.tap is None:
            return block, None, cache
        return block, context.tap(_tap_arrays(arrays | inner | {"block": block}, context.mask)), cache

    def attend(self, normed: Float[Array, "b *t d"], context: Context) -> tuple[Array, dict[str, Array], Any]:
        """Return the result of the attention. Raises ConfigError if it does not support the mask."""
        check_supported(type(self.attention).__name__, self.attention.masks, context.mask.parts)
        return self.attention(normed, context)

    def empty_cache(self, batch: int, size: int) -> Any:
        return self.attention.empty_cache(batch, size)


OF_TOKENS = ("tokens", "normed", "q", "k", "v", "out", "attention", "middle", "hidden", "block")  # B T ...


def _tap_arrays(arrays: dict[str, Array], mask: Mask) -> dict[str, Any]:
    """Return the arrays for a tap: padding set to zero, and the mask added if there is one."""
    if not mask.parts:
        return arrays
    real = mask.valid_tokens(arrays["tokens"].shape[1])
    if real is not None:
        for name in OF_TOKENS:
            if name in arrays:
                valid = real.reshape(*real.shape, *(1,) * (arrays[name].ndim - 2))
                arrays = arrays | {name: jnp.where(valid, arrays[name], 0)}
    return arrays | {"mask": mask}


def scaled(branch: Float[Array, "b t d"], gamma: nnx.Param[Array] | None) -> Float[Array, "b t d"]:
    """Multiply a branch by its layer scale; None leaves it unchanged."""
    return branch if gamma is None else branch * gamma[...].astype(branch.dtype)[None, None]
