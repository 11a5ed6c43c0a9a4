"""Weights that are refused: with a NaN or an infinity, or published for a model that is computed otherwise."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from leanformer.errors import WeightsError
from leanformer.runtime import multihost


# What their files call keys of config.model; the base of rotary positions may stand among the others of these.
NAMES = {"rotary": ("rope_theta",), "epsilon": ("rms_norm_eps", "layer_norm_epsilon", "layer_norm_eps")}


@jax.jit
def _count_not_finite(arrays: Sequence[jax.Array]) -> list[jax.Array]:
    return [jnp.sum(~jnp.isfinite(x)) for x in arrays]


def check_finite(tensors: Mapping[str, Any], source: str) -> None:
    """Raise WeightsError for a NaN or an infinity in weights, which every command would pass on as an answer.

    All weights that are read, from files and from checkpoints, come through here. Every process must call it.

    Args:
        tensors: NumPy arrays, or arrays on devices, by name.
        source: where they were read, for the message.
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
            "Use an earlier checkpoint, or other weights. `probe --allow_nonfinite` measures them as they are."
        )


def check_published(path: str | Path, model: Mapping[str, Any]) -> None:
    """Raises WeightsError where weights were published with rotary positions that no model here has: of another type
    than "default", such as DeepSeek's "yarn", which scales angles and logits, or DeepSeek's without interleaved pairs;
    or with another base of these, or another epsilon of norms, than the model has.

    Args:
        path: a file of weights, an index of several, or their folder. Without a `config.json` nothing is known.
        model: the section `model` of the config.
    """
    path = Path(path).expanduser()
    beside = (path if path.is_dir() else path.parent) / "config.json"
    if not beside.is_file():
        return
    try:
        told = json.loads(beside.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise WeightsError(
            f"{beside}, beside the weights, cannot be read as JSON ({error}). Fetch it again."
        ) from error
    if not isinstance(told, dict):
        return
    kind = _kind(told.get("rope_parameters") or told.get("rope_scaling"))
    if kind != "default":
        raise WeightsError(
            f'{beside}: these weights want rotary positions of the type "{kind}", and here are only plain ones, '
            '"default": logits would be others. Take a model that has these.'
        )
    if "kv_lora_rank" in told and told.get("rope_interleave") is False:
        raise WeightsError(
            f"{beside}: rope_interleave=false pairs channels of halves, and the key map of latent attention reads "
            "neighbours: logits would be others. Take a model that has these."
        )
    flat = {**told, **rotary} if isinstance(rotary := told.get("rope_parameters"), dict) else told
    for key, names in NAMES.items():
        own = model.get(key)
        theirs = next((flat[name] for name in names if isinstance(flat.get(name), int | float)), own)
        if theirs != own and (own is not None or key == "rotary"):  # without it there are no rotary positions
            raise WeightsError(
                f"{beside}: these weights want model.{key}={theirs}, and the model has {own}: logits would be others. "
                f"Set --config.model.{key}={theirs}."
            )


def _kind(rotary: Any) -> Any:
    if not isinstance(rotary, dict):
        return rotary or "default"
    return rotary.get("rope_type", rotary.get("type", "default"))
