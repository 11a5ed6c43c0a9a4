"""What the model families share: the residual block, and a stack of it scanned over layers."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Key, PyTree

from leanformer.errors import ConfigError
from leanformer.layers import levers, norms
from leanformer.layers.attention import full_lengths, normal
from leanformer.layers.context import PLAIN, Context
from leanformer.layers.dropping import drop_path, dropout, path_scales
from leanformer.layers.masks import Mask, check_heeded
from leanformer.layers.mlp import Mlp
from leanformer.layers.remat import REMAT
from leanformer.runtime.mesh import keep_in_order, keep_shared


class Block(nnx.Module):
    """Transformer block: x + attention(norm(x)), then x + MLP(norm(x)); or, with `post_norm`, norm(x + attention(x)),
    then norm(x + MLP(x)), as in Vaswani et al. 2017.

    With `dropout`, both branches and the MLP's hidden layer lose that share of their numbers in training.
    With `layer_scale`, each branch is multiplied by a learned vector that starts from it (Touvron et al. 2021b).
    Without an MLP, `mlp_dim` 0, there is but the attention's branch.

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

    Args:
        norm: of `norms.NORMS`.
        activation, gated, mlp_bias, mlp_sigma_reparam: of the MLP, see `mlp.Mlp`.
        norm_scaling: whether both norms of layer l, counted from 1, are divided by √l (Sun et al. 2025, The Curse of
            Depth in Large Language Models, arXiv 2502.05795), for blocks with a norm before each branch.

    Raises:
        ConfigError: a word that is not known, or `norm_scaling` and `post_norm`.
    """

    branches = 2  # residual branches, each with its own stochastic depth

    def __init__(
        self,
        attention: nnx.Module,
        width: int,
        mlp_dim: int,
        *,
        norm: str = "layernorm",
        post_norm: bool = False,
        activation: str = "gelu",
        gated: bool = False,
        mlp_bias: bool = True,
        mlp_sigma_reparam: bool | None = None,
        norm_scaling: bool | None = None,
        epsilon: float = 1e-6,
        layer_scale: float | None = None,
        dropout: float = 0.0,
        kernel_init: nnx.Initializer = normal,
        dtype: Any = jnp.float32,
        rngs: nnx.Rngs,
    ):
        if norm_scaling and post_norm:
            raise ConfigError("model.norm_scaling=True divides norms before branches. Set model.post_norm=False.")
        self.dropout, self.post_norm, self.norm_scaling = dropout, post_norm, bool(norm_scaling)
        common = {"dtype": dtype, "rngs": rngs}
        self.norm1 = norms.make(norm, width, epsilon=epsilon, **common)
        self.attention = attention
        self.norm2 = norms.make(norm, width, epsilon=epsilon, **common) if mlp_dim else None
        kind = {"activation": activation, "gated": gated, "bias": mlp_bias, "kernel_init": kernel_init}
        kind |= {"sigma_reparam": mlp_sigma_reparam}
        self.mlp = Mlp(width, mlp_dim, **kind, **common) if mlp_dim else None
        scales = (layer_scale, layer_scale if mlp_dim else None)
        self.gamma1, self.gamma2 = (None if s is None else nnx.Param(jnp.full(width, s)) for s in scales)

    def __call__(self, x: Float[Array, "b t d"], context: Context = PLAIN) -> tuple[Float[Array, "b t d"], Any, Any]:
        """The output; what the tap made of the arrays, None without one, when no array is kept for it; and the cache.

        `context.scales` are those of stochastic depth, of the attention's branch and of the MLP's.
        """
        first, second = (None, None) if context.scales is None else context.scales
        tokens, normed = x, x if self.post_norm else shrunk(self.norm1(x), context)
        attention, arrays, cache = self.attend(normed, context)
        key = context.key
        keys = (None,) * 3 if key is None else jax.vmap(functools.partial(jax.random.split, num=3), out_axes=1)(key)
        attention = dropout(scaled(attention, self.gamma1), self.dropout, keys[0])
        middle = tokens + drop_path(attention, first)
        own = {"tokens": tokens, "normed": normed, "attention": attention, "middle": middle}
        block = self.norm1(middle) if self.post_norm else middle
        if self.mlp is not None:
            read = block if self.post_norm else shrunk(self.norm2(block), context)
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

    def values(self, x: Float[Array, "b t d"], context: Context) -> Float[Array, "b t k h"]:
        """Those that attention makes of the tokens entering the block, before any are mixed in."""
        return self.attention.value(x if self.post_norm else shrunk(self.norm1(x), context))

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


def shrunk(normed: Float[Array, "b *t d"], context: Context) -> Float[Array, "b *t d"]:
    """A norm's output times the context's scale of norms; None leaves it as it is."""
    return normed if context.norm_scale is None else normed * context.norm_scale.astype(normed.dtype)


def scaled(branch: Float[Array, "b t d"], gamma: nnx.Param | None) -> Float[Array, "b t d"]:
    """A branch times its layer scale; None leaves it as it is."""
    return branch if gamma is None else branch * gamma[...].astype(branch.dtype)[None, None]


class Stack(nnx.Module):
    """`depth` equal blocks as one scan over stacked parameters, so compile time does not grow with depth.

    Args:
        make_block: builds one block from `nnx.Rngs`, called as `block(x, context)` and returning the next x, the tap's
            result and the cache; it says how many residual `branches` it has, and its rate of `dropout`.
        depth: L.
        drop_path: stochastic depth rate of each layer; one number stands for a linear rise from 0 to it.
        remat: what the backward pass computes again, a key of REMAT.
        unroll: layers that one turn of the scan holds, 1 if None. Where it holds all, each reads its own weights, which
            a loop copies out of the stack, and their gradients into one; compile time grows with it.

    Where attention mixes the first layer's values in, they are made once before the scan, a norm and a projection more
    than need be: in what the scan carries, every layer would keep them for the backward pass.

    Raises:
        ConfigError: such attention, or one that drops weights, in blocks that do not hand values or keys on.
    """

    def __init__(
        self,
        make_block: Callable[[nnx.Rngs], nnx.Module],
        depth: int,
        *,
        drop_path: float | Sequence[float] = 0.0,
        remat: str = "light",
        unroll: int | None = None,
        rngs: nnx.Rngs,
    ):
        rates = np.linspace(0, drop_path, depth) if isinstance(drop_path, int | float) else np.asarray(drop_path)
        self.rates, self.remat, self.unroll = tuple(map(float, rates)), remat, unroll or 1
        self.layers = nnx.vmap(make_block)(rngs.split(depth))
        mixing = [m for _, m in nnx.iter_modules(self.layers) if getattr(m, "value_residual", None) is not None]
        dropping = [m for _, m in nnx.iter_modules(self.layers) if getattr(m, "attention_dropout", 0)]
        self.mixes_values, hands_on = bool(mixing), type(self.layers).__call__ is Block.__call__
        self.drops = bool(dropping) or self.layers.dropout > 0
        if dropping and not hands_on:
            raise ConfigError(
                f"model.attention_dropout={dropping[0].attention_dropout}: blocks of this kind "
                f"({type(self.layers).__name__}) drop no attention weights. Leave it out."
            )
        if mixing and not hands_on:
            raise ConfigError(
                f"model.value_residual={mixing[0].value_residual}: blocks of this kind ({type(self.layers).__name__}) "
                "hand no values of a first layer on. Leave it out."
            )

    def __call__(self, x: PyTree[Float[Array, "b ..."]], context: Context = PLAIN) -> tuple[Any, ...]:
        """The output and the tap's results stacked over layers (leading axis L); with a cache, the new one too.

        A key, one an example, means training: drop path and dropout are drawn, and batch statistics are taken and
        moved. A cache (see `empty_cache`) wants a causal mask whose offset is the number of tokens in it; x are the
        tokens that follow, and `cache` returns with them.

        Raises:
            ValueError: a tap and a cache, or training with a cache: measures and gradients are of whole sequences.
        """
        if context.cache is not None and (context.tap is not None or context.key is not None):
            raise ValueError("With a cache a stack sees a piece of its sequences: no tap and no training key then.")
        graphdef, params, statistics = nnx.split(self.layers, nnx.Param, ...)
        key, train, drawn = context.key, context.key is not None, {"cache": context.cache, "scales": None, "key": None}
        if train and max(self.rates) > 0:
            # Drawn before the scan: inside, the compiler puts the generator into loops over every activation.
            drawn["scales"] = path_scales(key, np.asarray(self.rates, np.float32), self.layers.branches)
        if train and self.drops:
            drawn["key"] = self._dropout_keys(key)

        context = dataclasses.replace(context, lengths=full_lengths(*jax.tree.leaves(x)))
        if getattr(self.layers, "norm_scaling", False):
            drawn["norm_scale"] = 1 / jnp.sqrt(jnp.arange(1, len(self.rates) + 1, dtype=jnp.float32))
        if self.mixes_values:
            first = nnx.merge(graphdef, *jax.tree.map(lambda leaf: leaf[0], (params, statistics)))
            if train:
                levers.move(first)
            scale = drawn["norm_scale"][0] if "norm_scale" in drawn else None
            context = dataclasses.replace(
                context, values=first.values(x, dataclasses.replace(context, norm_scale=scale))
            )

        def body(x: Any, layer: tuple[Any, Any, dict[str, Any]]) -> tuple[Any, Any]:
            params, statistics, drawn = layer
            block = nnx.merge(graphdef, params, statistics)
            if train:
                levers.move(block)
            x, taps, cache = block(keep_in_order(keep_shared(x)), dataclasses.replace(context, train=train, **drawn))
            moved = nnx.state(block, nnx.BatchStat) if train else None
            return keep_in_order(keep_shared(x)), (taps, moved, cache)

        if self.remat != "none":
            # The backward pass is a loop of its own; barriers between the two would only have slices copied.
            body = jax.checkpoint(body, policy=REMAT[self.remat], prevent_cse=False)
        x, (taps, moved, cache) = jax.lax.scan(body, x, (params, statistics, drawn), unroll=self.unroll)
        if train:
            nnx.update(self.layers, moved)
        return (x, taps) if context.cache is None else (x, taps, cache)

    def empty_cache(self, batch: int, size: int) -> Any:
        """Room for up to `size` tokens, zeros: keys and values L B S K H of softmax attention."""
        one = self.layers.empty_cache(batch, size)
        return jax.tree.map(lambda x: jnp.zeros((len(self.rates), *x.shape), x.dtype), one)

    def _dropout_keys(self, key: Key[Array, "b"]) -> Key[Array, "l b"]:
        """A key for each layer and example, none of which drop path uses."""
        first = len(self.rates) * self.layers.branches
        fold = jax.vmap(jax.random.fold_in, in_axes=(0, None))
        return jax.vmap(fold, in_axes=(None, 0))(key, first + jnp.arange(len(self.rates)))
