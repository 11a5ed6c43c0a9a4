"""Model training: `python -m leanformer.train --config=configs/quickstart.py --workdir=runs/quickstart [--dry_run]`.

The same command resumes an interrupted run. A finished run has `summary.json` and plots in the workdir. Training uses
one device, all devices of a host, or several processes (`launch/README.md`).

Exit status: 0 finished; 75 saved after SIGTERM, SIGHUP, SIGUSR1, SIGUSR2 or SIGXCPU, run it again; 130 saved after
Ctrl-C; 2 user-fixable error; 70 and others: crashed, run the command again.
"""

import contextlib
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from leanformer import cli
from leanformer.config import run_file


def train(
    config: ConfigDict,
    workdir: Path,
    *,
    dry_run: bool = False,
    resume_command: str = "the same call",
    make_evaluators: Callable[..., Any] | None = None,
    make_loggers: Callable[..., Any] | None = None,
) -> int:
    """Train from the newest checkpoint in `workdir` to the end, or to a stop request. Return the exit status.

    The status is 0 for a finished run, 75 or 130 after a stop request (see the module). Records, checkpoints,
    summary.json and plots are written to `workdir`.

    Args:
        config: config, which `cli.validate` checks and completes.
        workdir: folder of the run, which is created if it does not exist.
        dry_run: True to print processes, devices and the starting step without training or writing to the workdir.
        resume_command: command that resumes the run, for messages.
        make_evaluators: function of the trainer that returns further evaluators, see `training.evaluators`.
        make_loggers: function (workdir, first step, config) that returns further loggers, see `training.loggers`.

    Raises:
        LeanformerError: the class says what prevents training: ConfigError, DataError, WeightsError, CheckpointError,
            WorkdirError or TrainingError (diverged, or the step does not fit the device).
    """
    # Imported here, since spawned data workers run this module again and need no JAX.
    import jax

    from leanformer import data
    from leanformer.costs import devices
    from leanformer.data import loader
    from leanformer.reports import pages
    from leanformer.runtime import mesh as meshes
    from leanformer.runtime import multihost
    from leanformer.runtime.stopping import StopRequest
    from leanformer.runtime.timing import Timer, Watchdog
    from leanformer.training import evaluators, loop, train_setup
    from leanformer.training.trainer import open_run_data, open_trainer

    cli.validate(config)
    loader.check_main_program(config.data.workers)
    timer, stop = Timer(), StopRequest()
    with contextlib.ExitStack() as stack:
        # Devices, data, model, optimizer and training step: no array is allocated, and the workdir is not written.
        with Watchdog(config.hang_seconds, lambda: timer.activity):
            mesh = meshes.make_mesh(**config.mesh)
        task, source, held_out = open_run_data(config, workdir)  # its first tokenisation may take hours
        stack.enter_context(Watchdog(config.hang_seconds, lambda: timer.activity))
        setup = train_setup.set_up_training(config, examples=data.size(source), mesh=mesh, task=task)
        if dry_run:
            print(pages.dry_run(setup, workdir))
            return 0

        # The workdir, the newest or the initial state, and the compiled step.
        opened = open_trainer(setup, source, held_out, workdir, timer, make_loggers)
        trainer, state = stack.enter_context(opened)
        if trainer.complete:
            print(pages.complete(trainer))
            return 0
        between = functools.partial(stop.during, feed=timer.touch)
        measurements = evaluators.make(trainer, between, make_evaluators)
        device = jax.local_devices()[0]
        with timer("compile"):
            train_step = setup.compile_train_step()
            peaks = {devices.STEP: devices.peak_memory(train_step)}
            if devices.memory_limit(device):  # so that an evaluation cannot run out of memory after hours
                peaks |= evaluators.peak_memory(setup.state, setup.model.weights, measurements)
        print(pages.start(trainer, peaks[devices.STEP]), flush=True)
        devices.check_memory(config, peaks, device)
        print(pages.origin(trainer), flush=True)

        stack.enter_context(stop)  # until here a signal ends the process: there is nothing to save
        with contextlib.closing(trainer.batches()) as batches:
            state, status = loop.train(
                trainer, state, train_step, batches, measurements, stop, resume_command=resume_command
            )
        if status == 0 and multihost.is_primary():
            pages.summarise(trainer, state, peaks[devices.STEP])
    return status


@cli.command(
    cli.CONFIG,
    cli.Flag("workdir", "Folder of the run: metrics, checkpoints, plots.", required=True),
    cli.Flag("dry_run", "Print processes, devices and the starting step, without training.", bool, default=False),
    multi_process=True,
)
def main(flags: cli.Values) -> int:
    from leanformer.costs import devices

    defined = run_file(flags.files["config"])
    with devices.explained(flags.config):
        return train(
            flags.config,
            Path(flags.workdir).expanduser(),
            dry_run=flags.dry_run,
            resume_command=f"python -m leanformer.train {flags.argv}",
            make_evaluators=defined.get("make_evaluators"),
            make_loggers=defined.get("make_loggers"),
        )


if __name__ == "__main__":
    cli.run(main)
