"""Startup summary, warnings, final report and summary.json of a training run."""

import os
import socket
import statistics
import sys
from collections.abc import Mapping
from typing import Any

import jax
from ml_collections import ConfigDict

from leanformer import data, tasks
from leanformer.config import Intervals
from leanformer.config.rules import LENGTHS
from leanformer.costs import count, hardware
from leanformer.costs.memory import memory_limit, peak_memory
from leanformer.quantities import find
from leanformer.runtime import multihost, text
from leanformer.training import progress, restoring, run_files
from leanformer.training.run import Run
from leanformer.training.state import TrainState


def start(run: Run, compiled: Any) -> str:
    """Return the startup summary of a run: model, data, batch, length, optimizer, devices, memory and precision.

    Args:
        run: run to train.
        compiled: its compiled training step, for the peak memory.
    """
    c, mesh, model, score = run.config, run.model.mesh, run.model, run.task.objective.score
    forward, training = run.flops_per_example
    memory, device = peak_memory(compiled), jax.local_devices()[0]
    limit = memory_limit(device)
    shape = ", ".join(f"{key} {value}" for key, value in c.model.items() if key != "name" and value is not None)
    devices = f"{mesh.size} x {device.device_kind} ({device.platform})"
    rows = {
        "model": f"{c.model.name}: {shape}",
        "parameters": _format_parameters(run),
        "FLOPs per example": f"{count.format_number(forward)} forward, {count.format_number(training)} training",
        "peak memory": f"{count.format_number(memory)}B per device (compiled step)"
        + (f"; device limit {count.format_number(limit)}B" if limit else ""),
        "data": f"{c.data.name}: {_format_examples(run.source)} training examples, {_format_held_out(run.held_out)}",
        **({"classes": data.quote(names)} if (names := tasks.class_names(run.source)) else {}),
        "batch": f"{c.batch_size} global = {_format_batch(run)}",
        "length": _format_length(run),
        "optimizer": _format_optimizer(c.optim),
        "devices": f"{devices}; mesh: {_format_axes(mesh)}; {jax.process_count()} process(es)",
        "precision": precision(c.dtype, device),
        "attention": f"{model.backend} ({model.backend_reason})",
        **run.task.data.notes(),
        "score": f"{find(score.name).label}, {'higher' if score.higher else 'lower'} is better",
        "compiled in": f"{run.timer.seconds()['compile']:.1f} s",
    }
    return progress.format_page("leanformer", rows)


def warn_intervals(c: ConfigDict, intervals: Intervals) -> None:
    """Print a warning to stderr for each interval (eval.every, ...) that is longer than the run.

    Args:
        c: config, with the values to show.
        intervals: length and intervals of the run in steps.
    """
    once = "or set it to 0 if once is enough"
    rows = []
    for section, steps, consequence, otherwise in (
        ("eval", intervals.eval[""], "the run is evaluated once, at its end", once),
        ("probe", intervals.probe, "conditioning is measured only at step 0 and at the end", "or set it to 0"),
        ("checkpoint", intervals.checkpoint, "only the best and the last state are saved", once),
    ):
        name = "every_epochs" if c[section].every_epochs else "every"
        rows.append((f"{section}.{name}", c[section][name], steps, consequence, otherwise))
    for name, more in c.eval.more.items():
        consequence = f"split {more.split} is evaluated once, at the end"
        rows.append((f"eval.more.{name}.every", more.every, more.every, consequence, once))
    for key, value, steps, consequence, otherwise in rows:
        if steps > intervals.total:
            warning = f"{key}={value} exceeds the {intervals.total:,} steps of this run: {consequence}"
            print(f"WARNING: {warning}. Lower {key}, {otherwise}.", file=sys.stderr, flush=True)


def _format_examples(source: data.Source) -> str:
    size = data.size(source)
    return "unlimited" if size is None else f"{size:,}"


def _format_held_out(sources: Mapping[str, data.Source]) -> str:
    parts = (
        f"{_format_examples(source)} evaluation examples{f' ({name})' * bool(name)}" for name, source in sources.items()
    )
    return ", ".join(parts)


def _format_length(run: Run) -> str:
    """Return the length of a run in steps, with steps per epoch, tokens and warm-up steps."""
    seen, batch = run.examples_and_tokens_seen(run.intervals.total), run.config.batch_size
    parts = [f"{run.intervals.total:,} steps"]
    parts += [f"{run.examples / batch:.1f} steps/epoch"] if run.examples else []
    parts += [f"{seen['tokens_seen']:,} tokens"] if "tokens_seen" in seen else []
    return ", ".join([*parts, f"{run.schedule.warmup} warm-up steps"])


def _format_parameters(run: Run) -> str:
    total, trained = count.parameters(run.state.params), run.freezing.count(run.state.params)
    return f"{total:,}" if trained == total else f"{total:,}, of which {trained:,} are trained"


def _format_optimizer(o: ConfigDict) -> str:
    return f"{o.name}, peak learning rate {o.lr:g}, {o.schedule} schedule"


def precision(dtype: str, device: Any) -> str:
    """Return a text with the data types of activations and parameters.

    A note is added for a GPU without bfloat16 units, and for one that multiplies float32 matrices in TF32.

    Args:
        dtype: data type of the activations, "float32" or "bfloat16".
        device: JAX device that trains.
    """
    note = hardware.without_bfloat16(device) if dtype == "bfloat16" else None
    if dtype == "float32" and hardware.has_tensor_float32(device) and not jax.config.jax_default_matmul_precision:
        note = "Matmuls in TF32, with 10 bits of mantissa; JAX_DEFAULT_MATMUL_PRECISION=highest keeps all 23"
    return f"{dtype} activations, float32 parameters" + (f". {note}" if note else "")


def dry_run(run: Run) -> str:
    """Return the page of a dry run: processes, devices, mesh, per-device batch, and the step to start or resume from.

    All processes must call it; each contributes its host and devices.
    """
    from leanformer.runtime import distributed  # needed only here

    c, mesh, model = run.config, run.model.mesh, run.model
    local = jax.local_devices()
    mine = f"{len(local)} x {local[0].device_kind} ({local[0].platform}) on {socket.gethostname()}"
    steps = restoring.steps_in(run.workdir / "checkpoints")
    origin = c.init_from.path or f"scratch, seed {c.seed}"
    rows: dict[str, Any] = distributed.describe()
    rows |= {f"  process {i}": theirs for i, theirs in enumerate(multihost.all_gather_host(mine))}
    per_process = c.batch_size // multihost.count()
    if steps:
        origin = f"step {steps[-1]}, if its files are intact (checkpoints: {', '.join(map(str, steps))})"
    rows |= {
        "devices": f"{mesh.size}; mesh: {_format_axes(mesh)}",
        "batch": f"{c.batch_size} global = {per_process} read per process = {_format_batch(run)}",
        "length": _format_length(run),
        "attention": f"{model.backend} ({model.backend_reason})",
        "XLA_FLAGS": os.environ.get("XLA_FLAGS", ""),
        "workdir": run.workdir,
        "would start from": origin,
    }
    return progress.format_page("Dry run: nothing was trained or written.", rows)


def _format_batch(run: Run) -> str:
    c, shards = run.config, run.model.placement.shards
    examples, tensor = c.batch_size // c.accumulate // shards, run.model.mesh.shape["tensor"]
    where = f"per device x {shards} devices" if tensor == 1 else f"per group of {tensor} devices x {shards} groups"
    return f"{examples} {where} x {c.accumulate} gradient accumulation steps"


def _format_axes(mesh: jax.sharding.Mesh) -> str:
    return ", ".join(f"{axis} {size}" for axis, size in mesh.shape.items())


def origin(run: Run) -> str:
    """Return the line about the step, or the weights, from which a restored run continues, with its workdir."""
    path = run.config.init_from.path
    fresh = f"Starting from the weights of {path}" if path else "Starting from scratch"
    return f"Resuming from step {run.start} in {run.workdir}." if run.start else f"{fresh} in {run.workdir}."


def complete(run: Run) -> str:
    """Return the message about a run that has nothing left to train, with the config key that makes it longer."""
    more = f"Raise {next(key for key in LENGTHS if run.config.get(key))} to train longer."
    return f"This run is complete: {run.start} steps in {run.workdir}. {more}"


def summarise(run: Run, state: TrainState, memory: int) -> None:
    """Write summary.json and the plots of a finished run to its workdir, and print its final scores and their paths.

    Call this in process 0 only. The run must have been evaluated.

    Args:
        run: finished run.
        state: its final state.
        memory: bytes per device that the training step needs.
    """
    workdir, records, step = run.workdir, run.recorder.records, int(state.step)
    seconds, score = run.timer.seconds(), run.checkpoints.score
    evaluations = [record for record in records if record["kind"] == "eval"]
    speeds = [record["examples_per_s"] for record in records if "examples_per_s" in record]
    forward, training = run.flops_per_example
    wall = sum(seconds.values())
    summary = {
        "steps": step,
        **run.examples_and_tokens_seen(step),
        "final": evaluations[-1],
        "score": score.record(evaluations[-1][score.name]),
        "best_checkpoint": run.checkpoints.best(),
        "params": count.parameters(run.state.params),
        "trained_params": run.freezing.count(run.state.params),
        "forward_flops": forward,
        "train_flops": training,
        "memory_bytes": memory,
        "skipped_steps": int(state.skipped),
        "unreadable_examples": len(run.corrupt.seen),
        "examples_per_s": statistics.median(speeds) if speeds else None,
        "wall_s": round(wall, 1),
        "probe_share": round(seconds.get("probe", 0.0) / wall, 4),
        "goodput": round(seconds["steps"] / wall, 4),
        "seconds": {name: round(spent, 1) for name, spent in seconds.items()},
    }
    run_files.write_json(workdir / "summary.json", summary)
    from leanformer.reports import plots  # imports matplotlib, which is slow and needed only here

    drawn = plots.plot_run(records, workdir / "plots")
    final = progress.format_scores(
        {key: value for key, value in evaluations[-1].items() if key not in ("step", "kind")}
    )
    phases = ", ".join(f"{name} {spent:.1f}" for name, spent in seconds.items())
    goodput = f"{100 * seconds['steps'] / wall:.1f} % ({phases} s)"
    rows = final | {find("wall_s").axis: round(wall, 1), find("goodput").label: goodput}
    print(progress.format_page("Done.", rows | {"summary": workdir / "summary.json"}))
    names = ", ".join(path.name for path in drawn)
    print(text.wrap(f"Plots in {workdir / 'plots'}: {names}."))
