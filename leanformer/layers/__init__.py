"""Parts of models. Their gradients are their own, faster than JAX's; `forward_mode` switches to JAX's."""

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
    forward: Callable[..., Any],
    backward: Callable[..., Any],
    *,
    plain: Callable[..., Any] | None = None,
    static: tuple[int, ...] = (),
) -> Callable[..., Any]:
    """Return a function with a gradient of its own, except inside `forward_mode`.

    `forward` returns the value and what `backward` reads; `plain` only the value, if that is cheaper.
    """
    plain = plain or (lambda *args: forward(*args)[0])
    custom = jax.custom_vjp(plain, nondiff_argnums=static)
    custom.defvjp(forward, backward)

    def call(*args: Any) -> Any:
        return plain(*args) if _forward.value else custom(*args)

    return call
