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
    arrivals = Arrivals(watch)

    def take(arrays: Any) -> tuple[Any, Any]:
        tokens = arrays["tokens"]
        valid = arrays.get("mask", UNMASKED).valid_tokens(tokens.shape[1])
        if limit is not None:  # of attention within windows, q and k have several rows per example
            arrays = jax.tree.map(
                lambda x: x[: limit * max(1, len(x) // len(tokens))] if jnp.ndim(x) else x, dict(arrays)
            )
            valid = None if valid is None else valid[:limit]
        measured = {name: pack(x) for name, x in tap(measures)(arrays).items()}
        return measured, count_rows(valid, *arrays["tokens"].shape[:2])

    def call(self: Any, original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if kwargs.get("tap") is not None:
            return original(*args, **kwargs)
        result, taps = original(*args, **kwargs | {"tap": take})
        for stack, groups in taps.items():
            first = 0
            for measured, rows in groups if isinstance(groups, list) else [groups]:
                arrivals.see_stack(stack, measured, rows, first)
                first += len(rows)
        return result, {}

    return replace_call(watch.model, call)
