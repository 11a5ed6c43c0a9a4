"""Train a model: `python -m leanformer.train --config=configs/quickstart.py --workdir=runs/quickstart [--dry_run]`.

The same command goes on where an earlier one stopped, and ends with `summary.json` and plots in the workdir. It runs
on one device, on all of a host, or in many processes (`launch/README.md`). Exit status: 0 done; 75 saved on SIGTERM,
SIGUSR1 or SIGUSR2, run it again; 130 saved on Ctrl-C; 2 the user must mend something; 70 and others: it broke, run it
again.
"""

from leanformer.runtime import signals


if __name__ == "__main__":
    signals.exit_on_stop()  # before what follows, which takes seconds to import

import contextlib
from pathlib import Path

import jax
from ml_collections import ConfigDict

from leanformer import cli
from leanformer.config.rules import LENGTHS
from leanformer.costs import count
from leanformer.reports import pages
from leanformer.runtime import mesh as meshes
from leanformer.runtime import peers
from leanformer.runtime.interrupt import StopRequest
from leanformer.runtime.watch import Watchdog
from leanformer.training import goodput, loop
from leanformer.training.session import Session


def train(c: ConfigDict, workdir: Path, *, dry_run: bool = False, again: str = "the same call") -> int:
    """Trains to the end, or to a stop request, from the newest checkpoint in `workdir`. Returns an exit status.

    `again` is how to go on after a stop, for the message that says so.
    """
    attempts = goodput.Attempts(workdir)
    with contextlib.ExitStack() as stack:
        watch = stack.enter_context(Watchdog(c.hang_seconds, beat=attempts.alive))
        clock = goodput.Clock(feed=watch.feed)
        stop = stack.enter_context(StopRequest())
        session = Session(c, workdir, meshes.make_mesh(**c.mesh), attempts)
        run = session.run
        if peers.first():
            pages.warn_intervals(c, run.total)
        if dry_run:
            print(pages.dry_run(run, workdir))
            return 0
        state = session.take(stack, feed=watch.feed)
        start, last = session.start, session.last(session.start)
        if start >= last and peers.same((workdir / "summary.json").is_file()):
            longer = f"Raise {next(key for key in LENGTHS if c.get(key))} to go on."
            more = longer if session.complete(start) else loop.given_up(c, start, run.total)
            print(f"This run is complete: {start} steps in {workdir}. {more}")
            return 0
        clock.go_on_from(session.books)
        attempts.begin(step=start, processes=peers.count(), devices=run.mesh.size)
        program = loop.Alone(run, state, clock)
        print(pages.start(run, session.source, session.held_out, program.compiled, clock), flush=True)
        pages.check_memory(c, program.compiled, jax.local_devices()[0])
        fresh = f"Starting from the weights of {c.init_from.path}" if c.init_from.path else "Starting from scratch"
        print(f"Going on from step {start} in {workdir}." if start else f"{fresh} in {workdir}.", flush=True)
        if stop.before_work():
            print(f"Stopped at step {start}, where it began. To go on: {again}", flush=True)
            return stop.status
        session.begin(stack, clock)
        signals.begin()
        if status := loop.Loop([session], program, clock=clock, watch=watch, stop=stop).run(again):
            return status
        if peers.first():
            pages.summarise(session, program.state(0), count.peak_memory(program.compiled))
    return 0


@cli.command(
    cli.CONFIG,
    cli.Flag("workdir", "Folder of the run: records, checkpoints, plots.", required=True, writes=True),
    cli.Flag("dry_run", "Say where and from what the run would train, and stop there.", bool, default=False),
    spread=True,
)
def main(f: cli.Values) -> int:
    again = f"python -m leanformer.train {f.argv}"
    with pages.memory_explained(f.config):
        return train(f.config, Path(f.workdir).expanduser(), dry_run=f.dry_run, again=again)


if __name__ == "__main__":
    cli.run(main)
