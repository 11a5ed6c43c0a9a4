"""`Watch`: the measurements of one model during a `with` block, whatever library the model is from."""

import dataclasses
import functools
import numbers
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from array_api_compat import array_namespace, device

from leanformer.conditioning.spectrum import to_numpy
from leanformer.errors import ConfigError
from leanformer.watching.measures import Layer, reduce
from leanformer.watching.results import Results


@dataclasses.dataclass(frozen=True)
class Options:
    """Options of `leanformer.watch`, checked before the model is called."""

    measures: tuple[str, ...]
    at: str | None = None
    heads: int | None = None
    mask: Any = None
    every: int = 1
    examples: int | None = None
    reference: Any = None

    def __post_init__(self):
        for name in ("every", "heads", "examples"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, numbers.Integral) or value < 1):
                raise ConfigError(f"{name}={value!r}: expected a whole number of at least 1.")
        _ = self.valid  # raises ConfigError

    @functools.cached_property
    def valid(self) -> np.ndarray | None:
        """The mask as booleans, T or B T, True for tokens that are not padding; None without a mask."""
        if self.mask is None:
            return None
        mask = to_numpy(self.mask).astype(bool)
        if mask.ndim not in (1, 2):
            raise ConfigError(f"mask of shape {mask.shape}: expected tokens, or examples x tokens; True: not padding.")
        if not mask.any():
            raise ConfigError(f"mask of shape {mask.shape} is False everywhere. Invert it: True means not padding.")
        return mask

    def valid_for(self, examples: int, tokens: int, layer: str) -> np.ndarray | None:
        """Return `valid` as B T for the first `examples` of a call of a layer."""
        if self.valid is None:
            return None
        valid = self.valid[:examples] if self.valid.ndim == 2 and examples == self.examples else self.valid
        if valid.shape not in ((tokens,), (1, tokens), (examples, tokens)):
            raise ConfigError(
                f"mask of shape {self.valid.shape}: layer {layer} has {examples} examples of {tokens} tokens. Pass "
                f"{tokens} values, or {examples} x {tokens}, or leave mask= out to read the call's attention_mask."
            )
        return np.broadcast_to(valid, (examples, tokens))

    def refuse_selection(self) -> None:
        """Raise ConfigError for options that select layers of PyTorch models."""
        if self.at is not None or self.heads is not None:
            raise ConfigError("at= and heads= select layers of PyTorch models: leave them out for Flax and Equinox.")


class Watch(Results):
    """Measurements of a model, collected while its `with` block is open.

    The block attaches hooks and removes them at its end, also after an exception. The results stay. Entering it raises
    ConfigError if the model cannot be measured, or if the block is already open.

    Attributes:
        layers, unmatched, reference: as in `Results`.
        model: model to call: the given object, except that Equinox needs this copy within the block.
        options: options of the watch.
    """

    def __init__(self, model: Any, options: Options, attach: Callable[["Watch"], Callable[[], None]]):
        super().__init__(options.reference)
        self.model, self.options = model, options
        self.effects: Callable[[], Any] = lambda: None  # waits for results that are under way
        self._attach = attach  # attaches hooks to the model of a watch, and returns the function that removes them
        self._detach: Callable[[], None] | None = None

    def __enter__(self) -> "Watch":
        if self._detach is not None:
            raise ConfigError("watch: this block is already open. Open another with leanformer.watch(model).")
        self._detach = self._attach(self)
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self.wait()
        finally:
            detach, self._detach = self._detach, None
            if detach is not None:
                detach()

    @property
    def open(self) -> bool:
        """True while the `with` block is open."""
        return self._detach is not None

    def wait(self) -> None:
        """Wait until the results of compiled calls, which JAX computes in the background, have arrived."""
        self.effects()

    def add_layer(self, name: str, heads: int | None = None) -> Layer:
        """Return the statistics of a layer, created at first use."""
        if name not in self.layers:
            self.layers[name] = Layer(name, self.options.measures, heads)
        return self.layers[name]

    def collect(
        self, layer: Layer, arrays: Mapping[str, Any], valid: np.ndarray | None, roundoffs: Mapping[str, float]
    ) -> None:
        """Reduce the arrays of one call of a layer, as for `measures.reduce`, and add the numbers to its statistics.

        `valid` is bool B T, True for tokens that are not padding.
        """

        def reduced(valid: Any, **arrays: Any) -> dict[str, np.ndarray]:
            return {name: to_numpy(x) for name, x in reduce(arrays, valid, layer.names).items()}

        out, tokens = arrays["out"], arrays.get("tokens")
        if tokens is not None and tokens.shape[:2] != out.shape[:2]:  # of the block, around attention within windows
            layer.add(reduced(None, tokens=tokens), roundoffs)
            arrays = {name: x for name, x in arrays.items() if name != "tokens"}
        if out.shape[1] == 1:
            layer.single += 1
            return
        rows = np.full(len(out), out.shape[1]) if valid is None else valid.sum(axis=1)
        padded = None
        if valid is not None and not valid.all():
            padded = array_namespace(out).asarray(np.ascontiguousarray(valid), device=device(out))
        layer.add_call(reduced(padded, **arrays), rows, roundoffs)

    def record(self) -> dict[str, float]:
        """Return {"layer/measure": median} of the calls since the last call of this method, for any logger.

        A median that is a lower bound is named "layer/measure_at_least".
        """
        self.wait()
        return {name: x for layer in self.layers.values() for name, x in layer.record().items()}
