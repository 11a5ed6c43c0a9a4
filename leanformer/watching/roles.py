"""Roles of the tensors in a file of weights, from their names in the files of PyTorch's libraries."""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from leanformer.errors import ConfigError
from leanformer.stored import StoredTensor


ROLES = {  # last part of a name: role
    **dict.fromkeys(("q_proj", "query", "q_lin", "to_q", "wq", "q", "query_proj", "q_attn"), "query"),
    **dict.fromkeys(("k_proj", "key", "k_lin", "to_k", "wk", "k", "key_proj"), "key"),
    **dict.fromkeys(("v_proj", "value", "v_lin", "to_v", "wv", "v", "value_proj"), "value"),
    **dict.fromkeys(("qkv", "c_attn", "wqkv", "query_key_value", "in_proj_weight", "qkv_proj", "in_proj"), "packed"),
    **dict.fromkeys(("o_proj", "out_proj", "out_lin", "wo", "o", "to_out"), "out"),
    **dict.fromkeys(("fc1", "up_proj", "c_fc", "lin1", "wi", "wi_1", "dense_h_to_4h", "linear1", "w3"), "up"),
    **dict.fromkeys(("fc2", "down_proj", "lin2", "dense_4h_to_h", "linear2", "w2"), "down"),
}
INSIDE = ("proj", "c_proj", "dense")  # the output projection inside an attention, the second matrix inside an MLP
ATTENTION, MLP = re.compile(r"attn|attention", re.IGNORECASE), re.compile(r"mlp|dense|ffn|feed_forward", re.IGNORECASE)
FLOATS = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
HEADS, KV_HEADS = ("num_attention_heads", "n_head", "num_heads", "n_heads"), ("num_key_value_heads", "n_head_kv")


def read_config(path: Path) -> dict[str, Any]:
    """Return the `config.json` beside weights, of transformers or of timm, with nested model settings merged.

    It is {} if there is no such file.

    Args:
        path: file or folder of weights.

    Raises:
        ConfigError: the file is not a JSON object.
    """
    file = (path if path.is_dir() else path.parent) / "config.json"
    if not file.is_file():
        return {}
    try:
        content = json.loads(file.read_bytes())
        content = content | (content.get("text_config") or content.get("model_args") or {})
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise ConfigError(f"{file} is not a config of a model ({error}). Remove it, or download it again.") from error
    return content


def find_size(content: Mapping[str, Any], names: Sequence[str]) -> int | None:
    """Return the first positive integer in a config under one of several names; None if there is none.

    Args:
        content: config, such as that of `read_config`.
        names: keys, in order of preference.
    """
    return next((content[n] for n in names if isinstance(content.get(n), int) and content[n] > 0), None)


def group(
    tensors: Mapping[str, StoredTensor],
) -> tuple[dict[str, dict[str, StoredTensor]], dict[str, StoredTensor], dict[str, str]]:
    """Return the matrices of a file by layer and role, the other matrices, and the tensors that are not measured.

    Args:
        tensors: all tensors of the file by name.

    Returns:
        {layer: {role: tensor}} with the roles in ROLES; {name: tensor} of matrices without a role; and {name: reason}.
    """
    groups: dict[str, dict[str, StoredTensor]] = {}
    others: dict[str, StoredTensor] = {}
    unmatched: dict[str, str] = {}
    for stored, tensor in sorted(tensors.items(), key=lambda item: _natural(item[0])):
        name = stored if stored.isprintable() else ascii(stored)  # a terminal would obey control characters
        if len(tensor.shape) < 2 or name.endswith(("bias", "position_ids")):
            continue
        if tensor.dtype not in FLOATS:
            unmatched[name] = f"{tensor.dtype} is not a type of numbers that is measured: quantised, or an index"
        elif len(tensor.shape) != 2:
            unmatched[name] = f"{' x '.join(map(str, tensor.shape))} is not a matrix"
        elif min(tensor.shape) == 1:
            unmatched[name] = f"{' x '.join(map(str, tensor.shape))} has a condition number of 1"
        else:
            layer, role = find_role(name)
            if role is None or role in groups.get(layer, {}):
                others[name] = tensor
            else:
                groups.setdefault(layer, {})[role] = tensor
    return groups, others, unmatched


def _natural(name: str) -> list[tuple[int, str]]:
    """Return a key that sorts layer 10 after layer 9."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in name.split(".")]


def find_role(name: str) -> tuple[str, str | None]:
    """Return the layer of a tensor of the given name, and its role there, a value of ROLES.

    For a matrix without a role it is None; the layer is then the whole name if no part of that is a number.

    >>> find_role("encoder.layer.0.attention.output.dense.weight")
    ('encoder.layer.0.attention', 'out')
    """
    parts = name.removesuffix(".weight").removesuffix(".0").split(".")
    numbered = max((i + 1 for i, part in enumerate(parts) if part.isdecimal()), default=0)
    inside = next((i + 1 for i in range(numbered, len(parts)) if ATTENTION.search(parts[i])), None)
    end, role = parts[-1].lower(), ROLES.get(parts[-1].lower())
    if not numbered:
        return name, None
    if end in INSIDE:
        before = parts[-2].lower() if len(parts) > 1 else ""
        role = (
            "up" if before == "intermediate" else "out" if inside else "down" if before in ("output", "mlp") else None
        )
    elif end == "wo" and len(parts) > 1 and MLP.search(parts[-2]):  # of T5 and ModernBERT
        role = "down"
    if role in ("up", "down"):
        return ".".join(parts[:numbered]), role
    return ".".join(parts[: inside or numbered]), role
