"""Model training: `python -m leanformer.train --config=configs/quickstart.py --workdir=runs/quickstart [--dry_run]`.

The same command resumes an interrupted run. A finished run has `summary.json` and plots in the workdir. Training uses
one device, all devices of a host, or several processes (`launch/README.md`).

Exit status: 0 finished; 75 saved after SIGTERM, SIGHUP, SIGUSR1 or SIGUSR2, run it again; 130 saved after Ctrl-C;
2 user-fixable error; 70 and others: crashed, run the command again.
"""

import contextlib
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from leanformer import cli


def train(
    config: ConfigDict,
    workdir: Path,
    *,
    dry_run: bool = False,
    again: str = "the same call",
    make_loggers: Callable[..., Any] | None = None,
) -> int:
    """Train from the newest checkpoint in `workdir` to the end, or to a stop request. Return the exit status.

    The status is 0 for a finished run, 75 or 130 after a stop request (see the module). Records, checkpoints,
    summary.json and plots are written to `workdir`.

    Args:
        config: validated config.
        workdir: folder of the run, which is created if it does not exist.
        dry_run: True to print processes, devices and the starting step without training or writing.
        again: command that resumes the run, for messages.
        make_loggers: function (workdir, first step, config) that returns further loggers (`training.loggers`).

    Raises:
        LeanformerError: the class says what prevents training: ConfigError, DataError, WeightsError, CheckpointError,
            WorkdirError or TrainingError (diverged, or the step does not fit the device).
    """
    # Imported here, since spawned data workers run this module again and need no JAX.
    import jax

    from leanformer.costs import memory
    from leanformer.data import pool
    from leanformer.reports import pages
    from leanformer.runtime import multihost
    from leanformer.runtime.stopping import StopRequest
    from leanformer.runtime.watchdog import Watchdog
    from leanformer.training import evaluators, loop, restoring, train_setup
    from leanformer.training.timer import Timer

    pool.check_main_program(config.data.workers)
    timer, stop = Timer(), StopRequest()
    with contextlib.ExitStack() as stack:
        stack.enter_context(Watchdog(config.hang_seconds, lambda: timer.activity))
        # Devices, data, model, optimizer, training step. Nothing is allocated or written.
        run = train_setup.prepare(config, workdir, timer, make_loggers=make_loggers)
        measurements = evaluators.make(run, functools.partial(stop.during, feed=timer.touch))
        if multihost.is_primary():
            pages.warn_intervals(config, run.intervals)
        if dry_run:
            if config.init_from.path is not None and not restoring.steps_in(run.workdir / "checkpoints"):
                run.model.initial_weights()  # raises WeightsError if they cannot be read
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
        memory.check_memory(config, peaks, device)
        print(pages.origin(run), flush=True)
        stack.enter_context(stop)  # until here a signal ends the process: there is nothing to save
        with contextlib.closing(run.batches()) as batches:
            step_fn = run.make_step_fn(compiled)
            state, status = loop.train(run, state, step_fn, batches, measurements, stop, again=again)
        if status == 0 and multihost.is_primary():
            pages.summarise(run, state, memory.peak_memory(compiled))
    return status


@cli.command(
    cli.CONFIG,
    cli.Flag("workdir", "Folder of the run: metrics, checkpoints, plots.", required=True),
    cli.Flag("dry_run", "Print processes, devices and the starting step, without training.", bool, default=False),
    multi_process=True,
)
def main(flags: cli.Values) -> int:
    from leanformer.costs import memory

    again = f"python -m leanformer.train {flags.argv}"
    with memory.explained(flags.config):
        return train(flags.config, Path(flags.workdir).expanduser(), dry_run=flags.dry_run, again=again)


if __name__ == "__main__":
    cli.run(main)
