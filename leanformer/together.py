"""Train runs of one shape as one program on one device, each in a folder of its own, as `sweep --together` does.

python -m leanformer.together --member='["DIR", "--config=FILE", "--config.seed=0"]' --member=...

They may differ in their seeds and learning rates. Small models leave a device idle one by one; together they fill it.
Every folder is that of an ordinary run, with the same examples and draws, records, checkpoints and summary, and steps
that differ by float32 rounding alone; `train` goes on from it. The same command goes on where an earlier one stopped,
which all members must have done at the same step.
"""

from leanformer.runtime import signals


if __name__ == "__main__":
    signals.exit_on_stop()  # before what follows, which takes seconds to import

import contextlib
import json
from collections.abc import Sequence
from pathlib import Path

import jax
from ml_collections import ConfigDict

from leanformer import cli
from leanformer.costs import count
from leanformer.errors import ConfigError
from leanformer.reports import pages
from leanformer.runtime import mesh as meshes
from leanformer.runtime.interrupt import StopRequest
from leanformer.runtime.watch import Watchdog
from leanformer.training import checks, goodput, together
from leanformer.training.loop import Loop
from leanformer.training.session import Session


def train(members: Sequence[tuple[Path, ConfigDict]], again: str = "the same call") -> int:
    """Trains all of them to the end, or to a stop request. Returns an exit status, as `leanformer.train`.

    Raises:
        ConfigError: they cannot be one program, or stopped at different steps.
        TrainingError: nothing can come of one of them any more, which ends all.
    """
    configs = [c for _, c in members]
    together.check(configs)
    attempts = [goodput.Attempts(workdir) for workdir, _ in members]
    with contextlib.ExitStack() as stack:
        watch = Watchdog(configs[0].hang_seconds, beat=lambda: [each.alive() for each in attempts])
        stack.enter_context(watch)
        clock = goodput.Clock(feed=watch.feed)
        stop = stack.enter_context(StopRequest())
        mesh = meshes.make_mesh(devices=jax.local_devices()[:1])
        sessions = [
            Session(c, workdir, mesh, ledger, name=workdir.name)
            for (workdir, c), ledger in zip(members, attempts, strict=True)
        ]
        pages.warn_intervals(configs[0], sessions[0].run.total)
        states = [session.take(stack, feed=watch.feed) for session in sessions]
        start, total = _start(sessions), sessions[0].run.total
        clock.go_on_from(sessions[0].books)
        for session, ledger in zip(sessions, attempts, strict=True):
            ledger.begin(step=start, processes=1, devices=1)
            session.begin(stack, clock)
            session.eval_step, session.probe_step = sessions[0].eval_step, sessions[0].probe_step  # one compilation
        with clock("compile"):
            program = together.Together([session.run for session in sessions], states)
        pages.check_memory(configs[0], program.compiled, jax.local_devices()[0], runs=len(sessions))
        del states  # the program has them stacked: nobody need hold each a second time
        if stop.before_work():
            print(f"Stopped at step {start}, where they began. To go on: {again}", flush=True)
            return stop.status
        signals.begin()
        print(f"{len(sessions)} runs together, from step {start} to {total}.", flush=True)
        if status := Loop(sessions, program, clock=clock, watch=watch, stop=stop).run(again):
            return status
        for i, session in enumerate(sessions):
            pages.summarise(session, program.state(i), count.peak_memory(program.compiled), together=len(sessions))
    return 0


def _start(sessions: Sequence[Session]) -> int:
    """The step that all have done. Raises ConfigError unless it is the same, and before the end."""
    found = {session.workdir.name: session.start for session in sessions}
    if len(set(found.values())) > 1 or sessions[0].start >= sessions[0].run.total:
        shown = ", ".join(f"{name} {step}" for name, step in found.items())
        raise ConfigError(f"Together runs go on from one step before the end, found {shown}. Train them one by one.")
    return sessions[0].start


def _member(text: str) -> list[str]:
    """Raises ConfigError for what is no JSON list of words."""
    try:
        found = json.loads(text)
    except json.JSONDecodeError:
        found = None
    if not (isinstance(found, list) and found and all(isinstance(word, str) for word in found)):
        raise ConfigError(f"--member={text} is no JSON list of a folder and flags. `sweep --together` writes them.")
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
        return train(members, again=f"python -m leanformer.together {f.argv}")


if __name__ == "__main__":
    cli.run(main)
