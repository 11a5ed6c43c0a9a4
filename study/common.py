"""Helpers of the experiments: training runs, sweeps, and measures of models at initialisation."""

import contextlib
import io
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from leanformer import conditioning, tasks
from leanformer import train as training
from leanformer.config import ConfigDict, is_run_only
from leanformer.errors import ConfigError
from leanformer.runtime.mesh import make_mesh
from leanformer.training import evaluators, model_setup, probing, run_files


NEVER = 10**6  # interval in steps: at the start and at the end only


def is_finished(c: ConfigDict, workdir: Path) -> bool:
    """Return whether a folder holds the finished run of a config.

    Raises ConfigError if it holds one of another config: a change of an experiment must not be read as its result.
    """
    if not (workdir / "summary.json").is_file():
        return False
    changes = run_files.config_changes(workdir, c)
    if differing := [key for key in changes if not is_run_only(key)]:
        (was, now), key = changes[differing[0]], differing[0]
        raise ConfigError(f"{workdir} holds a finished run with {key}={was}, now {now}. Use another folder.")
    return True


def train(c: ConfigDict, workdir: Path) -> dict[str, Any]:
    """Train a config unless its run is finished, and return its summary. Raises ConfigError as `is_finished`."""
    if not is_finished(c, workdir):
        with contextlib.redirect_stdout(io.StringIO()):
            status = training.train(c, workdir)
        if status:
            sys.exit(status)
    return json.loads((workdir / "summary.json").read_text())


def sweep(workdir: Path, *words: str) -> None:
    """Run `leanformer.sweep`, which resumes interrupted runs. Exit if a run failed."""
    command = [sys.executable, "-m", "leanformer.sweep", f"--workdir={workdir}", *words]
    if status := subprocess.run(command, check=False).returncode:
        sys.exit(status)


def parse_run_name(workdir: Path) -> dict[str, str]:
    """Return the KEY=VALUE parts of the name that `sweep` gives to a run."""
    return dict(part.split("=", 1) for part in workdir.name.split(",") if "=" in part)


def measure_at_start(c: ConfigDict, measures: Sequence[str], seeds: int) -> list[Mapping[str, list[dict[str, Any]]]]:
    """Return for each seed the digests (`conditioning.digest`) of a config's measures before training, by layer."""
    mesh = make_mesh(devices=jax.devices()[:1])
    model, task = model_setup.set_up_model(c, mesh=mesh), tasks.build_task(c)
    read = probing.make_reader(model, task.objective, measures)
    batch = evaluators.probe_batch(model, task.data, task.data.open(c.data.eval_split), c.probe.examples)
    results = []
    for seed in range(seeds):
        values = jax.device_get(read(model.random_weights(seed), batch))
        results.append({n: conditioning.digest(v[1] if isinstance(v, tuple) else v) for n, v in values.items()})
    return results
