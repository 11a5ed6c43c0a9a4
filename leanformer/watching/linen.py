"""Watch of a Flax linen model: methods are intercepted while the block is open, and `attention_fn` is wrapped.

Interception works through `model.apply`, also under `nn.scan` and `nn.remat`, and through `model.bind`. Calls of other
models are left alone. It does not reach functions that were compiled before the block.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from flax import linen as nn

from leanformer.errors import ConfigError
from leanformer.watching.jax_arrays import find_tokens, is_cross_attention
from leanformer.watching.nnx import attention_of
from leanformer.watching.session import Watch
from leanformer.watching.traced import Arrivals, find_place


EQUAL = "a second model of the same class and settings was called, which linen cannot tell from this one: both count"


def attach(watch: Watch) -> Callable[[], None]:
    """Intercept the methods of all linen modules to measure attention, and return the function that ends it.

    Args:
        watch: watch whose model is measured; attention layers are added to it.

    Raises:
        ConfigError: the options `at` or `heads` are set, which select layers of PyTorch models.
    """
    if watch.options.at is not None or watch.options.heads is not None:
        raise ConfigError("at= and heads= select layers of PyTorch models: leave them out for Flax.")
    model, arrivals, tokens = watch.model, Arrivals(watch), {}
    # Of the calls of models that are under way, outermost first: variables of the watched model, None of another.
    under_way: list[Any] = []
    identical, others = set(), set()

    def enter(called: nn.Module) -> bool:
        """Return True if a model that is called is the watched one, or equal to it; note the class of another."""
        equal = called is model or (type(called) is type(model) and _equal(called, model))
        if not equal:
            others.add(type(called).__name__)
        return equal

    def intercept(call: Callable[..., Any], args: Any, kwargs: Any, context: nn.module.InterceptorContext) -> Any:
        module, path = context.module, context.module.path
        if context.method_name != "__call__" or module.scope is None or module.is_initializing():
            return call(*args, **kwargs)
        if not under_way:  # in a model that `bind` returned, a copy; also by another method than `__call__`
            root = module
            while isinstance(root.parent, nn.Module):
                root = root.parent
            under_way.append(root.variables if enter(root.unbind()[0]) else None)
            try:
                return intercept(call, args, kwargs, context)
            finally:
                under_way.pop()
        if under_way[-1] is None:
            return call(*args, **kwargs)

        def measured(*args: Any, **kwargs: Any) -> Any:
            return measure(call, args, kwargs, module)

        return measured(*args, **kwargs) if path else arrivals.call(measured, args, kwargs)

    def measure(call: Callable[..., Any], args: Any, kwargs: Any, module: nn.Module) -> Any:
        path = module.path
        tokens[path] = find_tokens(args)
        original = getattr(module, "attention_fn", None)
        if not callable(original):
            try:
                return call(*args, **kwargs)
            finally:
                tokens.pop(path, None)  # a tracer must not outlive its trace
        name = ".".join(path) or type(module).__name__
        outside = functools.reduce(lambda tree, key: tree.get(key, {}), path, under_way[-1].get("params", {}))
        place = find_place(name, module.variables.get("params", {}), _count(outside))
        cross = is_cross_attention(args, kwargs)

        @functools.wraps(original)
        def attention_fn(query: Any, key: Any, value: Any, *rest: Any, **options: Any) -> Any:
            out = original(query, key, value, *rest, **options)
            attention = attention_of(original, query, key, rest, options, cross)
            return arrivals.see(place, out, tokens.get(path[:-1]) if path else None, attention)

        object.__setattr__(module, "attention_fn", attention_fn)  # modules are frozen
        try:
            return call(*args, **kwargs)
        finally:
            object.__setattr__(module, "attention_fn", original)

    apply = nn.Module.apply

    def apply_counted(self: nn.Module, variables: Any, *args: Any, **kwargs: Any) -> Any:
        called = functools.partial(apply, self, variables)
        watched = enter(self)
        under_way.append(variables if watched else None)
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
            called = ", ".join(sorted(others))
            instead = f"; {called} was called, whose layers are not those of the watched model" if others else ""
            watch.unmatched[type(model).__name__] = (
                "no module with an attention_fn, such as nn.MultiHeadDotProductAttention, was called in the block; a "
                f"function that was compiled before is not traced again{instead}"
            )

    return detach


def _count(tree: Any) -> int:
    return sum(math.prod(np.shape(x)) for x in jax.tree.leaves(tree))


def _equal(a: nn.Module, b: nn.Module) -> bool:
    try:
        return bool(a == b)
    except (TypeError, ValueError):  # settings that are different arrays, or traced
        return False
