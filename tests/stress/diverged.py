"""Recovery from divergence: runs whose learning rate becomes 1e6 at a random step, and then the old one again.

python tests/stress/diverged.py [--runs=20] [--steps=60] [--every=1] [--seed=0]

An undisturbed run of a small ViT on the bundled images stores the checkpoints of all its steps. Each other run starts
with those that a run killed at a random step leaves behind (keep=2), and resumes from them with optim.lr=1e6. It must
end with an error that names a step, and leave only finite states. Then the same command at the old learning rate must
finish. Prints one line per run; exit status 1 unless all succeed. At the old rate, the final state equals that of the
undisturbed run, bit for bit.
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


def make_config(steps: int, every: int) -> ConfigDict:
    """Return the config of a few seconds of training with clipping, EMA, weight decay and mixup."""
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


def make_killed_run(step: int, reference: Path, workdir: Path, every: int) -> None:
    """Write the folder of a run that was killed after saving its checkpoint of `step`: that one and the one before."""
    (workdir / "checkpoints").mkdir(parents=True)
    for saved_step in (step - every, step):
        shutil.copytree(reference / "checkpoints" / str(saved_step), workdir / "checkpoints" / str(saved_step))
    for name in ("config.json", "classes.json", "metrics.jsonl"):
        shutil.copy(reference / name, workdir)


def load_states(c: ConfigDict, workdir: Path) -> dict[int, list[np.ndarray]]:
    """Return the arrays of every checkpoint."""
    abstract = train_setup.build(c, examples=60_000, mesh=meshes.make_mesh(**c.mesh)).state
    with Checkpoints(workdir / "checkpoints", c.checkpoint.keep) as saved:
        return {step: list(map(np.asarray, jax.tree.leaves(saved.restore(abstract, step)[0]))) for step in saved.steps}


def disturb(c: ConfigDict, reference: Path, step: int, every: int, workdir: Path) -> dict[str, object]:
    """Resume a run from `step` with a huge learning rate, then with the old one, and return the outcome."""
    make_killed_run(step, reference, workdir, every)
    diverging, normal = c.copy_and_resolve_references(), c.copy_and_resolve_references()
    normal.checkpoint.keep = diverging.checkpoint.keep = 2
    diverging.optim.lr = HUGE
    try:
        train(diverging, workdir)
        return {"step": step, "ended": "without an error"}
    except TrainingError as error:
        match = re.search(r"resumes from step (\d+)", str(error))
    remaining = load_states(c, workdir)
    finite = all(np.isfinite(x).all() for leaves in remaining.values() for x in leaves if x.dtype.kind == "f")
    train(normal, workdir)
    final = json.loads((workdir / "summary.json").read_text())["final"]
    is_same = all(map(np.array_equal, load_states(c, workdir)[c.total_steps], load_states(c, reference)[c.total_steps]))
    resume_step = int(match[1]) if match else None
    return {
        "step": step,
        "resume_step": resume_step,
        "left": sorted(remaining),
        "finite": finite,
        "same": is_same,
        "final": final,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in (("runs", 20), ("steps", 60), ("every", 1), ("seed", 0)):
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        jax.config.update("jax_compilation_cache_dir", f"{folder}/compiled")
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
        compilation_cache.reset_cache()
        c, reference, rng, passed = (
            make_config(args.steps, args.every),
            Path(folder) / "whole",
            random.Random(args.seed),
            0,
        )
        train(c, reference)
        reference_final = json.loads((reference / "summary.json").read_text())["final"]
        result = []
        for i in range(args.runs):
            step = args.every * rng.randint(2, (args.steps - 1) // args.every)
            result.append(disturb(c, reference, step, args.every, Path(folder) / str(i)))
    for row in result:
        ok = (
            row.get("resume_step") in row.get("left", ())
            and row["finite"]
            and row["final"]["loss"] <= reference_final["loss"]
        )
        passed += ok
        print("ok    " if ok else "FAILED", json.dumps(row))
    print(f"undisturbed: {json.dumps(reference_final)}\n{passed} of {len(result)} recovered from a finite state.")
    return 0 if passed == len(result) else 1


if __name__ == "__main__":
    sys.exit(main())
