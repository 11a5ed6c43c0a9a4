"""The experiment of Leaner Transformers' Figure 2 on trained models: conditioning against the number of heads.

    python -m experiments.heads --out=DIR [--heads=2,3,4,8,16] [--seeds=3] [--epochs=6] [--config=configs/quickstart.py]

Trains every member, both trades (head width fixed, total width fixed), on bundled images in patches of 7 (17 tokens;
smaller ones are mostly blank, and the attention output is then singular in float32), then measures the attention output
of all of them at initialisation and after training on the same images. Finished members are kept in DIR, so the same
command goes on where it stopped. Prints tables and writes heads.json and charts.
"""

import argparse
import json
import runpy
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np

from leanformer.conditioning import charts, tables
from leanformer.runtime import mesh as meshes
from leanformer.training import experiment, probing, report
from leanformer.training.checkpoint import Checkpoints


ROOT = Path(__file__).parents[1]
WIDTH = 96  # heads x head width of the trade that fixes it


def config(file: str, heads: int, head_dim: int, epochs: float):
    c = runpy.run_path(file)["get_config"]()
    c.model.update(num_heads=heads, head_dim=head_dim)
    c.update(total_epochs=epochs)
    c.optim.warmup_epochs = min(1.0, epochs / 4)
    c.probe.update(every=100, examples=64)
    return c


def train(file: str, workdir: Path, heads: int, head_dim: int, epochs: float, seed: int) -> None:
    """Trains one member by the ordinary command, or goes on with it."""
    c = config(file, heads, head_dim, epochs)
    if (workdir / "summary.json").is_file():
        done = report.read_config(workdir)
        if (done.total_epochs, done.model.to_dict()) != (epochs, c.model.to_dict()):
            raise SystemExit(f"{workdir} holds a member of other settings. Take another --out.")
        return
    changed = {"model.num_heads": heads, "model.head_dim": head_dim, "seed": seed}
    changed |= {"total_epochs": epochs, "optim.warmup_epochs": c.optim.warmup_epochs}
    changed |= {"probe.every": c.probe.every, "probe.examples": c.probe.examples, "eval.every": 0}
    words = [f"--config.{name}={value}" for name, value in changed.items()]
    command = [sys.executable, "-m", "leanformer.train", f"--config={file}", f"--workdir={workdir}", *words]
    subprocess.run(command, check=True, cwd=ROOT, stdout=subprocess.DEVNULL)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--heads", default="2,3,4,8,16")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=float, default=6)
    parser.add_argument("--config", default=str(ROOT / "configs" / "quickstart.py"))
    options = parser.parse_args()
    heads = [int(n) for n in options.heads.split(",")]
    out = options.out.absolute()
    base = config(options.config, WIDTH // 16, 16, options.epochs)
    base.unlock()
    mesh = meshes.make_mesh()
    batch = probing.batch(experiment.build(probing.bare(base), examples=1, mesh=mesh))

    def member(run: experiment.Experiment, seed: int) -> Path:
        return out / f"{run.config.model.num_heads}x{run.config.model.head_dim}_seed{seed}"

    def trained(run: experiment.Experiment, seed: int):
        m, workdir = run.config.model, member(run, seed)
        train(options.config, workdir, m.num_heads, m.head_dim, options.epochs, seed)
        with Checkpoints(workdir / "checkpoints") as saved:
            return saved.restore(run.like)[0].weights

    ways = {"at initialisation": experiment.Experiment.random_weights, "after training": trained}
    swept = {when: probing.sweep(base, mesh, batch, heads, options.seeds, way, when) for when, way in ways.items()}
    for when, found in swept.items():
        print(tables.sweep_table(found))
        charts.over_heads(found).savefig(out / f"over_heads_{when.replace(' ', '_')}.png")
    print("Top-1 on the test images, by seed")
    for point in swept["after training"]["points"]:
        name = f"{point['heads']}x{point['head_dim']}"
        summaries = [out / f"{name}_seed{seed}" / "summary.json" for seed in swept["after training"]["seeds"]]
        scores = [100 * json.loads(path.read_text())["final"]["top1"] for path in summaries]
        point["top1"] = scores
        spread = f"mean {np.mean(scores):.2f}, standard deviation {np.std(scores, ddof=1):.2f}" if scores[1:] else ""
        print(f"{point['trade']:<18}{name:<8}{' '.join(f'{score:.2f}' for score in scores)}   {spread}")
    report.write_json(out / "heads.json", {**swept, "config": json.loads(base.to_json()), **report.provenance()})
    print(f"Wrote heads.json and two charts to {out}. Devices: {jax.devices()[0].device_kind}")


if __name__ == "__main__":
    main()
