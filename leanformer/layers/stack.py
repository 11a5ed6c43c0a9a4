"""Scanned stack of equal blocks, and its rematerialisation policies."""

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
from leanformer.layers import interventions
from leanformer.layers.attention import ATTENDED, WEIGHTS, full_lengths
from leanformer.layers.blocks import Block, BlockConfig
from leanformer.layers.context import PLAIN, Context
from leanformer.layers.dropping import path_scales
from leanformer.runtime.mesh import constrain_batch, constrain_layout


def _fused_attention(primitive: Any, *_: Any, **__: Any) -> bool:
    """Return True for cuDNN's forward kernel: its gradient reads the outputs, which JAX does not name."""
    return primitive.name.startswith("dot_product_attention_fwd")


_both = jax.checkpoint_policies.save_from_both_policies

# Rematerialisation policies: values saved by the forward pass. "light" saves matmuls with weights, inputs of the
# attention gradient and dropout masks. It recomputes values that are cheaper to compute than to move through memory:
# norms, GELU and, without a fused kernel, the T x S attention matrix.
REMAT = {
    "none": jax.checkpoint_policies.everything_saveable,
    "light": functools.reduce(
        _both,
        (
            jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
            jax.checkpoint_policies.save_only_these_names("dropout", ATTENDED),
            _fused_attention,
        ),
    ),
    "block": jax.checkpoint_policies.nothing_saveable,
}


class Stack(nnx.Module):
    """Stack of equal blocks, run as one scan over stacked parameters: compile time does not grow with depth.

    Args:
        make_block: function from `nnx.Rngs` to a block. `block(x, context)` returns the next x, the tap's result and
            the cache; attributes `branches` (number of residual branches) and `dropout` (rate) are required.
        depth: L.
        drop_path: stochastic-depth rate per layer; one number means a linear rise from 0 to it.
        remat: rematerialisation policy, a key of REMAT.
        unroll: layers per scan iteration, 1 if None. Unrolling all layers avoids copies of weights and gradients
            between the stack and a layer; compile time grows with it. `model_setup` selects it for GPUs.

    Raises:
        ConfigError: attention has dropout in blocks other than `Block`, which do not support it.
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
        self.layers: Any = nnx.vmap(make_block)(rngs.split(depth))
        plain = type(self.layers).__call__ is Block.__call__
        self.graying = self.layers.graying if plain else (None, None)
        rates = (getattr(module, "attention_dropout", None) for _, module in nnx.iter_modules(self.layers))
        attention_dropout = next(filter(None, rates), None)
        self.drops = bool(attention_dropout) or self.layers.dropout > 0
        if not plain and attention_dropout:
            raise ConfigError(
                f"model.attention_dropout={attention_dropout}: not supported by blocks of type "
                f"{type(self.layers).__name__}. Leave it unset."
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
        """Return the stack of a config.

        Args:
            make_block: function from `nnx.Rngs` to a block; makes a `Block` if None.
            drop_path: stochastic-depth rates that replace those of the config; None to keep them.
        """

        def plain(rngs: nnx.Rngs) -> nnx.Module:
            return Block(config.make_attention(rngs), config, rngs=rngs)

        rates = config.drop_path if drop_path is None else drop_path
        how: dict[str, Any] = {"remat": config.remat, "unroll": config.unroll, "rngs": rngs}
        return cls(make_block or plain, config.depth, drop_path=rates, **how)

    def __call__(self, x: PyTree[Float[Array, "b ..."]], context: Context = PLAIN) -> tuple[Any, ...]:
        """Return the output and the tap's results, stacked over layers (leading axis L); with a cache, the new one too.

        A key per example switches training on: drop path and dropout are drawn, and batch statistics are used and
        updated. A cache (see `empty_cache`) requires a causal mask whose offset is the number of cached tokens; x are
        the tokens that follow, and the returned cache contains them.

        Raises:
            ValueError: a cache is combined with a tap or with training, which need whole sequences.
        """
        if context.cache is not None and (context.tap is not None or context.key is not None):
            raise ValueError("A cache excludes a tap and a training key: both need whole sequences.")
        graphdef, params, statistics = nnx.split(self.layers, nnx.Param, ...)
        key, train, drawn = context.key, context.key is not None, {"cache": context.cache, "scales": None, "key": None}
        if train and max(self.rates) > 0:
            # Drawn before the scan: inside, the compiler fuses the generator into loops over every activation.
            drawn["scales"] = path_scales(key, np.asarray(self.rates, np.float32), self.layers.branches)
        if train and self.drops:
            drawn["key"] = self._dropout_keys(key)

        context = dataclasses.replace(context, lengths=full_lengths(*jax.tree.leaves(x)))
        if self.graying[0] is not None:
            x = interventions.flatten_token_spectrum(x, *self.graying)

        def body(x: Any, layer: tuple[Any, Any, dict[str, Any]]) -> tuple[Any, Any]:
            params, statistics, drawn = layer
            block = nnx.merge(graphdef, params, statistics)
            if train:
                interventions.power_iteration_step(block)
            x, taps, cache = block(
                constrain_layout(constrain_batch(x)), dataclasses.replace(context, train=train, **drawn)
            )
            moved = nnx.state(block, nnx.BatchStat) if train else None
            return constrain_layout(constrain_batch(x)), (taps, moved, cache)

        step: Callable[..., tuple[Any, Any]] = body
        if self.remat != "none":
            # If the backward pass is a separate loop, barriers between the two would only cause copies of slices.
            # Without a loop, the compiler would reuse the values of the forward pass instead of computing them again.
            # Weights converted to bfloat16 are small, and converting them again takes a kernel each.
            barriers, policy = self.unroll > 1 and self.unroll >= len(self.rates), REMAT[self.remat]
            if barriers:
                policy = _both(policy, jax.checkpoint_policies.save_only_these_names(WEIGHTS))
            step = jax.checkpoint(body, policy=policy, prevent_cse=barriers)
        x, (taps, moved, cache) = jax.lax.scan(step, x, (params, statistics, drawn), unroll=self.unroll)
        if train:
            nnx.update(self.layers, moved)
        return (x, taps) if context.cache is None else (x, taps, cache)

    def empty_cache(self, batch: int, size: int) -> Any:
        """Return an empty cache for `size` tokens: the arrays of `attention.empty_cache` with a leading axis L."""
        one = self.layers.empty_cache(batch, size)
        return jax.tree.map(lambda x: jnp.zeros((len(self.rates), *x.shape), x.dtype), one)

    def _dropout_keys(self, key: Key[Array, "b"]) -> Key[Array, "l b"]:
        """Return a key per layer and example, distinct from the keys of drop path."""
        first = len(self.rates) * self.layers.branches
        fold = jax.vmap(jax.random.fold_in, in_axes=(0, None))
        return jax.vmap(fold, in_axes=(None, 0))(key, first + jnp.arange(len(self.rates)))
