"""Model training: `python -m leanformer.train --config=configs/quickstart.py --workdir=runs/quickstart [--dry_run]`.

The same command resumes an interrupted run. A finished run has `summary.json` and plots in the workdir. Training uses
one device, all devices of a host, or several processes (`launch/README.md`).

Exit status: 0 finished; 75 saved after SIGTERM, SIGHUP, SIGUSR1 or SIGUSR2, run it again; 130 saved after Ctrl-C;
2 user-fixable error; 70 and others: crashed, run the command again.
"""

if __name__ == "__main__":
    from leanformer.__main__ import run

    run("train")  # imports this module again, once the command line is parsed

import contextlib
import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from ml_collections import ConfigDict

from leanformer import cli, programs
from leanformer.config.rules import LENGTHS
from leanformer.reports import pages
from leanformer.runtime import mesh as meshes
from leanformer.runtime import multihost, signals
from leanformer.runtime.interrupt import StopRequest
from leanformer.runtime.watch import Watchdog
from leanformer.training import evaluators, loop, streams, train_setup
from leanformer.training.run import Run
from leanformer.training.state import TrainState
from leanformer.training.timer import Timer
from leanformer.training.train_setup import TrainSetup


def train(c: ConfigDict, workdir: Path, *, dry_run: bool = False, again: str = "the same call") -> int:
    """Train from the newest checkpoint in `workdir` to the end, or to a stop request. Returns the exit status.

    Args:
        c: config.
        workdir: folder of the run.
        dry_run: True to print processes, devices and the starting step without training.
        again: command that resumes the run, for messages.
    """
    timer = Timer()
    with contextlib.ExitStack() as stack:
        stack.enter_context(Watchdog(c.hang_seconds, lambda: timer.activity))
        stop = stack.enter_context(StopRequest())
        setup, source, held_out = train_setup.prepare(c, workdir, meshes.make_mesh(**c.mesh))
        between = functools.partial(stop.during, feed=timer.touch)
        measurements = evaluators.make(setup, held_out, between)
        if multihost.is_primary():
            pages.warn_intervals(c, setup.total, setup.examples)
        if dry_run:
            setup.check_initial_weights(workdir)
            print(pages.dry_run(setup, workdir))
            return 0
        run = stack.enter_context(Run(workdir, setup, source, timer))
        state = run.restore()
        if run.complete:
            longer = f"Raise {next(key for key in LENGTHS if c.get(key))} to train longer."
            more = longer if run.start >= setup.total else loop.early_stopping_message(c, run.start, setup.total)
            print(f"This run is complete: {run.start} steps in {workdir}. {more}")
            return 0
        with timer("compile"):
            compiled = setup.compile_train_step()
        print(pages.start(setup, source, held_out, compiled, timer), flush=True)
        pages.check_memory(c, compiled, jax.local_devices()[0])
        fresh = f"Starting from the weights of {c.init_from.path}" if c.init_from.path else "Starting from scratch"
        print(f"Resuming from step {run.start} in {workdir}." if run.start else f"{fresh} in {workdir}.", flush=True)
        if stop.before_work():
            print(f"Stopped at step {run.start}, before the first step. To resume: {again}", flush=True)
            return stop.status
        signals.install()
        with contextlib.closing(setup.stream(source, run.start)) as batches:
            step_fn, peak = make_step_fn(setup, compiled), setup.peak_examples
            state, status = loop.train(
                run, state, step_fn, batches, measurements, stop, again=again, peak_examples=peak
            )
        if status == 0 and multihost.is_primary():
            pages.summarise(run, state, programs.peak_memory(compiled))
    return status


def make_step_fn(setup: TrainSetup, compiled: jax.stages.Compiled) -> Any:
    """Return the function (state, host batch) -> (state, metrics) of a compiled training step."""
    names, key = setup.abstract_batch(), setup.run_key()

    def step_fn(state: TrainState, host: Mapping[str, np.ndarray]) -> tuple[TrainState, Mapping[str, Any]]:
        return compiled(state, streams.put(setup.model, host, names), key)

    return step_fn


@cli.body("train")
def main(f: cli.Values) -> int:
    again = f"python -m leanformer.train {f.argv}"
    with pages.memory_explained(f.config):
        return train(f.config, Path(f.workdir).expanduser(), dry_run=f.dry_run, again=again)
