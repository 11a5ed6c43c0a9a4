"""Train a model: `python -m leanformer.train --config=configs/quickstart.py --workdir=runs/quickstart [--dry_run]`.

The same command goes on where an earlier one stopped, and ends with `summary.json` and plots in the workdir. It runs
on one device, on all of a host, or in many processes (`launch/README.md`). Exit status: 0 done; 75 saved on SIGTERM or
SIGUSR1, run it again; 130 saved on Ctrl-C; 2 the user must mend something; 70 and others: it broke, run it again.
"""

import contextlib
from pathlib import Path

import jax
from ml_collections import ConfigDict

from leanformer import cli, data, experiment, goodput, hardware, labels, loggers, optim, pages, peers, report, tasks
from leanformer import mesh as meshes
from leanformer import step as steps
from leanformer.checkpoint import Checkpoints
from leanformer.errors import TrainingError
from leanformer.health import Health
from leanformer.interrupt import Stopped, StopRequest
from leanformer.watch import Watchdog


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
        train_source, eval_source = tasks.open_data(c, labels.read(workdir))
        if not (workdir / "config.json").is_file():
            tasks.check_names(c, train_source)
        teacher = tasks.open_teacher(c, train_source)
        run = experiment.build(c, examples=len(train_source), mesh=mesh, teacher=teacher)
        probed = run.probe_batch(eval_source) if run.probe_step else None
        eval_source = data.spread(eval_source, c.eval.examples)
        if dry_run:
            print(pages.dry_run(run, workdir))
            return 0
        stack.enter_context(report.claim(workdir, feed=watch.feed))
        report.tell_changes(workdir, c)
        labels.tell_old(workdir, train_source.classes)

        saved = stack.enter_context(Checkpoints(workdir / "checkpoints", c.checkpoint.keep, owner=True))
        restored = saved.restore(run.like)
        state, books = restored or (run.initial_state(), {})
        start = int(state.step)
        top1 = "ema_top1" if c.optim.ema else "top1"
        for step, score in peers.same(report.read_scores(workdir, top1)).items():
            if int(step) <= start:
                saved.score(int(step), score)

        def end(step: int) -> int:
            """The last step of the run, as can be told at `step`: that one if patience has run out there."""
            known = {at: score for at, score in saved.scores.items() if at <= step}
            return step if c.eval.patience and since_the_best(known) >= c.eval.patience else run.total

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
        print(pages.start(run, train_source, eval_source, train_step, clock), flush=True)
        pages.check_memory(c, train_step, jax.local_devices()[0])
        fresh = f"Starting from the weights of {c.init_from.path}" if c.init_from.path else "Starting from scratch"
        print(f"Going on from step {start} in {workdir}." if start else f"{fresh} in {workdir}.", flush=True)

        logged = loggers.start(c, workdir, start)
        record = stack.enter_context(report.Recorder(workdir, start=start, total=run.total, logger=logged))
        eval_step, probe_step = jax.jit(run.eval_step), run.probe_step and jax.jit(run.probe_step)
        corrupt = data.CorruptLog(run.train_batches(train_source), c.data.max_corrupt)
        health = Health(c, optim.leaf_names(run.like.params), saved, record)
        _, train_flops = run.flops_per_example
        peak = hardware.peak_flops(run.device) if c.dtype == "bfloat16" else None
        key, recorded = run.run_key(), start

        def evaluate(step: int) -> float | None:
            """Writes the record of an evaluation and returns its top-1; None where a stop request came between."""
            weights = {"": state.weights} | ({"ema_": state.ema} if c.optim.ema else {})
            with clock("evaluation"), contextlib.closing(run.eval_stream(eval_source)) as batches:
                try:
                    values = steps.evaluate(eval_step, weights, stop.during(batches, feed=watch.feed))
                except Stopped:
                    return None
            record.write(step, "eval", values)
            health.evaluated(step, values)
            saved.score(step, values[top1])
            return values[top1]

        def probe(step: int) -> None:
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
        owed = peers.same({kind: not record.has(start, kind) for kind in ("eval", "probe")})
        if start and _due(start, c.eval.every, total) and owed["eval"] and evaluate(start) is None:
            print(f"Stopped at step {start}, where it began. To go on: {again}", flush=True)
            return stop.status
        total = end(start)
        if probe_step and _due(start, c.probe.every, total) and owed["probe"]:
            probe(start)

        batches = stack.enter_context(contextlib.closing(run.train_stream(train_source, start)))
        clock.started()
        for step in range(start + 1, total + 1):
            watch.step(step)
            with clock("data wait"):
                host = next(batches)
            if step == start + 1:  # only now: a run that trains nothing must leave the config of the one that did
                report.write_config(workdir, c)
                labels.write(workdir, train_source.classes)
            corrupt(host["corrupt"])
            state, metrics = train_step(state, run.put_batch(host), key)
            health.sent(step, metrics)
            saved.poll()
            record.advance(step)

            if step % c.log_every == 0 or step == total:
                look_back(step)
            stopping, score = stop.now(), None
            if _due(step, c.eval.every, total) and not stopping:
                score = evaluate(step)
                stopping, total = score is None, end(step)
                if step == total < run.total:
                    print(_given_up(c, step, run.total), flush=True)
                    look_back(step)
            best = score is not None and score > max((s for at, s in saved.scores.items() if at < step), default=-1)
            if probe_step and _due(step, c.probe.every, total) and not stopping:
                probe(step)
            if best or stopping or _due(step, c.checkpoint.every, total):
                health.settle()
                sound = not health.skipped or score is not None  # or it would replace one that is
                if sound:
                    with clock("checkpoint"):
                        saved.save(step, state, score=score, books=clock.books())
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
            pages.summarise(run, workdir, record.records, state, saved.best(), corrupt, attempts.account(clock.books()))
    return 0


def since_the_best(scores: dict[int, float]) -> int:
    """Evaluations after the best one, by step; of equals the first is the best."""
    best = max(sorted(scores), key=scores.get, default=None)
    return sum(step > best for step in scores)


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
