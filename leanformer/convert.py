"""Weights from another layout to ours, or back, with the proof that they give the same logits.

python -m leanformer.convert --config=FILE --from=timm --weights=in.safetensors --out=DIR [--reference=REF.safetensors]
python -m leanformer.convert --config=FILE --weights=OURS.safetensors --to=timm --out=DIR
      ... [--config.init_from.new_head] [--config.init_from.resize_positions]

Writes DIR/weights.safetensors under the names asked for. A reference file holds `input` (images, B C height width as
PyTorch has them, or B height width C, normalised) and `logits` (B V) of the model it came from; the largest difference
relative to the largest logit is printed, computed in float32.
"""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from leanformer import cli, experiment, layouts, pretrained
from leanformer.errors import WeightsError


LAYOUTS = ("own", *layouts.SOURCES)


def worst_difference(run: experiment.Experiment, weights: Any, reference: pretrained.Tensors, path: str) -> float:
    """Largest difference between our logits and a reference's, relative to its largest logit.

    Raises:
        WeightsError: the reference is not one, or is of another shape.
    """
    missing = {"input", "logits"} - reference.keys()
    if missing:
        raise WeightsError(f"--reference={path} has no {', '.join(sorted(missing))}; it needs input and logits.")
    channels = run.config.model.channels
    images, logits = reference["input"], reference["logits"]
    if images.ndim == 4 and images.shape[1] == channels != images.shape[-1]:
        images = images.transpose(0, 2, 3, 1)
    if images.ndim != 4 or images.shape[-1] != channels:
        raise WeightsError(f"--reference={path}: input is {images.shape}, wanted B C height width, C = {channels}.")
    found, _ = nnx.merge(run.graphdef, *weights)(jnp.asarray(images))
    if found.shape != logits.shape:
        raise WeightsError(f"--reference={path}: logits are {logits.shape}, this model gives {found.shape}.")
    return float(np.abs(np.asarray(found) - logits).max() / np.abs(logits).max())


@cli.command(
    cli.CONFIG,
    cli.Flag("from", "Whose names and shapes --weights has.", LAYOUTS, default="own"),
    cli.Flag("to", "Whose names and shapes to write.", LAYOUTS, default="own"),
    cli.Flag("weights", "safetensors file to read.", required=True),
    cli.Flag("out", "Folder to write weights.safetensors to.", required=True),
    cli.Flag("reference", "safetensors file with input and logits of the source."),
)
def main(f: cli.Values) -> None:
    c = f.config
    c.unlock()
    c.dtype, c.model.backend = "float32", "xla"
    c.init_from.update(path=f.weights, layout=getattr(f, "from"))
    run = experiment.build(c, examples=1_000_000, mesh=None)
    weights = run.first_weights()
    target = Path(f.out).expanduser() / "weights.safetensors"
    pretrained.write(target, pretrained.export(jax.device_get(weights), run.layout(f.to)), {"layout": f.to})
    print(f"Wrote {target}: {c.model.name}, layout {f.to}.")
    if f.reference:
        worst = worst_difference(run, weights, pretrained.read(f.reference), f.reference)
        print(f"Worst difference of logits from {f.reference}: {worst:.1e} of the largest.")


if __name__ == "__main__":
    cli.run(main)
