"""Measurement of arrays of a JAX model, concrete or traced: results leave a trace through a callback.

Under `jax.jit` and in a scan over layers the measures are part of the program, and only their small results reach the
host. No tracer is kept. The callback returns 1, by which the layer's output is multiplied: this changes no bit, and
unlike an effect it is allowed inside Flax's `nn.scan`. A layer inside a scan is traced once and arrives once per
iteration, each time with other weights, by which the iterations are told apart.
"""

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from leanformer.conditioning.spectrum import observed
from leanformer.errors import ConfigError
from leanformer.watching import Watch
from leanformer.watching.jax_arrays import Attention, batched, count_rows, replicate
from leanformer.watching.measures import WINDOWS, Layer, reduce


REFUSED = (
    "watch: calls inside jax.vmap, jax.pmap and jax.shard_map are not measured, since their layers cannot be told "
    "apart: call the model with a batch, outside of them."
)
CROSS = "cross-attention, whose mask says nothing of the queries: their padding counts without mask="
reduce_compiled = jax.jit(reduce, static_argnames="names")


class Place(NamedTuple):
    """Layer that is called."""

    name: str
    repeats: int = 1  # in a scan over layers
    weights: Any = ()  # some of its weights, which tell the repetitions apart


class Arrivals:
    """Measurement of the layers of one watch.

    Args:
        mapped: True for layers that are called under `jax.vmap`, one example at a time.
    """

    def __init__(self, watch: Watch, mapped: bool = False):
        self.watch, self.mapped = watch, mapped
        watch.wait = jax.effects_barrier
        self.calls: dict[str, int] = {}  # by part, "" for the model, to measure each `every`-th
        self.due: bool | None = None  # whether the call of the model that is under way is measured; None outside one
        self.known: dict[str, dict[bytes, int]] = {}  # by scanned layer: index of each iteration by its weights

    def call(self, model: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Call the model, and return its result."""
        if jax.sharding.get_abstract_mesh().manual_axes:
            raise ConfigError(REFUSED)
        if self.due is not None:
            return model(*args, **kwargs)  # within another call, such as a base class's
        traced = _is_traced(args, kwargs, jnp.zeros(()))
        if traced:
            jax.debug.callback(lambda: None)  # an effect, so that `jax.effects_barrier` waits for the program
        self.due = traced or self._is_due("")
        try:
            result = model(*args, **kwargs)
            return jax.block_until_ready(result) if self.due and not traced else result
        finally:
            self.due = None

    def see(self, place: Place, out: Any, tokens: Any = None, attention: Attention | None = None) -> Any:
        """Measure one call of a layer, and return `out`, with which the layer must continue.

        `out` are the heads' outputs before the output projection, *B T N H, `tokens` the input of the block, *B T D.
        """
        if type(out).__name__ == "BatchTracer" and not self.mapped:
            raise ConfigError(REFUSED)
        options, layers = self.watch.options, self._layers(place)
        arrays = {"out": batched(out, 4)[: options.examples]}
        examples, length = arrays["out"].shape[:2]
        elsewhere = isinstance(tokens, Tracer) and tokens._trace is not getattr(out, "_trace", None)
        for layer in layers:
            layer.heads, layer.head_dim = out.shape[-2:]
            if attention is None:
                layer.unseen["q", "k"] = "attention_fn is not dot_product_attention"
            if elsewhere:
                layer.unseen["tokens",] = "to JAX the block is a function of its own, as by nnx.remat or nnx.jit"
        if tokens is not None and not elsewhere and np.shape(tokens)[:-1] == out.shape[:-2]:
            arrays["tokens"] = batched(tokens, 3)[:examples]
        valid = options.valid_for(examples, length, place.name)
        if attention is not None:
            arrays |= attention.arrays(options.measures, examples)
            if valid is None:
                valid = attention.valid(length, examples)
                for layer in layers if attention.cross and attention.mask is not None else ():
                    layer.note(CROSS)
        deliver = functools.partial(self._deliver, place)
        results = functools.partial(_measure, arrays, valid, options.measures, place.weights)
        if not _is_traced(arrays, valid):
            if self._is_due(place.name) if self.due is None else self.due:
                deliver(*results())
            return out
        self._check_uncounted()
        if not self.mapped:
            return out * _on_host(deliver, *results()).astype(out.dtype)
        jax.debug.callback(deliver, *results())
        return out

    def see_stack(
        self, stack: str, measured: Mapping[str, Any], rows: Any, heads: Any, first: int, examples: int
    ) -> None:
        """Take the measures of a call of a stack of `leanformer.layers`, from layer number `first` on.

        `measured` are results of `measures.pack` with leading axes L B; within windows, L and the windows of all
        examples. `rows` are the numbers of tokens that are not padding, L B; `heads` are numbers of heads and their
        dimensions, L 2, or 0.
        """
        places = [Place(f"{stack}.{first + i}") for i in range(len(rows))]
        layers = [self.watch.add_layer(place.name) for place in places]

        def deliver(measured: Mapping[str, Any], rows: Any, heads: Any) -> None:
            for i, (place, layer) in enumerate(zip(places, layers, strict=True)):
                layer.heads, layer.head_dim = (int(x) or None for x in heads[i])
                if rows.shape[1] > examples:
                    layer.note(WINDOWS)
                self._deliver(place, {name: x[i] for name, x in measured.items()}, rows[i], ())

        if _is_traced(measured, rows):
            self._check_uncounted()
            jax.debug.callback(deliver, measured, rows, heads)
        elif self._is_due(places[0].name):
            deliver(measured, rows, heads)

    def _check_uncounted(self) -> None:
        if self.watch.options.every > 1:
            raise ConfigError(
                f"every={self.watch.options.every}: a call in jax.jit, jax.vmap or a gradient cannot be counted. Call "
                "the model without these, or open the watch at each step to measure."
            )

    def _is_due(self, name: str) -> bool:
        count = self.calls.get(name, 0)
        self.calls[name] = count + 1
        return count % self.watch.options.every == 0

    def _layers(self, place: Place) -> list[Layer]:
        """Return the statistics of a layer, one for each repetition in a scan, created at first use."""
        if place.repeats == 1:
            return [self.watch.add_layer(place.name)]
        self.watch.layers.pop(place.name, None)
        return [self.watch.add_layer(f"{place.name}[{i}]") for i in range(place.repeats)]

    def _deliver(self, place: Place, measured: Mapping[str, Any], rows: Any, weights: Any) -> None:
        """Add results to the statistics of a layer."""
        if not self.watch.open:
            return  # a compiled function that was traced inside the block and is called after it
        known, key = self.known.setdefault(place.name, {}), np.asarray(weights).tobytes()
        if key not in known and len(known) == place.repeats:
            known.clear()  # the next call, with other weights
        layer = self._layers(place)[known.setdefault(key, len(known))]
        layer.add_call({name: np.asarray(x) for name, x in measured.items()}, np.asarray(rows))


def _is_traced(*trees: Any) -> bool:
    return any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(trees))


def _measure(arrays: Mapping[str, Any], valid: Any, names: tuple[str, ...], weights: Any) -> tuple[Any, Any, Any]:
    examples, length = arrays["out"].shape[:2]
    valid = None if valid is None else jnp.asarray(valid)
    return reduce_compiled(observed(arrays), valid, names), count_rows(valid, examples, length), weights


def _on_host(function: Callable[..., None], *results: Any) -> Any:
    """Return 1 after `function(*results)` was called on the host; the program has to multiply by it."""

    def call(*results: Any) -> np.ndarray:
        function(*jax.tree.map(np.asarray, results))
        return np.ones((), np.float32)

    return jax.pure_callback(call, jax.ShapeDtypeStruct((), np.float32), *jax.lax.stop_gradient(results))


def count_weights(tree: Any) -> int:
    return sum(math.prod(np.shape(x)) for x in jax.tree.leaves(tree))


def find_place(name: str, inside: Any, outside: int) -> Place:
    """Return the place of a layer from its weights in a call, and the number of all its weights in the model.

    In a scan over layers the model has several times as many as a call.
    """
    repeats = outside // max(1, count_weights(inside))
    if repeats <= 1:
        return Place(name)
    largest = max(jax.tree.leaves(inside), key=np.size)
    return Place(name, repeats, replicate(largest).reshape(-1)[:16])
