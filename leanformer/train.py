"""Train a model: `python -m leanformer.train --config=configs/quickstart.py --workdir=runs/quickstart`.

The same command goes on where an earlier one stopped, and ends with `summary.json` and plots in the workdir.
"""

import collections
import contextlib
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
from absl import flags
from ml_collections import ConfigDict

from leanformer import cli, count, data, experiment, optim, plots, report
from leanformer import mesh as meshes
from leanformer import step as steps
from leanformer.checkpoint import Checkpoints
from leanformer.errors import TrainingError
from leanformer.experiment import Experiment
from leanformer.interrupt import StopRequest
from leanformer.state import TrainState


IN_FLIGHT = 2  # steps sent ahead to the device: enough to keep it busy, few enough to hold few batches in memory


def train(c: ConfigDict, workdir: Path) -> int:
    """Trains to the end, or to a stop request, from the newest checkpoint in `workdir`. Returns an exit status."""
    began = time.monotonic()
    clock: dict[str, float] = collections.defaultdict(float)  # seconds by what they went to

    mesh = meshes.make_mesh(**c.mesh)
    train_source, eval_source = experiment.open_data(c)
    run = experiment.build(c, examples=len(train_source), mesh=mesh)
    report.tell_changes(workdir, c)

    with contextlib.ExitStack() as stack:
        saved = stack.enter_context(Checkpoints(workdir / "checkpoints", c.checkpoint.keep))
        restored = saved.restore(run.like)
        report.write_config(workdir, c)  # only now: a config that does not fit must not replace the one that does
        state, wall = restored or (run.initial_state(), 0.0)
        start = int(state.step)
        if start >= run.total and (workdir / "summary.json").is_file():
            print(f"This run is complete: {start} steps in {workdir}. Raise total_epochs or total_steps to go on.")
            return 0
        with _timed(clock, "compile"):
            train_step = run.compile_train_step()
        print(_page(run, train_source, eval_source, train_step, clock["compile"]), flush=True)
        fresh = f"Starting from the weights of {c.init_from.path}" if c.init_from.path else "Starting from scratch"
        print(f"Going on from step {start} in {workdir}." if start else f"{fresh} in {workdir}.")

        record = stack.enter_context(report.Recorder(workdir, start=start, total=run.total))
        stop = stack.enter_context(StopRequest())
        _, train_flops = run.flops_per_example
        peak = count.peak_flops(jax.devices()[0]) if c.dtype == "bfloat16" else None
        eval_step = jax.jit(run.eval_step)
        corrupt = data.CorruptLog(train_source, c.data.max_corrupt)
        names = optim.leaf_names(run.like.params)
        key, running = run.run_key(), collections.deque()
        clock["start"] = time.monotonic() - began - clock["compile"]

        def seconds() -> float:
            return wall + time.monotonic() - began

        def evaluate(step: int) -> dict[str, float]:
            with _timed(clock, "evaluation"):
                weights = {"": state.weights} | ({"ema_": state.ema} if c.optim.ema else {})
                values = steps.evaluate(eval_step, weights, run.eval_stream(eval_source))
            record.write(step, "eval", values)
            return values

        probe_step = run.probe_step and jax.jit(run.probe_step)
        probed = run.probe_images(eval_source) if probe_step else None

        def probe(step: int) -> None:
            with _timed(clock, "probe"):
                record.write(step, "probe", steps.probe_record(probe_step(state.weights, probed)))

        # What was due when an earlier run was stopped, between its save and this; and the probe at initialisation.
        if start and _due(start, c.eval.every, run.total) and not record.has(start, "eval"):
            evaluate(start)
        if probe_step and _due(start, c.probe.every, run.total) and not record.has(start, "probe"):
            probe(start)

        batches = stack.enter_context(contextlib.closing(run.train_stream(train_source, start)))
        window = time.monotonic(), dict(clock), start
        for step in range(start + 1, run.total + 1):
            with _timed(clock, "data wait"):
                host = next(batches)
            corrupt(host["corrupt"])
            batch = meshes.put_batch(mesh, {name: host[name] for name in ("image", "label")})
            state, metrics = train_step(state, batch, key)
            running.append((step, metrics))
            if len(running) > IN_FLIGHT:
                _guard(*running.popleft(), c.optim.max_skipped, names, record)
            saved.poll()
            record.advance(step)

            if step % c.log_every == 0 or step == run.total:
                while running:
                    _guard(*running.popleft(), c.optim.max_skipped, names, record)
                timing = _speed(window, clock, step, c.batch_size, train_flops, peak)
                shown = {name: jax.device_get(metrics[name]) for name in ("loss", "lr", "grad_norm", "skipped")}
                record.write(step, "train", shown | timing | {"wall_s": round(seconds(), 1)})
                window = time.monotonic(), dict(clock), step

            # A stop is honoured at once, but not at the last step, where only evaluation and summary are left to do.
            stopping, score = bool(stop) and step < run.total, None
            if _due(step, c.eval.every, run.total) and not stopping:
                values = evaluate(step)
                score = {"top1": values["ema_top1" if c.optim.ema else "top1"]}
            if probe_step and _due(step, c.probe.every, run.total) and not stopping:
                probe(step)
            best = score and score["top1"] > max(_scores(record.records, c.optim.ema, before=step), default=-1)
            if best or stopping or _due(step, c.checkpoint.every, run.total):
                with _timed(clock, "checkpoint"):
                    saved.save(step, state, score=score, wall_s=seconds())
            if stopping:
                saved.wait()
                print(f"Saved at step {step}. To go on: {_command()}", flush=True)
                return stop.status
        with _timed(clock, "checkpoint"):
            saved.wait()
        clock["steps"] = time.monotonic() - began - sum(clock.values())
        _summarise(run, workdir, record.records, state, saved, corrupt, clock, seconds())
    return 0


@contextlib.contextmanager
def _timed(clock: dict[str, float], name: str) -> Iterator[None]:
    before = time.monotonic()
    yield
    clock[name] += time.monotonic() - before


def _due(step: int, every: int, total: int) -> bool:
    return step == total or (every > 0 and step % every == 0)


def _guard(step: int, metrics: dict[str, jax.Array], limit: int, names: list[str], record: report.Recorder) -> None:
    """Waits for a step sent ahead; raises TrainingError after `limit` non-finite steps in a row."""
    in_row = int(metrics["skipped_in_row"])
    if in_row == 0:
        return
    leaf = names[int(metrics["bad_leaf"])]
    if in_row == 1:
        print(f"*** STEP {step} IS NOT FINITE, SKIPPED; first bad gradient: {leaf}", file=sys.stderr, flush=True)
    if in_row >= limit:
        first = step - in_row + 1
        record.write(step, "abort", {"first_bad_step": first, "leaf": leaf, "skipped_in_row": in_row})
        raise TrainingError(
            f"{in_row} steps in a row were not finite, from step {first} on; first bad gradient: {leaf}. "
            f"None of them changed the weights. Lower optim.lr, set optim.clip_norm, lengthen optim.warmup_epochs, "
            'or train with dtype="float32".'
        )


def _speed(
    window: tuple[float, dict[str, float], int],
    clock: dict[str, float],
    step: int,
    batch_size: int,
    train_flops: int,
    peak: float | None,
) -> dict[str, float]:
    """Examples per second since the last record, evaluation and saving left out, and where the time went."""
    since, before, first = window
    aside = sum(clock[name] - before.get(name, 0) for name in ("evaluation", "checkpoint", "probe"))
    spent = max(time.monotonic() - since - aside, 1e-9)
    rate = (step - first) * batch_size / spent
    speed = {"examples_per_s": round(rate, 2)}
    speed["data_wait"] = round((clock["data wait"] - before.get("data wait", 0)) / spent, 4)
    if peak:
        speed["mfu"] = round(rate * train_flops / (peak * jax.device_count()), 4)
    return speed


def _scores(records: list[dict[str, Any]], ema: float, before: int) -> Iterator[float]:
    evals = (record for record in records if record["kind"] == "eval" and record["step"] < before)
    return (record["ema_top1" if ema else "top1"] for record in evals)


def _page(run: Experiment, train: data.Source, held_out: data.Source, compiled: Any, compile_s: float) -> str:
    """The start-up page: what will be trained, on what, where, and what it will take."""
    c, mesh = run.config, run.mesh
    forward, training = run.flops_per_example
    memory, device = count.peak_memory(compiled), jax.devices()[0]
    limit = (device.memory_stats() or {}).get("bytes_limit")
    shape = ", ".join(f"{key} {value}" for key, value in c.model.items() if key != "name" and value is not None)
    devices = f"{mesh.size} x {device.device_kind} ({device.platform})"
    axes = ", ".join(f"{axis} {size}" for axis, size in mesh.shape.items())
    rows = {
        "model": f"{c.model.name}: {shape}",
        "parameters": f"{count.parameters(run.like.params):,}",
        "FLOPs per example": f"{count.human(forward)} forward, {count.human(training)} training",
        "peak memory": f"{count.human(memory)}B a device, estimated from the compiled step"
        + (f"; the device has {count.human(limit)}B" if limit else ""),
        "data": f"{c.data.name}: {len(train):,} to train on, {len(held_out):,} to evaluate on",
        "batch": f"{c.batch_size} global = {c.batch_size // c.accumulate // mesh.size} a device"
        f" x {mesh.size} devices x {c.accumulate} accumulated",
        "length": f"{run.total:,} steps, {run.steps_per_epoch:.1f} an epoch, {run.warmup} of warm-up",
        "learning rate": f"{c.optim.lr:g} at its peak",
        "devices": f"{devices}; mesh: {axes}; {jax.process_count()} process(es)",
        "precision": f"{c.dtype} activations, float32 parameters",
        "attention": f"{run.backend} ({run.backend_reason})",
        "compiled in": f"{compile_s:.1f} s",
    }
    return report.page("leanformer", rows)


def _summarise(
    run: Experiment,
    workdir: Path,
    records: list[dict[str, Any]],
    state: TrainState,
    saved: Checkpoints,
    corrupt: data.CorruptLog,
    clock: dict[str, float],
    wall: float,
) -> None:
    """Writes summary.json and the plots, and says where they are."""
    evals = [record for record in records if record["kind"] == "eval"]
    speeds = [record["examples_per_s"] for record in records if record["kind"] == "train"]
    forward, training = run.flops_per_example
    summary = {
        "steps": run.total,
        "final": evals[-1],
        "best_checkpoint": saved.best(),
        "params": count.parameters(run.like.params),
        "forward_flops": forward,
        "train_flops": training,
        "skipped_steps": int(state.skipped),
        "unreadable_examples": len(corrupt.seen),
        "examples_per_s": sorted(speeds)[len(speeds) // 2],
        "wall_s": round(wall, 1),
        "probe_share": round(clock["probe"] / sum(clock.values()), 4),
        "seconds_of_this_run": {name: round(spent, 1) for name, spent in clock.items()},
    }
    report.write_json(workdir / "summary.json", summary)
    drawn = plots.plot_run(records, workdir / "plots")
    final = {key: value for key, value in evals[-1].items() if key not in ("step", "kind")}
    print(report.page("Done.", final | {"wall_s": round(wall, 1), "summary": workdir / "summary.json"}))
    print("Plots:", *drawn)


def _command() -> str:
    return " ".join(["python -m leanformer.train", *sys.argv[1:]])


WORKDIR = flags.DEFINE_string("workdir", None, "Folder of the run: records, checkpoints, plots.", required=True)


def main() -> int:
    c = cli.config()
    try:
        return train(c, Path(WORKDIR.value).expanduser())
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        raise TrainingError(out_of_memory(c)) from error


def out_of_memory(c: ConfigDict) -> str:
    """What to change, with values that fit this config."""
    parts = next((n for n in range(2 * c.accumulate, c.batch_size + 1) if c.batch_size % n == 0), c.batch_size)
    knobs = [f"--config.accumulate={parts}: smaller micro-batches, the same result"]
    if c.model.remat != "block":
        knobs.append("--config.model.remat=block: activations of one block at a time, about a third slower")
    knobs.append(f"--config.mesh.fsdp={jax.device_count()}: parameters and moments split over the devices")
    knobs.append(f"--config.batch_size={max(1, c.batch_size // 2)}: another recipe; lower optim.lr with it")
    return "Out of device memory. Change one of these, the first that you can:\n  " + "\n  ".join(knobs[:3])


if __name__ == "__main__":
    cli.config_flag()
    cli.run(main)
