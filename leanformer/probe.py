"""The conditioning of a model here, layer by layer, beside what Gaussian matrices of the same shapes would show.

python -m leanformer.probe --workdir=runs/quickstart [--step=N | --all]     the newest checkpoint, one, or every one
python -m leanformer.probe --config=configs/quickstart.py                   at initialisation
python -m leanformer.probe --config=FILE --weights=FILE.safetensors [--config.init_from.layout=timm]     outside weights
      ... [--measures=attention_output,tokens] [--examples=N] [--out=DIR]
      ... --heads=2,4,8,16 [--seeds=3]       number of heads at initialisation: head width fixed, and total width fixed

Prints tables; writes them with shapes, theory and versions to DIR/probe.json, and charts beside it. The images are the
first of the evaluation split, the weights raw, not averaged, and activations as in the config's dtype.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from absl import flags

from leanformer import cli, determinism, experiment, peers, probing, report
from leanformer import mesh as meshes
from leanformer.checkpoint import Checkpoints
from leanformer.conditioning import charts, tables
from leanformer.errors import CheckpointError, ConfigError
from leanformer.experiment import Experiment


WORKDIR = flags.DEFINE_string("workdir", None, "Folder of a run, to probe its checkpoints.")
STEP = flags.DEFINE_integer("step", None, "Checkpoint to probe; the newest if neither this nor --all is given.")
ALL = flags.DEFINE_bool("all", False, "Probe every saved step.")
OUTSIDE = flags.DEFINE_string("weights", None, "safetensors file with the parameters of the --config.")
OUT = flags.DEFINE_string("out", None, "Folder to write to; WORKDIR/probe, or ./probe without a workdir.")
MEASURES = flags.DEFINE_list(
    "measures", None, "Names of measures; config.probe.measures and W_Q, W_K, W_V, W_O if unset."
)
EXAMPLES = flags.DEFINE_integer("examples", None, "Images; config.probe.examples if unset.")
HEADS = flags.DEFINE_list("heads", [], "Numbers of heads to compare at initialisation.")
SEEDS = flags.DEFINE_integer("seeds", 3, "Initialisations of each number of heads.")

OWN = ("query_weights", "key_weights", "value_weights", "output_weights")


def subjects(run: Experiment, workdir: Path | None) -> Iterator[tuple[int, str, Any]]:
    """What to probe, one at a time: step, words, weights."""
    if workdir is None:
        words = f"weights of {OUTSIDE.value}" if OUTSIDE.value else f"initialisation, seed {run.config.seed}"
        yield 0, words, run.first_weights()
        return
    with Checkpoints(workdir / "checkpoints", run.config.checkpoint.keep) as saved:
        for step in saved.steps if ALL.value else [STEP.value]:
            restored = saved.restore(run.like, step)
            if restored is not None:
                state = restored[0]
                yield int(state.step), f"{workdir}, step {int(state.step)}", state.weights


def check_flags() -> list[int]:
    """The numbers of heads. Raises ConfigError for flags that do not go together."""
    if (WORKDIR.value is None) == (flags.FLAGS["config"].value is None):
        raise ConfigError("Give one of --workdir=DIR and --config=FILE: what is to be probed.")
    for name, needs in {"step": "workdir", "all": "workdir", "weights": "config"}.items():
        if flags.FLAGS[name].value not in (None, False) and flags.FLAGS[needs].value is None:
            raise ConfigError(f"--{name} goes with --{needs} only.")
    if ALL.value and STEP.value is not None:
        raise ConfigError(f"--all and --step={STEP.value} exclude each other.")
    if SEEDS.value < 1 or not all(n.isdecimal() for n in HEADS.value):
        raise ConfigError(f"--heads={','.join(HEADS.value)} --seeds={SEEDS.value}: whole numbers from 1 are wanted.")
    return sorted({int(n) for n in HEADS.value})


def draw(out: Path, snapshots: list[dict[str, Any]], spectra: dict[str, np.ndarray], swept: Any) -> list[str]:
    """Writes the charts that there are data for; the newest snapshot where a chart shows one."""
    last, steps = snapshots[-1], [snapshot["step"] for snapshot in snapshots]
    figures = {
        "by_layer": charts.by_layer(last["measures"], last["of"]),
        "spectra": charts.spectra(spectra, last["of"]),
    }
    if len(snapshots) > 1:
        figures["over_steps"] = charts.over_steps(
            steps, [snapshot["measures"] for snapshot in snapshots], WORKDIR.value
        )
    if swept:
        figures["over_heads"] = charts.over_heads(swept)
    drawn = {f"{name}.png": figure for name, figure in figures.items() if figure is not None}
    for name, figure in drawn.items():
        figure.savefig(out / name)
    return list(drawn)


def main() -> None:
    heads = check_flags()
    workdir = cli.existing(WORKDIR.value) if WORKDIR.value else None
    c = report.read_config(workdir) if workdir else cli.config()
    determinism.require(c.get("deterministic", False))
    names = MEASURES.value if MEASURES.value is not None else [*c.probe.measures, *OWN]
    activations, _ = probing.split_names(names)
    c.unlock()
    c.init_from.path = OUTSIDE.value or c.init_from.path
    c.probe.examples = c.probe.examples if EXAMPLES.value is None else EXAMPLES.value
    probing.head_plans(c.model, heads)
    mesh = meshes.fitting(**c.mesh) if workdir else meshes.make_mesh(**c.mesh)
    run = experiment.build(probing.bare(c), examples=1, mesh=mesh)
    batch, read = probing.batch(run) if activations or heads else None, probing.make_reader(run, names)
    out = Path(OUT.value).expanduser() if OUT.value else (workdir or Path()) / "probe"
    snapshots, spectra = [], {}
    if batch and "lengths" in batch:
        print("Padding is zeros in every matrix; the Gaussian figures are of the padded number of rows.\n")
    for step, of, weights in subjects(run, workdir):
        entries, spectra = tables.describe(peers.fetch(read(weights, batch)))
        snapshots.append({"of": of, "step": step, "measures": entries})
        print(f"Conditioning of {of}, {c.probe.examples} examples in {c.dtype}\n\n{tables.table(entries)}", flush=True)
    if not snapshots:
        raise CheckpointError(f"{workdir / 'checkpoints'} holds no checkpoint yet. Train first.")
    swept = probing.sweep(c, mesh, batch, heads, SEEDS.value) if heads else None
    if swept:
        print(tables.sweep_table(swept), flush=True)
    about = {"examples": c.probe.examples, "split": f"{c.data.name}, {c.data.eval_split}", "dtype": c.dtype}
    if peers.first():
        out.mkdir(parents=True, exist_ok=True)
    content = about | {"model": c.model.to_dict(), "snapshots": snapshots, "sweep": swept, **report.provenance()}
    report.write_json(out / "probe.json", content)
    if peers.first():
        print(f"Wrote {', '.join(['probe.json', *draw(out, snapshots, spectra, swept)])} to {out}.")


if __name__ == "__main__":
    cli.config_flag(required=False)
    cli.run(main, spread=True)
