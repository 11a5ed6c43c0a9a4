"""The residual block that the model families share, and its settings."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from leanformer.layers import levers, norms
from leanformer.layers.attention import normal
from leanformer.layers.context import PLAIN, Context
from leanformer.layers.dropping import drop_path, dropout
from leanformer.layers.kinds import AttentionConfig
from leanformer.layers.masks import Mask, check_heeded
from leanformer.layers.mlp import Mlp, MlpConfig


@dataclasses.dataclass(frozen=True)
class BlockConfig:
    """Settings of a stack of blocks, all alike.

    Attributes:
        width: D. depth: L.
        attention: of each block; mlp: likewise, None for blocks without one.
        norm: of `norms.NORMS`. epsilon: of both norms.
        post_norm: whether norms follow the residual sums, else they come before branches.
        layer_scale: start of the learned vectors that scale each branch (Touvron et al. 2021b); None for none.
        dropout: share that training drops of both branches and the MLP's hidden layer.
        drop_path: stochastic depth rate of the last block, linear from 0.
        remat: what the backward pass computes again, a key of `stack.REMAT`.
        unroll: layers per iteration of the scan over layers; 1 if None.
        graying, graying_by: of the tokens that enter the first block, see `levers.grayed`; None for none.
        kernel_init: of attention and MLP. dtype: of activations; parameters are float32.
    """

    width: int
    depth: int = 1
    attention: AttentionConfig | None = None
    mlp: MlpConfig | None = None
    norm: str = "layernorm"
    epsilon: float = 1e-6
    post_norm: bool = False
    layer_scale: float | None = None
    dropout: float = 0.0
    drop_path: float = 0.0
    remat: str = "light"
    unroll: int | None = None
    graying: float | None = None
    graying_by: str | None = None
    kernel_init: nnx.Initializer = normal
    dtype: Any = jnp.float32

    def make_attention(self, rngs: nnx.Rngs) -> nnx.Module:
        """Return the attention of one block."""
        return self.attention.make(self.width, kernel_init=self.kernel_init, dtype=self.dtype, rngs=rngs)

    def make_norm(self, rngs: nnx.Rngs) -> nnx.Module:
        """Return a norm as those of the blocks."""
        return norms.make(self.norm, self.width, epsilon=self.epsilon, dtype=self.dtype, rngs=rngs)


class Block(nnx.Module):
    """Transformer block: x + attention(norm(x)), then x + MLP(norm(x)); or, with `post_norm`, norm(x + attention(x)),
    then norm(x + MLP(x)), as in Vaswani et al. 2017. Without an MLP there is only the attention's branch.

    A tap sees the block's arrays by name and returns a small pytree; it reduces inside the layer, so nothing of the
    size L B T D is ever kept:

        tokens     B T D     entering the block
        normed     B T D     what attention reads, norm(tokens), or with `post_norm` the tokens
        q, k, v    B T N H   and out, B T N H, the heads before the output projection
        attention  B T D     attention's branch, before its skip
        middle     B T D     tokens + attention, before a norm
        hidden     B T F     the MLP's hidden layer after its activation; only where there is one
        block      B T D     leaving the block
        mask                 which keys each query sees, a `masks.Mask`; only where some are not seen
        soft_cap             of the logits of attention; only where there is one

    Padding is zeros in all arrays with an axis T: rows that change no singular value while as many tokens are real as
    there are columns.

    Raises:
        ConfigError: a word that is not known.
    """

    branches = 2  # residual branches, each with its own stochastic depth

    def __init__(self, attention: nnx.Module, config: BlockConfig, *, rngs: nnx.Rngs):
        levers.check_graying(config.graying, config.graying_by)
        self.dropout, self.post_norm = config.dropout, config.post_norm
        self.graying = (config.graying, config.graying_by)
        mlp = config.mlp
        self.norm1 = config.make_norm(rngs)
        self.attention = attention
        self.norm2 = config.make_norm(rngs) if mlp else None
        self.mlp = (
            Mlp(config.width, mlp, kernel_init=config.kernel_init, dtype=config.dtype, rngs=rngs) if mlp else None
        )
        scales = (config.layer_scale, config.layer_scale if mlp else None)
        self.gamma1, self.gamma2 = (None if s is None else nnx.Param(jnp.full(config.width, s)) for s in scales)

    @property
    def hooked(self) -> bool:
        """Whether a stack has to call `begin`."""
        mixes = getattr(self.attention, "value_residual", None) is not None
        return mixes or self.graying[0] not in (None, 1)

    def begin(self, x: Any, context: Context) -> tuple[Any, Context]:
        """Hook that a stack calls once, on its first block: return the tokens and the context for all blocks.

        Values of the first layer are made here, a norm and a projection more than need be: in what the scan carries,
        every layer would keep them for the backward pass.
        """
        x = levers.grayed(x, *self.graying)
        if getattr(self.attention, "value_residual", None) is not None:
            context = dataclasses.replace(context, values=self.attention.value(x if self.post_norm else self.norm1(x)))
        return x, context

    def __call__(self, x: Float[Array, "b t d"], context: Context = PLAIN) -> tuple[Float[Array, "b t d"], Any, Any]:
        """The output; what the tap made of the arrays, None without one, when no array is kept for it; and the cache.

        `context.scales` are those of stochastic depth, of the attention's branch and of the MLP's.
        """
        first, second = (None, None) if context.scales is None else context.scales
        tokens, normed = x, x if self.post_norm else self.norm1(x)
        attention, arrays, cache = self.attend(normed, context)
        key = context.key
        keys = (None,) * 3 if key is None else jax.vmap(functools.partial(jax.random.split, num=3), out_axes=1)(key)
        attention = dropout(scaled(attention, self.gamma1), self.dropout, keys[0])
        middle = tokens + drop_path(attention, first)
        own = {"tokens": tokens, "normed": normed, "attention": attention, "middle": middle}
        block = self.norm1(middle) if self.post_norm else middle
        if self.mlp is not None:
            read = block if self.post_norm else self.norm2(block)
            branch, own["hidden"] = self.mlp(read, rate=self.dropout, key=keys[1])
            branch = dropout(scaled(branch, self.gamma2), self.dropout, keys[2])
            block = block + drop_path(branch, second)
            block = self.norm2(block) if self.post_norm else block
        if context.tap is None:
            return block, None, cache
        return block, context.tap(_shown(arrays | own | {"block": block}, context.mask)), cache

    def attend(self, normed: Float[Array, "b *t d"], context: Context) -> tuple[Array, dict[str, Array], Any]:
        """What the attention returns. Raises ConfigError where it would pass over what the mask hides."""
        check_heeded(type(self.attention).__name__, self.attention.masks, context.mask.parts)
        return self.attention(normed, context)

    def empty_cache(self, batch: int, size: int) -> Any:
        return self.attention.empty_cache(batch, size)


OF_TOKENS = ("tokens", "normed", "q", "k", "v", "out", "attention", "middle", "hidden", "block")  # B T ...


def _shown(arrays: dict[str, Array], mask: Mask) -> dict[str, Any]:
    """A block's arrays as a tap sees them: padding is zeros, and the mask is among them if there is one."""
    if not mask.parts:
        return arrays
    real = mask.real(arrays["tokens"].shape[1])
    if real is not None:
        for name in OF_TOKENS:
            if name in arrays:
                kept = real.reshape(*real.shape, *(1,) * (arrays[name].ndim - 2))
                arrays = arrays | {name: jnp.where(kept, arrays[name], 0)}
    return arrays | {"mask": mask}


def scaled(branch: Float[Array, "b t d"], gamma: nnx.Param | None) -> Float[Array, "b t d"]:
    """A branch times its layer scale; None leaves it as it is."""
    return branch if gamma is None else branch * gamma[...].astype(branch.dtype)[None, None]
