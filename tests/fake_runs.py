"""Fake workdirs: the files of a finished run, as `compare` reads them, without training."""

import json

import numpy as np
from commands import ROOT

from leanformer import config


def write_run(
    workdir, value=0.8, *, seed=0, changes=(), probe=100.0, ended=True, task=None, score="top1", steps=(50, 100)
):
    """Write the workdir of a run and return it.

    Args:
        workdir: folder to create.
        value: final score; the score rises linearly to it over `steps`.
        seed: seed in the config.
        changes: config keys and values that differ from the quickstart config.
        probe: median condition number of every layer.
        ended: write the summary of a finished run.
        task: task name in the config; None for the quickstart config's.
        score: name of the score.
        steps: steps with records.
    """
    c = config.load(str(ROOT / "configs" / "quickstart.py"))
    c.update_from_flattened_dict({"seed": seed, **dict(changes)})
    config_tree = json.loads(c.to_json()) | ({"task": task} if task else {})
    workdir.mkdir(parents=True)
    (workdir / "config.json").write_text(json.dumps({"config": config_tree, "git": "abc", "devices": ["cpu cpu"]}))
    final = {"step": steps[-1], "kind": "eval", "loss": 1.0 - (value or 0), score: value, "examples": 2000}
    layers = c.model.depth
    quantiles = {"median": [probe] * layers, "q10": [probe / 2] * layers, "q90": [2 * probe] * layers}
    quantiles |= {"singular": [0] * layers, "not_finite": [0] * layers, "shape": [[17, 96]] * layers}
    records = [
        record
        for step in steps
        for record in (
            {"step": step, "kind": "train", "loss": 50 / step, "lr": 0.01, "wall_s": step / 10, "examples_per_s": 1e3},
            final | {"step": step, score: (value or 0) * step / steps[-1]},
            {"step": step, "kind": "probe", "attention_output": quantiles},
        )
    ]
    (workdir / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    if ended:
        score_summary = {"score": value, "of": score, "higher": score != "error"}
        size = 10_000 * int(np.sum(np.broadcast_to(c.model.num_heads, layers)))
        costs = {"params": size, "forward_flops": 7 * size, "train_flops": 21 * size, "memory_bytes": 40 * size}
        costs |= {
            "steps": steps[-1],
            "examples_seen": steps[-1] * c.batch_size,
            "wall_s": 12.5,
            "goodput": 0.8,
            "examples_per_s": 1e3,
        }
        summary = {"final": final, "score": score_summary, "seconds": {"steps": size / 1e5, "compile": 3.0}, **costs}
        (workdir / "summary.json").write_text(json.dumps(summary))
    return workdir


def write_sweep(folder, depths=(2, 3), heads=(2, 4), seeds=3, *, effect=0.05, spread=0.01):
    """Write a sweep of runs: with more heads, scores rise by `effect` per doubling and condition numbers fall."""
    rng = np.random.default_rng(7)
    for depth in depths:
        for n in heads:
            for seed in range(seeds):
                value = float(0.6 + effect * np.log2(n) + spread * rng.normal())
                changes = {"model.depth": depth, "model.num_heads": n}
                name = f"made,depth={depth},num_heads={n},seed={seed}"
                write_run(folder / name, value, seed=seed, changes=changes, probe=1e4 / n)
    return folder
