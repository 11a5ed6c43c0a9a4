"""Conditioning of the matrices in a safetensors file or folder, without the code of their model.

The role of a matrix follows from its name in the files of PyTorch's libraries. W_Q, W_K, W_V and W_O are split into
heads by `config.json` beside the file, or by the arguments. At most two matrices are in memory.
"""

import copy
import functools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from leanformer.conditioning import WEIGHTS, with_spectrum
from leanformer.conditioning.measures import Measure, apply, look_up
from leanformer.errors import ConfigError
from leanformer.stored import StoredTensor, open_lazily
from leanformer.watching.measures import Layer, pack
from leanformer.watching.results import LEGEND, Results, draw_checkpoints


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
INTERLEAVED = ("gpt_neox", "bloom", "deberta")  # packed as N 3 H; others as N H, K H, K H
BY_GROUP = ("codegen", "internlm2")  # packed as groups of queries with their keys and values
CONTIGUOUS = ("chatglm", "glm", "glm4")  # with the name query_key_value, but N H, K H, K H
Members = Mapping[str, StoredTensor]  # matrices of a layer by role
Loaders = dict[str, Callable[[], np.ndarray]]


class WeightsWatch(Results):
    """Measures of the matrices of safetensors files, as `watch_weights` returns them.

    With several files, layers, rows, table and verdict are of the last one, with the first as reference.

    Attributes:
        layers: statistics by the name of a layer, or of a matrix without a role.
        unmatched: {name: reason} for tensors that are not measured.
        files: {path: `WeightsWatch`} of each of several files, in order; empty for a single one.
    """

    legend = "Condition number of the matrix, or median [10 %, 90 %] over its heads.\n" + LEGEND

    def __init__(self, layers: Mapping[str, Layer], unmatched: Mapping[str, str], reference: Any = None):
        super().__init__(reference)
        self.layers, self.unmatched = dict(layers), dict(unmatched)
        self.files: dict[str, WeightsWatch] = {}

    def draw(self, title: str) -> Any:
        """Draw condition numbers by layer, or for several files their medians over the files, by layer."""
        if not self.files:
            return super().draw(title)
        names = [Path(name).stem if Path(name).suffix else Path(name).name for name in self.files]
        return draw_checkpoints(names, [w.rows for w in self.files.values()], title)


def watch_weights(
    path: str | Path | Sequence[str | Path],
    *,
    heads: int | None = None,
    kv_heads: int | None = None,
    head_dim: int | None = None,
    measures: Sequence[str] | None = None,
    reference: Any = None,
) -> WeightsWatch:
    """Measure every matrix of safetensors weights.

    Args:
        path: safetensors file, index of shards, or folder with one of them; or several, such as the checkpoints of a
            run in order.
        heads, kv_heads, head_dim: sizes of the attention; by default from config.json beside the file.
        measures: names of `leanformer.conditioning.WEIGHTS`, and "matrix" for all other matrices; by default all.
        reference: other results or their rows to compare with; by default the first of several files.

    Raises:
        ConfigError: an argument is invalid or does not fit the matrices, or no matrix has one of the measures.
        WeightsError: the file is unreadable, see `pretrained.read`.
    """
    known = WEIGHTS | {"matrix": Measure("any other matrix", ())}
    names = tuple(look_up(known if measures is None else measures, known))
    paths = [path] if isinstance(path, str | Path) else path
    given = {"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim}
    files = {str(each): _watch_file(each, given, names) for each in paths}
    first, last = next(iter(files.values())), list(files.values())[-1]
    result = WeightsWatch(last.layers, last.unmatched, reference or (first if len(files) > 1 else None))
    result.files = files if len(files) > 1 else {}
    return result


def _watch_file(path: str | Path, given: Mapping[str, int | None], names: Sequence[str]) -> WeightsWatch:
    tensors = open_lazily(path)
    if any(name.endswith(".kernel") for name in tensors):
        raise ConfigError(f"{path} is in leanformer's own format. Use leanformer.probe --config=FILE --weights={path}.")
    groups, others, unmatched = _group(tensors)
    layout, layers = Layout(given, _read_config(Path(path).expanduser()), groups), {}
    for name, members in groups.items():
        layers[name] = Layer(name, [m for m in names if m != "matrix"])
        _measure_group(layers[name], members, layout.of(name))
    for name, tensor in others.items() if "matrix" in names else ():
        layers[name] = Layer(name, ("matrix",))
        _, measured = with_spectrum(tensor()[None].astype(np.float32), dtype=FLOATS[tensor.dtype])
        _add(layers[name], "matrix", measured)
    if not any(layer.calls for layer in layers.values()):
        reasons = f" ({next(iter(unmatched.values()))})" if unmatched else ""
        raise ConfigError(f"{path}: none of its {len(tensors)} tensors is a matrix of the chosen measures{reasons}.")
    return WeightsWatch({name: layer for name, layer in layers.items() if layer.calls or layer.notes}, unmatched)


def _read_config(path: Path) -> dict[str, Any]:
    """Return the `config.json` beside weights, with nested model settings merged; {} if there is none."""
    file = (path if path.is_dir() else path.parent) / "config.json"
    content = json.loads(file.read_bytes()) if file.is_file() else {}
    return content | (content.get("text_config") or content.get("model_args") or {})


def _find_size(content: Mapping[str, Any], names: Sequence[str]) -> int | None:
    """Return the first positive integer in a config under one of several names."""
    return next((content[n] for n in names if isinstance(content.get(n), int) and content[n] > 0), None)


def _group(tensors: Members) -> tuple[dict[str, dict[str, StoredTensor]], dict[str, StoredTensor], dict[str, str]]:
    """Return {layer: {role: tensor}}, {name: tensor} of matrices without a role, and {name: reason} of the rest."""
    groups: dict[str, dict[str, StoredTensor]] = {}
    others: dict[str, StoredTensor] = {}
    unmatched: dict[str, str] = {}
    for name, tensor in sorted(tensors.items(), key=lambda item: _natural(item[0])):
        sizes = " x ".join(map(str, tensor.shape))
        if len(tensor.shape) < 2 or name.endswith(("bias", "position_ids")):
            continue
        if tensor.dtype not in FLOATS:
            unmatched[name] = f"{tensor.dtype} is not a type of numbers that is measured: quantised, or an index"
        elif len(tensor.shape) != 2:
            unmatched[name] = f"{sizes} is not a matrix"
        elif min(tensor.shape) == 1:
            unmatched[name] = f"{sizes} has a condition number of 1"
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


def _stem(name: str) -> str:
    """Return the stack of a layer: "decoder.h" of "decoder.h.0.attn"."""
    return re.split(r"\.?\b\d+\b", name)[0]


def find_role(name: str) -> tuple[str, str | None]:
    """Return the layer of a tensor, and its role there, a value of ROLES, or None.

    >>> find_role("encoder.layer.0.attention.output.dense.weight")
    ('encoder.layer.0.attention', 'out')
    """
    parts = name.removesuffix(".weight").removesuffix(".0").split(".")
    numbered = max((i + 1 for i, part in enumerate(parts) if part.isdecimal()), default=0)
    if not numbered:
        return name, None
    inside = next((i + 1 for i in range(numbered, len(parts)) if ATTENTION.search(parts[i])), None)
    before, end = (part.lower() for part in ["", *parts][-2:])
    role = ROLES.get(end)
    if end in INSIDE:
        role = (
            "up" if before == "intermediate" else "out" if inside else "down" if before in ("output", "mlp") else None
        )
    elif end == "wo" and MLP.search(before):  # of T5 and ModernBERT
        role = "down"
    if role in ("up", "down"):
        return ".".join(parts[:numbered]), role
    return ".".join(parts[: inside or numbered]), role


class Layout:
    """Sizes of heads and order of axes of a file's matrices.

    Args:
        given: sizes from the caller, which come before sizes in `published`, the content of config.json.
    """

    def __init__(self, given: Mapping[str, int | None], published: Mapping[str, Any], groups: Mapping[str, Members]):
        self.kind, self._given = published.get("model_type"), given
        self._towers = {name.removesuffix("_config"): x for name, x in published.items() if name.endswith("_config")}
        self._set_sizes(published)
        packed = {name: members["packed"] for name, members in groups.items() if "packed" in members}
        self.turned = False  # True for Conv1D of transformers' GPT-2: inputs x outputs, as in no other layer
        self._conv1d = {
            _stem(name)
            for name, x in packed.items()
            if x.name.endswith("c_attn.weight") and x.shape[1] == 3 * x.shape[0]
        }

    def _set_sizes(self, published: Mapping[str, Any]) -> None:
        self.heads = self._given["heads"] or _find_size(published, HEADS)
        self.kv_heads = self._given["kv_heads"] or _find_size(published, KV_HEADS)
        plain, rotated = (_find_size(published, (f"qk_{part}_head_dim",)) for part in ("nope", "rope"))
        # Dimension of a query and key where config.json gives it another than a value's.
        self.query_dim = plain + rotated if plain and rotated else _find_size(published, ("qk_head_dim",))
        self.head_dim = self._given["head_dim"] or _find_size(published, ("v_head_dim", "head_dim"))

    def of(self, name: str) -> "Layout":
        """Return the layout of a layer, with the sizes of its tower: those in "vision_config" for "vision_model.0"."""
        parts = ["vision" if part == "visual" else part for part in name.split(".")]
        own = [x for tower, x in self._towers.items() if any(part.startswith(tower) for part in parts)]
        result = copy.copy(self)
        result.turned = _stem(name) in self._conv1d
        if own and isinstance(own[0], Mapping) and _find_size(own[0], HEADS) is not None:
            result._set_sizes(own[0])
        return result

    def object(self, layer: Layer, sentence: str) -> None:
        """Report sizes that do not fit a layer; config.json may be about another part of the model."""
        if any(self._given.values()):
            raise ConfigError(f"{sentence}. Pass heads=, kv_heads= and head_dim= of this model.")
        layer.note(f"{sentence}: config.json does not fit this layer")

    def outputs(self, tensor: StoredTensor) -> int:
        return tensor.shape[1 if self.turned else 0]

    def load(self, tensor: StoredTensor) -> np.ndarray:
        """Read a matrix from the file, inputs x outputs."""
        return tensor() if self.turned else tensor().T

    def load_heads(self, tensor: StoredTensor, head_dim: int) -> np.ndarray:
        """Read a matrix from the file, inputs x heads x head dimension."""
        x = self.load(tensor)
        return x.reshape(len(x), -1, head_dim)


def _measure_group(layer: Layer, members: Members, layout: Layout) -> None:
    """Add the measures of the matrices of one layer to its statistics."""
    loaders: Loaders = {
        role: functools.partial(layout.load, members[role]) for role in ("up", "down") if role in members
    }
    loaders |= _attention_loaders(layer, members, layout)
    for name in layer.names:
        roles = {need: need.split(".")[1] for need in WEIGHTS[name].needs}  # such as attention.query.kernel: query
        by_head = name.endswith(("per_head", "product"))
        if all(role in loaders for role in roles.values()) and (layer.heads or not by_head):
            arrays = {need: loaders[role]()[None] for need, role in roles.items()}  # with a leading axis L
            dtype = FLOATS[next(iter(members.values())).dtype]
            _add(layer, name, apply({name: WEIGHTS[name]}, arrays, dtype=dtype)[name])
    layer.names = tuple(layer.total)


def _add(layer: Layer, name: str, measured: Any) -> None:
    layer.add({name: pack(measured)})
    layer.calls = 1


def _attention_loaders(layer: Layer, members: Members, layout: Layout) -> Loaders:
    """Set the sizes of a layer, and return functions that load its D N H, and N H D of the output projection.

    Matrices are one head of all their outputs if the number of heads is unknown.
    """
    out, packed, query = (members.get(role) for role in ("out", "packed", "query"))
    if not members.keys() & {"query", "key", "value", "packed", "out"}:
        return {}
    total = None  # outputs of all heads
    if out:
        total = sum(out.shape) - layout.outputs(out)
    elif query:
        total = layout.outputs(query)
    elif packed:
        total = layout.outputs(packed) // 3
    heads, head_dim = layout.heads, layout.head_dim
    if heads is None:
        layer.note("the number of heads is unknown: pass heads=, or keep config.json beside the file")
    elif total is None or total % heads or total != heads * (head_dim or total // heads):
        layout.object(layer, f"heads={heads}, head_dim={head_dim}: {layer.name} has {total} outputs of all heads")
    else:
        layer.heads, layer.head_dim = heads, total // heads
    loaders: Loaders = {}
    for role in ("query", "key", "value"):
        if role in members:
            width = layout.outputs(members[role])
            size = layer.head_dim or width
            if (n := layer.heads) is not None:
                size = (role != "value" and layout.query_dim) or size
                possible = [n] if role == "query" else [k for k in range(1, n + 1) if n % k == 0]
                if width not in [k * size for k in possible]:
                    sizes = f"{width} outputs, not of heads of {size}"
                    layout.object(layer, f"heads={heads}: {members[role].name} has {sizes}")
                    continue
            loaders[role] = functools.partial(layout.load_heads, members[role], size)
    if packed and query:
        layer.note(f"{packed.name}: keys and values packed without queries are not measured")
    elif packed and total is not None:
        loaders |= _packed_loaders(layer, packed, total, layout)
    if out:
        loaders["out"] = lambda: layout.load(out).reshape(layer.heads or 1, -1, layout.outputs(out))
    return loaders


def _packed_loaders(layer: Layer, packed: StoredTensor, total: int, layout: Layout) -> Loaders:
    """Return functions that load the parts of a matrix with queries, keys and values, (N + 2 K) H outputs."""
    heads, head_dim = layer.heads or 1, layer.head_dim or total
    rest = layout.outputs(packed) - total
    kv = rest // (2 * head_dim)
    interleaved = layout.kind in INTERLEAVED or (layout.kind == "gpt_bigcode" and kv == heads)
    if kv * 2 * head_dim != rest or not kv or heads % kv or (layer.heads and layout.kv_heads not in (None, kv)):
        sizes = f"{packed.name} has {layout.outputs(packed)} outputs, not {heads} queries of {head_dim}"
        layout.object(layer, f"kv_heads={layout.kv_heads}: {sizes} and keys and values")
        return {}
    named = packed.name.endswith("query_key_value.weight") and layout.kind not in (*INTERLEAVED, *CONTIGUOUS)
    if named or layout.kind in BY_GROUP:
        layer.note(f"{packed.name}: the order of queries, keys and values of {layout.kind} is unknown")
        return {}
    if interleaved and not layer.heads:
        return {}
    starts = np.cumsum([0, heads, kv, kv]) * head_dim

    def load(index: int) -> np.ndarray:
        x = layout.load(packed)
        if interleaved:
            return x.reshape(len(x), heads, 3, head_dim)[:, :, index]
        return x[:, starts[index] : starts[index + 1]].reshape(len(x), -1, head_dim)

    return {role: functools.partial(load, index) for index, role in enumerate(("query", "key", "value"))}
