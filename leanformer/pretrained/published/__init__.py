"""Comparison of a published `config.json` beside weights with the config of the model that reads them.

The shapes of weights do not determine what a model computes: 4 heads of 16 and 8 heads of 8 have equal shapes. So every
setting of the published config must be that of the model, including those that are absent and have a default.
"""

import json
import sys
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from leanformer.errors import WeightsError
from leanformer.pretrained.published import huggingface, timm
from leanformer.pretrained.published.tables import Table
from leanformer.runtime import multihost


QK_EPSILON = 1e-6  # of norms of queries and keys, see `layers.multihead`


def check(
    path: str | Path,
    layout: str,
    settings: Mapping[str, Any],
    *,
    configurable: Collection[str] = (),
    ignored: Collection[str] = (),
) -> tuple[int, int] | None:
    """Raise WeightsError if the `config.json` beside published weights does not match the model.

    Returns the rows and columns of patches of the published model; None if the file does not tell them.

    Process 0 prints one warning to stderr for keys that are unknown. Nothing is checked without a `config.json`, see
    `warn_unchecked`.

    Args:
        path: file of weights, index of several, or their folder.
        layout: layout of the weights, "huggingface" or "timm".
        settings: every setting of the model, from `model_base.Family.settings`, and its `name`.
        configurable: the keys of config.model that the architecture has, for the advice in the error.
        ignored: keys of config.model that may differ, because positions are resized or the head is new.
    """
    config = _config_beside(path)
    if not config.is_file():
        return None
    content = _read(config)
    try:
        grid, warning = _check(config, content, layout, settings, configurable, ignored)
    except (TypeError, ValueError, LookupError, ArithmeticError, AttributeError) as error:
        raise WeightsError(
            f"{config} (next to the weights) has a value of an unexpected type: {error}. Download it again."
        ) from error
    if warning and multihost.is_primary():
        print(f"WARNING: {config}: {warning}", file=sys.stderr, flush=True)
    return grid


def warn_unchecked(path: str | Path) -> None:
    """Warn, in the process that writes, if there is no `config.json` beside the published weights, a file or folder."""
    config = _config_beside(path)
    if multihost.is_primary() and not config.is_file():
        print(
            f"WARNING: there is no {config}: the shapes of weights do not show the number of heads, the epsilon or the "
            "activation, so it is not checked that these are those of the config. Copy it from where the weights are "
            "from.",
            file=sys.stderr,
            flush=True,
        )


def class_names(path: str | Path) -> list[str]:
    """Return the class names in the `config.json` beside published weights, in the order of the outputs; [] if none.

    The path is that of `check`. Raises WeightsError if the file is not a JSON object.
    """
    config = _config_beside(path)
    content = _read(config) if config.is_file() else {}
    names = content.get("id2label") or content.get("label_names")  # of transformers, and of timm
    if isinstance(names, dict) and all(isinstance(key, str) and key.isdecimal() for key in names):
        names = [name for _, name in sorted(names.items(), key=lambda item: int(item[0]))]
    return names if isinstance(names, list) and all(isinstance(name, str) for name in names) else []


def _config_beside(path: str | Path) -> Path:
    """Return the path of the `config.json` in a folder, or in that of a file."""
    path = Path(path).expanduser()
    return (path if path.is_dir() else path.parent) / "config.json"


def _check(
    config: Path,
    content: Mapping[str, Any],
    layout: str,
    settings: Mapping[str, Any],
    configurable: Collection[str],
    ignored: Collection[str],
) -> tuple[tuple[int, int] | None, str]:
    """Return the grid of patches, None if unknown, and a warning or "" for a published config that matches the model.

    Raises WeightsError if it does not match.
    """
    read = _of_timm if layout == "timm" else _of_transformers
    table, values, warning = read(config, content, settings)
    if table.architecture != settings["name"]:
        raise WeightsError(
            f"{config}: these are weights of model.name={table.architecture}, but the model is {settings['name']}. "
            "Use a config of that architecture."
        )
    if wrong := table.find_unsupported(values):
        shown = ", ".join(f"{key}={value!r}" for key, value in wrong.items())
        raise WeightsError(
            f"{config}: {shown}: not supported, so the model would compute something else. Use other weights."
        )
    theirs = table.translate(values, complete=not warning)
    _compare(config, theirs, settings, configurable, ignored)
    if unknown := table.find_unknown(values):
        warning = f"unknown keys, which may change what these weights compute: {', '.join(unknown)}. {warning}"
    if not theirs.get("image_size") or not theirs.get("patch_size"):
        return None, warning.strip()
    height, width = theirs["image_size"]
    return (height // theirs["patch_size"], width // theirs["patch_size"]), warning.strip()


def _read(config: Path) -> dict[str, Any]:
    """Return the content of a published config."""
    try:
        content = json.loads(config.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise WeightsError(
            f"{config} (next to the weights) cannot be read as JSON: {error}. Download it again."
        ) from error
    if not isinstance(content, dict):
        raise WeightsError(f"{config} (next to the weights) is not a JSON object. Download it again.")
    return content


def _compare(
    config: Path,
    theirs: Mapping[str, Any],
    settings: Mapping[str, Any],
    configurable: Collection[str],
    ignored: Collection[str],
) -> None:
    """Raise WeightsError that lists all settings in which the model differs from a published config."""
    ours = _comparable(settings)
    differ = {key: x for key, x in theirs.items() if key not in ignored and (ours.get(key) or None) != (x or None)}
    if not differ:
        return
    shown = ", ".join(f"model.{key}={value}" for key, value in differ.items())
    model = ", ".join(f"{key}={ours.get(key)}" for key in differ)
    free = {key: value for key, value in differ.items() if key in configurable}
    flags = [f"--config.model.{key}={_flag(value)}" for key, value in free.items() if value is not None]
    unset = [f"model.{key}" for key, value in free.items() if value is None]
    fixes = [f"Set {' '.join(flags)}."] if flags else []
    fixes += [f"Leave {' and '.join(unset)} unset."] if unset else []
    fixes += ["Use other weights."] if free.keys() != differ.keys() else []
    hint = " or init_from.resize_positions=True" if "image_size" in differ else ""
    hint += " or init_from.new_head=True" if "num_classes" in differ else ""
    raise WeightsError(
        f"{config}: these weights need {shown}, but the model has {model}: outputs would differ. "
        f"{' '.join(fixes).removesuffix('.')}{hint}."
    )


def _comparable(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a model in the form of those of a table."""
    ours = dict(settings)
    for key, other in (("value_dim", "head_dim"), ("channel_head_dim", "head_dim"), ("num_kv_heads", "num_heads")):
        if ours.get(key) is None:
            ours[key] = ours.get(other)
    ours["out_bias"] = ours.get("out_bias") is not False
    ours["layer_scale"] = ours.get("layer_scale") is not None
    if isinstance(size := ours.get("image_size"), int):
        ours["image_size"] = (size, size)
    return {key: tuple(x) if isinstance(x, list) else x for key, x in ours.items()}


def _flag(value: Any) -> str:
    return str(value).replace(" ", "")


def _of_transformers(
    config: Path, content: Mapping[str, Any], settings: Mapping[str, Any]
) -> tuple[Table, dict[str, Any], str]:
    """Return the table of a config of transformers, its values, and a warning or ""."""
    kind = content.get("model_type")
    if kind in huggingface.REFUSED:
        raise WeightsError(
            f"{config}: model_type={kind} has {huggingface.REFUSED[kind]}, which no model here has. Use weights of "
            "another model."
        )
    kind = huggingface.SAME.get(kind, kind)
    if kind not in huggingface.TABLES:
        raise WeightsError(
            f"{config}: model_type={kind}: not one of {', '.join(huggingface.TABLES)}, so it is unknown what these "
            "weights compute. If they compute what one of these does, set its model_type in a copy of the folder."
        )
    table, values = huggingface.TABLES[kind], dict(content)
    for name, other in huggingface.ALIASES.get(kind, {}).items():
        if name in values:
            values[other] = values.pop(name)
    if table.architecture == "gpt" and kind != "gpt2":
        values = _with_rotary(config, values)
        _check_windows(config, kind, values, settings)
        _check_latent(config, kind, values, settings)
        epsilon = values.get("rms_norm_eps", QK_EPSILON)
        if table.implied["qk_norm"] and epsilon != QK_EPSILON:
            raise WeightsError(
                f"{config}: rms_norm_eps={epsilon}: norms of queries and keys have {QK_EPSILON} here. Use others."
            )
    return table, values, ""


def _with_rotary(config: Path, values: dict[str, Any]) -> dict[str, Any]:
    """Return values with those of `rope_parameters`, and of `rope_scaling` in older files, among them.

    Raises WeightsError for unsupported positions.
    """
    known, result = ("rope_theta", "partial_rotary_factor"), dict(values)
    for rotary in filter(None, (values.get("rope_parameters"), values.get("rope_scaling"))):
        kind = rotary.get("rope_type", rotary.get("type", "default")) if isinstance(rotary, dict) else rotary
        if isinstance(rotary, dict) and any(isinstance(value, dict) for value in rotary.values()):
            kind = "different in each layer"
        if kind != "default":
            raise WeightsError(
                f'{config}: these weights need rotary positions of type "{kind}", but only "default" is supported: '
                "logits would differ. Use other weights."
            )
        result |= {key: value for key, value in rotary.items() if key in known and value is not None}
    return result


def _check_windows(config: Path, kind: str, values: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
    """Raise WeightsError if layers see only near tokens in rows of the model's length."""
    windows = kind == "mistral" or values.get("use_sliding_window", False)
    window = values.get("sliding_window", 4096) if windows else None
    near = {*(values.get("layer_types") or ())} - {"full_attention"}
    length = settings["max_length"]
    if (window is not None and window < length) or (near and window is None):
        raise WeightsError(
            f"{config}: sliding_window={window}: layers see only near tokens, but here they see all of up to "
            f"model.max_length={length}. " + (f"Set --config.model.max_length={window}." if window else "Use others.")
        )


def _check_latent(config: Path, kind: str, values: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
    """Raise WeightsError for DeepSeek models that no model here computes: with experts, or other rotary pairs."""
    if not kind.startswith("deepseek"):
        return
    if values.get("rope_interleave", True) is False:
        raise WeightsError(
            f"{config}: rope_interleave=false pairs channels of the two halves, but the layout of latent "
            "attention pairs neighbours: logits would differ. Use other weights."
        )
    dense = values.get("first_k_dense_replace", 3 if kind == "deepseek_v3" else 0)
    if dense < settings["depth"]:
        raise WeightsError(
            f"{config}: first_k_dense_replace={dense}: later layers are mixtures of experts, but all "
            f"model.depth={settings['depth']} layers here have one MLP. Use other weights."
        )


def _of_timm(
    config: Path, content: Mapping[str, Any], settings: Mapping[str, Any]
) -> tuple[Table, dict[str, Any], str]:
    """Return the table of a config of timm, its values, and a warning or ""."""
    given = content.get("model_args")
    numbers = [part["num_classes"] for part in (content, given) if isinstance(part, dict) and "num_classes" in part]
    if len(numbers) == 2 and numbers[0] != numbers[1]:
        raise WeightsError(
            f"{config}: num_classes={numbers[0]}, but {numbers[1]} in model_args. timm draws a new head for such "
            "a file. Set both to the number of classes of the weights."
        )
    name = content.get("architecture")
    if isinstance(name, str) and (entry := timm.find(name)):
        table, named = entry
        return table, timm.flatten(content, named), ""
    warning = f"architecture={name}: unknown name, so only model_args are compared. Check the number of heads yourself."
    return timm.TABLES.get(settings["name"], Table(settings["name"], {})), timm.flatten(content, {}), warning
