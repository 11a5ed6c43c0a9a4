"""Conversion of weights: folders that other libraries load, and layouts, with a check of the outputs.

python -m leanformer.convert RUN --to=huggingface --out=DIR    folder for transformers: config, weights, tokenizer
python -m leanformer.convert RUN --to=timm --out=DIR           folder for timm.create_model("local-dir:DIR")
python -m leanformer.convert RUN --out=DIR                     folder for leanformer.load(DIR), without the optimizer
      ... [--best|--step=N]
python -m leanformer.convert --config=FILE --weights=OURS.safetensors --to=timm --out=DIR
python -m leanformer.convert --config=FILE --from=timm --weights=in.safetensors --out=DIR [--reference=REF.safetensors]
      ... [--config.init_from.new_head] [--config.init_from.resize_positions]

Takes a run's EMA weights if it keeps them. If transformers or timm is installed in the same environment, it loads the
folder back, and the largest difference of the outputs on examples of the run's data is printed.
RUN, or --weights, is a run's folder; --weights is also a safetensors file, an index, or a folder with either.

A reference file holds `input` and `logits` of the original model. The input is normalised images (B C height width, or
B height width C) or tokens (B T); the logits are B V or B T V. The largest difference of the logits, relative to the
largest logit, is computed in float32 and printed. If it is more than rounding, the exit status is 2.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from leanformer import cli
from leanformer.errors import ConfigError, WeightsError


LAYOUTS = ("own", "timm", "huggingface")  # names of pretrained.layouts.LAYOUTS


def check_reference(model: Any, weights: Any, reference: dict[str, np.ndarray], path: str) -> float:
    """Return the largest difference between the model's and the reference's logits, relative to the largest logit.

    Args:
        model: setup of the model.
        weights: weights of the model.
        reference: tensors of the original model: `input` (images B C height width or B height width C, or tokens B T)
            and `logits` (B V or B T V).
        path: path of the reference, for errors.

    Raises:
        WeightsError: `input` or `logits` is missing or has the wrong shape, or the logits are not finite or differ by
            more than float32 rounding.
    """

    import jax.numpy as jnp

    from leanformer.exports import verification

    missing = {"input", "logits"} - reference.keys()
    if missing:
        raise WeightsError(
            f"--reference={path}: {', '.join(sorted(missing))} is missing. The file must hold input and logits."
        )
    inputs, logits = reference["input"], reference["logits"]
    channels = model.config.model.get("channels")
    inputs = _check_tokens(inputs, path) if channels is None else _arrange_images(inputs, channels, path)
    result, _ = model.merge(weights)(jnp.asarray(inputs))
    advice = (
        "The weights are written. Unless they or the reference are in half precision, compare the config with that of "
        "the original model: epsilon of norms, activation, image size."
    )
    return verification.check_outputs(np.asarray(result), logits, f"--reference={path}", advice)


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


def _sources(f: cli.Values) -> tuple[str, bool]:
    """Return the path of the weights, and whether it is a run's folder. Raises ConfigError for invalid flags."""

    from leanformer.tasks import artifacts
    from leanformer.training.checkpoint import is_run

    if len(f.words) + (f.weights is not None) != 1:
        raise ConfigError(
            f"{' '.join(f.words) or '--weights'}: expected exactly one source of weights. Pass the folder of one run, "
            "or --weights=FILE."
        )
    path, source = f.weights or f.words[0], getattr(f, "from")
    if not Path(path).expanduser().exists():
        raise ConfigError(f"{path} does not exist. Pass the folder of a run, or --weights=FILE.")
    of_run = is_run(path) or artifacts.exported_weights(Path(path).expanduser()) is not None
    if of_run == (f.config is not None):
        raise ConfigError(
            f"{path} is the folder of a run, which contains its config. Leave out --config."
            if of_run
            else f"{path} is not the folder of a run. Pass --config=FILE with the config of the model."
        )
    if not of_run and (f.best or f.step is not None):
        raise ConfigError(f"--best and --step select a checkpoint of a run, but {path} is a file of weights.")
    if of_run and source != "own":
        raise ConfigError(f'{path} is the folder of a run, whose layout is "own", not "{source}". Use "own".')
    return path, of_run


def _write(f: cli.Values, model: Any, weights: Any, workdir: Path | None, restored: Any) -> Iterator[str]:
    """Write the folder that --to names, and yield lines about it."""
    import jax

    from leanformer import pretrained
    from leanformer.exports import folders, verification
    from leanformer.tasks import artifacts

    folder = Path(f.out).expanduser()
    if f.to in folders.LIBRARIES:
        origin = folders.Origin()
        if workdir and restored:
            origin = folders.Origin.of_run(workdir, model.config, restored.step)
        description, target = folders.write_folder(folder, model, weights, f.to, origin)
        other = f"{description.architecture} of {description.library}"
        yield f"Wrote {target}: {model.config.model.name} as {other}, layout {f.to}."
        sample = verification.real_sample(model, workdir) if workdir else verification.random_sample(model)
        yield verification.describe(folder, description, model, weights, sample)
    else:
        tensors = pretrained.export(jax.device_get(weights), model.layout(f.to))
        target = folder / "weights.safetensors"
        pretrained.write(target, tensors, {"layout": f.to})
        if workdir and restored:
            artifacts.export(workdir, folder, step=restored.step, averaged=restored.ema is not None)
        opened = f' Open it with leanformer.load("{folder}").' if workdir else ""
        yield f"Wrote {target}: {model.config.model.name}, layout {f.to}.{opened}"


@cli.command(
    cli.OPTIONAL_CONFIG,
    cli.Flag("from", "Layout of --weights.", LAYOUTS, default="own"),
    cli.Flag("to", "Format to write.", LAYOUTS, default="own"),
    cli.Flag("weights", "safetensors file, index of several files, folder with either, or run folder."),
    cli.Flag("step", "Checkpoint step of the run to convert; the newest if neither --step nor --best is given.", int),
    cli.Flag("best", "Convert the run's best checkpoint by validation score.", bool, default=False),
    cli.Flag("out", "New folder to write to.", required=True),
    cli.Flag("reference", "safetensors file with input and logits of the original model, to compare with."),
    words="the folder of a run, and flags as --name=value",
    optional_words=True,
)
def main(f: cli.Values) -> None:
    from leanformer import pretrained
    from leanformer.exports import folders
    from leanformer.tasks import artifacts
    from leanformer.training import inference, model_setup

    path, of_run = _sources(f)
    folder = Path(f.out).expanduser()
    if folder.is_dir() and any(folder.iterdir()):
        raise ConfigError(f"--out={f.out} is not empty, and files of a run would be replaced. Choose a new folder.")
    reference = pretrained.read(f.reference) if f.reference else None
    workdir = inference.run_folder(path) if of_run else None
    c = artifacts.load_config(workdir) if workdir else f.config
    if workdir:
        artifacts.use_saved_tokenizer(workdir, c)
    c.unlock()
    c.dtype, c.model.backend = "float32", "xla"
    model = model_setup.build(c)
    if f.to in folders.LIBRARIES:
        model.layout(f.to)
        folders.describe(c, f.to)
    restored = inference.restore_weights(workdir, model, f.step, best=f.best) if workdir else None
    weights = (restored.ema or restored.weights) if restored else model.read_weights(path, getattr(f, "from"))
    for line in _write(f, model, weights, workdir, restored):
        print(line, flush=True)
    if reference is not None:
        worst = check_reference(model, weights, reference, f.reference)
        print(f"Largest difference from the logits in {f.reference}: {worst:.1e} of the largest logit.")


if __name__ == "__main__":
    cli.run(main)
