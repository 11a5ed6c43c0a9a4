"""Watch of an Equinox model: `watch.model` is the model with each `eqx.nn.MultiheadAttention` in a measuring wrapper.

The wrapper has the layer's name as a static field, so it is known under `jax.vmap`, `eqx.filter_jit` and scans too.
"""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp

from leanformer.errors import ConfigError
from leanformer.watching import Watch
from leanformer.watching.jax_arrays import Attention, is_cross_attention, replicate
from leanformer.watching.traced import Arrivals, Place


UNCALLED = "call w.model, not the model"


class Measured(eqx.Module):
    """Wrapper of an attention layer that measures its calls. It takes the layer's arguments and returns its output."""

    layer: eqx.nn.MultiheadAttention
    name: str = eqx.field(static=True)
    arrivals: Arrivals = eqx.field(static=True)

    def __call__(self, query: Any, key_: Any, value: Any, mask: Any = None, **options: Any) -> Any:
        process, heads = options.pop("process_heads", None), []

        def see(q: Any, k: Any, v: Any) -> Any:
            q, k, v = (q, k, v) if process is None else process(q, k, v)
            heads.extend((q, k, v))
            return q, k, v

        result = self.layer(query, key_, value, mask, process_heads=see, **options)
        q, k, v = heads
        attention = Attention(q, k, mask, cross=is_cross_attention((query, key_), {}))
        # Equinox projects within the same call: the product is computed a second time.
        weights = jax.nn.softmax(attention.logits())
        out = jnp.einsum("bnts,bsnh->btnh", weights, replicate(v)[None])[0]
        self.arrivals.see(Place(self.name), out.astype(v.dtype), attention=attention)
        return result


def attach(watch: Watch) -> Callable[[], None]:
    """Set `watch.model` to a copy whose attention layers are measured, and return the function that restores it."""
    original, arrivals = watch.model, Arrivals(watch, mapped=True)

    def is_attention(x: Any) -> bool:
        return isinstance(x, eqx.nn.MultiheadAttention)

    def name_of(path: Any) -> str:
        return jax.tree_util.keystr(path).lstrip(".") or type(original).__name__

    leaves = jax.tree_util.tree_leaves_with_path(original, is_leaf=is_attention)
    places = [(name_of(path), x) for path, x in leaves if is_attention(x)]
    if not places:
        raise ConfigError(
            f"watch: {type(original).__name__} has no eqx.nn.MultiheadAttention. "
            "leanformer.conditioning.condition(array) measures any array."
        )
    for name, layer in places:
        watch.add_layer(name, layer.num_heads).unseen["tokens",] = "blocks of Equinox are not seen"

    def wrap(path: Any, x: Any) -> Any:  # by path, since a layer may be at several places
        return Measured(x, name_of(path), arrivals) if is_attention(x) else x

    watch.model = jax.tree_util.tree_map_with_path(wrap, original, is_leaf=is_attention)

    def detach() -> None:
        watch.model = original
        for layer in watch.layers.values():
            if not layer.calls and not layer.single:
                layer.note(UNCALLED)

    return detach
