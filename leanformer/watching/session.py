"""`Watch`: the measurements of one model during a `with` block, whatever library the model is from."""

import dataclasses
import functools
import numbers
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from array_api_compat import array_namespace, device

from leanformer.conditioning.spectrum import to_numpy
from leanformer.errors import ConfigError
from leanformer.watching import pictures, table
from leanformer.watching.measures import Layer, reduce
from leanformer.watching.verdict import Verdict, judge


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
        reference: what to compare with, as in `leanformer.watch`; None for nothing.

    Raises:
        ConfigError: `every`, `heads` or `examples` is not a whole number of at least 1, or `mask` is not a mask.
    """

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
        _ = self.valid  # raises before the model is called

    @functools.cached_property
    def valid(self) -> np.ndarray | None:
        """Mask as a boolean array, T or B T, True for tokens that are not padding; None without a mask.

        Raises ConfigError for another number of axes, and for a mask of padding alone.
        """
        if self.mask is None:
            return None
        mask = to_numpy(self.mask).astype(bool)
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


class Results:
    """Results by layer: rows, verdict, table and picture.

    Attributes:
        layers: {name: `measures.Layer`}, the statistics of each attention layer, or of a matrix of a file.
        unmatched: {name: reason} for what is not measured.
        reference: rows or other results to compare with; None for nothing.
    """

    def __init__(self, reference: Any = None):
        self.layers: dict[str, Layer] = {}
        self.unmatched: dict[str, str] = {}
        self.reference: Any = reference

    def wait(self) -> None:
        """Wait until the results of compiled calls, which JAX computes in the background, have arrived."""

    @property
    def rows(self) -> list[dict[str, Any]]:
        """Dictionaries of plain values, one per layer, measure and head (None: all heads together).

        Keys:
            layer, heads, head_dim, calls, measure, head: what was measured.
            median, q10, q90: quantiles; None if no value is finite.
            interval: 95 % interval of the median over examples; None for fewer than six.
            bounds: list of those of the three quantiles that are lower bounds.
            shape: [median number of rows, columns] of the matrices.
            tokens: [fewest, most rows].
            effective_rank, stable_rank: medians.
            gaussian: {quantile: value} for Gaussian matrices of this shape; None if not comparable.
            reference: {"median", "effective_rank"} of the same layer, measure and head there; None if there is none.
            singular, not_finite, count: numbers of such matrices, and of all.
            negligible: largest number of negligible singular values of one matrix.
            examples: number of examples.
            status: "ok", or sentences.

        Each dictionary has all keys. For a reading, such as an entropy, shape, tokens, both ranks and gaussian are
        None. A layer that was never measured has one row, with its status, and None for all that was not measured.
        """
        self.wait()
        rows = [row for layer in self.layers.values() for row in layer.rows()]
        others = getattr(self.reference, "rows", self.reference) or ()
        known = {(row["layer"], row["measure"], row["head"]): row for row in others}
        for row in rows:
            other = known.get((row["layer"], row["measure"], row["head"]))
            if other is not None and None not in (row["median"], other["median"]):
                row["reference"] = {key: other[key] for key in ("median", "effective_rank")}
        return rows

    def verdict(self) -> Verdict:
        """Return what the rows say: it prints as two to four sentences, and is a dictionary ready for JSON."""
        return judge(self.rows)

    def table(self) -> str:
        """Return the `rows` of all heads together as a table of text, with statuses and what was not matched."""
        return table.format_table(self.rows, self.unmatched)

    def __str__(self) -> str:
        return f"{self.verdict()}\n\n{self.table()}"

    def plot(self, path: str | Path | None = None, title: str = "") -> Any:
        """Return a Matplotlib figure: condition numbers by layer, and layers x heads, condition number and rank.

        Args:
            path: file to write it to, such as conditioning.png; None for none.
            title: title of the figure.

        Raises:
            ConfigError: nothing was measured, or Matplotlib is not installed.
        """
        return pictures.save(pictures.draw(self.rows, title), path)


class Watch(Results):
    """Measurements of a model, collected while its `with` block is open.

    The block attaches hooks and removes them at its end, also after an exception. The results stay. Entering it raises
    the errors of `attach`, and ConfigError if the block is already open.

    Attributes:
        layers, unmatched, reference: as in `Results`.
        model: model to call: the given object, except that Equinox needs this copy within the block.
        options: options of the watch.

    Args:
        model: model to measure.
        options: options of the watch.
        attach: function from this watch that attaches hooks to the model, and returns the function that removes them.
    """

    def __init__(self, model: Any, options: Options, attach: Callable[["Watch"], Callable[[], None]]):
        super().__init__(options.reference)
        self.model, self.options = model, options
        self.effects: Callable[[], Any] = lambda: None  # waits for results that are under way
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

    def wait(self) -> None:
        """Wait until the results of compiled calls, which JAX computes in the background, have arrived."""
        self.effects()

    def add_layer(self, name: str, **about: Any) -> Layer:
        """Return the statistics of a layer, created at first use with `heads` and `head_dim` if they are given."""
        if name not in self.layers:
            self.layers[name] = Layer(name, self.options.measures, **about)
        return self.layers[name]

    def collect(self, layer: Layer, arrays: Mapping[str, Any], valid: Any, roundoffs: Mapping[str, float]) -> None:
        """Reduce the arrays of one call of a layer to numbers, and add the numbers to its statistics.

        A call with one token is only counted. Examples without a valid token are left out, with a note.

        Args:
            layer: statistics to which the numbers are added.
            arrays: arrays by name, as in `measures.reduce`, with `out` or `tokens`.
            valid: NumPy bool B T, True for tokens that are not padding; None if there is no padding.
            roundoffs: unit roundoff of the type that stored them, by measure.
        """
        if "out" in arrays and "tokens" in arrays and arrays["out"].shape[:2] != arrays["tokens"].shape[:2]:
            # Attention within windows: the tokens of the block have another number of rows.
            self._reduce(layer, {"tokens": arrays["tokens"]}, None, roundoffs)
            arrays = {name: x for name, x in arrays.items() if name != "tokens"}
        if self._reduce(layer, arrays, valid, roundoffs):
            layer.calls += 1

    def _reduce(
        self, layer: Layer, arrays: Mapping[str, Any], valid: np.ndarray | None, roundoffs: Mapping[str, float]
    ) -> bool:
        """Add the measures of arrays with equal numbers of rows. Return False if there was at most a single token."""
        first = arrays["out"] if "out" in arrays else arrays["tokens"]
        (examples, tokens), xp, where = first.shape[:2], array_namespace(first), device(first)
        if tokens == 1:
            layer.single += 1
            return False
        rows = np.full(examples, tokens) if valid is None else valid.sum(axis=1)
        if valid is not None and not rows.all():
            layer.note(ALL_PADDING)
            kept = rows > 0
            if not kept.any():
                return False
            arrays = {name: x[xp.asarray(kept, device=where)] for name, x in arrays.items()}
            valid = valid[kept]
        padded = None if valid is None or valid.all() else xp.asarray(np.ascontiguousarray(valid), device=where)
        layer.add({name: to_numpy(x) for name, x in reduce(arrays, padded, layer.names).items()}, roundoffs)
        return True

    def record(self) -> dict[str, float]:
        """Return {"layer/measure": median} of the calls since the last call of this method, for any logger.

        A median that is a lower bound is named "layer/measure_at_least".
        """
        self.wait()
        return {name: x for layer in self.layers.values() for name, x in layer.record().items()}
