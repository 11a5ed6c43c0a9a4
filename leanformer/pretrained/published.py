"""What the `config.json` beside Hugging Face's weights says of them, and no tensor shows."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from leanformer.errors import WeightsError


# What their files call keys of config.model; the base of rotary positions may stand among the others of these.
NAMES = {"rotary": ("rope_theta",), "epsilon": ("rms_norm_eps", "layer_norm_epsilon", "layer_norm_eps")}


def check(path: str | Path, model: Mapping[str, Any]) -> None:
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
