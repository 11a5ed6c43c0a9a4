"""Watch of a model of `leanformer.models`, by its tap."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from leanformer.conditioning import tap
from leanformer.errors import ConfigError
from leanformer.layers.masks import UNMASKED
from leanformer.watching import Watch
from leanformer.watching.jax_arrays import count_rows, replace_call
from leanformer.watching.measures import pack
from leanformer.watching.traced import Arrivals


def attach(watch: Watch) -> Callable[[], None]:
    """Have a model called with a tap, unless the caller passes one, and return the function that undoes it."""
    if watch.options.mask is not None:
        raise ConfigError("mask=: models of leanformer.models take padding as an argument, lengths. Leave mask= out.")
    measures, limit = watch.options.measures, watch.options.examples
    arrivals, batch = Arrivals(watch), 1

    def take(arrays: Any) -> tuple[Any, Any, Any]:
        tokens = arrays["tokens"]
        arrays, valid = dict(arrays), arrays.get("mask", UNMASKED).valid_tokens(tokens.shape[1])
        if limit is not None:  # within windows and patches, arrays have several rows per example
            arrays, valid = jax.tree.map(
                lambda x: x[: limit * max(1, len(x) // batch)] if jnp.ndim(x) else x, (arrays, valid)
            )
        measured = {name: pack(x) for name, x in tap(measures)(arrays).items()}
        heads = jnp.array(arrays["out"].shape[-2:] if "out" in arrays else (0, 0))
        return measured, count_rows(valid, *arrays["tokens"].shape[:2]), heads

    def call(self: Any, original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        nonlocal batch
        if kwargs.get("tap") is not None:
            return original(*args, **kwargs)
        batch = len(jax.tree.leaves((args, kwargs))[0])
        result, taps = original(*args, **kwargs | {"tap": take})
        for stack, groups in taps.items():
            first = 0
            for measured, rows, heads in groups if isinstance(groups, list) else [groups]:
                arrivals.see_stack(stack, measured, rows, heads, first, min(batch, limit or batch))
                first += len(rows)
        return result, {}

    return replace_call(watch.model, call)
