"""Scanned stack of blocks, with one scan per group of equal blocks, and its rematerialisation policies."""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int, Key, PyTree

from leanformer.config.rules import require
from leanformer.layers import interventions
from leanformer.layers.attention import ATTENDED, WEIGHTS, full_lengths
from leanformer.layers.blocks import Block, BlockConfig
from leanformer.layers.masks import EVAL_CONTEXT, Context
from leanformer.runtime.mesh import constrain_batch, constrain_layout


def _fused_attention(primitive: Any, *_: Any, **__: Any) -> bool:
    """Return True for cuDNN's forward kernel: its gradient reads the outputs, which JAX does not name."""
    return primitive.name.startswith("dot_product_attention_fwd")


policies = jax.checkpoint_policies
_both = policies.save_from_both_policies

# Rematerialisation policies: values saved by the forward pass. "light" saves matmuls with weights, inputs of the
# attention gradient and dropout masks. It recomputes values that are cheaper to compute than to move through memory:
# norms, GELU and, without a fused kernel, the T x S attention matrix.
REMAT = {
    "none": policies.everything_saveable,
    "light": _both(
        _both(policies.dots_with_no_batch_dims_saveable, policies.save_only_these_names("dropout", ATTENDED)),
        _fused_attention,
    ),
    "block": policies.nothing_saveable,
}


MakeBlock = Callable[[nnx.Rngs], nnx.Module]


class Groups(nnx.Module):
    """Stacked blocks of each group of equal layers, as `from0`, `from4`, ... by the group's first layer."""

    def __init__(self, groups: Mapping[int, nnx.Module]):
        self.firsts = tuple(sorted(groups))
        for first in self.firsts:
            setattr(self, f"from{first}", groups[first])

    def __iter__(self) -> Iterator[Any]:
        return (getattr(self, f"from{first}") for first in self.firsts)


def list_groups(layers: nnx.Module) -> list[Any]:
    """Return the stacked blocks of `Stack.layers` as a list, from the first layer up; one entry if all are equal."""
    return [*layers] if isinstance(layers, Groups) else [layers]


class Stack(nnx.Module):
    """Stack of blocks, run as one scan over stacked parameters: compile time does not grow with depth.

    Blocks of several shapes run as one scan per group of consecutive equal blocks. The parameters of a stack of equal
    blocks are in `layers`; of a group that begins with layer 4, in `layers.from4`.

    Args:
        make_block: function from `nnx.Rngs` to a block, or one function per group by the index of its first layer.
            `block(x, context)` returns the next x, the tap's result and the cache; attributes `branches` (number of
            residual branches) and `dropout` (rate) are required.
        depth: L, of all groups together.
        drop_path: stochastic-depth rate per layer; one number means a linear rise from 0 to it.
        remat: rematerialisation policy, a key of REMAT.
        unroll: layers per scan iteration, 1 if None. Unrolling all layers avoids copies of weights and gradients
            between the stack and a layer; compile time grows with it. `model_setup` selects it for GPUs.
    """

    def __init__(
        self,
        make_block: MakeBlock | Mapping[int, MakeBlock],
        depth: int,
        *,
        drop_path: float | Sequence[float] = 0.0,
        remat: str = "light",
        unroll: int | None = None,
        rngs: nnx.Rngs,
    ):
        rates = np.linspace(0, drop_path, depth) if isinstance(drop_path, int | float) else np.asarray(drop_path)
        self.rates, self.remat, self.unroll = tuple(map(float, rates)), remat, unroll or 1
        makers = make_block if isinstance(make_block, Mapping) else {0: make_block}
        self.bounds = tuple(itertools.pairwise([*makers, depth]))  # of each group: first layer, and that after its last
        groups = {first: nnx.vmap(makers[first])(rngs.split(end - first)) for first, end in self.bounds}
        self.layers: Any = groups[0] if len(groups) == 1 else Groups(groups)
        block = list_groups(self.layers)[0]
        plain = type(block).__call__ is Block.__call__
        self.branches, self.graying = block.branches, block.graying if plain else (None, None)
        rates = (getattr(module, "attention_dropout", None) for _, module in nnx.iter_modules(self.layers))
        attention_dropout = next(filter(None, rates), None)
        self.drops = bool(attention_dropout) or block.dropout > 0
        dropped = f"model.attention_dropout={attention_dropout}"
        require(plain or not attention_dropout, f"{dropped}: {type(block).__name__} does not support it. Unset it.")

    @classmethod
    def from_config(
        cls,
        config: BlockConfig,
        make_block: Callable[[BlockConfig, nnx.Rngs], nnx.Module] = Block.from_config,
        *,
        drop_path: float | Sequence[float] | None = None,
        rngs: nnx.Rngs,
    ) -> "Stack":
        """Return the stack of blocks that a config describes."""
        groups = config.groups or (config,)
        firsts = itertools.accumulate((group.depth for group in groups[:-1]), initial=0)
        makers = {i: functools.partial(make_block, group) for i, group in zip(firsts, groups, strict=True)}
        rates = config.drop_path if drop_path is None else drop_path
        return cls(makers, config.depth, drop_path=rates, remat=config.remat, unroll=config.unroll, rngs=rngs)

    def __call__(self, x: PyTree[Float[Array, "b ..."]], context: Context = EVAL_CONTEXT) -> tuple[Any, ...]:
        """Return the output and the tap's results, stacked over layers (leading axis L); with a cache, the new one too.

        Tap's results and caches of several groups are lists, with one entry per group. A key per example switches
        training on; drop path and dropout are drawn, and batch statistics are used and updated. A cache (see
        `empty_cache`) requires a causal mask whose offset is the number of cached tokens, no tap and no key; x are the
        tokens that follow, and the returned cache contains them.
        """
        key, train, scales, keys = context.key, context.key is not None, None, None
        if train and max(self.rates) > 0:
            # Drawn before the scan: inside, the compiler fuses the generator into loops over every activation.
            scales = path_scales(key, np.asarray(self.rates, np.float32), self.branches)
        if train and self.drops:
            # One per layer and example, distinct from the keys of drop path.
            fold = jax.vmap(jax.vmap(jax.random.fold_in, in_axes=(0, None)), in_axes=(None, 0))
            keys = fold(key, len(self.rates) * self.branches + jnp.arange(len(self.rates)))

        context = dataclasses.replace(context, lengths=full_lengths(*jax.tree.leaves(x)), train=train)
        if self.graying[0] is not None:
            x = interventions.flatten_token_spectrum(x, *self.graying)

        taps, caches, single = [], [], len(self.bounds) == 1
        for i, (layers, (first, end)) in enumerate(zip(list_groups(self.layers), self.bounds, strict=True)):
            drawn = {name: None if x is None else x[first:end] for name, x in (("scales", scales), ("key", keys))}
            drawn["cache"] = context.cache if single or context.cache is None else context.cache[i]
            x, tap, cache = self._scan(layers, x, context, drawn)
            taps.append(tap)
            caches.append(cache)
        taps, cache = (taps[0], caches[0]) if single else (taps, caches)
        return (x, taps) if context.cache is None else (x, taps, cache)

    def _scan(
        self, layers: nnx.Module, x: PyTree[Array], context: Context, of_layers: dict[str, Any]
    ) -> tuple[Any, Any, Any]:
        """Run a group of equal layers; return the output, the tap's results and the cache, and update statistics.

        `of_layers` are fields of a block's context, with a leading axis of layers.
        """
        graphdef, params, statistics = nnx.split(layers, nnx.Param, ...)
        train, length = context.train, jax.tree.leaves(params)[0].shape[0]
        unroll = min(self.unroll, length)

        def body(x: Any, layer: tuple[Any, Any, dict[str, Any]]) -> tuple[Any, Any]:
            params, statistics, drawn = layer
            block = nnx.merge(graphdef, params, statistics)
            if train:
                interventions.power_iteration_step(block)
            x, taps, cache = block(constrain_layout(constrain_batch(x)), dataclasses.replace(context, **drawn))
            moved = nnx.state(block, nnx.BatchStat) if train else None
            return constrain_layout(constrain_batch(x)), (taps, moved, cache)

        step: Callable[..., tuple[Any, Any]] = body
        if self.remat != "none":
            # If the backward pass is a separate loop, barriers between the two would only cause copies of slices.
            # Without a loop, the compiler would reuse the values of the forward pass instead of computing them again.
            # Weights converted to bfloat16 are small, and converting them again takes a kernel each.
            barriers, policy = self.unroll > 1 and unroll == length, REMAT[self.remat]
            if barriers:
                policy = _both(policy, policies.save_only_these_names(WEIGHTS))
            step = jax.checkpoint(body, policy=policy, prevent_cse=barriers)
        x, (taps, moved, cache) = jax.lax.scan(step, x, (params, statistics, of_layers), unroll=unroll)
        if train:
            nnx.update(layers, moved)
        return x, taps, cache

    def empty_cache(self, batch: int, size: int) -> Any:
        """Return the attention's `empty_cache` with a leading axis L; a list with one per group of layers."""
        caches = []
        for layers, (first, end) in zip(list_groups(self.layers), self.bounds, strict=True):
            one = layers.attention.empty_cache(batch, size)
            caches.append({name: jnp.zeros((end - first, *x.shape), x.dtype) for name, x in one.items()})
        return caches[0] if len(caches) == 1 else caches


def path_scales(key: Key[Array, "b"], rates: Float[np.ndarray, "l"], branches: int) -> Float[Array, "l {branches} b"]:
    """Draw the factor of each residual branch and example, L branches B: 0 with the layer's rate, else 1 / (1 − rate).

    Stochastic depth (Huang et al. 2016). Each example has its own key, so the result does not depend on the rest of the
    batch, on gradient accumulation or on the number of devices.
    """
    keep = 1 - jnp.asarray(rates)

    def draw(key: Key[Array, ""], keep: Float[Array, ""], index: Int[Array, ""]) -> Float[Array, ""]:
        return jax.random.bernoulli(jax.random.fold_in(key, index), keep) / keep

    index = jnp.arange(len(rates) * branches).reshape(len(rates), branches)
    over_examples = jax.vmap(draw, (0, None, None))
    return jax.vmap(jax.vmap(over_examples, (None, None, 0)), (None, 0, 0))(key, keep, index)
