"""Runs whose learning rate becomes 1e6 at a random step: each must end with the way back, and get to the same end.

python tests/stress/diverged.py [--runs=20] [--steps=60] [--every=1] [--seed=0]

An undisturbed run of a small ViT on the bundled images keeps the checkpoints of all its steps. Each other run has those
that a run killed at a random step leaves behind (keep=2), goes on from them with optim.lr=1e6, must end with an error
that names a step, leave nothing but finite states, and then reach the end by the same command at the old rate.
Prints a line per run, and exits with 1 unless all do. With the old rate, the end is the undisturbed one's, bit for bit.
"""

import argparse
import json
import random
import re
import shutil
import sys
import tempfile
from pathlib import Path

import jax
import numpy as np
from jax.experimental.compilation_cache import compilation_cache
from ml_collections import ConfigDict

from leanformer import config
from leanformer.errors import TrainingError
from leanformer.runtime import mesh as meshes
from leanformer.train import train
from leanformer.training import train_setup
from leanformer.training.checkpoint import Checkpoints


HUGE = 1e6


def small(steps: int, every: int) -> ConfigDict:
    """A few seconds of training with clipping, averaging, weight decay and mixing on."""
    c = config.load_sibling(str(Path(__file__).parents[2] / "configs" / "x"), "quickstart")
    c.update(batch_size=64, total_epochs=0.0, total_steps=steps, log_every=5, dtype="float32")
    c.model.update(width=24, num_heads=3, head_dim=8, mlp_dim=48, depth=2)
    c.data.workers = 0
    c.optim.update(lr=3e-3, warmup_epochs=0.0, ema=0.9)
    c.eval.update(every=0, batch_size=1000)
    c.probe.every = 0
    c.checkpoint.update(every=every, keep=steps)
    config.check(c)
    return c


def killed_at(step: int, whole: Path, workdir: Path, every: int) -> None:
    """Makes the folder of a run that was killed after saving its checkpoint of `step`: that and the one before."""
    (workdir / "checkpoints").mkdir(parents=True)
    for kept in (step - every, step):
        shutil.copytree(whole / "checkpoints" / str(kept), workdir / "checkpoints" / str(kept))
    for name in ("config.json", "classes.json", "metrics.jsonl"):
        shutil.copy(whole / name, workdir)


def states(c: ConfigDict, workdir: Path) -> dict[int, list[np.ndarray]]:
    """Every checkpoint's numbers."""
    like = train_setup.build(c, examples=60_000, mesh=meshes.make_mesh(**c.mesh)).state
    with Checkpoints(workdir / "checkpoints", c.checkpoint.keep) as saved:
        return {step: list(map(np.asarray, jax.tree.leaves(saved.restore(like, step)[0]))) for step in saved.steps}


def disturb(c: ConfigDict, whole: Path, step: int, every: int, workdir: Path) -> dict[str, object]:
    """What became of a run that goes on from `step` with a huge rate, and then with the old one."""
    killed_at(step, whole, workdir, every)
    wild, tame = c.copy_and_resolve_references(), c.copy_and_resolve_references()
    tame.checkpoint.keep = wild.checkpoint.keep = 2
    wild.optim.lr = HUGE
    try:
        train(wild, workdir)
        return {"step": step, "ended": "without an error"}
    except TrainingError as error:
        said = re.search(r"resumes from step (\d+)", str(error))
    left = states(c, workdir)
    finite = all(np.isfinite(x).all() for leaves in left.values() for x in leaves if x.dtype.kind == "f")
    train(tame, workdir)
    final = json.loads((workdir / "summary.json").read_text())["final"]
    same = all(map(np.array_equal, states(c, workdir)[c.total_steps], states(c, whole)[c.total_steps]))
    back = int(said[1]) if said else None
    return {"step": step, "told": back, "left": sorted(left), "finite": finite, "same": same, "final": final}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in (("runs", 20), ("steps", 60), ("every", 1), ("seed", 0)):
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        jax.config.update("jax_compilation_cache_dir", f"{folder}/compiled")
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
        compilation_cache.reset_cache()
        c, whole, chance, good = small(args.steps, args.every), Path(folder) / "whole", random.Random(args.seed), 0
        train(c, whole)
        undisturbed = json.loads((whole / "summary.json").read_text())["final"]
        result = []
        for i in range(args.runs):
            step = args.every * chance.randint(2, (args.steps - 1) // args.every)
            result.append(disturb(c, whole, step, args.every, Path(folder) / str(i)))
    for one in result:
        ok = one.get("told") in one.get("left", ()) and one["finite"] and one["final"]["loss"] <= undisturbed["loss"]
        good += ok
        print("ok    " if ok else "FAILED", json.dumps(one))
    print(
        f"undisturbed: {json.dumps(undisturbed)}\n{good} of {len(result)} went on from a finite state to such an end."
    )
    return 0 if good == len(result) else 1


if __name__ == "__main__":
    sys.exit(main())
