"""Measurement of arrays of a JAX model, concrete or traced: results leave a trace through a callback.

Under `jax.jit` and in a scan over layers the measures are part of the program, and only their small results reach the
host. No tracer is kept. The callback returns 1, by which the layer's output is multiplied: this changes no bit, and
unlike an effect it is allowed inside Flax's `nn.scan`. A layer inside a scan is traced once and arrives once per
iteration, each time with other weights, by which the iterations are told apart.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from leanformer.conditioning.spectrum import use_jax
from leanformer.errors import ConfigError
from leanformer.watching.jax_arrays import Attention, batched, count_rows, is_traced, replicate
from leanformer.watching.measures import Layer, find_roundoffs, reduce
from leanformer.watching.session import ALL_PADDING, Watch


REFUSED = (
    "watch: calls inside jax.vmap, jax.pmap and jax.shard_map are not measured, since their layers cannot be told "
    "apart: call the model with a batch, outside of them."
)
CROSS = "cross-attention, whose mask says nothing of the queries: their padding counts without mask="
reduce_compiled = jax.jit(reduce, static_argnames="names")


class Place(NamedTuple):
    """Layer that is called: its number of repetitions in a scan, and some of its weights, which tell these apart."""

    name: str
    repeats: int = 1
    weights: Any = ()


class Arrivals:
    """Measurement of the layers of one watch.

    Args:
        watch: watch that collects the results.
        mapped: True for layers that are called under `jax.vmap`, one example at a time.
    """

    def __init__(self, watch: Watch, mapped: bool = False):
        self.watch, self.mapped = watch, mapped
        watch.effects = jax.effects_barrier
        self.calls: dict[str, int] = {}  # by part, "" for the model, to measure each `every`-th
        self.due: bool | None = None  # whether the call of the model that is under way is measured; None outside one
        self.known: dict[str, dict[bytes, int]] = {}  # by scanned layer: index of each iteration by its weights

    def call(self, model: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Call the model, and return its result. Raise ConfigError inside `jax.shard_map` and `jax.pmap`."""
        if jax.sharding.get_abstract_mesh().manual_axes:
            raise ConfigError(REFUSED)
        if self.due is not None:
            return model(*args, **kwargs)  # within another call, such as that of a base class
        traced = is_traced(args, kwargs, jnp.zeros(()))
        if traced:
            jax.debug.callback(lambda: None)  # an effect, so that `jax.effects_barrier` waits for the program
        self.due = True if traced else self._is_due("")
        try:
            result = model(*args, **kwargs)
            return jax.block_until_ready(result) if self.due and not traced else result
        finally:
            self.due = None

    def see(self, place: Place, out: Any, tokens: Any = None, attention: Attention | None = None) -> Any:
        """Measure one call of a layer, and return `out`, with which the layer must continue.

        Args:
            place: layer that is called.
            out: heads' outputs before the output projection, *B T N H.
            tokens: input of the block, *B T D, if known.
            attention: queries, keys and masks, if known.

        Raises:
            ConfigError: the call is under `jax.vmap`, or it is traced and the option `every` is above 1.
        """
        if not out.size:
            return out
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
        given = options.valid_for(examples, length, place.name)
        valid = None if given is None else jnp.asarray(given)
        if attention is not None:
            arrays |= attention.arrays(layers[0].names, examples)
            if given is None:
                valid = attention.valid(length, examples)
                for layer in layers if attention.cross and attention.mask is not None else ():
                    layer.note(CROSS)
        roundoffs = find_roundoffs(options.measures, out.dtype, arrays.get("tokens", out).dtype)
        deliver = functools.partial(self._deliver, place, roundoffs)
        results = functools.partial(_measure, arrays, valid, layers[0].names, place.weights)
        if not is_traced(arrays, valid):
            if self._is_due(place.name) if self.due is None else self.due:
                deliver(*results())
            return out
        self._check_uncounted()
        if not self.mapped:
            return out * _on_host(deliver, *results()).astype(out.dtype)
        jax.debug.callback(deliver, *results())
        return out

    def deliver_stack(
        self, stack: str, measured: Mapping[str, Any], rows: Any, roundoffs: Mapping[str, float], first: int = 0
    ) -> None:
        """Deliver the results of a call of a stack of `leanformer.layers`, or of a group of its layers.

        Args:
            stack: name of the stack.
            measured: results of `measures.pack` by measure, with leading axes L B; within windows, L and the windows
                of all examples.
            rows: numbers of tokens that are not padding, L B.
            roundoffs: unit roundoff by measure, as from `measures.find_roundoffs`.
            first: index of the first layer of the group.

        Raises:
            ConfigError: the call is traced, and the option `every` is above 1.
        """

        def deliver(measured: Mapping[str, Any], rows: Any) -> None:
            for i, number in enumerate(rows):
                place = Place(f"{stack}.{first + i}")
                of_layer = {name: np.asarray(x[i]) for name, x in measured.items()}
                windows = {name: x for name, x in of_layer.items() if len(x) != len(number)}
                self._deliver(place, roundoffs, {n: x for n, x in of_layer.items() if n not in windows}, number, ())
                if windows and self.watch.open:  # of attention within windows, which count as examples
                    self._layers(place)[0].add(windows, roundoffs)

        for i in range(len(rows)):
            layer = self.watch.add_layer(f"{stack}.{first + i}")
            if "head_output" in measured:
                layer.heads = measured["head_output"].shape[2]
        if not is_traced(measured, rows):
            if self._is_due(f"{stack}.{first}"):
                deliver(measured, rows)
            return
        self._check_uncounted()
        jax.debug.callback(deliver, measured, rows)

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

    def _deliver(
        self, place: Place, roundoffs: Mapping[str, float], measured: Mapping[str, Any], rows: Any, weights: Any
    ) -> None:
        """Add results to the statistics of a layer."""
        if not self.watch.open:
            return  # a compiled function that was traced inside the block and is called after it
        known, key = self.known.setdefault(place.name, {}), np.asarray(weights).tobytes()
        if key not in known and len(known) == place.repeats:
            known.clear()  # the next call, with other weights
        layer, rows = self._layers(place)[known.setdefault(key, len(known))], np.asarray(rows)
        kept = rows > 0
        if not kept.all():
            layer.note(ALL_PADDING)
        if not kept.any():
            return
        if rows.max() == 1:
            layer.single += 1
            return
        layer.calls += 1
        layer.add({name: np.asarray(x)[kept] for name, x in measured.items()}, roundoffs)


def _measure(arrays: Mapping[str, Any], valid: Any, names: tuple[str, ...], weights: Any) -> tuple[Any, Any, Any]:
    examples, length = arrays["out"].shape[:2]
    return reduce_compiled(use_jax().observed(arrays), valid, names), count_rows(valid, examples, length), weights


def _on_host(function: Callable[..., None], *results: Any) -> Any:
    """Return 1 after `function(*results)` was called on the host; the program has to multiply by it."""

    def call(*results: Any) -> np.ndarray:
        function(*jax.tree.map(np.asarray, results))
        return np.ones((), np.float32)

    return jax.pure_callback(call, jax.ShapeDtypeStruct((), np.float32), *jax.lax.stop_gradient(results))


def find_place(name: str, inside: Any, outside: int) -> Place:
    """Return the place of a layer from its weights in a call, and from the number of all its weights in the model.

    In a scan over layers the model has several times as many as a call.
    """
    leaves = [x for x in jax.tree.leaves(inside) if getattr(x, "size", 0)]
    repeats = outside // max(1, sum(x.size for x in leaves))
    if repeats <= 1:
        return Place(name)
    largest = max(leaves, key=lambda x: x.size)
    return Place(name, repeats, replicate(largest).reshape(-1)[:16])
