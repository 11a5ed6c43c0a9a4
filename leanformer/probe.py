"""Condition numbers of a model's matrices per layer, with the random-matrix reference for the same shapes.

python -m leanformer.probe --workdir=runs/quickstart [--step=N | --all]     checkpoints: newest, step N, or all
python -m leanformer.probe --config=configs/quickstart.py                   model at initialisation
python -m leanformer.probe --config=FILE --weights=FILE.safetensors [--config.init_from.layout=timm]    external weights
python -m leanformer.probe --weights=FILE.safetensors|FOLDER [--num_heads=N] [--kv_heads=K] [--head_dim=H]
                                                                     matrices of any model's weights, without its code
      ... [--measures=attention_output,tokens] [--examples=N] [--out=DIR]
      ... --heads=2,4,8,16 [--seeds=3]       numbers of heads at initialisation, with fixed head dimension, and with
                                             fixed num_heads x head_dim

Prints tables, and writes them with shapes, theory and versions to DIR/probe.json, with plots in the same folder. The
examples are the first of the evaluation split. Weights are not averaged (no EMA). Activations have the config's dtype.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from leanformer import cli, config
from leanformer.errors import CheckpointError, ConfigError
from leanformer.runtime import text


def iterate_models(model: Any, workdir: Path | None, f: cli.Values) -> Iterator[tuple[int, str, Any]]:
    """Yield (step, description, weights) of each model to probe.

    These are checkpoints of the run: all with --all, else that of --step, by default the newest. Without a run it is
    one model at step 0, with the weights of --weights or at initialisation. The weights are a pair (parameters, batch
    statistics).

    Args:
        model: setup of the model.
        workdir: folder of the run; None for initial or external weights.
        f: values of the flags step, all, weights and allow_nonfinite.

    Raises:
        CheckpointError: a checkpoint does not exist or is damaged.
        WeightsError: weights cannot be read, do not fit the model, or are not finite without --allow_nonfinite.
    """

    from leanformer.training import inference
    from leanformer.training.checkpoint import is_run, steps_in

    finite = not f.allow_nonfinite
    if workdir is None:
        description = f"weights of {f.weights}" if f.weights else f"initialisation, seed {model.config.seed}"
        yield 0, description, model.initial_weights(finite=finite)
        return
    steps: list[int | None] = [f.step]
    if f.all and is_run(str(workdir)):  # a folder that convert wrote has one
        steps = [*steps_in(workdir / "checkpoints")]
    for step in steps:
        restored = inference.restore_weights(workdir, model, step, finite=finite)
        yield restored.step, f"{workdir}, step {restored.step}", restored.weights


def check_flags(f: cli.Values) -> list[int]:
    """Check the flags of a probe of a model, and return the numbers of heads in --heads.

    They are ascending and without repetitions; [] without the flag.

    Args:
        f: values of the command's flags.

    Raises:
        ConfigError: flags cannot be combined, a number of heads is not a whole number of at least 1, or --seeds is
            below 1.
    """
    if f.workdir is not None and f.config is not None:
        raise ConfigError(
            f"--workdir={f.workdir} --config: both specify the model, and the run has a config of its own. Pass one."
        )
    if f.workdir is None and f.config is None:
        raise ConfigError(
            "The model is not specified. Pass exactly one of --workdir=DIR and --config=FILE, or only --weights=FILE."
        )
    check_alone(f, ("num_heads", "kv_heads", "head_dim"), "--weights without --config")
    for name, other in {"step": "workdir", "all": "workdir", "weights": "config"}.items():
        if getattr(f, name) not in (None, False) and getattr(f, other) is None:
            raise ConfigError(f"--{name} requires --{other}.")
    if f.all and f.step is not None:
        raise ConfigError(f"--all cannot be combined with --step={f.step}. Remove one of them.")
    if f.seeds < 1 or not all(n.isdecimal() and int(n) for n in f.heads):
        raise ConfigError(f"--heads={','.join(f.heads)} --seeds={f.seeds}: expected whole numbers of at least 1.")
    return sorted({int(n) for n in f.heads})


def check_alone(f: cli.Values, names: Sequence[str], needs: str) -> None:
    """Raise ConfigError if one of these flags is given; call this if the flags that they require are missing.

    Args:
        f: values of the flags.
        names: names of the flags that must not be given.
        needs: what they require as text, such as "--workdir or --config", for the message.
    """
    for name in names:
        if getattr(f, name) not in (None, False, (), []):
            raise ConfigError(f"--{name} requires {needs}.")


def probe_weights(f: cli.Values) -> None:
    """Print the measures of the matrices in --weights, a file or folder, and write them to --out, by default probe.

    The files are probe.json and by_layer.png.

    Args:
        f: values of the command's flags.

    Raises:
        ConfigError: a flag needs a model, or does not fit the matrices.
        WeightsError: the file cannot be read.
        WorkdirError: the folder to write to is not writable.
    """

    from leanformer.training import run_files
    from leanformer.watching.weights import watch_weights

    check_alone(f, ("step", "all", "heads", "examples", "allow_nonfinite"), "--workdir or --config")
    out = Path(f.out or "probe").expanduser()
    w = watch_weights(f.weights, heads=f.num_heads, kv_heads=f.kv_heads, head_dim=f.head_dim, measures=f.measures)
    print(f"Conditioning of the matrices of {f.weights}\n\n{w.table()}\n")
    out.mkdir(parents=True, exist_ok=True)
    content = {"weights": str(f.weights), "rows": w.rows, "unmatched": w.unmatched, **run_files.provenance()}
    run_files.write_json(out / "probe.json", content)
    w.plot(out / "by_layer.png", Path(f.weights).name)
    print(f"Wrote probe.json, by_layer.png to {out}.")


def draw(
    out: Path, snapshots: list[dict[str, Any]], spectra: dict[str, Any], swept: Any, title: str | None
) -> list[str]:
    """Write the plots for which there are data, and return the names of their files.

    These are by_layer.png and spectra.png of the last checkpoint in `snapshots`, over_steps.png of several checkpoints,
    and over_heads.png.

    Args:
        out: folder for the plots.
        snapshots: `step`, `of` (description) and `measures` of each checkpoint.
        spectra: singular values of the last checkpoint, from `tables.describe`.
        swept: result of `probing.sweep`; None without --heads.
        title: title of the plot over steps.
    """

    from leanformer.conditioning import charts

    last, steps = snapshots[-1], [snapshot["step"] for snapshot in snapshots]
    figures = {
        "by_layer": charts.plot_by_layer(last["measures"], last["of"]),
        "spectra": charts.plot_spectra(spectra, last["of"]),
    }
    if len(snapshots) > 1:
        figures["over_steps"] = charts.plot_over_steps(
            steps, [snapshot["measures"] for snapshot in snapshots], title or ""
        )
    if swept:
        figures["over_heads"] = charts.plot_over_heads(swept)
    drawn = {f"{name}.png": figure for name, figure in figures.items() if figure is not None}
    for name, figure in drawn.items():
        figure.savefig(out / name)
    return list(drawn)


@cli.command(
    cli.OPTIONAL_CONFIG,
    cli.Flag("workdir", "Folder of a run, to probe its checkpoints."),
    cli.Flag("step", "Checkpoint step to probe; the newest if neither --step nor --all is given.", int),
    cli.Flag("all", "Probe all saved checkpoints.", bool, default=False),
    cli.Flag("weights", "safetensors file with the parameters of --config; alone, a file or folder of any model."),
    cli.Flag("num_heads", "Number of heads of --weights alone; by default that of its config.json.", int, minimum=1),
    cli.Flag("kv_heads", "Number of key and value heads of --weights alone; likewise.", int, minimum=1),
    cli.Flag("head_dim", "Head dimension of --weights alone; likewise.", int, minimum=1),
    cli.Flag("out", "Folder to write to; by default WORKDIR/probe, or ./probe without --workdir."),
    cli.Flag(
        "measures",
        "Names of measures; by default config.probe.measures and the existing ones of W_Q, W_K, W_V, W_O.",
        list,
    ),
    cli.Flag("examples", "Number of examples; by default config.probe.examples.", int),
    cli.Flag("heads", "Numbers of heads to compare at initialisation.", list, default=()),
    cli.Flag("seeds", "Initialisations per number of heads (--heads).", int, default=3),
    cli.Flag("allow_nonfinite", "Also probe weights that contain NaN or infinity.", bool, default=False),
    multi_process=True,
)
def main(f: cli.Values) -> None:
    from leanformer import tasks
    from leanformer.conditioning import tables
    from leanformer.runtime import mesh as meshes
    from leanformer.runtime import multihost, startup, timing
    from leanformer.runtime.timing import Timer, Watchdog
    from leanformer.tasks import artifacts
    from leanformer.training import evaluators, inference, model_setup, probing, run_files

    if f.weights and f.workdir is None and f.config is None:
        probe_weights(f)
        return
    heads = check_flags(f)
    workdir = inference.run_folder(f.workdir) if f.workdir else None
    out = Path(f.out).expanduser() if f.out else (workdir or Path()) / "probe"
    c = artifacts.load_config(workdir) if workdir else f.config
    if workdir:
        artifacts.use_saved_tokenizer(workdir, c)
    startup.require_deterministic(c.get("deterministic", False))
    if f.measures is not None:
        probing.split_names(f.measures)
    c.unlock()
    c.init_from.path = f.weights or c.init_from.path
    c.probe.examples = c.probe.examples if f.examples is None else f.examples
    config.check(c)
    probing.head_plans(c.model, heads)
    mesh = meshes.make_mesh() if workdir else meshes.make_mesh(**c.mesh)
    task = tasks.build(c)
    model = model_setup.build(c, mesh=mesh)
    names = f.measures if f.measures is not None else [*c.probe.measures, *probing.projections(model)]
    activations, _ = probing.split_names(names)
    read, batch = probing.make_reader(model, task.objective, names), None
    if activations or heads:
        batch = evaluators.probe_batch(model, task.data, task.data.open(c.data.eval_split), c.probe.examples)
    snapshots, spectra = [], {}
    if batch and "lengths" in batch:
        note = "Padding tokens are rows of zeros; the random-matrix reference uses the padded number of rows."
        print(f"{text.wrap(note)}\n")
    timer = Timer()
    with Watchdog(c.hang_seconds, lambda: timer.activity):
        for step, of, weights in timer.watched(iterate_models(model, workdir, f), "restore and probe"):
            with timing.announce(f"Compiling the probe, and measuring {of}"):
                entries, spectra = tables.describe(multihost.fetch(read(weights, batch)))
            snapshots.append({"of": of, "step": step, "measures": entries})
            title = text.wrap(f"Conditioning of {of}, {c.probe.examples} examples in {c.dtype}")
            print(f"{title}\n\n{tables.format_table(entries)}", flush=True)
    if not snapshots:
        raise CheckpointError(f"{(workdir or Path()) / 'checkpoints'} contains no checkpoint. Train the model first.")
    swept = probing.sweep(c, mesh, batch, heads, f.seeds) if heads and batch else None
    if swept:
        print(tables.format_sweep(swept), flush=True)
    about = {"examples": c.probe.examples, "split": f"{c.data.name}, {c.data.eval_split}", "dtype": c.dtype}
    if multihost.is_primary():
        out.mkdir(parents=True, exist_ok=True)
    content = about | {"model": c.model.to_dict(), "snapshots": snapshots, "sweep": swept, **run_files.provenance()}
    run_files.write_json(out / "probe.json", content)
    if multihost.is_primary():
        names = ["probe.json", *draw(out, snapshots, spectra, swept, f.workdir)]
        print(text.wrap(f"Wrote {', '.join(names)} to {out}."))


if __name__ == "__main__":
    cli.run(main)
