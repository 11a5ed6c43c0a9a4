"""Train runs of equal shape as one program on one device, each in a folder of its own, as `sweep --together` does.

python -m leanformer.together --member='["DIR", "--config=FILE", "--config.seed=0"]' --member=...

They may differ in their seeds and learning rates. Small models leave a device idle one by one; together they fill it.
Every folder is that of an ordinary run, with the same examples and draws, records, checkpoints and summary, and steps
that differ by float32 rounding alone; `train` goes on from it. The same command goes on where an earlier one stopped,
which all members must have done at the same step.
"""

import contextlib
import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
from ml_collections import ConfigDict

from leanformer import cli, data, tasks
from leanformer.costs import count
from leanformer.errors import ConfigError, TrainingError
from leanformer.reports import pages
from leanformer.runtime import mesh as meshes
from leanformer.runtime.interrupt import StopRequest
from leanformer.runtime.watch import Watchdog
from leanformer.tasks import kept, labels
from leanformer.training import checks, experiment, goodput, loggers, report, streams, together
from leanformer.training import step as steps
from leanformer.training.checkpoint import Checkpoints
from leanformer.training.state import TrainState


class Run:
    """One of the runs: its folder, its data, and what is written of it."""

    def __init__(self, c: ConfigDict, workdir: Path, mesh: jax.sharding.Mesh, stack: contextlib.ExitStack):
        self.config, self.workdir, task = c, workdir, tasks.of(c)
        self.source, held_out = tasks.open_data(task, c, labels.read(workdir))
        kept.check(workdir, self.source)
        if not (workdir / "config.json").is_file():
            tasks.check_names(c, self.source)
        self.held_out = data.spread(held_out[""], c.eval.examples)
        self.run = experiment.build(c, examples=data.size(self.source), mesh=mesh, task=task.trained_on(self.source))
        self.probed = streams.probe(self.run, held_out[""]) if c.probe.every else None
        stack.enter_context(report.claim(workdir))
        report.tell_changes(workdir, c)
        self.attempts = goodput.Attempts(workdir)
        self.score = dataclasses.replace(task.score, name=f"{'ema_' if c.optim.ema else ''}{task.score.name}")
        self.saved = stack.enter_context(Checkpoints(workdir / "checkpoints", c.checkpoint.keep, score=self.score))
        restored = self.saved.restore(self.run.like)
        self.state, self.books = restored or (self.run.initial_state(), {})
        self.start = int(self.state.step)
        for step, value in report.read_scores(workdir, self.score.name).items():
            if step <= self.start:
                self.saved.evaluated(step, value)

    def begin(self, stack: contextlib.ExitStack) -> None:
        """Opens the records and starts to read."""
        self.attempts.begin(step=self.start, processes=1, devices=1)
        logged = loggers.start(self.config, self.workdir, self.start)
        total = self.run.total
        self.record = stack.enter_context(report.Recorder(self.workdir, start=self.start, total=total, logger=logged))
        self.batches = stack.enter_context(contextlib.closing(streams.train(self.run, self.source, self.start)))
        self.corrupt = data.CorruptLog(streams.train_batches(self.run, self.source), self.config.data.max_corrupt)
        report.begin(self.workdir, self.config)
        kept.write(self.workdir, self.source)

    def read(self) -> dict[str, Any]:
        """The next batch."""
        host = next(self.batches)
        self.corrupt(host["corrupt"])
        return host

    def evaluate(self, step: int, state: TrainState, eval_step: Any) -> bool:
        """Writes the record of an evaluation; whether it is the best so far."""
        weights = {"": state.weights} | ({"ema_": state.ema} if self.config.optim.ema else {})
        with contextlib.closing(streams.evaluation(self.run, self.held_out)) as batches:
            values = steps.evaluate(eval_step, self.run.task.metrics, weights, batches)
        self.record.write(step, "eval", values)
        self.saved.evaluated(step, values[self.score.name])
        return self.score.best(self.saved.scores) == step

    def summarise(self, state: TrainState, clock: goodput.Clock, memory: int) -> None:
        self.saved.wait()
        account = self.attempts.account(clock.books())
        found = (self.record.records, state, self.saved, self.corrupt, account, memory)
        pages.summarise(self.run, self.workdir, *found)


def train(members: Sequence[tuple[Path, ConfigDict]], again: str = "the same call") -> int:
    """Trains all of them to the end, or to a stop request. Returns an exit status, as `leanformer.train`.

    Raises:
        ConfigError: they cannot be one program, or stopped at different steps.
        TrainingError: one of them skipped optim.max_skipped steps in a row.
    """
    c = members[0][1]
    together.check([config for _, config in members])
    with contextlib.ExitStack() as stack:
        stop = stack.enter_context(StopRequest())
        mesh = meshes.make_mesh(devices=jax.local_devices()[:1])
        runs = [Run(config, workdir, mesh, stack) for workdir, config in members]
        watch = stack.enter_context(Watchdog(c.hang_seconds, beat=lambda: [run.attempts.alive() for run in runs]))
        clock = goodput.Clock(feed=watch.feed)
        start, total = _start(runs), runs[0].run.total
        clock.go_on_from(runs[0].books)
        for run in runs:
            run.begin(stack)
        state, keys = together.stacked(run.state for run in runs), together.stacked(run.run.run_key() for run in runs)
        names = runs[0].run.abstract_batch()
        with clock("compile"):
            shapes = {n: jax.ShapeDtypeStruct((len(runs), *x.shape), x.dtype) for n, x in names.items()}
            step_of_all = jax.jit(together.make_step([run.run for run in runs]), donate_argnums=0)
            step_of_all = step_of_all.lower(state, shapes, keys).compile()
        eval_step, probe_step = (
            jax.jit(runs[0].run.eval_step),
            runs[0].run.probe_step and jax.jit(runs[0].run.probe_step),
        )
        print(f"{len(runs)} runs together, from step {start} to {total}.", flush=True)

        def probe(step: int) -> None:
            with clock("probe"):
                for i, run in enumerate(runs):
                    weights = together.of(i, state).weights
                    run.record.write(step, "probe", steps.probe_record(jax.device_get(probe_step(weights, run.probed))))

        if probe_step and start == 0:
            probe(0)
        recorded = start
        clock.started()
        for step in range(start + 1, total + 1):
            watch.step(step)
            with clock("data wait"):
                hosts = [run.read() for run in runs]
            state, metrics = step_of_all(state, together.batch(hosts, names), keys)
            due = [_due(step, every, total) for every in (c.log_every, c.eval.every, c.checkpoint.every, c.probe.every)]
            if due[0]:
                shown = jax.device_get(metrics)
                # No end without a loss to show.
                limit = min(c.optim.max_skipped, step - recorded) if step == total else c.optim.max_skipped
                _check_health([run.workdir.name for run in runs], shown["skipped_in_row"], step, limit)
                seconds, waited = clock.lap()
                examples = (step - recorded) * c.batch_size
                timing = {"examples_per_s": round(examples / seconds, 2), "data_wait": round(waited / seconds, 4)}
                recorded = step
                for i, run in enumerate(runs):
                    own = {name: shown[name][i] for name in ("loss", "lr", "grad_norm", "skipped")}
                    run.record.advance(step)
                    run.record.write(step, "train", own | timing | {"wall_s": round(clock.seconds(), 1)})
            stopping, best = stop.now(), set()
            if due[1] and not stopping:
                with clock("evaluation"):
                    best = {i for i, run in enumerate(runs) if run.evaluate(step, together.of(i, state), eval_step)}
            if probe_step and due[3] and not stopping:
                probe(step)
            for i, run in enumerate(runs):
                if i in best or stopping or due[2]:
                    with clock("checkpoint"):
                        run.saved.save(step, together.of(i, state), books=clock.books())
            if stopping:
                for run in runs:
                    run.saved.wait()
                print(f"Saved at step {step}. To go on: {again}", flush=True)
                return stop.status
        for i, run in enumerate(runs):
            run.summarise(together.of(i, state), clock, count.peak_memory(step_of_all))
    return 0


def _start(runs: Sequence[Run]) -> int:
    """The step that all have done. Raises ConfigError unless it is the same, and before the end."""
    found = {run.workdir.name: run.start for run in runs}
    if len(set(found.values())) > 1 or runs[0].start >= runs[0].run.total:
        shown = ", ".join(f"{name} {step}" for name, step in found.items())
        raise ConfigError(f"Together runs go on from one step before the end, found {shown}. Train them one by one.")
    return runs[0].start


def _due(step: int, every: int, total: int) -> bool:
    return step == total or (every > 0 and step % every == 0)


def _check_health(names: Sequence[str], in_row: Any, step: int, limit: int) -> None:
    for name, skipped in zip(names, in_row, strict=True):
        if skipped >= limit:
            raise TrainingError(
                f"{name} skipped {skipped} steps in a row up to step {step}, and ends all of "
                "them. Leave it out, or train it alone to see why."
            )


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
    return train(members, again=f"python -m leanformer.together {f.argv}")


if __name__ == "__main__":
    cli.run(main)
