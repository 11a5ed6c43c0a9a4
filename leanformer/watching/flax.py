"""Watch of a Flax model, by wrapping the `attention_fn` of its attention layers.

NNX: it is wrapped while the block is open. The modules around it are given a subclass of their class that notes the
tokens entering the block, so that a call through `nnx.jit` or `nnx.scan` is seen too. Models of `leanformer.models`
have a tap, which is used instead.

linen: methods are intercepted while the block is open, and `attention_fn` is wrapped during a call. This works through
`model.apply`, also under `nn.scan` and `nn.remat`, and through `model.bind`. Calls of other models are left alone.

Functions that were compiled before the block are not seen.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import nnx

from leanformer.conditioning import tap
from leanformer.errors import ConfigError
from leanformer.layers.masks import UNMASKED
from leanformer.layers.model_base import Family
from leanformer.watching.jax_arrays import Attention, count_rows, find_tokens, is_cross_attention
from leanformer.watching.measures import find_roundoffs, pack
from leanformer.watching.session import Watch
from leanformer.watching.traced import Arrivals, count_weights, find_place


EQUAL = "a second model of the same class and settings was called, which linen cannot tell from this one: both count"


def attach(watch: Watch) -> Callable[[], None]:
    """Wrap the attention layers of a model to measure them, and return the function that undoes it."""
    watch.options.refuse_selection()
    arrivals = Arrivals(watch)
    if isinstance(watch.model, nn.Module):
        return _attach_linen(watch, arrivals)
    return (_attach_family if isinstance(watch.model, Family) else _attach_nnx)(watch, arrivals)


@contextlib.contextmanager
def _noted(notes: dict[Any, Any], path: Any, value: Any) -> Iterator[None]:
    """Keep a value while a module is called: a tracer must not outlive its trace."""
    notes[path] = value
    try:
        yield
    finally:
        notes.pop(path, None)


def _wrap(original: Callable[..., Any], arrivals: Arrivals, find: Callable[[], Any]) -> Callable[..., Any]:
    """Return an attention function that measures its call; `find` returns its place, tokens, and if it is cross."""

    @functools.wraps(original)
    def attention_fn(query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
        out = original(query, key, value, *args, **kwargs)
        place, tokens, cross = find()
        attention = None
        if getattr(original, "__name__", "") == "dot_product_attention" and not args:
            masks = kwargs.get("mask"), kwargs.get("bias"), bool(kwargs.get("is_causal"))
            attention = Attention(query, key, *masks, cross)
        return arrivals.see(place, out, tokens, attention)

    return attention_fn


def _attach_nnx(watch: Watch, arrivals: Arrivals) -> Callable[[], None]:
    model = watch.model
    modules: dict[Any, Any] = dict(nnx.iter_modules(model))
    attentions = {path: m for path, m in modules.items() if callable(getattr(m, "attention_fn", None))}
    if not attentions:
        classes = sorted({type(module).__name__ for module in modules.values()})
        raise ConfigError(
            f"watch: no module of {type(model).__name__} has an attention_fn, as nnx.MultiHeadAttention has. It has "
            f"{', '.join(classes)}. leanformer.conditioning.condition(array) measures any array."
        )
    tokens: dict[Any, Any] = {}  # entering the modules that are being called
    places: dict[Any, Any] = {}  # of the attention layers that are being called, and whether they are cross-attention
    undo = contextlib.ExitStack()

    def watch_block(path: Any) -> None:
        def call(self: Any, original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
            with _noted(tokens, path, find_tokens(args)):
                return original(*args, **kwargs) if path else arrivals.call(original, args, kwargs)

        undo.callback(_replace_call(modules[path], call))

    def watch_attention(path: Any, module: Any, parent: Any) -> None:
        name = ".".join(map(str, path)) or type(model).__name__
        watch.add_layer(name, getattr(module, "num_heads", None))
        count = count_weights(nnx.state(module, nnx.Param))

        def call(self: Any, original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
            place = find_place(name, nnx.state(self, nnx.Param), count)
            with _noted(places, path, (place, is_cross_attention(args, kwargs))):
                return original(*args, **kwargs)

        def find() -> Any:
            place, cross = places[path]
            return place, tokens.get(parent), cross

        undo.callback(setattr, module, "attention_fn", module.attention_fn)
        module.attention_fn = _wrap(module.attention_fn, arrivals, find)
        undo.callback(_replace_call(module, call))

    parents = {
        path: next((path[:i] for i in range(len(path) - 1, -1, -1) if path[:i] in modules), None) for path in attentions
    }
    for path in {(), *parents.values()} - {None}:
        watch_block(path)
    for path, module in attentions.items():
        watch_attention(path, module, parents[path])
    return undo.close


def _replace_call(module: nnx.Module, around: Callable[..., Any]) -> Callable[[], None]:
    """Give a module a subclass of its class whose call is `around(self, call, args, kwargs)`; return the undoing."""
    original = type(module)

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return around(self, functools.partial(original.__call__, self), args, kwargs)

    subclass = type(original.__name__, (original,), {"__call__": call, "__module__": original.__module__})
    object.__setattr__(module, "__class__", subclass)
    return lambda: object.__setattr__(module, "__class__", original)


def _attach_family(watch: Watch, arrivals: Arrivals) -> Callable[[], None]:
    """Have a model of `leanformer.models` called with a tap, unless the caller passes one."""
    if watch.options.valid is not None:
        raise ConfigError("mask=: models of leanformer.models take padding as an argument, lengths. Leave mask= out.")
    measures, limit = watch.options.measures, watch.options.examples
    roundoffs: dict[str, float] = {}  # noted while a layer is traced

    def take(arrays: Any) -> tuple[Any, Any]:
        tokens = arrays["tokens"]
        roundoffs.update(find_roundoffs(measures, arrays.get("out", tokens).dtype, tokens.dtype))
        valid = arrays.get("mask", UNMASKED).valid_tokens(tokens.shape[1])
        if limit is not None:
            examples = max(1, len(tokens))  # of attention within windows, q and k have several rows per example
            arrays = jax.tree.map(
                lambda x: x[: limit * max(1, len(x) // examples)] if jnp.ndim(x) else x,
                {name: x for name, x in arrays.items() if x is not None},
            )
            valid = valid if valid is None else valid[:limit]
        measured = {name: pack(x) for name, x in tap(measures)(arrays).items()}
        return measured, count_rows(valid, *arrays["tokens"].shape[:2])

    def call(self: Any, original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if kwargs.get("tap") is not None:
            return original(*args, **kwargs)
        result, taps = original(*args, **kwargs | {"tap": take})
        for stack, groups in taps.items():
            first = 0
            for measured, rows in groups if isinstance(groups, list) else [groups]:
                arrivals.see_stack(stack, measured, rows, roundoffs, first)
                first += len(rows)
        return result, {}

    return _replace_call(watch.model, call)


def _attach_linen(watch: Watch, arrivals: Arrivals) -> Callable[[], None]:
    model, tokens = watch.model, {}
    # Of the calls of models that are under way, outermost first: variables of the watched model, None of another.
    under_way: list[Any] = []
    identical = set()

    def enter(called: nn.Module, variables: Any) -> bool:
        """Note that a model is called, and return whether it is the watched one, or equal to it."""
        equal = called is model or (type(called) is type(model) and _equal(called, model))
        under_way.append(variables if equal else None)
        return equal

    def intercept(call: Callable[..., Any], args: Any, kwargs: Any, context: nn.module.InterceptorContext) -> Any:
        module, path = context.module, context.module.path
        if context.method_name != "__call__" or module.scope is None or module.is_initializing():
            return call(*args, **kwargs)
        if not under_way:  # in a model that `bind` returned, a copy; also by another method than `__call__`
            root = module
            while isinstance(root.parent, nn.Module):
                root = root.parent
            enter(root.unbind()[0], root.variables)
            try:
                return intercept(call, args, kwargs, context)
            finally:
                under_way.pop()
        if under_way[-1] is None:
            return call(*args, **kwargs)
        measured = functools.partial(measure, call, module)
        return measured(*args, **kwargs) if path else arrivals.call(measured, args, kwargs)

    def measure(call: Callable[..., Any], module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        path, original = module.path, getattr(module, "attention_fn", None)
        with _noted(tokens, path, find_tokens(args)):
            if not callable(original):
                return call(*args, **kwargs)
            outside = functools.reduce(lambda tree, key: tree.get(key, {}), path, under_way[-1].get("params", {}))
            name, weights = ".".join(path) or type(module).__name__, module.variables.get("params", {})
            place, cross = find_place(name, weights, count_weights(outside)), is_cross_attention(args, kwargs)
            wrapped = _wrap(original, arrivals, lambda: (place, tokens.get(path[:-1]) if path else None, cross))
            object.__setattr__(module, "attention_fn", wrapped)  # modules are frozen
            try:
                return call(*args, **kwargs)
            finally:
                object.__setattr__(module, "attention_fn", original)

    apply = nn.Module.apply

    def apply_counted(self: nn.Module, variables: Any, *args: Any, **kwargs: Any) -> Any:
        called = functools.partial(apply, self, variables)
        watched = enter(self, variables)
        if watched:
            identical.add(self is model)
        try:
            return arrivals.call(called, args, kwargs) if watched else called(*args, **kwargs)
        finally:
            under_way.pop()

    interception = nn.intercept_methods(intercept)
    interception.__enter__()
    # A scanned model is intercepted at each of its layers; what is called once is this.
    nn.Module.apply = apply_counted

    def detach() -> None:
        nn.Module.apply = apply
        interception.__exit__(None, None, None)
        for layer in watch.layers.values() if len(identical) > 1 else ():
            layer.note(EQUAL)
        if not watch.layers:
            watch.unmatched[type(model).__name__] = (
                "no module with an attention_fn, such as nn.MultiHeadDotProductAttention, was called in the block; a "
                "function that was compiled before is not traced again"
            )

    return detach


def _equal(a: nn.Module, b: nn.Module) -> bool:
    try:
        return bool(a == b)
    except (TypeError, ValueError):  # settings that are different arrays, or traced
        return False
