"""Conditioning of a model of PyTorch, Flax or Equinox, and of weights in a file without the model's code.

with leanformer.watch(model) as w:
    model(batch)
print(w.table())
"""

import importlib
from collections.abc import Sequence
from typing import Any

from leanformer.errors import ConfigError
from leanformer.watching.measures import DEFAULT, check_names
from leanformer.watching.session import Options, Watch


__all__ = ["DEFAULT", "Options", "Watch", "watch"]

# Base classes by module and name, and the module here that knows them. No library is imported to find out.
FRAMEWORKS = {
    ("torch.nn.modules.module", "Module"): "torch_hooks",
    ("flax.nnx.module", "Module"): "nnx",
    ("flax.linen.module", "Module"): "linen",
    ("equinox._module._module", "Module"): "equinox",
    ("equinox._module", "Module"): "equinox",
}


def watch(
    model: Any,
    *,
    measures: Sequence[str] = DEFAULT,
    at: str | None = None,
    heads: int | None = None,
    mask: Any = None,
    every: int = 1,
    examples: int | None = None,
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
        examples: measure at most the first examples of each batch; not for Equinox.

    Raises:
        ConfigError: the model is of no known library, or an option is invalid; when the block is entered, the model has
            no attention or cannot be measured.
    """
    options = Options(check_names(measures), at, heads, mask, every, examples)
    for base in type(model).__mro__:
        if name := FRAMEWORKS.get((base.__module__, base.__name__)):
            return Watch(model, options, importlib.import_module(f"leanformer.watching.{name}").attach)
    raise ConfigError(
        f"watch: {type(model).__module__}.{type(model).__qualname__} is not a model of PyTorch, Flax (NNX or linen) or "
        "Equinox. Pass the module itself, not a function or a pipeline; leanformer.conditioning.condition(array) "
        "measures any array."
    )
