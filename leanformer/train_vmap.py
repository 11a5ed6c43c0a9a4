"""Train runs of one shape as one program on one device, each in a folder of its own, as `sweep --vmap` does.

python -m leanformer.train_vmap --member='["DIR", "--config=FILE", "--config.seed=0"]' --member=...

They may differ in their seeds and learning rates. Small models leave a device idle one by one; together they fill it.
Every folder is that of an ordinary run, with the same examples and draws, records, checkpoints and summary, and steps
that differ by float32 rounding alone; `train` goes on from it. The same command goes on where an earlier one stopped,
which all members must have done at the same step.
"""

from leanformer.runtime import signals


if __name__ == "__main__":
    signals.exit_on_stop()  # before the imports below, which take seconds

import contextlib
import functools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
from ml_collections import ConfigDict

from leanformer import cli
from leanformer.costs import count
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
    """Train all runs to the end, or to a stop request. Returns an exit status, as `leanformer.train`.

    Raises:
        ConfigError: they cannot be one program, or stopped at different steps.
        TrainingError: one of them diverged, which ends all.
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
        measurements = vmap.ensemble(measurements, len(setups))
        pages.warn_intervals(configs[0], setups[0].total)
        runs = [
            stack.enter_context(Run(workdir, setup, source, timer, name=workdir.name))
            for (workdir, _), (setup, source, _) in zip(members, prepared, strict=True)
        ]
        states = vmap.stack([run.restore() for run in runs])
        start = _start(runs)
        with timer("compile"):
            compiled, keys = vmap.compile_step(setups, states)
        pages.check_memory(configs[0], compiled, jax.local_devices()[0], runs=len(runs))
        if stop.before_work():
            print(f"Stopped at step {start}, where they began. To resume: {again}", flush=True)
            return stop.status
        signals.begin()
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
                pages.summarise(run, vmap.index(states, i), count.peak_memory(compiled), runs=len(runs))
    return status


def _start(runs: Sequence[Run]) -> int:
    """Return the step that all runs are at. Raises ConfigError unless it is the same, and before the end."""
    steps = {run.workdir.name: run.start for run in runs}
    if len(set(steps.values())) > 1 or runs[0].start >= runs[0].setup.total:
        shown = ", ".join(f"{name} {step}" for name, step in steps.items())
        raise ConfigError(f"Runs of one program resume from one step before the end, found {shown}. Train them apart.")
    return runs[0].start


def _member(text: str) -> list[str]:
    """Raises ConfigError for what is no JSON list of words."""
    try:
        found = json.loads(text)
    except json.JSONDecodeError:
        found = None
    if not (isinstance(found, list) and found and all(isinstance(word, str) for word in found)):
        raise ConfigError(f"--member={text} is no JSON list of a folder and flags. `sweep --vmap` writes them.")
    return found


@cli.command(
    cli.Flag("member", "A run: a JSON list of its folder and the flags of its config.", required=True, many=True),
)
def main(f: cli.Values) -> int:
    members = []
    for text in f.member:
        folder, *words = _member(text)
        c = cli.parse([cli.CONFIG], words).config
        members.append((Path(folder).expanduser(), c))
    checks.check(members[0][1])  # the others have the same shapes, or are refused
    with pages.memory_explained(members[0][1], runs=len(members)):
        return train(members, again=f"python -m leanformer.train_vmap {f.argv}")


if __name__ == "__main__":
    cli.run(main)
