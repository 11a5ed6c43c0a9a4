"""Vectorised (vmap) training of several runs as one program on one device, for `sweep --vmap`.

python -m leanformer.train_vmap --member='["DIR", "--config=FILE", "--config.seed=0"]' --member=...

The runs may differ only in seed and learning rates. A single small model does not use a device fully. Each folder is an
ordinary run with the same examples, random draws, records, checkpoints and summary; steps differ only by float32
rounding, and `train` can resume it. The same command resumes interrupted runs, which must all be at the same step.
"""

from leanformer.runtime import signals, terminal


if __name__ == "__main__":
    terminal.open_streams(result=False)
    signals.exit_on_stop()  # before the imports below, which take seconds

import contextlib
import functools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
from ml_collections import ConfigDict

from leanformer import cli, programs, tasks
from leanformer.errors import ConfigError
from leanformer.reports import pages
from leanformer.runtime import mesh as meshes
from leanformer.runtime.interrupt import StopRequest
from leanformer.runtime.watch import Watchdog
from leanformer.training import checks, evaluators, loop, train_setup, vmap
from leanformer.training.run import Run
from leanformer.training.state import TrainState
from leanformer.training.timer import Timer


def train(members: Sequence[tuple[Path, ConfigDict]], again: str = "the same call") -> int:
    """Train all runs to the end, or to a stop request. Returns the exit status, as `leanformer.train`.

    Args:
        members: folder and config of each run.
        again: command that resumes the runs, for messages.

    Raises:
        ConfigError: the runs cannot be one program, or are at different steps.
        TrainingError: one run diverged, which ends all of them.
    """
    configs = [c for _, c in members]
    vmap.check(configs)
    timer = Timer()
    with contextlib.ExitStack() as stack:
        stack.enter_context(Watchdog(configs[0].hang_seconds, lambda: timer.activity))
        stop = stack.enter_context(StopRequest())
        mesh = meshes.make_mesh(devices=jax.local_devices()[:1])
        prepared = [train_setup.prepare(c, workdir, mesh) for workdir, c in members]
        setups = [setup for setup, *_ in prepared]
        _, _, held_out = prepared[0]
        measurements = evaluators.make(setups[0], held_out, functools.partial(stop.during, feed=timer.touch))
        measurements = vmap.ensemble_evaluators(measurements, len(setups))
        pages.warn_intervals(configs[0], setups[0].total, setups[0].examples)
        runs = [
            stack.enter_context(Run(workdir, setup, source, timer, name=workdir.name))
            for (workdir, _), (setup, source, _) in zip(members, prepared, strict=True)
        ]
        states = vmap.stack_trees([run.restore() for run in runs])
        start = _start(runs)
        with timer("compile"):
            compiled, keys = vmap.compile_step(setups, states)
        pages.check_memory(configs[0], compiled, jax.local_devices()[0], runs=len(runs))
        if stop.before_work():
            print(f"Stopped at step {start}, before the first step. To resume: {again}", flush=True)
            return stop.status
        signals.install()
        print(f"{len(runs)} runs as one program, from step {start} to {setups[0].total}.", flush=True)
        batches = [
            stack.enter_context(contextlib.closing(setup.stream(source, start))) for setup, source, _ in prepared
        ]
        names = setups[0].abstract_batch()

        def step_fn(states: TrainState, host: Mapping[str, Any]) -> tuple[TrainState, Mapping[str, Any]]:
            return compiled(states, {name: host[name] for name in names}, keys)

        stacked = vmap.stack_batches(batches, names)
        everyone = vmap.EnsembleRun(runs)
        states, status = loop.train(everyone, states, step_fn, stacked, measurements, stop, again=again)
        if status == 0:
            for i, run in enumerate(runs):
                pages.summarise(run, vmap.index_tree(states, i), programs.peak_memory(compiled), runs=len(runs))
    return status


def _start(runs: Sequence[Run]) -> int:
    """Return the common step of all runs. Raises ConfigError if their steps differ, or if they are finished."""
    steps = {run.workdir.name: run.start for run in runs}
    if len(set(steps.values())) > 1 or runs[0].start >= runs[0].setup.total:
        shown = ", ".join(f"{name} {step}" for name, step in steps.items())
        raise ConfigError(
            f"--vmap: the runs must resume from the same step, and none may be finished. Found: {shown}. Leave out "
            "--vmap."
        )
    return runs[0].start


def _parse_member(text: str) -> list[str]:
    """Return the folder and the flags of a run. Raises ConfigError if the text is not a JSON list of strings."""
    try:
        words = json.loads(text)
    except json.JSONDecodeError:
        words = None
    if not (isinstance(words, list) and words and all(isinstance(word, str) for word in words)):
        raise ConfigError(f"--member={text}: expected a JSON list of a folder and flags, as `sweep --vmap` writes it.")
    return words


@cli.command(
    cli.Flag("member", "Run, as a JSON list of its folder and the flags of its config.", required=True, many=True),
)
def main(f: cli.Values) -> int:
    members = []
    for text in f.member:
        folder, *words = _parse_member(text)
        c = cli.parse([cli.CONFIG], words).config
        tasks.fill_num_classes(c)
        members.append((Path(folder).expanduser(), c))
    checks.check(members[0][1])  # the other configs differ only in keys that vmap.check allows
    with pages.memory_explained(members[0][1], runs=len(members)):
        return train(members, again=f"python -m leanformer.train_vmap {f.argv}")


if __name__ == "__main__":
    cli.run(main)
