"""Weights from another layout to ours, or back, with the proof that they give the same logits.

python -m leanformer.convert --config=FILE --from=timm --weights=in.safetensors --out=DIR [--reference=REF.safetensors]
python -m leanformer.convert --config=FILE --weights=OURS.safetensors --to=timm --out=DIR
      ... [--config.init_from.new_head] [--config.init_from.resize_positions]
python -m leanformer.convert --weights=WORKDIR [--best|--step=N] --to=timm --out=DIR

Writes DIR/weights.safetensors under the names asked for; of a run the averaged weights, where it keeps them; with
--max_shard_size=5GB DIR/model-00001-of-00002.safetensors, ... and DIR/model.safetensors.index.json, as Hugging Face
publishes them. --weights takes a file, such an index, or a folder with one or the other. A
reference file holds `input` (images, B C height width as PyTorch has them, or B height width C, normalised; or tokens,
B T) and `logits` (B V; B T V) of the model it came from; the largest difference relative to the largest logit is
printed, computed in float32.
"""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from leanformer import cli, pretrained
from leanformer.errors import ConfigError, WeightsError
from leanformer.pretrained import layouts, sharded
from leanformer.tasks import artifacts
from leanformer.training import inference, model_setup, restoring
from leanformer.training.model_setup import ModelSetup


def worst_difference(model: ModelSetup, weights: Any, reference: pretrained.Tensors, path: str) -> float:
    """Largest difference between our logits and a reference's, relative to its largest logit.

    Raises:
        WeightsError: the reference is not one, or is of another shape.
    """
    missing = {"input", "logits"} - reference.keys()
    if missing:
        raise WeightsError(f"--reference={path} has no {', '.join(sorted(missing))}; it needs input and logits.")
    inputs, logits = reference["input"], reference["logits"]
    channels = model.config.model.get("channels")
    inputs = _tokens(inputs, path) if channels is None else _images(inputs, channels, path)
    found, _ = model.merge(weights)(jnp.asarray(inputs))
    if found.shape != logits.shape:
        raise WeightsError(f"--reference={path}: logits are {logits.shape}, this model gives {found.shape}.")
    return float(np.abs(np.asarray(found) - logits).max() / np.abs(logits).max())


def _images(found: np.ndarray, channels: int, path: str) -> np.ndarray:
    if found.ndim == 4 and found.shape[1] == channels != found.shape[-1]:
        found = found.transpose(0, 2, 3, 1)
    if found.ndim != 4 or found.shape[-1] != channels:
        raise WeightsError(f"--reference={path}: input is {found.shape}, wanted B C height width, C = {channels}.")
    return found


def _tokens(found: np.ndarray, path: str) -> np.ndarray:
    if found.ndim != 2 or not np.issubdtype(found.dtype, np.integer):
        raise WeightsError(f"--reference={path}: input is {found.dtype} {found.shape}, wanted tokens, integers B T.")
    return found


@cli.command(
    dataclasses.replace(cli.CONFIG, required=False),
    cli.Flag("from", "Whose names and shapes --weights has.", layouts.LAYOUTS, default="own"),
    cli.Flag("to", "Whose names and shapes to write.", layouts.LAYOUTS, default="own"),
    cli.Flag("weights", "safetensors file or index of several, or the folder of either, or of a run.", required=True),
    cli.Flag("step", "Of a run: the checkpoint; the newest if neither this nor --best is given.", int),
    cli.Flag("best", "Of a run: the best checkpoint by evaluation.", bool, default=False),
    cli.Flag("out", "Folder to write weights.safetensors to.", required=True, writes=True),
    cli.Flag("max_shard_size", "Writes files of at most so much, 5GB or 500MiB, with an index, instead of one."),
    cli.Flag("reference", "safetensors file with input and logits of the source."),
)
def main(f: cli.Values) -> None:
    largest = None if f.max_shard_size is None else sharded.size_of(f.max_shard_size)
    of_run, source = restoring.is_run(f.weights), getattr(f, "from")
    if of_run == (f.config is not None):
        raise ConfigError(
            f"--weights={f.weights} is the folder of a run, whose config is in it: leave out --config."
            if of_run
            else f"--weights={f.weights} is no folder of a run: --config=FILE has to say of what model it is."
        )
    if not of_run and (f.best or f.step is not None):
        raise ConfigError(f"--best and --step are of a run's checkpoints, and --weights={f.weights} is a file.")
    c = artifacts.load_config(inference.run_folder(f.weights)) if of_run else f.config
    c.unlock()
    c.dtype, c.model.backend = "float32", "xla"
    model = model_setup.build(c)
    weights = model.read_weights(f.weights, source, step=f.step, best=f.best)
    folder, tensors = Path(f.out).expanduser(), pretrained.export(jax.device_get(weights), model.layout(f.to))
    if largest is None:
        pretrained.write(target := folder / "weights.safetensors", tensors, {"layout": f.to})
    else:
        target = pretrained.write_sharded(folder / "model", tensors, largest, {"layout": f.to})
    print(f"Wrote {target}: {c.model.name}, layout {f.to}.")
    if f.reference:
        worst = worst_difference(model, weights, pretrained.read(f.reference), f.reference)
        print(f"Worst difference of logits from {f.reference}: {worst:.1e} of the largest.")


if __name__ == "__main__":
    cli.run(main)
