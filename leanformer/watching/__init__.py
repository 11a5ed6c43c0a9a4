"""Conditioning of a model of PyTorch, Flax or Equinox, and of weights in a file without the model's code.

with leanformer.watch(model) as w:
    model(batch)
print(w)
"""

import importlib
from collections.abc import Sequence
from typing import Any

from leanformer.errors import ConfigError
from leanformer.watching.measures import DEFAULT, check_names
from leanformer.watching.session import Options, Watch


__all__ = ["DEFAULT", "LightningCallback", "Options", "TrainerCallback", "Watch", "watch"]
EXAMPLES = 8

# Base classes by module and name, and the module here that knows them. No library is imported to find out.
FRAMEWORKS = {
    ("torch.nn.modules.module", "Module"): "torch_hooks",
    ("flax.nnx.module", "Module"): "flax",
    ("flax.linen.module", "Module"): "flax",
    ("equinox._module._module", "Module"): "equinox",
    ("equinox._module", "Module"): "equinox",
}
CALLBACKS = {"TrainerCallback": "trainer_callback", "LightningCallback": "lightning_callback"}


def watch(
    model: Any,
    *,
    measures: Sequence[str] = DEFAULT,
    at: str | None = None,
    heads: int | None = None,
    mask: Any = None,
    every: int = 1,
    examples: int | None = EXAMPLES,
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
            six (`interval` in `Watch.rows`); batches add up. A model of Equinox takes one example: None there.
        reference: what to compare with: a finished watch, or its rows; for PyTorch also a model, such as a copy from
            before training, which is called with the arguments of each measured call.

    Raises:
        ConfigError: the model is of no known library, or an option is invalid; when the block is entered, the model has
            no attention or cannot be measured.
    """
    options = Options(check_names(measures), at, heads, mask, every, examples, reference)
    for base in type(model).__mro__:
        if name := FRAMEWORKS.get((base.__module__, base.__name__)):
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
