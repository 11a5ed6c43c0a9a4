"""Watch of a Flax NNX model: the `attention_fn` of its attention layers is wrapped while the block is open.

The modules around them are given a subclass of their class that notes the tokens entering the block, so that a call
through `nnx.jit`, `nnx.scan` or `nnx.vmap` is seen too. Both are undone at the end. Models of `leanformer.models` have
a tap, which is used instead.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from leanformer.conditioning import tap
from leanformer.errors import ConfigError
from leanformer.layers.masks import ALL
from leanformer.layers.model_base import Family
from leanformer.watching.jax_arrays import Attention, count_rows, find_tokens, is_cross_attention
from leanformer.watching.measures import find_roundoffs, pack
from leanformer.watching.session import Watch
from leanformer.watching.traced import Arrivals, Place, find_place


def attach(watch: Watch) -> Callable[[], None]:
    """Wrap the attention layers of an NNX model to measure them, and return the function that undoes it.

    Args:
        watch: watch whose model is measured; attention layers are added to it.

    Raises:
        ConfigError: no module of the model has an `attention_fn`, or the options `at` or `heads` are set.
    """
    model, arrivals = watch.model, Arrivals(watch)
    if watch.options.at is not None or watch.options.heads is not None:
        raise ConfigError("at= and heads= select layers of PyTorch models: leave them out for Flax.")
    if isinstance(model, Family):
        return _attach_family(watch, arrivals)
    modules: dict[Any, Any] = dict(nnx.iter_modules(model))
    attentions = {path: m for path, m in modules.items() if callable(getattr(m, "attention_fn", None))}
    if not attentions:
        classes = sorted({type(module).__name__ for module in modules.values()})
        raise ConfigError(
            f"watch: no module of {type(model).__name__} has an attention_fn, as nnx.MultiHeadAttention has. It has "
            f"{', '.join(classes)}. leanformer.conditioning.condition(array) measures any array."
        )
    tokens: dict[Any, Any] = {}
    undo: list[Callable[[], None]] = []
    parents = {
        path: next((path[:i] for i in range(len(path) - 1, -1, -1) if path[:i] in modules), None) for path in attentions
    }
    for path in {(), *parents.values()} - {None}:
        undo.append(_replace_call(modules[path], _noting(type(modules[path]), tokens, path, arrivals)))
    places: dict[Any, tuple[Place, bool]] = {}  # attention layers that are being called: is it cross-attention?
    for path, module in attentions.items():
        name = ".".join(map(str, path)) or type(model).__name__
        watch.add_layer(name, heads=getattr(module, "num_heads", None))
        original = module.attention_fn
        sources = functools.partial(tokens.get, parents[path]), functools.partial(places.get, path)
        module.attention_fn = _wrap(original, arrivals, *sources)
        undo.append(functools.partial(setattr, module, "attention_fn", original))
        undo.append(_replace_call(module, _noting_place(type(module), places, path, name, _count(module))))

    def detach() -> None:
        for function in reversed(undo):
            function()

    return detach


def _noting(original: type, tokens: dict[Any, Any], path: Any, arrivals: Arrivals) -> Callable[..., Any]:
    """Return a `__call__` that notes the first array among its arguments."""

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        def measured(*args: Any, **kwargs: Any) -> Any:
            tokens[path] = find_tokens(args)
            try:
                return original.__call__(self, *args, **kwargs)
            finally:
                tokens.pop(path, None)  # a tracer must not outlive its trace

        return measured(*args, **kwargs) if path else arrivals.call(measured, args, kwargs)

    return call


def _count(module: nnx.Module) -> int:
    return sum(x.size for x in jax.tree.leaves(nnx.state(module, nnx.Param)))


def _noting_place(original: type, places: dict[Any, Any], path: Any, name: str, count: int) -> Callable[..., Any]:
    """Return a `__call__` that notes the layer, and whether queries and keys are from different tokens."""

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        place = find_place(name, nnx.state(self, nnx.Param), count)
        places[path] = (place, is_cross_attention(args, kwargs))
        try:
            return original.__call__(self, *args, **kwargs)
        finally:
            places.pop(path, None)  # a tracer must not outlive its trace

    return call


def _replace_call(module: nnx.Module, call: Callable[..., Any]) -> Callable[[], None]:
    """Give a module a subclass of its class with another `__call__`, and return the function that undoes it."""
    original = type(module)
    subclass = type(original.__name__, (original,), {"__call__": call, "__module__": original.__module__})
    object.__setattr__(module, "__class__", subclass)
    return lambda: object.__setattr__(module, "__class__", original)


def _wrap(
    original: Callable[..., Any], arrivals: Arrivals, tokens: Callable[[], Any], place: Callable[[], Any]
) -> Callable[..., Any]:
    """Return an attention function that measures its call."""

    @functools.wraps(original)
    def attention_fn(query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
        out = original(query, key, value, *args, **kwargs)
        layer, cross = place()
        return arrivals.see(layer, out, tokens(), attention_of(original, query, key, args, kwargs, cross))

    return attention_fn


def attention_of(
    original: Callable[..., Any], query: Any, key: Any, args: Any, kwargs: Any, cross: bool
) -> Attention | None:
    """Return the queries, keys and masks of a call of an attention function.

    None if it is not Flax's `dot_product_attention`, or has more than three positional arguments.

    Args:
        original: attention function of the layer.
        query, key: its first two arguments.
        args: positional arguments after the values.
        kwargs: keyword arguments.
        cross: True if queries and keys are from different tokens.
    """
    if getattr(original, "__name__", "") != "dot_product_attention" or args:
        return None
    return Attention(query, key, kwargs.get("mask"), kwargs.get("bias"), bool(kwargs.get("is_causal")), cross)


def _attach_family(watch: Watch, arrivals: Arrivals) -> Callable[[], None]:
    """Have a model of `leanformer.models` called with a tap, unless the caller passes one.

    Raises:
        ConfigError: the option `mask` is set.
    """
    if watch.options.valid is not None:
        raise ConfigError("mask=: models of leanformer.models take padding as an argument, lengths. Leave mask= out.")
    model, original = watch.model, type(watch.model)
    roundoffs: dict[str, float] = {}  # noted while a layer is traced

    def take(arrays: Any) -> tuple[Any, Any]:
        limit = watch.options.examples
        tokens = arrays["tokens"]
        roundoffs.update(find_roundoffs(watch.options.measures, arrays.get("out", tokens).dtype, tokens.dtype))
        valid = arrays.get("mask", ALL).valid_tokens(arrays["tokens"].shape[1])
        if limit is not None:
            examples = max(1, len(tokens))  # of attention within windows, q and k have several rows per example
            arrays = jax.tree.map(
                lambda x: x[: limit * max(1, len(x) // examples)] if jnp.ndim(x) else x,
                {name: x for name, x in arrays.items() if x is not None},
            )
            valid = valid if valid is None else valid[:limit]
        measured = {name: pack(x) for name, x in tap(watch.options.measures)(arrays).items()}
        return measured, count_rows(valid, *arrays["tokens"].shape[:2])

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("tap") is not None:
            return original.__call__(self, *args, **kwargs)
        result, taps = original.__call__(self, *args, **kwargs | {"tap": take})
        for stack, groups in taps.items():
            first = 0
            for measured, rows in groups if isinstance(groups, list) else [groups]:
                arrivals.deliver_stack(stack, measured, rows, roundoffs, first)
                first += len(rows)
        return result, {}

    return _replace_call(model, call)
