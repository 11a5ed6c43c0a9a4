"""Arrays of a call of attention in JAX, as the layers of Flax and Equinox pass them."""

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import NamedSharding, PartitionSpec

from leanformer.watching.measures import OF_LOGITS, OF_QUERIES


class Attention:
    """Queries, keys and masks of one call of softmax attention, with any batch axes *B, as libraries pass them.

    Args:
        query, key: queries *B T N H and keys *B S K H before the product; K divides N.
        mask: True where a query may attend to a key, with axes that broadcast to *B N T S; None for no mask.
        bias: array added to the logits, which broadcasts to *B N T S; None for none.
        causal: True to hide later keys too.
        cross: True if queries and keys are from different tokens.
    """

    def __init__(
        self, query: Any, key: Any, mask: Any = None, bias: Any = None, causal: bool = False, cross: bool = False
    ):
        axes = np.shape(query)[:-3]
        self.query, self.key = batched(query, 4), batched(key, 4)
        self.mask, self.bias = (None if x is None else _batched_logits(x, axes) for x in (mask, bias))
        self.causal, self.cross = causal, cross or self.query.shape[1] != self.key.shape[1]

    def arrays(self, names: tuple[str, ...], examples: int) -> dict[str, Any]:
        """Return the logits, and the queries and keys, of the first examples, as far as measures need them."""
        result = {} if OF_LOGITS.isdisjoint(names) else {"logits": self.logits()[:examples]}
        return (
            result if OF_QUERIES.isdisjoint(names) else result | {"q": self.query[:examples], "k": self.key[:examples]}
        )

    def logits(self) -> Any:
        """Return the logits B N T S in float32, with biases, and with -inf at hidden keys."""
        q, k = self.query.astype(jnp.float32), self.key.astype(jnp.float32)
        if q.shape[2] != k.shape[2]:
            k = jnp.repeat(k, q.shape[2] // k.shape[2], axis=2)
        result = jnp.einsum("btnh,bsnh->bnts", q, k, precision="highest") * q.shape[-1] ** -0.5
        if self.bias is not None:
            result = result + self.bias
        if self.mask is not None:
            result = jnp.where(self.mask != 0, result, -jnp.inf)
        return jnp.where(jnp.tri(*result.shape[-2:], dtype=bool), result, -jnp.inf) if self.causal else result

    def valid(self, length: int, examples: int) -> Any:
        """Return the tokens that some query may attend to, which excludes padding, bool B T, of the first examples.

        None without a mask, in cross-attention, whose mask says nothing of the queries, or if the mask has another
        number of keys than `length`.
        """
        if self.mask is None or self.mask.shape[-1] != length or self.cross:
            return None
        return jnp.broadcast_to((self.mask != 0).any(axis=(1, 2)), (len(self.query), length))[:examples]


def replicate(x: Any) -> Any:
    """Return an array that any operation accepts: one that is sharded over Explicit axes is replicated."""
    x = jnp.asarray(x)
    sharding = jax.typeof(x).sharding
    if all(axes is None for axes in sharding.spec):
        return x
    placed = None if isinstance(x, Tracer) else x.sharding
    mesh = placed.mesh if isinstance(placed, NamedSharding) else sharding.mesh
    return jax.sharding.reshard(x, NamedSharding(mesh, PartitionSpec()))


def find_tokens(args: tuple[Any, ...]) -> Any:
    """Return the first of the positional arguments of a module that may be tokens, floats with two axes or more."""
    return next((x for x in args if getattr(x, "ndim", 0) >= 2 and jnp.issubdtype(x.dtype, jnp.floating)), None)


def is_cross_attention(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Return whether an attention module is called with keys, positional or named as in Flax, of other tokens."""
    query: Any = args[0] if args else kwargs.get("inputs_q")
    named = (kwargs.get("inputs_k"), kwargs.get("inputs_kv"), *args[1:2])
    key: Any = next((x for x in named if x is not None), query)
    return key is not query and np.ndim(key) == np.ndim(query) and jnp.issubdtype(jnp.result_type(key), jnp.floating)


def replace_call(module: Any, around: Callable[..., Any]) -> Callable[[], None]:
    """Give a module a subclass of its class whose call is `around(self, call, args, kwargs)`; return the undoing."""
    original = type(module)

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return around(self, functools.partial(original.__call__, self), args, kwargs)

    subclass = type(original.__name__, (original,), {"__call__": call, "__module__": original.__module__})
    object.__setattr__(module, "__class__", subclass)
    return lambda: object.__setattr__(module, "__class__", original)


def batched(x: Any, ndim: int) -> Any:
    """Return x with exactly one batch axis."""
    x = replicate(x)
    rest = x.shape[1 - ndim :]
    return x.reshape(math.prod(x.shape[: 1 - ndim]), *rest) if x.ndim >= ndim else x[None]


def _batched_logits(x: Any, axes: tuple[int, ...]) -> Any:
    """Return a mask or bias, which broadcasts to *B N T S, with four axes, the first of B examples."""
    x = replicate(x)
    rest = (1, 1, 1, *x.shape)[-3:]
    return jnp.broadcast_to(x, (*axes, *rest)).reshape(-1, *rest)


def count_rows(valid: Any, examples: int, length: int) -> Any:
    """Return the number of tokens of each example that are not padding, int B; all without `valid`, bool B T."""
    return np.full(examples, length) if valid is None else valid.sum(axis=1)
