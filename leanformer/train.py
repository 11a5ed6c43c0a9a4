"""Train a model: `python -m leanformer.train --config=configs/quickstart.py --workdir=runs/quickstart [--dry_run]`.

The same command goes on where an earlier one stopped, and ends with `summary.json` and plots in the workdir. It runs
on one device, on all of a host, or in many processes (`launch/README.md`). Exit status: 0 done; 75 saved on SIGTERM or
SIGUSR1, run it again; 130 saved on Ctrl-C; 2 the user must mend something; 70 and others: it broke, run it again.
"""

import contextlib
import dataclasses
from pathlib import Path

import jax
from ml_collections import ConfigDict

from leanformer import cli, data, tasks
from leanformer.costs import count, hardware
from leanformer.errors import TrainingError
from leanformer.reports import pages
from leanformer.runtime import mesh as meshes
from leanformer.runtime import peers
from leanformer.runtime.interrupt import Stopped, StopRequest
from leanformer.runtime.watch import Watchdog
from leanformer.tasks import kept, labels
from leanformer.training import experiment, goodput, loggers, optim, report, streams
from leanformer.training import step as steps
from leanformer.training.checkpoint import Checkpoints
from leanformer.training.health import Health
from leanformer.training.state import TrainState


def train(c: ConfigDict, workdir: Path, *, dry_run: bool = False, again: str = "the same call") -> int:
    """Trains to the end, or to a stop request, from the newest checkpoint in `workdir`. Returns an exit status.

    `again` is how to go on after a stop, for the message that says so.
    """
    attempts = goodput.Attempts(workdir)
    with contextlib.ExitStack() as stack:
        watch = stack.enter_context(Watchdog(c.hang_seconds, beat=attempts.alive))
        clock = goodput.Clock(feed=watch.feed)
        stop = stack.enter_context(StopRequest())

        mesh = meshes.make_mesh(**c.mesh)
        task = tasks.of(c)
        source, held_out = tasks.open_data(task, c, labels.read(workdir))
        kept.check(workdir, source)
        if not (workdir / "config.json").is_file():
            tasks.check_names(c, source)
        run = experiment.build(c, examples=data.size(source), mesh=mesh, task=task.trained_on(source))
        probed = streams.probe(run, held_out[""]) if run.probe_step else None
        held_out = {name: data.spread(split, c.eval.examples) for name, split in held_out.items()}
        intervals = {"": c.eval.every} | {name: more.every for name, more in c.eval.more.items()}
        if dry_run:
            print(pages.dry_run(run, workdir))
            return 0
        stack.enter_context(report.claim(workdir, feed=watch.feed))
        report.tell_changes(workdir, c)
        labels.tell_old(workdir, tasks.names(source))

        score = dataclasses.replace(task.score, name=f"{'ema_' if c.optim.ema else ''}{task.score.name}")
        saved = stack.enter_context(Checkpoints(workdir / "checkpoints", c.checkpoint.keep, score=score))
        restored = saved.restore(run.like)
        state, books = restored or (run.initial_state(), {})
        start = int(state.step)
        for step, value in peers.same(report.read_scores(workdir, score.name)).items():
            if int(step) <= start:
                saved.evaluated(int(step), value)

        def end(step: int) -> int:
            """The last step of the run, as can be told at `step`: that one if patience has run out there."""
            known = {at: value for at, value in saved.scores.items() if at <= step}
            return step if c.eval.patience and score.since_best(known) >= c.eval.patience else run.total

        total = end(start)
        if start >= total and peers.same((workdir / "summary.json").is_file()):
            longer = "Raise total_epochs or total_steps to go on."
            more = longer if start >= run.total else _given_up(c, start, run.total)
            print(f"This run is complete: {start} steps in {workdir}. {more}")
            return 0
        clock.go_on_from(books)
        attempts.begin(step=start, processes=peers.count(), devices=mesh.size)
        with clock("compile"):
            train_step = run.compile_train_step()
        print(pages.start(run, source, held_out, train_step, clock), flush=True)
        pages.check_memory(c, train_step, jax.local_devices()[0])
        fresh = f"Starting from the weights of {c.init_from.path}" if c.init_from.path else "Starting from scratch"
        print(f"Going on from step {start} in {workdir}." if start else f"{fresh} in {workdir}.", flush=True)

        logged = loggers.start(c, workdir, start)
        record = stack.enter_context(report.Recorder(workdir, start=start, total=run.total, logger=logged))
        eval_step, probe_step = jax.jit(run.eval_step), run.probe_step and jax.jit(run.probe_step)
        corrupt = data.CorruptLog(streams.train_batches(run, source), c.data.max_corrupt)
        health = Health(c, task.ceiling, optim.leaf_names(run.like.params), saved, record)
        _, train_flops = run.flops_per_example
        peak = hardware.peak_flops(run.device) if c.dtype == "bfloat16" else None
        key, recorded = run.run_key(), start

        def evaluate(step: int, state: TrainState, name: str = "") -> bool:
            """Writes the record of an evaluation; False where a stop request came between."""
            weights = {"": state.weights} | ({"ema_": state.ema} if c.optim.ema else {})
            with clock("evaluation"), contextlib.closing(streams.evaluation(run, held_out[name])) as batches:
                try:
                    within = stop.during(batches, feed=watch.feed)
                    values = steps.evaluate(eval_step, task.metrics, weights, within)
                except Stopped:
                    return False
            record.write(step, _kind(name), values)
            health.evaluated(step, values)
            if not name:
                saved.evaluated(step, values[score.name])
            return True

        def evaluate_all(step: int, state: TrainState, last: int) -> bool:
            """Whatever is due at `step` and not in the records yet; False as `evaluate`."""
            due = [name for name, every in intervals.items() if _due(step, every, last)]
            owed = peers.same([name for name in due if not record.has(step, _kind(name))]) if due else []
            return all(evaluate(step, state, name) for name in owed)

        def probe(step: int, state: TrainState) -> None:
            with clock("probe"):
                record.write(step, "probe", steps.probe_record(peers.fetch(probe_step(state.weights, probed))))

        def look_back(step: int) -> None:
            """Writes the record of the steps since the last one."""
            nonlocal recorded
            if recorded == step:
                return
            health.settle(step - recorded if step == total else None)  # no end without a loss to show
            shown = {name: jax.device_get(metrics[name]) for name in ("loss", "lr", "grad_norm", "skipped")}
            timing = _speed(clock.lap(), (step - recorded) * c.batch_size, train_flops, peak)
            record.write(step, "train", shown | timing | {"wall_s": round(clock.seconds(), 1)})
            recorded = step
            corrupt.seen |= peers.union("unreadable", corrupt.seen)

        # What was due when an earlier run was stopped, between its save and this; and the probe at initialisation.
        if start and not evaluate_all(start, state, total):
            print(f"Stopped at step {start}, where it began. To go on: {again}", flush=True)
            return stop.status
        total = end(start)
        if probe_step and _due(start, c.probe.every, total) and not peers.same(record.has(start, "probe")):
            probe(start, state)

        batches = stack.enter_context(contextlib.closing(streams.train(run, source, start)))
        clock.started()
        for step in range(start + 1, total + 1):
            watch.step(step)
            with clock("data wait"):
                host = next(batches)
            if step == start + 1:  # only now: a run that trains nothing must leave the config of the one that did
                report.begin(workdir, c)
                kept.write(workdir, source)
            corrupt(host["corrupt"])
            state, metrics = train_step(state, streams.put(run, host), key)
            health.sent(step, metrics)
            saved.poll()
            record.advance(step)

            if step % c.log_every == 0 or step == total:
                look_back(step)
            stopping = stop.now() or not evaluate_all(step, state, total)
            scored = step in saved.scores
            if scored and end(step) == step < total:
                total = step
                print(_given_up(c, step, run.total), flush=True)
                look_back(step)
                stopping = stopping or not evaluate_all(step, state, total)
            best = scored and score.best(saved.scores) == step
            if probe_step and _due(step, c.probe.every, total) and not stopping:
                probe(step, state)
            if best or stopping or _due(step, c.checkpoint.every, total):
                health.settle()
                sound = not health.skipped or scored  # or it would replace one that is
                if sound:
                    with clock("checkpoint"):
                        saved.save(step, state, books=clock.books())
            if stopping:
                saved.wait()
                what = "Saved" if sound else f"Stopped, and not saved since {health.skipped} steps were skipped,"
                print(f"{what} at step {step}. To go on: {again}", flush=True)
                return stop.status
            if step == total:
                break
        with clock("checkpoint"):
            saved.wait()
        if peers.first():
            account, memory = attempts.account(clock.books()), count.peak_memory(train_step)
            pages.summarise(run, workdir, record.records, state, saved, corrupt, account, memory)
    return 0


def _kind(name: str) -> str:
    """Of the records of an evaluation by its name."""
    return f"eval {name}" if name else "eval"


def _given_up(c: ConfigDict, step: int, total: int) -> str:
    return (
        f"It ends at step {step} of {total}: the last {c.eval.patience} evaluations were no better than one before "
        "them. To go on, raise eval.patience or set it to 0."
    )


def _due(step: int, every: int, total: int) -> bool:
    return step == total or (every > 0 and step % every == 0)


def _speed(lap: tuple[float, float], examples: int, train_flops: int, peak: float | None) -> dict[str, float]:
    """Examples per second since the last record, evaluation and saving left out, and the share that waited for data."""
    seconds, waited = lap
    speed = {"examples_per_s": round(examples / seconds, 2), "data_wait": round(waited / seconds, 4)}
    if peak:
        speed["mfu"] = round(examples / seconds * train_flops / (peak * jax.device_count()), 4)
    return speed


@cli.command(
    cli.CONFIG,
    cli.Flag("workdir", "Folder of the run: records, checkpoints, plots.", required=True, writes=True),
    cli.Flag("dry_run", "Say where and from what the run would train, and stop there.", bool, default=False),
    spread=True,
)
def main(f: cli.Values) -> int:
    again = f"python -m leanformer.train {f.argv}"
    try:
        return train(f.config, Path(f.workdir).expanduser(), dry_run=f.dry_run, again=again)
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        raise TrainingError(pages.out_of_memory(f.config)) from error


if __name__ == "__main__":
    cli.run(main)
