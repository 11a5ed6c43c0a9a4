"""Residual block shared by the model architectures, its MLP, and their settings."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Key

from leanformer.config.rules import require
from leanformer.layers import interventions, norms
from leanformer.layers.attention import dropout, normal, times_weights
from leanformer.layers.masks import EVAL_CONTEXT, Context, Mask
from leanformer.layers.multihead import MultiHeadAttention
from leanformer.runtime.mesh import over_hidden


def gelu(x: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """Return x Φ(x), exact, in float32 or wider inside. `erf` takes half the time of `jax.nn.gelu`'s erfc on a CPU."""
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    return (0.5 * wide * (1 + jax.lax.erf(wide * wide.dtype.type(0.5**0.5)))).astype(x.dtype)


def squared_relu(x: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """Return max(x, 0)² (So et al. 2021)."""
    return jnp.square(jax.nn.relu(x))


ACTIVATIONS = {
    "gelu": gelu,
    "gelu_tanh": functools.partial(jax.nn.gelu, approximate=True),
    "relu": jax.nn.relu,
    "relu2": squared_relu,
    "silu": jax.nn.silu,
}


@dataclasses.dataclass(frozen=True)
class MlpConfig:
    mlp_dim: int
    activation: str = "gelu"  # key of ACTIVATIONS
    gated: bool = False  # True: the hidden layer is activation(gate) · up
    mlp_bias: bool = True
    mlp_sigma_reparam: bool | None = None


class Mlp(nnx.Module):
    """Linear layer D → F, an activation, optionally a gate (Shazeer 2020), and a linear layer F → D.

    Parameters: `up` and, if gated, `gate` (D, F), `down` (F, D), each with a bias unless `mlp_bias` is False.

    >>> Mlp(8, MlpConfig(mlp_dim=32), rngs=nnx.Rngs(0))(jnp.ones((2, 7, 8)))[0].shape
    (2, 7, 8)
    """

    def __init__(
        self,
        width: int,
        config: MlpConfig,
        *,
        kernel_init: nnx.Initializer = normal,
        dtype: Any = jnp.float32,
        rngs: nnx.Rngs,
    ):
        known = config.activation in ACTIVATIONS
        require(known, f'model.activation="{config.activation}" is unknown. Choose one of: {", ".join(ACTIVATIONS)}.')
        self.activation, mlp_dim = config.activation, config.mlp_dim
        kind = functools.partial(interventions.Linear, sigma=True) if config.mlp_sigma_reparam else nnx.Linear
        common = {"kernel_init": kernel_init, "dot_general": times_weights, "dtype": dtype, "rngs": rngs}
        linear = functools.partial(kind, use_bias=config.mlp_bias, **common)
        inner = {"kernel_metadata": over_hidden(-1), "bias_metadata": over_hidden(-1)}
        self.up = linear(width, mlp_dim, **inner)
        self.down = linear(mlp_dim, width, kernel_metadata=over_hidden(-2))
        self.gate = linear(width, mlp_dim, **inner) if config.gated else None

    def __call__(
        self, x: Float[Array, "b t d"], *, rate: float = 0.0, key: Key[Array, "b"] | None = None
    ) -> tuple[Float[Array, "b t d"], Float[Array, "b t f"]]:
        """Return the output, and for a tap the input of `down`: the hidden layer after activation, gate and dropout."""
        activate, hidden = ACTIVATIONS[self.activation], self.up(x)
        hidden = activate(hidden) if self.gate is None else activate(self.gate(x)) * hidden
        hidden = dropout(hidden, rate, key)
        return self.down(hidden), hidden


@dataclasses.dataclass(frozen=True)
class BlockConfig:
    """Settings of a stack of blocks.

    If not all blocks are equal, `groups` has the settings of each group of consecutive equal blocks, and all other
    fields but `depth` describe the last group.
    """

    width: int
    depth: int = 1
    attention: Any = None  # an AttentionConfig; None for blocks that are given their module
    mlp: Any = None  # an MlpConfig; None for blocks without an MLP
    norm: str = "layernorm"  # key of `norms.NORMS`
    epsilon: float = 1e-6
    post_norm: bool = False  # True: norms follow the residual sums
    layer_scale: float | None = None  # initial value of a learned factor per channel of each branch
    dropout: float = 0.0  # of both branches and of the MLP's hidden layer
    drop_path: float = 0.0  # stochastic-depth rate of the last block; rises linearly from 0 at the first
    remat: str = "light"  # key of `stack.REMAT`
    unroll: int | None = None  # layers per iteration of the scan over layers
    graying: float | None = None  # see `interventions.flatten_token_spectrum`; acts before the first block
    graying_by: str | None = None
    kernel_init: nnx.Initializer = normal
    dtype: Any = jnp.float32  # of activations; parameters are float32
    groups: tuple["BlockConfig", ...] = ()

    def make_attention(self, rngs: nnx.Rngs) -> MultiHeadAttention:
        return self.attention.make(self.width, kernel_init=self.kernel_init, dtype=self.dtype, rngs=rngs)

    def make_norm(self, rngs: nnx.Rngs) -> nnx.Module:
        return norms.make(self.norm, self.width, epsilon=self.epsilon, dtype=self.dtype, rngs=rngs)

    def make_linear(self, inputs: int, outputs: int, rngs: nnx.Rngs, **options: Any) -> nnx.Linear:
        """Return a new linear layer outside the blocks, such as a head, initialised like the matrices of the blocks."""
        common: dict[str, Any] = {"kernel_init": self.kernel_init, "dot_general": times_weights, "dtype": self.dtype}
        return nnx.Linear(inputs, outputs, **common | options, rngs=rngs)


class Block(nnx.Module):
    """Transformer block of an attention branch and an MLP branch, each with a norm and a residual sum.

    It computes x + attention(norm(x)), then x + MLP(norm(x)); or, with `post_norm`, norm(x + attention(x)), then norm(x
    + MLP(x)) (Vaswani et al. 2017). Without an MLP there is only the attention branch.

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
    """

    branches = 2  # residual branches, each with its own stochastic depth, `context.scales`

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

    @classmethod
    def from_config(cls, config: BlockConfig, rngs: nnx.Rngs) -> "Block":
        return cls(config.make_attention(rngs), config, rngs=rngs)

    def __call__(
        self, x: Float[Array, "b t d"], context: Context = EVAL_CONTEXT
    ) -> tuple[Float[Array, "b t d"], Any, Any]:
        """Return the output, the tap's result (None without a tap) and the cache."""
        first, second = (None, None) if context.scales is None else context.scales
        tokens, normed = x, x if self.post_norm else self.norm1(x)
        attention, arrays, cache = self.attention(normed, context)
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


TOKEN_ARRAYS = ("tokens", "normed", "q", "k", "v", "out", "attention", "middle", "hidden", "block")  # B T ...


def _tap_arrays(arrays: dict[str, Array], mask: Mask) -> dict[str, Any]:
    """Return the arrays for a tap: padding set to zero, and the mask added if there is one."""
    if not mask.parts:
        return arrays
    if mask.segments is not None:  # segment 0 of a packed row is padding
        mask = dataclasses.replace(mask, keep=mask.segments > 0)
    real = mask.valid_tokens(arrays["tokens"].shape[1])
    if real is not None:
        for name in TOKEN_ARRAYS:
            if name in arrays:
                valid = real.reshape(*real.shape, *(1,) * (arrays[name].ndim - 2))
                arrays = arrays | {name: jnp.where(valid, arrays[name], 0)}
    return arrays | {"mask": mask}


def scaled(branch: Float[Array, "b t d"], gamma: nnx.Param[Array] | None) -> Float[Array, "b t d"]:
    return branch if gamma is None else branch * gamma[...].astype(branch.dtype)[None, None]


def drop_path(branch: Float[Array, "b *rest"], scale: Float[Array, "b"] | None) -> Float[Array, "b *rest"]:
    """Multiply a branch by its stochastic-depth factors from `stack.path_scales`, one per example."""
    if scale is None:
        return branch
    return branch * scale.astype(branch.dtype).reshape(-1, *(1,) * (branch.ndim - 1))
