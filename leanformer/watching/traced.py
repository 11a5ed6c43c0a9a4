"""Measurement of arrays of a JAX model, concrete or traced: results leave a trace through a callback.

Under `jax.jit`, `jax.vmap` and `jax.lax.scan` the measures are part of the program, and only their small results reach
the host. No tracer is kept. The callback returns 1, by which the layer's output is multiplied: this changes no bit, has
the layers arrive in the order of the program, and, unlike an effect, is allowed inside Flax's `nn.scan`. A layer inside
a scan is met once while it is traced and arrives once per iteration; its arrivals within one call are numbered. What
`jax.vmap` maps over counts as examples.
"""

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Float

from leanformer.conditioning import Summary
from leanformer.errors import ConfigError
from leanformer.layers import masks
from leanformer.runtime.jax_internals import mapped_array, program_of
from leanformer.runtime.mesh import explicit_mesh
from leanformer.watching.measures import OF_LOGITS, Layer, find_roundoffs, reduce
from leanformer.watching.session import ALL_PADDING, Watch


class Arrivals:
    """Measurement of the layers of one watch, whose results arrive in the order of the layers of a call.

    Args:
        watch: watch that collects the results.
        by_data: have traced results arrive through the layer's output; otherwise as an effect, for layers that are
            called under `jax.vmap`.
    """

    def __init__(self, watch: Watch, by_data: bool = True):
        self.watch, self.by_data = watch, by_data
        self.counts: dict[str, int] | None = None  # arrivals by layer in the call of the model that is under way
        self.eager: dict[str, int] = {}  # the same in calls that are not traced
        self.counted: dict[str, dict[str, int]] = {}  # by layer: the counts in the program that was traced last
        self.met: set[str] = set()  # layers met in the call of the model that is under way
        self.calls: dict[str, int] = {}  # calls by layer, "" for the model, to measure each `every`-th
        self.measures_call = True  # the call of the model that is under way, not traced, is one of them

    def call(self, model: Callable[..., Any], args: Any, kwargs: Any, weights: Any) -> Any:
        """Call the model, and return its result; results of layers that arrive several times in it are numbered.

        A call that is traced has counts of its own, since the program may contain others, and may run many times. They
        are reset before its first input is used.

        Args:
            model: function that calls the model.
            args, kwargs: its arguments.
            weights: weights of the model.

        Raises:
            ConfigError: the call is inside `jax.shard_map` or `jax.pmap`.
        """
        if jax.sharding.get_abstract_mesh().manual_axes:
            raise ConfigError(
                "watch: a call inside jax.shard_map or jax.pmap runs once per device, and its layers cannot be told "
                "apart. Watch a call of the model outside of it."
            )
        if self.counts is not None:
            return model(*args, **kwargs)  # within another call, such as that of a base class
        if not is_traced(args, kwargs, weights, jnp.zeros(())):
            for counts in (self.eager, *self.counted.values()):
                counts.clear()
            self.measures_call = self._due("")
            return self._counting(self.eager, functools.partial(model, *args, **kwargs))
        leaves, structure = jax.tree.flatten((args, kwargs))
        first = next((i for i, x in enumerate(leaves) if _is_numeric(x)), None)
        if first is None:
            return model(*args, **kwargs)
        counts, others = {}, []

        def reset(*_: Any) -> None:
            for started in (counts, *others):
                started.clear()

        # One number of each input, so that the program can neither merge this with another call nor do it once.
        inputs = [x for x in (*leaves, *jax.tree.leaves(weights)) if _is_numeric(x) and is_traced(x)]
        numbers = [_first_number(x) for x in inputs or leaves[first : first + 1]]
        leaves[first] = leaves[first] * on_host(reset, *numbers).astype(leaves[first].dtype)
        jax.debug.callback(lambda: None)  # an effect, so that `jax.effects_barrier` waits for the program
        args, kwargs = jax.tree.unflatten(structure, leaves)
        try:
            return self._counting(counts, functools.partial(model, *args, **kwargs))
        finally:  # layers that were not met are in a function that JAX traced before
            others += [self.counted[name] for name in self.counted.keys() - self.met]

    def _counting(self, counts: dict[str, int], model: Callable[[], Any]) -> Any:
        self.counts = counts
        self.met.clear()
        try:
            return model()
        finally:
            self.counts = None

    def see(
        self, name: str, out: Float[Array, "*b t n h"], tokens: Any = None, attention: "Attention | None" = None
    ) -> Float[Array, "*b t n h"]:
        """Measure one call of a layer, and return `out`, with which the layer must continue.

        Args:
            name: path of the layer.
            out: heads' outputs before the output projection.
            tokens: input of the block, *B T D, if known.
            attention: queries, keys and masks, if known.
        """
        if not out.size:
            return out
        options, arrays = self.watch.options, {"out": _batched(out, 4)[: self.watch.options.examples]}
        examples, length = arrays["out"].shape[:2]
        if tokens is not None and _is_outside(tokens, out):
            self.layer(name).unseen["tokens",] = "to JAX the block is a function of its own, as by nnx.remat or nnx.jit"
        elif tokens is not None and np.shape(tokens)[:-1] == out.shape[:-2]:
            arrays["tokens"] = _batched(tokens, 3)[:examples]
        roundoffs = find_roundoffs(self.watch.options.measures, out.dtype, arrays.get("tokens", out).dtype)
        layer, valid = self.layer(name), None
        layer.heads, layer.head_dim, names = *out.shape[-2:], layer.names
        if attention is not None:
            if OF_LOGITS.intersection(names):
                arrays["logits"] = attention.logits()[:examples]
            valid = attention.valid(length)
        given = options.valid_for(examples, length, name)
        if attention is not None and attention.cross and attention.mask is not None and given is None:
            layer.note("cross-attention, whose mask says nothing of the queries: their padding counts without mask=")
        valid = jnp.asarray(given) if given is not None else valid if valid is None else valid[:examples]
        deliver = functools.partial(self._deliver, name, roundoffs, self.counts)
        if self.counts is not None:
            self.counted[name] = self.counts
            self.met.add(name)
        if not is_traced(arrays, valid):
            if self.measures_call if self.counts is not None else self._due(name):
                deliver(reduce(arrays, valid, names), count_rows(valid, examples, length))
            return out
        self._check_uncounted()
        results = reduce(arrays, valid, names), count_rows(valid, examples, length)
        if self.by_data:
            return out * on_host(deliver, *results).astype(out.dtype)
        jax.debug.callback(deliver, *results)
        return out

    def deliver_stack(
        self, stack: str, measured: Mapping[str, Any], rows: Any, roundoffs: Mapping[str, float], first: int = 0
    ) -> None:
        """Deliver the results of a call of a stack of `leanformer.layers`, or of a group of its layers.

        Args:
            stack: name of the stack.
            measured: results by measure, with leading axes L B; within windows, L and the windows of all examples.
            rows: numbers of tokens that are not padding, L B.
            roundoffs: unit roundoff by measure, as from `measures.find_roundoffs`.
            first: index of the first layer of the group.

        Raises:
            ConfigError: the call is traced, and the option `every` is above 1.
        """

        def deliver(measured: Mapping[str, Any], rows: Any) -> None:
            for i, number in enumerate(rows):
                name, values = f"{stack}.{first + i}", jax.tree.map(lambda x, i=i: x[i], measured)
                windows = {key: x for key, x in values.items() if len(jax.tree.leaves(x)[0]) != len(number)}
                self._deliver(name, roundoffs, None, {key: values[key] for key in values.keys() - windows}, number)
                if windows and self.watch.open:  # of attention within windows, which count as examples
                    sizes = [x.shape[0] for x in windows.values() if isinstance(x, Summary)]
                    count = len(jax.tree.leaves(windows)[0])
                    self.layer(name).add(windows, np.full(count, max(sizes, default=1)), roundoffs)

        for i in range(len(rows)):
            layer, per_head = self.watch.add_layer(f"{stack}.{first + i}"), measured.get("head_output")
            if per_head is not None:
                layer.heads, layer.head_dim = per_head.condition_number.shape[2], per_head.shape[1]
        if not is_traced(measured, rows):
            if self._due(f"{stack}.{first}"):
                deliver(jax.device_get(measured), rows)
            return
        self._check_uncounted()
        jax.debug.callback(deliver, measured, rows)

    def _check_uncounted(self) -> None:
        every = self.watch.options.every
        if every > 1:
            raise ConfigError(
                f"every={every}: a call in jax.jit, jax.vmap or a gradient cannot be counted. Call the model without "
                "these, or open the watch at each step to measure."
            )

    def _due(self, name: str) -> bool:
        count = self.calls.get(name, 0)
        self.calls[name] = count + 1
        return count % self.watch.options.every == 0

    def _deliver(
        self,
        name: str,
        roundoffs: Mapping[str, float],
        counts: dict[str, int] | None,
        measured: Mapping[str, Any],
        rows: Any,
    ) -> None:
        """Add results to the statistics of a layer, of its next arrival if they are counted."""
        if not self.watch.open:
            return  # a compiled function that was traced inside the block and is called after it
        index = 0
        if counts is not None:
            index = counts.get(name, 0)
            counts[name] = index + 1
        layer, rows = self._layer(name, index), np.asarray(rows)
        kept = rows > 0
        if not kept.all():
            layer.note(ALL_PADDING)
        if not kept.any():
            return
        if rows.max() == 1:
            layer.single += 1
            return
        layer.calls += 1
        layer.add(jax.tree.map(lambda x: np.asarray(x)[kept], measured), rows[kept], roundoffs)

    def layer(self, name: str) -> Layer:
        """Return the statistics of a layer, created at first use; of the first, if it arrives several times in a call.

        Args:
            name: path of the layer.
        """
        return self.watch.layers.get(f"{name}[0]") or self.watch.add_layer(name)

    def _layer(self, name: str, index: int) -> Layer:
        """Return the statistics of an arrival. If there is a second one, the first is renamed to NAME[0]."""
        layers, first = self.watch.layers, self.layer(name)
        if index and name in layers:
            renamed = {f"{name}[0]" if key == name else key: layer for key, layer in layers.items()}
            first.name = f"{name}[0]"
            layers.clear()
            layers.update(renamed)
        if not index:
            return first
        return self.watch.add_layer(f"{name}[{index}]", heads=first.heads, head_dim=first.head_dim)


def on_host(function: Callable[..., None], *results: Any) -> Float[Array, ""]:
    """Return 1 after `function(*results)` was called on the host; the program has to multiply by it.

    Axes that `jax.vmap` adds are merged into the first axis of the results, the examples.

    Args:
        function: function of NumPy arrays.
        results: pytrees of traced arrays with an axis of examples.
    """
    ndim = jnp.ndim(jax.tree.leaves(results)[0])

    def call(*results: Any) -> np.ndarray:
        first = jax.tree.leaves(results)[0]
        mapped = first.ndim - ndim
        function(*jax.tree.map(lambda x: np.reshape(x, (-1, *x.shape[mapped + 1 :])), results))
        return np.ones(first.shape[:mapped], np.float32)

    one = jax.ShapeDtypeStruct((), np.float32)
    return jax.pure_callback(call, one, *jax.lax.stop_gradient(results), vmap_method="broadcast_all")


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
        self.query, self.key = _batched(query, 4), _batched(key, 4)
        self.mask, self.bias = (None if x is None else _batched_logits(x, axes) for x in (mask, bias))
        self.causal, self.cross = causal, cross or self.query.shape[1] != self.key.shape[1]

    def logits(self) -> Float[Array, "b n t s"]:
        """Return the logits B N T S in float32, with biases, and with -inf at hidden keys."""
        q, k = (x.astype(jnp.float32) for x in (self.query, self.key))
        result = masks.logits(q, k)
        if self.bias is not None:
            result = result + self.bias
        if self.mask is not None:
            result = jnp.where(self.mask != 0, result, -jnp.inf)
        if self.causal:
            result = jnp.where(jnp.tri(*result.shape[-2:], dtype=bool), result, -jnp.inf)
        return result

    def valid(self, length: int) -> Bool[Array, "b t"] | None:
        """Return the tokens that some query may attend to, bool B T, which excludes padding.

        None without a mask, in cross-attention, whose mask says nothing of the queries, or if the mask has another
        number of keys.

        Args:
            length: T, number of tokens.
        """
        if self.mask is None or self.mask.shape[-1] != length or self.cross:
            return None
        keys = (self.mask != 0).any(axis=(1, 2))
        return jnp.broadcast_to(keys, (len(self.query), length))


def replicate(x: Any) -> Array:
    """Return an array that any operation accepts: one that is sharded over Explicit axes is replicated.

    Raises:
        ConfigError: `jax.vmap` maps over an axis that is sharded over Explicit axes.
    """
    x = jnp.asarray(x)
    mesh = explicit_mesh(x)
    if (mapped := mapped_array(x)) is not x and explicit_mesh(mapped) is not None:
        raise ConfigError(
            "watch: jax.vmap maps over an axis that is sharded over Explicit axes of a mesh. Make the mesh with "
            "axis_types=(jax.sharding.AxisType.Auto,) * n, or watch a call with a batch on one device."
        )
    return x if mesh is None else jax.sharding.reshard(x, NamedSharding(mesh, PartitionSpec()))


def _first_number(x: Any) -> Array:
    """Return the first element of an array, with shape (1,)."""
    x = jnp.asarray(x)
    if (mesh := explicit_mesh(x)) is not None:
        return x.at[(0,) * x.ndim].get(out_sharding=NamedSharding(mesh, PartitionSpec())).reshape(1)
    return x[(slice(1),) * x.ndim].reshape(-1)


def is_traced(*trees: Any) -> bool:
    """Return True if a leaf of the trees is a tracer of JAX, so that it has no value yet."""
    return any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(trees))


def find_tokens(args: tuple[Any, ...]) -> Any:
    """Return the first of the positional arguments of a module that may be tokens, floats with two axes or more."""
    return next((x for x in args if getattr(x, "ndim", 0) >= 2 and jnp.issubdtype(x.dtype, jnp.floating)), None)


def is_cross_attention(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Return True if the queries and keys of a call of an attention module are different arrays of tokens.

    Args:
        args, kwargs: arguments of the call: queries, then keys, or keys as `inputs_k` or `inputs_kv`, as in Flax.
    """
    query: Any = args[0] if args else kwargs.get("inputs_q")
    named = (kwargs.get("inputs_k"), kwargs.get("inputs_kv"), *args[1:2])
    key: Any = next((x for x in named if x is not None), query)
    return key is not query and np.ndim(key) == np.ndim(query) and jnp.issubdtype(jnp.result_type(key), jnp.floating)


def _is_outside(tokens: Any, out: Any) -> bool:
    """Return whether tokens do not belong to the program in which `out` is traced, which JAX may keep for others."""
    program = program_of(out)
    return program is not None and program_of(tokens) is not program


def _is_numeric(x: Any) -> bool:
    return hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jnp.number)


def _batched(x: Any, ndim: int) -> Array:
    """Return x with exactly one batch axis."""
    x = replicate(x)
    rest = x.shape[1 - ndim :]
    return x.reshape(math.prod(x.shape[: 1 - ndim]), *rest) if x.ndim >= ndim else x[None]


def _batched_logits(x: Any, axes: tuple[int, ...]) -> Array:
    """Return a mask or bias, which broadcasts to *B N T S, with four axes, the first of B or 1 examples.

    Args:
        x: mask or bias.
        axes: sizes of *B.
    """
    x = replicate(x)
    x = x.reshape(*(1,) * max(0, 3 + len(axes) - x.ndim), *x.shape)
    if any(size > 1 for size in x.shape[:-3]):
        x = jnp.broadcast_to(x, (*axes, *x.shape[-3:]))
    return x.reshape(math.prod(x.shape[:-3]), *x.shape[-3:])


def count_rows(valid: Any, examples: int, length: int) -> Any:
    """Return the number of tokens of each example that are not padding, int B.

    Args:
        valid: bool B T, True for tokens that are not padding; None if there is no padding.
        examples: B.
        length: T.
    """
    return np.full(examples, length) if valid is None else valid.sum(axis=1)
