"""`Watch`: the measurements of one model during a `with` block, whatever library the model is from."""

import dataclasses
import functools
import numbers
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from leanformer.errors import ConfigError
from leanformer.watching import table
from leanformer.watching.measures import Layer, reduce


ALL_PADDING = "examples without a token that is not padding are left out"


@dataclasses.dataclass(frozen=True)
class Options:
    """Options of `leanformer.watch`.

    Attributes:
        measures: names of measures.
        at: pattern of the names of output projections, for PyTorch models; None to find them by structure.
        heads: number of heads, for models that do not state it; None to take it from the model.
        mask: tokens that are not padding, T or B T; None for the attention_mask of the call.
        every: interval of measured calls; 1 for every call.
        examples: number of examples of a batch to measure, the first ones; None for all.

    Raises:
        ConfigError: `every`, `heads` or `examples` is not a whole number of at least 1, or `mask` is not a mask.
    """

    measures: tuple[str, ...]
    at: str | None = None
    heads: int | None = None
    mask: Any = None
    every: int = 1
    examples: int | None = None

    def __post_init__(self):
        for name in ("every", "heads", "examples"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, numbers.Integral) or value < 1):
                raise ConfigError(f"{name}={value!r}: expected a whole number of at least 1.")
        _ = self.valid  # raises before the model is called

    @functools.cached_property
    def valid(self) -> np.ndarray | None:
        """Mask as a boolean array, T or B T, True for tokens that are not padding; None without a mask.

        Raises ConfigError for another number of axes, and for a mask of padding alone.
        """
        if self.mask is None:
            return None
        mask = np.asarray(self.mask.detach().cpu() if hasattr(self.mask, "detach") else self.mask).astype(bool)
        if mask.ndim not in (1, 2):
            raise ConfigError(f"mask of shape {mask.shape}: expected tokens, or examples x tokens; True: not padding.")
        if not mask.any():
            raise ConfigError(f"mask of shape {mask.shape} is False everywhere. Invert it: True means not padding.")
        return mask

    def valid_for(self, examples: int, tokens: int, layer: str) -> np.ndarray | None:
        """Return the mask of one call of a layer, bool B T, True for tokens that are not padding; None without a mask.

        Args:
            examples: B, number of examples that are measured, the first ones of the call.
            tokens: T, number of tokens.
            layer: name of the layer, for the message.

        Raises:
            ConfigError: the mask has another shape.
        """
        if self.valid is None:
            return None
        valid = self.valid[:examples] if self.valid.ndim == 2 and examples == self.examples else self.valid
        if valid.shape not in ((tokens,), (1, tokens), (examples, tokens)):
            raise ConfigError(
                f"mask of shape {self.valid.shape}: layer {layer} has {examples} examples of {tokens} tokens. Pass "
                f"{tokens} values, or {examples} x {tokens}, or leave mask= out to read the call's attention_mask."
            )
        return np.broadcast_to(valid, (examples, tokens))


class Watch:
    """Measurements of a model, collected while its `with` block is open.

    The block attaches hooks and removes them at its end, also after an exception. The results stay. Entering it raises
    the errors of `attach`, and ConfigError if the block is already open.

    Attributes:
        layers: {name: `measures.Layer`}, the statistics of each attention layer.
        unmatched: {name: reason} for what looks like attention but is not measured.
        model: model to call: the given object, except that Equinox needs this copy within the block.
        options: options of the watch.

    Args:
        model: model to measure.
        options: options of the watch.
        attach: function from this watch that attaches hooks to the model, and returns the function that removes them.
    """

    def __init__(self, model: Any, options: Options, attach: Callable[["Watch"], Callable[[], None]]):
        self.model, self.options = model, options
        self.layers: dict[str, Layer] = {}
        self.unmatched: dict[str, str] = {}
        self._attach = attach
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

    def add_layer(self, name: str, **about: Any) -> Layer:
        """Return the statistics of a layer, created at first use.

        Args:
            name: path of the layer in the model.
            about: further arguments of a new `measures.Layer`, heads and head_dim; ignored for an existing one.
        """
        if name not in self.layers:
            self.layers[name] = Layer(name, self.options.measures, **about)
        return self.layers[name]

    def collect(
        self,
        layer: Layer,
        arrays: Mapping[str, np.ndarray],
        valid: np.ndarray | None,
        roundoffs: Mapping[str, float],
    ) -> None:
        """Reduce the arrays of one call of a layer to numbers, and add the numbers to its statistics.

        A call with one token is only counted. Examples without a valid token are left out, with a note.

        Args:
            layer: statistics to which the numbers are added.
            arrays: arrays in host memory by name, as in `measures.reduce`, with `out` or `tokens`.
            valid: bool B T, True for tokens that are not padding; None if there is no padding.
            roundoffs: unit roundoff of the type that stored them, by measure.
        """
        if "out" in arrays and "tokens" in arrays and arrays["out"].shape[:2] != arrays["tokens"].shape[:2]:
            # Attention within windows: the tokens of the block have another number of rows.
            self._reduce(layer, {"tokens": arrays["tokens"]}, None, roundoffs)
            arrays = {name: x for name, x in arrays.items() if name != "tokens"}
        if self._reduce(layer, arrays, valid, roundoffs):
            layer.calls += 1

    def _reduce(
        self,
        layer: Layer,
        arrays: Mapping[str, np.ndarray],
        valid: np.ndarray | None,
        roundoffs: Mapping[str, float],
    ) -> bool:
        """Add the measures of arrays with equal numbers of rows. Return False if there was at most a single token."""
        examples, tokens = next(arrays[name] for name in ("out", "tokens") if name in arrays).shape[:2]
        rows = np.full(examples, tokens) if valid is None else valid.sum(axis=1)
        if tokens == 1:
            layer.single += 1
            return False
        if valid is not None and not rows.all():
            layer.note(ALL_PADDING)
            arrays = {name: x[rows > 0] for name, x in arrays.items()}
            valid, rows = valid[rows > 0], rows[rows > 0]
            if not len(rows):
                return False
        if valid is not None and valid.all():
            valid = None
        # On the CPU whatever JAX's default device is: the arrays are in host memory.
        with jax.default_device(jax.local_devices(backend="cpu")[0]):
            layer.add(jax.device_get(reduce(arrays, valid, layer.names)), rows, roundoffs)
        return True

    def wait(self) -> None:
        """Wait until the results of compiled calls, which JAX computes in the background, have arrived."""
        jax.effects_barrier()

    @property
    def rows(self) -> list[dict[str, Any]]:
        """Dictionaries of plain values, one per layer, measure and head (None: all heads together).

        Keys:
            layer, heads, head_dim, calls, measure, head: what was measured.
            median, q10, q90: quantiles; None if no value is finite.
            bounds: list of those of the three that are lower bounds.
            shape: [median number of rows, columns] of the matrices.
            tokens: [fewest, most rows].
            effective_rank, stable_rank: medians.
            gaussian: {quantile: value} for Gaussian matrices of this shape; None if not comparable.
            singular, not_finite, count: numbers of such matrices, and of all.
            negligible: largest number of negligible singular values of one matrix.
            examples: number of examples.
            status: "ok", or sentences.

        Each dictionary has all keys. For a reading, such as an entropy, shape, tokens, both ranks and gaussian are
        None. A layer that was never measured has one row, with its status, and None for all that was not measured.
        """
        self.wait()
        return [row for layer in self.layers.values() for row in layer.rows()]

    def table(self) -> str:
        """Return the `rows` of all heads together as a table of text, with statuses and what was not matched."""
        return table.format_table(self.rows, self.unmatched)

    def record(self) -> dict[str, float]:
        """Return {"layer/measure": median} of the calls since the last call of this method, for any logger.

        A median that is a lower bound is named "layer/measure_at_least".
        """
        self.wait()
        return {name: x for layer in self.layers.values() for name, x in layer.record().items()}

    def plot(self, path: str | Path, title: str = "") -> Path:
        """Write a plot of the condition numbers by layer to a file, and return its path.

        Args:
            path: file whose suffix is a format of Matplotlib, such as .png or .svg.
            title: title of the plot.

        Raises:
            ConfigError: nothing was measured.
        """
        return table.save(self.rows, path, title)
