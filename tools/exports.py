"""Exported folders of every architecture, loaded by transformers and timm: the table of docs/formats.md.

python -m tools.exports [--only=WORD] [--out=FILE.md]

Run it in an environment that has leanformer, torch, timm and transformers. Each model is small and has
random weights in which every part matters; its inputs are random too. The largest difference of the outputs is relative
to the largest output, in float32 on the CPU. "-" marks a format that cannot represent the model.
"""

import argparse
import datetime
import importlib.metadata
import math
import tempfile
import zlib
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from ml_collections import ConfigDict

from leanformer import config
from leanformer.errors import ConfigError
from leanformer.exports import folders, verification
from leanformer.runtime.mesh import flatten_names
from leanformer.training import model_setup
from leanformer.training.model_setup import ModelSetup


PACKAGES = ("jax", "transformers", "timm", "torch", "safetensors")
SIZES = {"width": 24, "depth": 2, "num_heads": 3, "head_dim": 8, "mlp_dim": 48}
LEAN, NARROW = {"num_heads": 5, "head_dim": 16}, {"num_heads": 3, "head_dim": 4}
IMAGE = {"image_size": 32, "patch_size": 8, "channels": 3, "num_classes": 11, **SIZES}
XCIT = {"layer_scale": 0.5, "class_heads": 3, "class_head_dim": 8, "patch_size": 16}
TNT = {"inner_width": 8, "inner_heads": 2, "inner_head_dim": 4, "inner_mlp_dim": 32}
STAGES = {"width": (8, 16), "depth": (1, 1), "num_heads": (2, 4), "head_dim": (4, 4), "mlp_dim": (32, 64)}
VOLO = {"patch_size": 8, "stem_width": 64, "class_heads": 12, "class_head_dim": 32, "depth": (4, 4, 8, 2)}
VOLO |= {"width": (192, 384, 384, 384), "num_heads": (6, 12, 12, 12), "head_dim": (32,) * 4}
VOLO |= {"mlp_dim": (576, 1152, 1152, 1152)}
TEXT = {"vocabulary": 61, "max_length": 16, "dropout": 0.0, **SIZES}
BERT = {"types": 2, "positions": "learned", "post_norm": True, "gated": False, "norm": "layernorm", "mlp_bias": True}
BERT |= {"qkv_bias": True, "out_bias": True, "activation": "gelu", "epsilon": 1e-12, "rotary": None}
GPT2 = {"tied": True, "head_bias": False, "qkv_bias": True, "activation": "gelu_tanh"}
LLAMA = {"tied": False, "head_bias": False, "positions": "none", "rotary": 10_000.0, "norm": "rmsnorm", "gated": True}
LLAMA |= {"activation": "silu", "mlp_bias": False, "qkv_bias": False, "out_bias": False, "epsilon": 1e-6}
LATENT = {"attention": "latent", "kv_rank": 8, "query_rank": 11, "latent_norm": "rmsnorm", "rotary_width": 6}
CASES = {  # task, keys of config.model
    "ViT": ("images", "vit", IMAGE),
    "ViT, 5 x 16 > 24": ("images", "vit", IMAGE | LEAN),
    "ViT, 3 x 4 < 24": ("images", "vit", IMAGE | NARROW),
    "ViT, mean of patches": ("images", "vit", IMAGE | {"pool": "mean"}),
    "DeiT, 5 x 16": ("images", "vit", IMAGE | LEAN | {"distilled": True}),
    "ViT, 5 x 16, layer scale": ("images", "vit", IMAGE | LEAN | {"layer_scale": 0.5}),
    "XCiT": ("images", "xcit", IMAGE | XCIT),
    "XCiT, 5 x 16": ("images", "xcit", IMAGE | XCIT | LEAN),
    "TNT": ("images", "tnt", IMAGE | TNT),
    "DaViT": ("images", "davit", {"image_size": 56, "channels": 3, "num_classes": 11, **STAGES}),
    "VOLO-D1": ("images", "volo", {"image_size": 32, "channels": 3, "num_classes": 11, **VOLO}),
    "BERT, masked": ("masked", "bert", TEXT | BERT | {"transform": True, "head_bias": True}),
    "BERT, classifier": ("sentences", "bert", TEXT | BERT | {"num_classes": 3, "pooler_dim": 24, "pool": "first"}),
    "BERT, 5 x 16": ("masked", "bert", TEXT | BERT | LEAN | {"transform": True, "head_bias": True}),
    "GPT-2": ("language", "gpt", TEXT | GPT2),
    "Llama": ("language", "gpt", TEXT | LLAMA | LEAN | {"num_heads": 4, "num_kv_heads": 2}),
    "Llama, 5 x 16": ("language", "gpt", TEXT | LLAMA | LEAN),
    "Qwen2, 5 x 16": ("language", "gpt", TEXT | LLAMA | LEAN | {"qkv_bias": True}),
    "Llama, biases": ("language", "gpt", TEXT | LLAMA | {"qkv_bias": True, "out_bias": True}),
    "Qwen3, 5 x 16": ("language", "gpt", TEXT | LLAMA | LEAN | {"qk_norm": "rmsnorm"}),
    "GPT, latent attention": ("language", "gpt", TEXT | LLAMA | LATENT | {"head_dim": 10, "value_dim": 7}),
    "Nyströmformer": ("sequences", "nystromformer", {"landmarks": 4, "convolution": 3, "max_length": 16, **SIZES}),
    "encoder of vectors": ("points", "encoder", SIZES),
}


def case_config(task: str, name: str, arguments: dict[str, Any]) -> ConfigDict:
    """Return the config of a case, in float32."""
    c = config.KINDS[task].defaults().unlock()
    c.model = config.model(name) if task == "images" else c.model
    c.model.unlock()
    c.model.update(arguments)
    c.dtype, c.model.backend = "float32", "xla"
    if task == "images":
        c.data.update(mean=(0.5,) * arguments["channels"], std=(0.25,) * arguments["channels"])
    elif task == "points":
        c.data.update(points=5, dim=arguments["width"])
    elif task in ("sentences", "sequences"):
        c.data.max_length = arguments["max_length"]
    return c


def random_weights(model: ModelSetup) -> Any:
    """Return random weights of about the size of trained ones; each depends only on its name."""

    def draw(name: str, leaf: Any) -> jax.Array:
        rng = np.random.default_rng(zlib.crc32(name.encode()))
        noise = rng.standard_normal(leaf.shape, np.float32)
        end = name.rpartition(".")[2]
        if end in ("scale", "var", "temperature") or end.startswith("gamma"):
            return jnp.asarray(np.exp(0.2 * noise))
        if end in ("bias", "mean"):
            return jnp.asarray(0.1 * noise)
        inputs = leaf.shape[-3] if end == "kernel" and leaf.ndim > 3 else leaf.shape[-2] if leaf.ndim > 1 else 1
        return jnp.asarray((0.3 if end != "kernel" else 1.2 / math.sqrt(inputs)) * noise)

    trees = []
    for tree in model.weights:
        leaves = [draw(name, leaf) for name, leaf in flatten_names(tree).items()]
        trees.append(jax.tree.unflatten(jax.tree.structure(tree), leaves))
    return tuple(trees)


def measure(case: tuple[str, str, dict[str, Any]]) -> list[str]:
    """Return a cell for each format: the largest difference, with the class of the other library; or "-"."""
    model = model_setup.set_up_model(case_config(*case))
    weights, cells = random_weights(model), []
    with tempfile.TemporaryDirectory() as root:
        for to in folders.LIBRARIES:
            folder = Path(root) / to
            try:
                description, _ = folders.write_folder(folder, model, weights, to, folders.Origin())
            except ConfigError:
                cells.append("-")
                continue
            worst = verification.compare(folder, description, model, weights, verification.random_sample(model))
            if worst is None:
                raise SystemExit(f"{description.library} or torch is not installed here.")
            cells.append(f"{worst:.1e} ({description.architecture}{', attn_layer' if description.head_dim else ''})")
    return cells


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", default="", help="only models whose name contains this word")
    parser.add_argument("--out", type=Path, help="file to write the printed table to")
    args = parser.parse_args()
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in PACKAGES)
    lines = [f"Measured on {datetime.datetime.now(datetime.UTC):%Y-%m-%d} with {versions}.", ""]
    lines += ["| model | huggingface | timm |", "|---|---|---|"]
    print("\n".join(lines), flush=True)
    for name, case in CASES.items():
        if args.only in name:
            lines.append(f"| {' | '.join([name, *measure(case)])} |")
            print(lines[-1], flush=True)
    if args.out:
        args.out.write_text("\n".join([*lines, ""]), encoding="utf-8")


if __name__ == "__main__":
    main()
