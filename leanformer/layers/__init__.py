"""Parts of models: attention and its masks, blocks, stacks. Their own gradients, and JAX's in forward mode."""

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import jax


_forward = jax.make_user_context(False)  # part of the key of JAX's caches


def forward_mode() -> AbstractContextManager[None]:
    """Return a context manager in whose block layers use JAX's own derivatives, so that every transformation works.

    Values are equal, gradients up to rounding. Training never needs it.
    """
    return _forward(True)


def with_gradient(
    plain: Callable[..., Any], forward: Callable[..., Any], backward: Callable[..., Any], static: tuple[int, ...] = ()
) -> Callable[..., Any]:
    """Return `plain` with a gradient of its own, as a `jax.custom_vjp`; inside `forward_mode` it is `plain` alone.

    Args:
        plain: function to differentiate.
        forward: function of the same arguments that returns (result, residuals).
        backward: function (*static arguments, residuals, gradient of the result) that returns the gradients of the
            other arguments.
        static: positions of arguments that are not differentiated.
    """
    custom = jax.custom_vjp(plain, nondiff_argnums=static)
    custom.defvjp(forward, backward)

    @functools.wraps(plain)
    def call(*args: Any) -> Any:
        return plain(*args) if _forward.value else custom(*args)

    return call
