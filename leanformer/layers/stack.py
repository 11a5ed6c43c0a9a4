"""Equal blocks as one scan over layers, and what the backward pass recomputes of them."""

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
from leanformer.layers import levers
from leanformer.layers.attention import ATTENDED, full_lengths
from leanformer.layers.blocks import Block, BlockConfig
from leanformer.layers.context import PLAIN, Context
from leanformer.layers.dropping import path_scales
from leanformer.runtime.mesh import constrain_batch, keep_in_order


def _fused_attention(primitive: Any, *_: Any, **__: Any) -> bool:
    """Whether it is cuDNN's forward kernel, whose output and sums its gradient reads; JAX gives them no names."""
    return primitive.name.startswith("dot_product_attention_fwd")


# What the backward pass computes again, by what the forward pass keeps. "light" keeps the products with weights, what
# attention's gradient reads and what dropout drew, and computes again what costs little next to moving it through
# memory: norms, GELU and, without a fused kernel, the T x S attention matrix.
REMAT = {
    "none": jax.checkpoint_policies.everything_saveable,
    "light": functools.reduce(
        jax.checkpoint_policies.save_from_both_policies,
        (
            jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
            jax.checkpoint_policies.save_only_these_names("dropout", ATTENDED),
            _fused_attention,
        ),
    ),
    "block": jax.checkpoint_policies.nothing_saveable,
}


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

    Raises:
        ConfigError: attention that mixes in values of the first layer, or drops weights, in blocks of another kind than
            `Block`, which have no hook and hand no keys on.
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
        plain = type(self.layers).__call__ is Block.__call__
        self.hooked = plain and self.layers.hooked
        asked = {
            name: next((found for _, m in nnx.iter_modules(self.layers) if (found := getattr(m, name, None))), None)
            for name in ("attention_dropout", "value_residual")
        }
        self.drops = bool(asked["attention_dropout"]) or self.layers.dropout > 0
        if not plain and any(asked.values()):
            name = next(name for name, value in asked.items() if value)
            raise ConfigError(
                f"model.{name}={asked[name]}: blocks of this kind ({type(self.layers).__name__}) do without it. Leave "
                "it out."
            )

    @classmethod
    def from_config(
        cls,
        config: BlockConfig,
        make_block: Callable[[nnx.Rngs], nnx.Module] | None = None,
        *,
        drop_path: float | Sequence[float] | None = None,
        rngs: nnx.Rngs,
    ) -> "Stack":
        """Return the blocks of a config.

        Args:
            make_block: builds one of them, a `Block` if None.
            drop_path: instead of the config's.
        """

        def plain(rngs: nnx.Rngs) -> nnx.Module:
            return Block(config.make_attention(rngs), config, rngs=rngs)

        rates = config.drop_path if drop_path is None else drop_path
        how = {"remat": config.remat, "unroll": config.unroll, "rngs": rngs}
        return cls(make_block or plain, config.depth, drop_path=rates, **how)

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
        if self.hooked:
            first = nnx.merge(graphdef, *jax.tree.map(lambda leaf: leaf[0], (params, statistics)))
            if train:
                levers.move(first)
            x, context = first.begin(x, context)

        def body(x: Any, layer: tuple[Any, Any, dict[str, Any]]) -> tuple[Any, Any]:
            params, statistics, drawn = layer
            block = nnx.merge(graphdef, params, statistics)
            if train:
                levers.move(block)
            x, taps, cache = block(
                keep_in_order(constrain_batch(x)), dataclasses.replace(context, train=train, **drawn)
            )
            moved = nnx.state(block, nnx.BatchStat) if train else None
            return keep_in_order(constrain_batch(x)), (taps, moved, cache)

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
