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
examples are the first of the evaluation split. Models run in float32, without the average of weights (EMA).
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from leanformer import cli, config, text
from leanformer.errors import ConfigError


def iterate_models(model: Any, workdir: Path | None, flags: cli.Values) -> Iterator[tuple[int, str, Any]]:
    """Yield (step, description, weights) of each checkpoint to probe, or of the initial or external weights."""
    from leanformer.training import inference
    from leanformer.training.checkpoint import is_run, steps_in

    if workdir is None:
        description = f"weights of {flags.weights}" if flags.weights else f"initialisation, seed {model.config.seed}"
        yield 0, description, model.initial_weights()
        return
    steps: list[int | None] = [flags.step]
    if flags.all and is_run(str(workdir)):  # a folder that convert wrote has one
        steps = [*steps_in(workdir / "checkpoints")] or [None]  # restoring says that there is none
    for step in steps:
        restored = inference.restore_weights(workdir, model, step)
        yield restored.step, f"{workdir}, step {restored.step}", restored.weights


def probe_weights(flags: cli.Values) -> None:
    """Print the measures of the matrices in --weights, a file or folder, and write probe.json and by_layer.png."""
    from leanformer.training import run_files
    from leanformer.watching.weights import watch_weights

    out = Path(flags.out or "probe").expanduser()
    sizes = {"heads": flags.num_heads, "kv_heads": flags.kv_heads, "head_dim": flags.head_dim}
    watch = watch_weights(flags.weights, **sizes, measures=flags.measures)
    print(f"Conditioning of the matrices of {flags.weights}\n\n{watch.table()}\n")
    content = {"weights": str(flags.weights), "rows": watch.rows, "unmatched": watch.unmatched}
    run_files.write_json(out / "probe.json", content | run_files.provenance())
    watch.plot(out / "by_layer.png", Path(flags.weights).name)
    print(f"Wrote probe.json, by_layer.png to {out}.")


def draw(
    out: Path, snapshots: Sequence[dict[str, Any]], spectra: dict[str, Any], swept: Any, title: str | None
) -> list[str]:
    """Write the plots for which there are data, and return the names of their files."""
    from leanformer.conditioning import charts

    last, steps = snapshots[-1], [snapshot["step"] for snapshot in snapshots]
    figures = {
        "by_layer": charts.plot_by_layer(last["measures"], last["of"]),
        "spectra": charts.plot_spectra(spectra, last["of"]),
    }
    if len(snapshots) > 1:
        measures = [snapshot["measures"] for snapshot in snapshots]
        figures["over_steps"] = charts.plot_over_steps(steps, measures, title or "")
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
    cli.Flag("num_heads", "Number of heads of --weights alone; by default from its config.json.", int, minimum=1),
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
    cli.Flag("seeds", "Initialisations per number of heads (--heads).", int, default=3, minimum=1),
    multi_process=True,
)
def main(flags: cli.Values) -> None:
    from leanformer import tasks
    from leanformer.conditioning import tables
    from leanformer.runtime import multihost, timing
    from leanformer.runtime.mesh import make_mesh
    from leanformer.training import evaluators, inference, model_setup, probing, run_files

    if (flags.workdir is None) == (flags.config is None and flags.weights is None):
        raise ConfigError("Pass exactly one of --workdir=DIR, --config=FILE [--weights=FILE], and only --weights=FILE.")
    alone = flags.workdir is None and flags.config is None
    unused = ("step", "all", "heads", "examples") if alone else ("num_heads", "kv_heads", "head_dim")
    for name in (*unused, *(("step", "all") if flags.config is not None else ())):
        if getattr(flags, name):
            given = "--weights alone" if alone else "--workdir" if flags.config is None else "--config"
            raise ConfigError(f"--{name} has no effect with {given}; see --help. Leave it out.")
    if alone:
        probe_weights(flags)
        return
    heads = sorted({int(number) for number in flags.heads})
    workdir = inference.run_folder(flags.workdir) if flags.workdir else None
    out = Path(flags.out).expanduser() if flags.out else (workdir or Path()) / "probe"
    c = run_files.load_config(workdir) if workdir else flags.config
    if workdir:
        run_files.use_saved_tokenizer(workdir, c)
    cli.require_deterministic(c.get("deterministic", False))
    if flags.measures is not None:
        probing.split_names(flags.measures)
    c.unlock()
    c.init_from.path = flags.weights or c.init_from.path
    c.probe.examples = c.probe.examples if flags.examples is None else flags.examples
    config.check(c)
    probing.head_plans(c.model, heads)
    mesh = make_mesh() if workdir else make_mesh(**c.mesh)
    task = tasks.build_task(c)
    model = model_setup.set_up_model(c, mesh=mesh).in_float32()
    c = model.config
    names = flags.measures if flags.measures is not None else [*c.probe.measures, *probing.projections(model)]
    activations, _ = probing.split_names(names)
    read, batch = probing.make_reader(model, task.objective, names), None
    if activations or heads:
        batch = evaluators.probe_batch(model, task.data, task.data.open(c.data.eval_split), c.probe.examples)
    snapshots, spectra = [], {}
    for step, of, weights in iterate_models(model, workdir, flags):
        with timing.announce(f"Compiling the probe, and measuring {of}"):
            entries, spectra = tables.describe(multihost.fetch(read(weights, batch)))
        snapshots.append({"of": of, "step": step, "measures": entries})
        title = text.wrap(f"Conditioning of {of}, {c.probe.examples} examples in {c.dtype}")
        print(f"{title}\n\n{tables.format_table(entries)}", flush=True)
    swept = probing.sweep(c, mesh, batch, heads, flags.seeds) if heads and batch else None
    if swept:
        print(tables.format_sweep(swept), flush=True)
    about = {"examples": c.probe.examples, "split": f"{c.data.name}, {c.data.eval_split}", "dtype": c.dtype}
    content = about | {"model": c.model.to_dict(), "snapshots": snapshots, "sweep": swept, **run_files.provenance()}
    run_files.write_json(out / "probe.json", content)
    if multihost.is_primary():
        drawn = draw(out, snapshots, spectra, swept, flags.workdir)
        print(text.wrap(f"Wrote {', '.join(['probe.json', *drawn])} to {out}."))


if __name__ == "__main__":
    cli.run(main)
