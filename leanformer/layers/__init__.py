"""Parts of models. Their gradients are their own, faster than JAX's; `forward_mode` switches to JAX's."""

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import jax


_forward = jax.make_user_context(False)  # part of the key of JAX's caches


def forward_mode() -> AbstractContextManager[None]:
    """Return a context manager in whose block layers use JAX's own derivatives, so that every transformation works.

    It serves `jax.jvp`, `jax.linearize`, `jax.jacfwd` and `jax.hessian`, which do not support gradients written by
    hand. Values are equal, gradients up to rounding. Training never needs it.

        with forward_mode():
            outputs, tangents = jax.jvp(lambda x: model(x)[0], (x,), (v,))
    """
    return _forward(True)


def with_gradient(
    plain: Callable[..., Any], forward: Callable[..., Any], backward: Callable[..., Any], static: tuple[int, ...] = ()
) -> Callable[..., Any]:
    """Give `plain` a gradient of its own by `jax.custom_vjp`, except inside `forward_mode`."""
    custom = jax.custom_vjp(plain, nondiff_argnums=static)
    custom.defvjp(forward, backward)

    @functools.wraps(plain)
    def call(*args: Any) -> Any:
        return plain(*args) if _forward.value else custom(*args)

    return call
