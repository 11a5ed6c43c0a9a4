"""Conditioning of a model of PyTorch, Flax or Equinox, and of weights in a file without the model's code.

with leanformer.watch(model) as w:
    model(batch)
print(w)
"""

import dataclasses
import importlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from leanformer.conditioning.measures import look_up
from leanformer.conditioning.spectrum import to_numpy
from leanformer.errors import ConfigError
from leanformer.watching.measures import AVAILABLE, DEFAULT, Layer
from leanformer.watching.results import Results


__all__ = ["DEFAULT", "LightningCallback", "Options", "TrainerCallback", "Watch", "watch"]

# Base classes by module and name, and the module here that knows them. No library is imported to find out.
FRAMEWORKS = {
    ("torch.nn.modules.module", "Module"): "torch_hooks",
    ("leanformer.layers.model_base", "Family"): "families",
    ("flax.nnx.module", "Module"): "flax",
    ("flax.linen.module", "Module"): "flax",
    ("equinox._module._module", "Module"): "equinox",
    ("equinox._module", "Module"): "equinox",
}
CALLBACKS = {"TrainerCallback": "trainer_callback", "LightningCallback": "lightning_callback"}


@dataclasses.dataclass(frozen=True)
class Options:
    """Arguments of `leanformer.watch`."""

    measures: tuple[str, ...]
    at: str | None = None
    heads: int | None = None
    mask: np.ndarray | None = None  # bool T or B T, True for tokens that are not padding
    every: int = 1
    examples: int | None = None
    reference: Any = None

    def valid_for(self, examples: int, tokens: int, layer: str) -> np.ndarray | None:
        """Return the mask as B T for the first `examples` of a call of a layer; None without a mask."""
        if self.mask is None:
            return None
        valid = self.mask[:examples] if self.mask.ndim == 2 and examples == self.examples else self.mask
        if valid.shape not in ((tokens,), (1, tokens), (examples, tokens)):
            raise ConfigError(
                f"mask of shape {self.mask.shape}: layer {layer} has {examples} examples of {tokens} tokens. Pass "
                f"{tokens} values, or {examples} x {tokens}, or leave mask= out to read the call's attention_mask."
            )
        return np.broadcast_to(valid, (examples, tokens))


class Watch(Results):
    """Measurements of a model, collected while its `with` block is open.

    The block attaches hooks and removes them at its end, also after an exception. The results stay. Entering it raises
    ConfigError if the model cannot be measured.

    Attributes:
        layers, unmatched, reference: as in `Results`.
        model: model to call: the given object, except that Equinox needs this copy within the block.
        options: options of the watch.
        training_only: False; True leaves out PyTorch calls in evaluation mode, as the callbacks do.
    """

    def __init__(self, model: Any, options: Options, attach: Callable[["Watch"], Callable[[], None]]):
        super().__init__(options.reference)
        self.model, self.options, self.training_only = model, options, False
        self._attach = attach  # attaches hooks to the model of a watch, and returns the function that removes them
        self._detach: Callable[[], None] | None = None

    def __enter__(self) -> "Watch":
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

    def add_layer(self, name: str, heads: int | None = None) -> Layer:
        """Return the statistics of a layer, created at first use."""
        if name not in self.layers:
            self.layers[name] = Layer(name, self.options.measures, heads)
        return self.layers[name]

    def record(self) -> dict[str, float]:
        """Return {"layer/measure": median} of the calls since the last call of this method, for any logger.

        A median that is a lower bound is named "layer/measure_at_least".
        """
        self.wait()
        return {name: x for layer in self.layers.values() for name, x in layer.record().items()}


def watch(
    model: Any,
    *,
    measures: Sequence[str] = DEFAULT,
    at: str | None = None,
    heads: int | None = None,
    mask: Any = None,
    every: int = 1,
    examples: int | None = 8,
    reference: Any = None,
) -> Watch:
    """Return a context manager that measures the conditioning of each attention layer while the model is called.

    Args:
        model: torch.nn.Module, flax.nnx.Module, flax.linen.Module or equinox.Module.
        measures: names of `leanformer.conditioning.ACTIVATIONS` that `measures.AVAILABLE` lists; by default `DEFAULT`.
            "attention_probabilities" adds their condition number and ranks, which costs more than all others together.
        at: PyTorch only: pattern such as "blocks.*.attn.proj" that selects output projections by name instead of by
            structure.
        heads: PyTorch only: number of heads, for models that do not state it.
        mask: tokens that are not padding, T or B T; by default the call's attention_mask.
        every: measure each call number 0, every, 2 · every and so on.
        examples: measure at most the first examples of each batch, None for all. The 95 % interval of a median needs
            six (`interval` in `Watch.rows`); batches add up. Without effect for Equinox, whose models take one example.
        reference: what to compare with: a finished watch, or its rows; for PyTorch also a model, such as a copy from
            before training, which is called with the arguments of each measured call.

    Raises:
        ConfigError: the model is of no known library, or an option is invalid; when the block is entered, the model has
            no attention or cannot be measured.
    """
    if every < 1 or (examples is not None and examples < 1):
        raise ConfigError(f"watch: every={every}, examples={examples}: must be at least 1.")
    valid = None if mask is None else to_numpy(mask).astype(bool)
    options = Options(tuple(look_up(measures, AVAILABLE)), at, heads, valid, every, examples, reference)
    for base in type(model).__mro__:
        if name := FRAMEWORKS.get((base.__module__, base.__name__)):
            if name != "torch_hooks" and (at or heads):
                raise ConfigError(
                    "at= and heads= select layers of PyTorch models: leave them out for Flax and Equinox."
                )
            return Watch(model, options, importlib.import_module(f"leanformer.watching.{name}").attach)
    raise ConfigError(
        f"watch: {type(model).__module__}.{type(model).__qualname__} is not a model of PyTorch, Flax (NNX or linen) or "
        "Equinox. Pass the module itself, not a function or a pipeline; leanformer.conditioning.condition(array) "
        "measures any array."
    )


def __getattr__(name: str) -> Any:
    """Import the callbacks at first use, since each needs its library."""
    if name in CALLBACKS:
        return getattr(importlib.import_module(f"leanformer.watching.{CALLBACKS[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
