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

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from leanformer import cli
from leanformer.errors import ConfigError


LAYOUTS = ("own", "timm", "huggingface")  # names of pretrained.layouts.LAYOUTS


def check_reference(model: Any, weights: Any, reference: Mapping[str, np.ndarray], path: str) -> float:
    """Return the largest difference between the model's and the reference's logits, relative to the largest logit.

    Raises WeightsError if they differ by more than rounding.
    """
    import jax.numpy as jnp

    from leanformer.exports import verification

    inputs, channels = reference["input"], model.config.model.get("channels")
    if inputs.ndim == 4 and inputs.shape[1] == channels != inputs.shape[-1]:
        inputs = inputs.transpose(0, 2, 3, 1)
    result, _ = model.merge(weights)(jnp.asarray(inputs))
    advice = (
        "The weights are written. Unless they or the reference are in half precision, compare the config with "
        "the original model's: epsilon of norms, activation, image size."
    )
    return verification.check_outputs(np.asarray(result), reference["logits"], f"--reference={path}", advice)


def _find_source(flags: cli.Values) -> tuple[str, Path | None]:
    """Return the path of the weights, and the folder of the run if it is one."""
    from leanformer.training import checkpoint, inference, run_files

    if len(flags.words) + (flags.weights is not None) != 1:
        raise ConfigError(
            f"{' '.join(flags.words) or '--weights'}: expected exactly one source of weights. Pass the folder of one "
            "run, or --weights=FILE."
        )
    path = flags.weights or flags.words[0]
    if not Path(path).expanduser().exists():
        raise ConfigError(f"{path} does not exist. Pass the folder of a run, or --weights=FILE.")
    if not (checkpoint.is_run(path) or run_files.exported_weights(Path(path).expanduser()) is not None):
        if flags.config is None:
            raise ConfigError(f"{path} is not the folder of a run. Pass --config=FILE with the config of the model.")
        return path, None
    if flags.config is not None or getattr(flags, "from") != "own":
        raise ConfigError(
            f"{path} is the folder of a run, which has its config and layout. Leave out --config, --from."
        )
    return path, inference.run_folder(path)


def _write(flags: cli.Values, model: Any, weights: Any, workdir: Path | None, restored: Any) -> Iterator[str]:
    """Write the folder that --to names, and yield lines about it."""
    import jax

    from leanformer import pretrained
    from leanformer.exports import folders, verification
    from leanformer.training import run_files

    folder = Path(flags.out).expanduser()
    if flags.to in folders.LIBRARIES:
        origin = folders.Origin.of_run(workdir, model.config, restored.step) if workdir else folders.Origin()
        description, target = folders.write_folder(folder, model, weights, flags.to, origin)
        other = f"{description.architecture} of {description.library}"
        yield f"Wrote {target}: {model.config.model.name} as {other}, layout {flags.to}."
        sample = verification.real_sample(model, workdir) if workdir else verification.random_sample(model)
        yield verification.describe(folder, description, model, weights, sample)
        return
    target, opened = folder / "weights.safetensors", ""
    pretrained.write(target, pretrained.export(jax.device_get(weights), model.layout(flags.to)), {"layout": flags.to})
    if workdir:
        run_files.export(workdir, folder, step=restored.step, averaged=restored.ema is not None)
        opened = f' Open it with leanformer.load("{folder}").'
    yield f"Wrote {target}: {model.config.model.name}, layout {flags.to}.{opened}"


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
def main(flags: cli.Values) -> None:
    from leanformer import pretrained
    from leanformer.exports import folders
    from leanformer.training import inference, model_setup, run_files

    path, workdir = _find_source(flags)
    folder = Path(flags.out).expanduser()
    if folder.is_dir() and any(folder.iterdir()):
        raise ConfigError(f"--out={flags.out} is not empty, and its files would be replaced. Choose a new folder.")
    reference = pretrained.read(flags.reference) if flags.reference else None
    config = run_files.load_config(workdir) if workdir else flags.config
    if workdir:
        run_files.use_saved_tokenizer(workdir, config)
    config.unlock()
    config.dtype, config.model.backend = "float32", "xla"
    model = model_setup.set_up_model(config)
    if flags.to in folders.LIBRARIES:  # errors before the weights are read
        model.layout(flags.to)
        folders.describe(config, flags.to)
    restored = inference.restore_weights(workdir, model, flags.step, best=flags.best) if workdir else None
    weights = (restored.ema or restored.weights) if restored else model.read_weights(path, getattr(flags, "from"))
    for line in _write(flags, model, weights, workdir, restored):
        print(line, flush=True)
    if reference is not None:
        worst = check_reference(model, weights, reference, flags.reference)
        print(f"Largest difference from the logits in {flags.reference}: {worst:.1e} of the largest logit.")


if __name__ == "__main__":
    cli.run(main)
