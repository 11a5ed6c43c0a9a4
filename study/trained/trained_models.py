"""Conditioning of the activations of two trained models that ship in Python packages, and of fresh ones beside them.

    python -m study.trained.trained_models [--out=study/data/trained_models.csv]

A BERT (all-MiniLM-L6-v2, fine-tuned for sentence similarity) reads passages of 64 tokens by Jane Austen. A ViT-S/14 in
DINOv2's layout, from a saliency model, sees photos of clothes enlarged to 224 pixels, unlike its training data. A fresh
model is the same architecture with this library's initialisation. Install the packages with `make pretrained`.
"""

import csv
import lzma
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from tokenizers import Tokenizer

import leanformer
from leanformer import cli, config, models, pretrained
from leanformer.data.images import open_images
from leanformer.data.images.sources import BUNDLED
from leanformer.pretrained import layouts
from leanformer.watching import Watch
from study.trained import packaged


EVIDENCE = Path(__file__).parents[1] / "data" / "trained_models.csv"
MEASURES = ("attention_output", "head_output", "tokens", "attention_entropy")
MODELS = {"BERT (MiniLM)": ("minilm", {}), "ViT-S/14": ("vit_s14", {"image_size": 224})}
EXAMPLES = 32
COLUMNS = ("model", "trained", "layer", "measure", "head", "median", "q10", "q90", "bounds", "shape", "effective_rank")


def build(name: str, trained: bool, **changes: Any) -> nnx.Module:
    """Return a model of `packaged.PACKAGED`, with the weights of its package or freshly initialised."""
    arguments = dict(packaged.PACKAGED[name].arguments) | changes
    model = models.build(**arguments, rngs=nnx.Rngs(0))
    if not trained:
        return model
    graphdef, *state = nnx.split(model, nnx.Param, nnx.BatchStat)
    allowed = pretrained.Allowed(new_head=True, resize_positions=True)
    layout = layouts.layout("huggingface", arguments)
    weights = pretrained.load(packaged.tensors(name), layout, tuple(map(nnx.as_pure, state)), allowed)
    return nnx.merge(graphdef, *jax.tree.map(jnp.asarray, weights))


def passages(examples: int = EXAMPLES, length: int = 64) -> jax.Array:
    """Return B T tokens of consecutive passages, each with the first and last token of BERT."""
    tokenizer = Tokenizer.from_file(str(packaged.folder("minilm") / "model" / "tokenizer.json"))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    with lzma.open(BUNDLED / "austen-test.txt.xz", "rt") as file:
        text = " ".join(file.read().split())[: examples * length * 8]
    ids = tokenizer.encode(text, add_special_tokens=False).ids[: examples * (length - 2)]
    rows = np.array(ids).reshape(examples, length - 2)
    ends = [np.full((examples, 1), tokenizer.token_to_id(word)) for word in ("[CLS]", "[SEP]")]
    return jnp.asarray(np.concatenate([ends[0], rows, ends[1]], axis=1), jnp.int32)


def photos(examples: int = EXAMPLES, side: int = 224) -> jax.Array:
    """Return B H W C images, normalised."""
    source = open_images("bundled:fashion_mnist", "t10k", image_size=28, channels=1, num_classes=10)
    grey = jnp.asarray(np.stack([source[i]["image"] for i in range(examples)]), jnp.float32) / 255
    enlarged = jax.image.resize(grey.reshape(examples, *grey.shape[1:3], -1), (examples, side, side, 1), "cubic")
    return (jnp.repeat(enlarged, 3, axis=3) - np.array(config.IMAGENET_MEAN)) / np.array(config.IMAGENET_STD)


def watch(label: str, trained: bool, examples: int = EXAMPLES) -> Watch:
    """Return the closed watch of a model of MODELS on its inputs."""
    name, changes = MODELS[label]
    inputs = passages(examples) if name == "minilm" else photos(examples)
    model = build(name, trained, **changes)
    with leanformer.watch(model, measures=MEASURES, examples=None) as result:
        model(inputs)
    return result


def _columns(label: str, trained: bool, row: dict[str, Any]) -> dict[str, Any]:
    def text(value: Any) -> Any:
        return f"{value:.4g}" if isinstance(value, float) else value

    shape, bounds = row.get("shape"), row.get("bounds") or ()
    cells = {key: text(row.get(key)) for key in COLUMNS} | {"model": label, "trained": int(trained)}
    return cells | {"shape": shape and "x".join(map(str, shape)), "bounds": " ".join(bounds)}


@cli.command(cli.Flag("out", "File to write the table to.", default=str(EVIDENCE)))
def main(f: cli.Values) -> None:
    rows = [
        _columns(label, trained, row)
        for label in MODELS
        for trained in (True, False)
        for row in watch(label, trained).rows
    ]
    with Path(f.out).open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    cli.run(main)
