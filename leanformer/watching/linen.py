"""Watch of a Flax linen model: methods are intercepted while the block is open, and `attention_fn` is wrapped.

Interception works through `model.apply`, also under `nn.scan` and `nn.remat`. It does not reach functions that were
compiled before the block.
"""

import functools
from collections.abc import Callable
from typing import Any

from flax import linen as nn

from leanformer.errors import ConfigError
from leanformer.watching.nnx import attention_of
from leanformer.watching.session import Watch
from leanformer.watching.traced import Arrivals, find_tokens


def attach(watch: Watch) -> Callable[[], None]:
    """Intercept the methods of all linen modules to measure attention, and return the function that ends it.

    Args:
        watch: watch whose model is measured; attention layers are added to it.

    Raises:
        ConfigError: the options `at` or `heads` are set, which select layers of PyTorch models.
    """
    if watch.options.at is not None or watch.options.heads is not None:
        raise ConfigError("at= and heads= select layers of PyTorch models: leave them out for Flax.")
    arrivals, tokens = Arrivals(watch), {}

    def intercept(call: Callable[..., Any], args: Any, kwargs: Any, context: nn.module.InterceptorContext) -> Any:
        module, path = context.module, context.module.path
        if context.method_name != "__call__" or module.scope is None or module.is_initializing():
            return call(*args, **kwargs)

        def measured(*args: Any, **kwargs: Any) -> Any:
            return measure(call, args, kwargs, module)

        return measured(*args, **kwargs) if path else arrivals.call(measured, args, kwargs, module.variables)

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
        arrivals.layer(name)

        @functools.wraps(original)
        def attention_fn(query: Any, key: Any, value: Any, *rest: Any, **options: Any) -> Any:
            out = original(query, key, value, *rest, **options)
            attention = attention_of(original, query, key, rest, options, arrivals, name)
            return arrivals.see(name, out, tokens.get(path[:-1]) if path else None, attention)

        object.__setattr__(module, "attention_fn", attention_fn)  # modules are frozen
        try:
            return call(*args, **kwargs)
        finally:
            object.__setattr__(module, "attention_fn", original)

    apply = nn.Module.apply

    def apply_counted(self: nn.Module, variables: Any, *args: Any, **kwargs: Any) -> Any:
        return arrivals.call(functools.partial(apply, self, variables), args, kwargs, variables)

    interception = nn.intercept_methods(intercept)
    interception.__enter__()
    # A scanned model is intercepted at each of its layers; what is called once is this.
    nn.Module.apply = apply_counted

    def detach() -> None:
        nn.Module.apply = apply
        interception.__exit__(None, None, None)
        if not watch.layers:
            watch.unmatched[type(watch.model).__name__] = (
                "no module with an attention_fn, such as nn.MultiHeadDotProductAttention, was called in the block; a "
                "function that was compiled before is not traced again"
            )

    return detach
