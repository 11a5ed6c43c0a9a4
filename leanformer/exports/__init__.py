"""Exports of trained models: folders that transformers or timm load, what they describe, and checks of configs."""

import dataclasses
from collections.abc import Callable, Collection, Mapping
from typing import Any

from leanformer.errors import ConfigError
from leanformer.pretrained.storage import Tensors
from leanformer.training.model_setup import IDLE


OTHERS = "--to=own holds every model."


@dataclasses.dataclass(frozen=True)
class Description:
    """Model of leanformer as another library loads it from a folder."""

    library: str  # package that loads the folder, "transformers" or "timm"
    architecture: str  # class of the model, or for timm the registered name
    config: Mapping[str, Any]  # content of config.json
    auto: str = ""  # class of transformers that loads the folder, such as "AutoModelForCausalLM"
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # of its `from_pretrained`
    needs: str = ""  # oldest version of the library that loads the folder; empty for any recent one
    head_dim: int | None = None  # head dimension for which timm needs an attention class of the user's
    grey: bool = False  # whether the other model reads RGB where ours reads grey images
    adapt: Callable[[Tensors], Tensors] = dict  # from the exported tensors to the folder's


def complete(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return a section config.model in which unset keys of attention have the values that None stands for."""
    values = dict(arguments) | {"value_dim": arguments.get("value_dim") or arguments["head_dim"]}
    values["num_kv_heads"] = arguments.get("num_kv_heads") or arguments["num_heads"]
    values["out_bias"] = arguments.get("out_bias") is not False
    return values


def plain_attention(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of keys that models of other libraries fix, from a section that is complete."""
    heads, head_dim = arguments["num_heads"], arguments["head_dim"]
    return {"attention": "softmax", "num_kv_heads": heads, "value_dim": head_dim, "out_bias": True}


def check_keys(
    arguments: Mapping[str, Any], taken: Collection[str], fixed: Mapping[str, Any], library: str, model: str
) -> None:
    """Raise ConfigError if a key of config.model has a value that the model of another library cannot express.

    `taken` keys may have any value, since the other library's config has them, and keys of `fixed` the value there. Any
    further key that matters in evaluation must be None, False, 0 or empty.
    """
    wrong = {
        key: value
        for key, value in arguments.items()
        if key not in taken and key not in IDLE and value != fixed.get(key) and (value or key in fixed)
    }
    if wrong:
        shown = ", ".join(f"model.{key}={value!r}" for key, value in sorted(wrong.items()))
        raise ConfigError(f"{shown}: not supported by {model} of {library}. {OTHERS}")


def check_total_width(arguments: Mapping[str, Any], library: str, model: str) -> None:
    """Raise ConfigError if num_heads x head_dim differs from the width, for published models that need them equal."""
    heads, head_dim, width = (arguments[key] for key in ("num_heads", "head_dim", "width"))
    if heads * head_dim != width:
        raise ConfigError(
            f"model.num_heads={heads}, model.head_dim={head_dim}: num_heads x head_dim = {heads * head_dim} differs "
            f"from model.width={width}, and {model} of {library} has no key for it. {OTHERS}"
        )
