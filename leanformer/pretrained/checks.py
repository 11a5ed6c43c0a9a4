"""Checks of weights: finite values, and published settings that match the model."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from leanformer.errors import WeightsError
from leanformer.runtime import multihost


# Keys of config.model and their names in published config.json files. "rope_theta" may be in "rope_parameters".
NAMES = {"rotary": ("rope_theta",), "epsilon": ("rms_norm_eps", "layer_norm_epsilon", "layer_norm_eps")}
NAMES |= {"head_cap": ("final_logit_softcapping",)}
OFF = ("rotary", "head_cap")  # keys whose None switches something off; None of the others is the architecture's default

REFUSED = {  # published models that no architecture here computes, by `model_type`
    "gemma": "norms with 1 added to their scales, and scaled embeddings",
    "gemma2": "norms before and after each branch, and layers that see only near tokens",
    "gemma3_text": "norms before and after each branch, and layers that see only near tokens",
    "modernbert": "layers that see only near tokens, with another base of rotary positions",
}


@jax.jit
def _count_not_finite(arrays: Sequence[jax.Array]) -> list[jax.Array]:
    """Return the number of values in each array that are not finite."""
    return [jnp.sum(~jnp.isfinite(x)) for x in arrays]


def check_finite(tensors: Mapping[str, Any], source: str) -> None:
    """Raise WeightsError for a NaN or an infinity in weights, which would silently spoil every result.

    All weights read from files and checkpoints are checked here. Every process must call it.

    Args:
        tensors: NumPy arrays or device arrays, by name.
        source: origin of the weights, for the message.
    """
    on_device = {name: x for name, x in tensors.items() if isinstance(x, jax.Array)}
    counts = {name: x.size - np.count_nonzero(np.isfinite(x)) for name, x in tensors.items() if name not in on_device}
    if on_device:
        counts |= zip(on_device, multihost.fetch(_count_not_finite([*on_device.values()])), strict=True)
    bad = [name for name in tensors if counts[name]]
    if bad:
        number, size = int(counts[bad[0]]), tensors[bad[0]].size
        more = f", and so do {len(bad) - 1} more of its {len(tensors)} tensors" if len(bad) > 1 else ""
        raise WeightsError(
            f"{source}: {bad[0]} has {number:,} of {size:,} numbers that are not finite (NaN or infinity){more}. "
            "Use an earlier checkpoint or other weights, or measure these with `probe --allow_nonfinite`."
        )


def check_published(path: str | Path, model: Mapping[str, Any]) -> None:
    """Raise WeightsError if the `config.json` beside published weights does not match the model.

    Not supported are the models in REFUSED, rotary positions of a type other than "default", such as DeepSeek's "yarn",
    which scales angles and logits, and latent attention without interleaved pairs. The base of rotary positions, the
    epsilon of norms and the soft cap of logits must be those of the model.

    Args:
        path: file of weights, index of several, or their folder. Nothing is checked without a `config.json`.
        model: section `model` of the config.
    """
    path = Path(path).expanduser()
    config = (path if path.is_dir() else path.parent) / "config.json"
    if not config.is_file():
        return
    try:
        content = json.loads(config.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise WeightsError(
            f"{config} (next to the weights) cannot be read as JSON: {error}. Download it again."
        ) from error
    if not isinstance(content, dict):
        return
    if (name := content.get("model_type")) in REFUSED:
        raise WeightsError(
            f"{config}: model_type={name} has {REFUSED[name]}, which no model here has. Use weights of another model."
        )
    kind = _rotary_type(content.get("rope_parameters") or content.get("rope_scaling"))
    if kind != "default":
        raise WeightsError(
            f'{config}: these weights need rotary positions of type "{kind}", but only "default" is supported: '
            "logits would differ. Use other weights."
        )
    if "kv_lora_rank" in content and content.get("rope_interleave") is False:
        raise WeightsError(
            f"{config}: rope_interleave=false pairs channels of the two halves, but the key map of latent "
            "attention pairs neighbours: logits would differ. Use other weights."
        )
    flat = {**content, **rotary} if isinstance(rotary := content.get("rope_parameters"), dict) else content
    for key, names in NAMES.items():
        ours = model.get(key)
        stated = [flat[name] for name in names if name in flat and (key in OFF or flat[name] is not None)]
        theirs = next((x for x in stated if x is None or isinstance(x, int | float)), ours)
        if theirs != ours and (ours is not None or key in OFF):
            raise WeightsError(
                f"{config}: these weights need model.{key}={theirs}, but the model has {ours}: logits would differ. "
                + (f"Set --config.model.{key}={theirs}." if theirs is not None else f"Leave model.{key} unset.")
            )


def _rotary_type(rotary: Any) -> Any:
    """Return the type of rotary positions in a published config, "default" if there is none."""
    if not isinstance(rotary, dict):
        return rotary or "default"
    return rotary.get("rope_type", rotary.get("type", "default"))
