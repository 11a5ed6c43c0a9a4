"""Conditioning of the matrices in a safetensors file or folder, without the code of their model.

The role of a matrix follows from its name in the files of PyTorch's libraries. W_Q, W_K, W_V and W_O are split into
heads by `config.json` beside the file, or by the arguments. At most two matrices are in memory.
"""

import copy
import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from leanformer import conditioning
from leanformer.conditioning import WEIGHTS
from leanformer.errors import ConfigError
from leanformer.stored import StoredTensor, open_lazily
from leanformer.watching import pictures
from leanformer.watching.measures import Layer, pack, unit_roundoff
from leanformer.watching.roles import FLOATS, HEADS, KV_HEADS, find_size, group, read_config
from leanformer.watching.session import Results


INTERLEAVED = ("gpt_neox", "bloom")  # packed as N 3 H; others as N H, K H, K H
BY_GROUP = ("codegen", "internlm2")  # packed as groups of queries with their keys and values
CONTIGUOUS = ("chatglm", "glm", "glm4")  # with the name query_key_value, but N H, K H, K H
PARTS = {"query": "attention.query.kernel", "key": "attention.key.kernel", "value": "attention.value.kernel"}
PARTS |= {"out": "attention.out.kernel", "up": "mlp.up.kernel", "down": "mlp.down.kernel"}
Loaders = dict[str, Callable[[], np.ndarray]]


@dataclasses.dataclass(frozen=True)
class Heads:
    """Sizes of the attention in a file of weights, as given by the caller.

    Attributes:
        heads: number of query heads; None if not given.
        kv_heads: number of key and value heads; None if not given.
        head_dim: dimension of a head; None if not given.

    Raises:
        ConfigError: a size is not a whole number of at least 1.
    """

    heads: int | None = None
    kv_heads: int | None = None
    head_dim: int | None = None

    def __post_init__(self):
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value is not None and (not isinstance(value, int) or value < 1):
                raise ConfigError(f"{field.name}={value!r}: expected a whole number of at least 1.")


class WeightsWatch(Results):
    """Measures of the matrices of safetensors files, as `watch_weights` returns them.

    With several files, layers, rows, table and verdict are those of the last one, beside the first as reference.

    Attributes:
        layers: statistics by the name of a layer, or of a matrix without a role.
        unmatched: {name: reason} for tensors that are not measured.
        files: {path: `WeightsWatch`} of each file, in order; empty for a single one.
    """

    def __init__(self, layers: Mapping[str, Layer], unmatched: Mapping[str, str], reference: Any = None):
        super().__init__(reference)
        self.layers, self.unmatched = dict(layers), dict(unmatched)
        self.files: dict[str, WeightsWatch] = {}

    def plot(self, path: str | Path | None = None, title: str = "") -> Any:
        """Return a figure: condition numbers by layer, or for several files their medians over the files, by layer.

        Args:
            path: file to write it to, such as conditioning.png; None for none.
            title: title of the figure.

        Raises:
            ConfigError: nothing was measured, or Matplotlib is not installed.
        """
        if not self.files:
            return super().plot(path, title)
        names = [Path(name).stem if Path(name).suffix else Path(name).name for name in self.files]
        figure = pictures.draw_checkpoints(names, [w.rows for w in self.files.values()], title)
        return pictures.save(figure, path)


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
        heads, kv_heads, head_dim: sizes of the attention; by default those of config.json beside the file.
        measures: names of `leanformer.conditioning.WEIGHTS`, and "matrix" for all other matrices; by default all.
        reference: other results or their rows to compare with; by default the first of several files.

    Raises:
        ConfigError: an argument is invalid or does not fit the matrices, or no matrix has one of the measures.
        WeightsError: the file is unreadable, see `pretrained.read`.
    """
    if not isinstance(path, str | Path):
        sizes: dict[str, Any] = {"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim, "measures": measures}
        files = {str(each): watch_weights(each, **sizes) for each in path}
        if not files:
            raise ConfigError("watch_weights: there is no file.")
        first, *_, last = (*files.values(), *files.values())
        result = WeightsWatch(last.layers, last.unmatched, reference or (first if len(files) > 1 else None))
        result.files = files
        return result
    names = tuple(measures) if measures is not None else (*WEIGHTS, "matrix")
    if wrong := [name for name in names if name not in (*WEIGHTS, "matrix")]:
        raise ConfigError(f"measures={', '.join(wrong)}: unknown. Choose from {', '.join(WEIGHTS)}, matrix.")
    given, tensors = Heads(heads, kv_heads, head_dim), open_lazily(path)
    if any(name.endswith(".kernel") for name in tensors):
        raise ConfigError(f"{path} is in leanformer's own format. Use leanformer.probe --config=FILE --weights={path}.")
    published = read_config(Path(path).expanduser())
    groups, others, unmatched = group(tensors)
    layout, layers = Layout(given, published, groups), {}
    for name, members in groups.items():
        layers[name] = Layer(name, [m for m in names if m != "matrix"])
        measure_group(layers[name], members, layout.of(name))
    for name, tensor in others.items() if "matrix" in names else ():
        layers[name] = Layer(name, ("matrix",))
        _add(layers[name], "matrix", conditioning.condition(tensor()[None].astype(np.float32)), tensor)
    if not any(layer.calls for layer in layers.values()):
        reasons = f" ({next(iter(unmatched.values()))})" if unmatched else ""
        raise ConfigError(f"{path}: none of its {len(tensors)} tensors is a matrix of the chosen measures{reasons}.")
    return WeightsWatch(
        {name: layer for name, layer in layers.items() if layer.calls or layer.notes}, unmatched, reference
    )


class Layout:
    """Sizes of heads and order of axes of a file's matrices.

    Attributes:
        kind: model type in config.json; None if unknown.
        given: sizes from the caller.
        heads, kv_heads, head_dim: sizes of the attention; None if unknown.
        query_dim: dimension of a query and key of a head where config.json gives it another than a value's; else None.
        turned: True if matrices are stored as inputs x outputs, False for outputs x inputs.

    Args:
        given: sizes from the caller, which come before those of `published`.
        published: content of config.json.
        groups: matrices by layer and role.
    """

    def __init__(self, given: Heads, published: Mapping[str, Any], groups: Mapping[str, Mapping[str, StoredTensor]]):
        self.kind, self.given = published.get("model_type"), given
        self._towers = {name.removesuffix("_config"): x for name, x in published.items() if name.endswith("_config")}
        self._set_sizes(published)
        packed = [members["packed"] for members in groups.values() if "packed" in members]
        # The Conv1D of transformers' GPT-2 has inputs x outputs, all others have outputs x inputs.
        self.turned = any(x.name.endswith("c_attn.weight") and x.shape[1] == 3 * x.shape[0] for x in packed)

    def _set_sizes(self, published: Mapping[str, Any]) -> None:
        self.heads = self.given.heads or find_size(published, HEADS)
        self.kv_heads = self.given.kv_heads or find_size(published, KV_HEADS)
        plain, rotated = (find_size(published, (f"qk_{part}_head_dim",)) for part in ("nope", "rope"))
        self.query_dim = plain + rotated if plain and rotated else find_size(published, ("qk_head_dim",))
        of_values = find_size(published, ("v_head_dim",))
        self.head_dim = self.given.head_dim or of_values or find_size(published, ("head_dim",))

    def of(self, name: str) -> "Layout":
        """Return the layout of a layer, with the sizes of its tower: those in "vision_config" for "vision_model.0"."""
        parts = ["vision" if part == "visual" else part for part in name.split(".")]
        own = [x for tower, x in self._towers.items() if any(part.startswith(tower) for part in parts)]
        if not own or not isinstance(own[0], Mapping) or find_size(own[0], HEADS) is None:
            return self
        result = copy.copy(self)
        result._set_sizes(own[0])
        return result

    def object(self, layer: Layer, sentence: str) -> None:
        """Report sizes that do not fit a layer: raise ConfigError if the caller gave them, else add a note to it.

        Sizes of config.json may be those of another part of the model.

        Args:
            layer: statistics of the layer.
            sentence: description of the problem.
        """
        if self.given != Heads():
            raise ConfigError(f"{sentence}. Pass heads=, kv_heads= and head_dim= of this model.")
        layer.note(f"{sentence}: config.json does not fit this layer")

    def outputs(self, tensor: StoredTensor) -> int:
        """Return the number of outputs of the matrix of a linear layer, as stored in the file."""
        return tensor.shape[1 if self.turned else 0]

    def load(self, tensor: StoredTensor) -> np.ndarray:
        """Read a matrix from the file, and return it as inputs x outputs."""
        return tensor() if self.turned else tensor().T

    def interleaved(self, packed: StoredTensor) -> bool:
        """Return True if the outputs of packed queries, keys and values have the order N 3 H; False for N H, K H, K H.

        Raises:
            ConfigError: the order is unknown for this model type.
        """
        if self.kind in INTERLEAVED:
            return True
        named = packed.name.endswith("query_key_value.weight") and self.kind not in CONTIGUOUS
        if named or self.kind in BY_GROUP:
            raise ConfigError(f"{packed.name}: the order of queries, keys and values of {self.kind} is unknown")
        return False


def measure_group(layer: Layer, members: Mapping[str, StoredTensor], layout: Layout) -> None:
    """Measure the matrices of one layer, and add the results to its statistics.

    Args:
        layer: statistics of the layer, with the names of the measures.
        members: matrices of the layer by role.
        layout: sizes of heads and order of axes.

    Raises:
        ConfigError: sizes of heads from the caller do not fit the matrices.
    """
    loaders = _mlp_loaders(members, layout) | _attention_loaders(layer, members, layout)
    for name in layer.names:
        spec = WEIGHTS[name]
        roles = [role for role, part in PARTS.items() if part in spec.needs]
        by_head = name.endswith(("per_head", "product"))
        if not all(role in loaders for role in roles) or (by_head and layer.heads is None):
            continue
        # Nested arrays with a leading axis L, as `conditioning.weights` takes them.
        block: dict[str, Any] = {"attention": {}, "mlp": {}}
        for role in roles:
            first, second, _ = PARTS[role].split(".")
            block[first][second] = {"kernel": loaders[role]()[None]}
        _add(layer, name, conditioning.weights({"": block}, [name])[""][name], next(iter(members.values())))
    layer.names = tuple(layer.total)


def _add(layer: Layer, name: str, measured: Any, tensor: StoredTensor) -> None:
    roundoff = {name: unit_roundoff(FLOATS[tensor.dtype])}
    layer.add({name: pack(measured)}, roundoff)
    layer.calls = 1


def _mlp_loaders(members: Mapping[str, StoredTensor], layout: Layout) -> Loaders:
    return {role: functools.partial(layout.load, members[role]) for role in ("up", "down") if role in members}


def _attention_loaders(layer: Layer, members: Mapping[str, StoredTensor], layout: Layout) -> Loaders:
    """Return functions that load the matrices of an attention: D N H, and N H D of the output projection.

    Sets the sizes of the layer. Matrices are one head of all their outputs if the number of heads is unknown.
    """
    out, packed, query = (members.get(role) for role in ("out", "packed", "query"))
    if not members.keys() & {"query", "key", "value", "packed", "out"}:
        return {}
    total = sum(out.shape) - layout.outputs(out) if out else layout.outputs(query) if query else None
    if total is None:
        total = layout.outputs(packed) // 3 if packed else None
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
            h = layer.head_dim or width
            if (n := layer.heads) is not None:
                h = (role != "value" and layout.query_dim) or h
                possible = [n] if role == "query" else [k for k in range(1, n + 1) if n % k == 0]
                if width not in [k * h for k in possible]:
                    sizes = f"{width} outputs, not of heads of {h}"
                    layout.object(layer, f"heads={heads}: {members[role].name} has {sizes}")
                    continue
            loaders[role] = functools.partial(_load_heads, layout, members[role], h)
    if packed is not None and total is not None:
        loaders |= _packed_loaders(layer, packed, total, layout)
    if out is not None:
        loaders["out"] = lambda: layout.load(out).reshape(layer.heads or 1, -1, layout.outputs(out))
    return loaders


def _load_heads(layout: Layout, tensor: StoredTensor, head_dim: int) -> np.ndarray:
    x = layout.load(tensor)
    return x.reshape(len(x), -1, head_dim)


def _packed_loaders(layer: Layer, packed: StoredTensor, total: int, layout: Layout) -> Loaders:
    """Return functions that load the parts of a matrix with queries, keys and values, (N + 2 K) H outputs."""
    heads, head_dim = layer.heads or 1, layer.head_dim or total
    rest = layout.outputs(packed) - total
    kv = rest // (2 * head_dim)
    if kv * 2 * head_dim != rest or not kv or heads % kv or (layer.heads and layout.kv_heads not in (None, kv)):
        width = f"{packed.name} has {layout.outputs(packed)} outputs"
        layout.object(
            layer, f"kv_heads={layout.kv_heads}: {width}, not {heads} queries of {head_dim} and keys and values"
        )
        return {}
    try:
        interleaved = layout.interleaved(packed)
    except ConfigError as error:
        layer.note(str(error))
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
