"""Watch of a Flax model: while an attention layer is called, its `attention_fn` is wrapped.

NNX: attention layers and the modules around them have a subclass of their class while the block is open, so that calls
through `nnx.jit` or `nnx.scan` are seen too.

linen: the model's methods are intercepted, through `apply` and `bind`, also under `nn.scan` and `nn.remat`; of a bound
model, a submodule that is called by itself is not seen. Calls of other models are left alone; linen cannot tell one of
the same class and settings from the watched one.

Functions that were compiled before the block are not seen.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

from flax import linen as nn
from flax import nnx

from leanformer.errors import ConfigError
from leanformer.watching import Watch
from leanformer.watching.jax_arrays import Attention, find_tokens, is_cross_attention, replace_call
from leanformer.watching.traced import Arrivals, Place, count_weights, find_place


def attach(watch: Watch) -> Callable[[], None]:
    """Have the attention layers of a model measured, and return the function that undoes it."""
    return (_attach_linen if isinstance(watch.model, nn.Module) else _attach_nnx)(watch, Arrivals(watch))


@contextlib.contextmanager
def _noted(notes: dict[Any, Any], path: Any, value: Any) -> Iterator[None]:
    """Keep a value while a module is called: a tracer must not outlive its trace."""
    notes[path] = value
    try:
        yield
    finally:
        del notes[path]


@contextlib.contextmanager
def _wrapped(module: Any, arrivals: Arrivals, place: Place, tokens: Any, cross: bool) -> Iterator[None]:
    """Measure a call of an attention layer; `tokens` enter its block, `cross` is true for cross-attention."""
    original = module.attention_fn

    @functools.wraps(original)
    def attention_fn(query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
        out = original(query, key, value, *args, **kwargs)
        attention = None
        if original in (nn.dot_product_attention, nnx.dot_product_attention) and not args:  # jax.nn's has a scale
            masks = kwargs.get("mask"), kwargs.get("bias"), bool(kwargs.get("is_causal"))
            attention = Attention(query, key, *masks, cross)
        return arrivals.see(place, out, tokens, attention)

    object.__setattr__(module, "attention_fn", attention_fn)  # linen's modules are frozen
    try:
        yield
    finally:
        object.__setattr__(module, "attention_fn", original)


def _attach_nnx(watch: Watch, arrivals: Arrivals) -> Callable[[], None]:
    model = watch.model
    modules: dict[Any, Any] = dict(nnx.iter_modules(model))
    attentions = [path for path, module in modules.items() if callable(getattr(module, "attention_fn", None))]
    if not attentions:
        raise ConfigError(
            f"watch: no module of {type(model).__name__} has an attention_fn, as nnx.MultiHeadAttention has. It has "
            f"{', '.join(sorted({type(module).__name__ for module in modules.values()}))}. "
            "leanformer.conditioning.condition(array) measures any array."
        )
    parents = {
        path: next(path[:i] for i in reversed(range(len(path))) if path[:i] in modules) for path in attentions if path
    }
    tokens: dict[Any, Any] = {}  # entering the modules that are being called
    undo = contextlib.ExitStack()

    def watch_block(path: Any) -> None:
        def call(self: Any, original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
            with _noted(tokens, path, find_tokens(args)):
                return original(*args, **kwargs) if path else arrivals.call(original, args, kwargs)

        undo.callback(replace_call(modules[path], call))

    def watch_attention(path: Any) -> None:
        module, name = modules[path], ".".join(map(str, path)) or type(model).__name__
        watch.add_layer(name, getattr(module, "num_heads", None))
        count = count_weights(nnx.state(module, nnx.Param))

        def call(self: Any, original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
            place = find_place(name, nnx.state(self, nnx.Param), count)
            with _wrapped(self, arrivals, place, tokens.get(parents.get(path)), is_cross_attention(args, kwargs)):
                return original(*args, **kwargs)

        undo.callback(replace_call(module, call))

    for path in {(), *parents.values()}:
        watch_block(path)
    for path in attentions:
        watch_attention(path)
    return undo.close


def _equal(a: nn.Module, b: nn.Module) -> bool:
    try:
        return bool(a == b)
    except ValueError:  # fields that are arrays
        return False


def _attach_linen(watch: Watch, arrivals: Arrivals) -> Callable[[], None]:
    model, tokens = watch.model, {}
    under_way: list[Any] = []  # variables of the models that are being called, outermost first; None of another model

    def intercept(call: Callable[..., Any], args: Any, kwargs: Any, context: nn.module.InterceptorContext) -> Any:
        module = context.module
        if module.scope is None or context.method_name == "setup":
            return call(*args, **kwargs)
        measured = functools.partial(measure, module, call)
        if module.path:
            return measured(*args, **kwargs)
        watched = not module.is_initializing() and _equal(module.clone(parent=None), model)
        under_way.append(module.variables if watched else None)
        try:
            return arrivals.call(measured, args, kwargs) if watched else call(*args, **kwargs)
        finally:
            under_way.pop()

    def measure(module: nn.Module, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        path = module.path
        if not under_way or under_way[-1] is None or path in tokens:  # already called, by a subclass of its class
            return call(*args, **kwargs)
        with _noted(tokens, path, find_tokens(args)):
            if not callable(getattr(module, "attention_fn", None)):
                return call(*args, **kwargs)
            outside = functools.reduce(lambda tree, key: tree.get(key, {}), path, under_way[-1].get("params", {}))
            name = ".".join(path) or type(module).__name__
            place = find_place(name, module.variables.get("params", {}), count_weights(outside))
            block = tokens.get(path[:-1]) if path else None
            with _wrapped(module, arrivals, place, block, is_cross_attention(args, kwargs)):
                return call(*args, **kwargs)

    interception = nn.intercept_methods(intercept)
    interception.__enter__()

    def detach() -> None:
        interception.__exit__(None, None, None)
        if not watch.layers:
            watch.unmatched[type(model).__name__] = (
                "no module with an attention_fn, such as nn.MultiHeadDotProductAttention, was called in the block. A "
                "function that was compiled before is not traced again; of nn.scan(...) or nn.remat(...) itself, watch "
                "a module around it"
            )

    return detach
