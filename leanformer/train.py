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
from collections.abc import Callable
from pathlib import Path

import jax
from ml_collections import ConfigDict

from leanformer import cli
from leanformer.costs import memory
from leanformer.data import pool
from leanformer.reports import pages
from leanformer.runtime import multihost, signals
from leanformer.runtime.stopping import StopRequest
from leanformer.runtime.watchdog import Watchdog
from leanformer.training import evaluators, loop, restoring, train_setup
from leanformer.training.loggers import MakeLoggers
from leanformer.training.run import Run
from leanformer.training.timer import Timer


def train(
    c: ConfigDict,
    workdir: Path,
    *,
    dry_run: bool = False,
    again: str = "the same call",
    make_loggers: MakeLoggers | None = None,
) -> int:
    """Train from the newest checkpoint in `workdir` to the end, or to a stop request. Return the exit status.

    The status is 0 for a finished run, 75 or 130 after a stop request (see the module). Records, checkpoints,
    summary.json and plots are written to `workdir`.

    Args:
        c: validated config.
        workdir: folder of the run, which is created if it does not exist.
        dry_run: True to print processes, devices and the starting step without training or writing.
        again: command that resumes the run, for messages.
        make_loggers: function (workdir, first step, config) that returns further loggers.

    Raises:
        LeanformerError: the class says what prevents training: ConfigError, DataError, WeightsError, CheckpointError,
            WorkdirError or TrainingError (diverged, or the step does not fit the device).
    """
    pool.check_main_program(c.data.workers)
    return start(
        functools.partial(train_setup.prepare, c, workdir, make_loggers=make_loggers),
        c.hang_seconds,
        dry_run=dry_run,
        again=again,
    )


def start(prepare: Callable[[Timer], Run], hang_seconds: float, *, dry_run: bool = False, again: str) -> int:
    """Set up a run, or several runs as one, and train it. Return the exit status: 0, or that of the stop request.

    The errors are those of `train`.

    Args:
        prepare: function from the timer of the process to the run, which writes nothing.
        hang_seconds: time limit of one activity in seconds; 0 for none.
        dry_run: True to print processes, devices and the starting step without training or writing.
        again: command that resumes the run, for messages.
    """
    timer = Timer()
    with contextlib.ExitStack() as stack:
        stack.enter_context(Watchdog(hang_seconds, lambda: timer.activity))
        stop = stack.enter_context(StopRequest())
        run = prepare(timer)  # devices, data, model, optimizer, training step; nothing is allocated or written
        c, model = run.config, run.model
        measurements = evaluators.make(run, functools.partial(stop.during, feed=timer.touch))
        if multihost.is_primary():
            pages.warn_intervals(c, run.intervals)
        if dry_run:
            if c.init_from.path is not None and not restoring.steps_in(run.workdir / "checkpoints"):
                model.initial_weights()  # raises WeightsError if they cannot be read
            print(pages.dry_run(run))
            return 0
        stack.enter_context(run)  # locks the workdir
        timer.touch("restore")
        state = run.restore()
        if run.complete:
            print(pages.complete(run))
            return 0
        device = jax.local_devices()[0]
        with timer("compile"):
            compiled = run.compile_train_step()
            peaks = {memory.STEP: memory.peak_memory(compiled)}
            if memory.memory_limit(device):  # so that an evaluation cannot run out of memory after hours
                peaks |= evaluators.peak_memory(run, measurements)
        print(pages.start(run, compiled), flush=True)
        memory.check_memory(c, peaks, device)
        print(pages.origin(run), flush=True)
        if stop.before_work():
            print(f"Stopped at step {run.start}, before the first step. To resume: {again}", flush=True)
            return stop.status
        signals.install()
        with contextlib.closing(run.batches()) as batches:
            step_fn = run.make_step_fn(compiled)
            state, status = loop.train(run, state, step_fn, batches, measurements, stop, again=again)
        if status == 0 and multihost.is_primary():
            pages.summarise(run, state, memory.peak_memory(compiled))
    return status


@cli.body("train")
def main(f: cli.Values) -> int:
    again = f"python -m leanformer.train {f.argv}"
    with memory.explained(f.config):
        return train(f.config, Path(f.workdir).expanduser(), dry_run=f.dry_run, again=again)
