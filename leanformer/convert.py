"""Conversion of weights between naming schemes (timm, Hugging Face, leanformer), with a check of the logits.

python -m leanformer.convert --config=FILE --from=timm --weights=in.safetensors --out=DIR [--reference=REF.safetensors]
python -m leanformer.convert --config=FILE --weights=OURS.safetensors --to=timm --out=DIR
      ... [--config.init_from.new_head] [--config.init_from.resize_positions]
python -m leanformer.convert --weights=WORKDIR [--best|--step=N] --to=timm --out=DIR

Writes DIR/weights.safetensors in the requested naming scheme. For a run these are the EMA weights if it keeps them.
With --max_shard_size=5GB it writes DIR/model-00001-of-00002.safetensors, ... and DIR/model.safetensors.index.json in
Hugging Face's format. --weights is a file, such an index, or a folder with either.

A reference file holds `input` and `logits` of the original model. The input is normalised images (B C height width, or
B height width C) or tokens (B T); the logits are B V or B T V. The largest difference of the logits, relative to the
largest logit, is computed in float32 and printed.
"""

if __name__ == "__main__":
    from leanformer.__main__ import run

    run("convert")  # imports this module again, once the command line is parsed


from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from leanformer import cli, pretrained
from leanformer.errors import ConfigError, WeightsError
from leanformer.pretrained import sharded
from leanformer.tasks import artifacts
from leanformer.training import inference, model_setup, restoring
from leanformer.training.model_setup import ModelSetup


def worst_difference(model: ModelSetup, weights: Any, reference: pretrained.Tensors, path: str) -> float:
    """Return the largest difference between the model's and the reference's logits, relative to the largest logit.

    Args:
        model: setup of the model.
        weights: weights of the model.
        reference: tensors `input` and `logits`.
        path: path of the reference, for errors.

    Raises:
        WeightsError: `input` or `logits` is missing or has the wrong shape.
    """
    missing = {"input", "logits"} - reference.keys()
    if missing:
        raise WeightsError(
            f"--reference={path}: {', '.join(sorted(missing))} is missing. The file must hold input and logits."
        )
    inputs, logits = reference["input"], reference["logits"]
    channels = model.config.model.get("channels")
    inputs = _check_tokens(inputs, path) if channels is None else _arrange_images(inputs, channels, path)
    result, _ = model.merge(weights)(jnp.asarray(inputs))
    if result.shape != logits.shape:
        raise WeightsError(f"--reference={path}: logits are {logits.shape}, but the model gives {result.shape}.")
    return float(np.abs(np.asarray(result) - logits).max() / np.abs(logits).max())


def _arrange_images(images: np.ndarray, channels: int, path: str) -> np.ndarray:
    if images.ndim == 4 and images.shape[1] == channels != images.shape[-1]:
        images = images.transpose(0, 2, 3, 1)
    if images.ndim != 4 or images.shape[-1] != channels:
        raise WeightsError(f"--reference={path}: input is {images.shape}; expected B C height width, C = {channels}.")
    return images


def _check_tokens(tokens: np.ndarray, path: str) -> np.ndarray:
    if tokens.ndim != 2 or not np.issubdtype(tokens.dtype, np.integer):
        raise WeightsError(f"--reference={path}: input is {tokens.dtype} {tokens.shape}; expected integer tokens, B T.")
    return tokens


@cli.body("convert")
def main(f: cli.Values) -> None:
    largest = None if f.max_shard_size is None else sharded.parse_size(f.max_shard_size)
    of_run, source = restoring.is_run(f.weights), getattr(f, "from")
    if of_run == (f.config is not None):
        raise ConfigError(
            f"--weights={f.weights} is the folder of a run, which contains its config. Leave out --config."
            if of_run
            else f"--weights={f.weights} is not the folder of a run. Pass --config=FILE with the config of the model."
        )
    if not of_run and (f.best or f.step is not None):
        raise ConfigError(f"--best and --step select a checkpoint of a run, but --weights={f.weights} is a file.")
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
    print(f"Wrote {target}: {c.model.name}, naming scheme {f.to}.")
    if f.reference:
        worst = worst_difference(model, weights, pretrained.read(f.reference), f.reference)
        print(f"Largest difference from the logits in {f.reference}: {worst:.1e} of the largest logit.")
