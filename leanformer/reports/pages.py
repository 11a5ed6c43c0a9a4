"""Startup summary, final report and summary.json of a training run, and messages on memory."""

import contextlib
import os
import socket
import statistics
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
from ml_collections import ConfigDict

from leanformer import data, programs, tasks
from leanformer.config import interval
from leanformer.costs import count, hardware, oom_suggestions
from leanformer.errors import TrainingError
from leanformer.runtime import distributed, files, multihost
from leanformer.runtime import mesh as meshes
from leanformer.training import loggers, progress, restoring, run_files
from leanformer.training.run import Run
from leanformer.training.state import TrainState
from leanformer.training.timer import Timer
from leanformer.training.train_setup import TrainSetup


def start(
    setup: TrainSetup, train: data.Source, held_out: Mapping[str, data.Source], compiled: Any, timer: Timer
) -> str:
    """Return the startup summary: model, data, batch, length, optimizer, devices, memory and precision."""
    c, mesh, model, score = setup.config, setup.mesh, setup.model, setup.task.objective.score
    forward, training = setup.flops_per_example
    memory, device = programs.peak_memory(compiled), jax.local_devices()[0]
    limit = _get_memory_limit(device)
    shape = ", ".join(f"{key} {value}" for key, value in c.model.items() if key != "name" and value is not None)
    devices = f"{mesh.size} x {device.device_kind} ({device.platform})"
    rows = {
        "model": f"{c.model.name}: {shape}",
        "parameters": _format_parameters(setup),
        "FLOPs per example": f"{count.format_number(forward)} forward, {count.format_number(training)} training",
        "peak memory": f"{count.format_number(memory)}B per device (compiled step)"
        + (f"; device limit {count.format_number(limit)}B" if limit else ""),
        "data": f"{c.data.name}: {_format_examples(train)} training examples, {_format_held_out(held_out)}",
        **({"classes": data.quote(names)} if (names := tasks.class_names(train)) else {}),
        "batch": f"{c.batch_size} global = {_format_batch(setup)}",
        "length": _format_length(setup),
        "optimizer": _format_optimizer(c.optim),
        "devices": f"{devices}; mesh: {_format_axes(mesh)}; {jax.process_count()} process(es)",
        "precision": precision(c.dtype, device),
        "attention": f"{model.backend} ({model.backend_reason})",
        **setup.task.data.notes(),
        "score": f"{score.name}, {'higher' if score.higher else 'lower'} is better",
        "compiled in": f"{timer.seconds()['compile']:.1f} s",
    }
    return progress.format_page("leanformer", rows)


def warn_intervals(c: ConfigDict, total: int, examples: int | None) -> None:
    """Warn about intervals (eval.every, ...) that are longer than the run: `total` steps, `examples` per epoch."""
    once = "or set it to 0 if once is enough"
    rows = []
    for section, consequence, otherwise in (
        ("eval", "the run is evaluated once, at its end", once),
        ("probe", "conditioning is measured only at step 0 and at the end", "or set it to 0"),
        ("checkpoint", "only the best and the last state are saved", once),
    ):
        name = "every_epochs" if c[section].every_epochs else "every"
        steps = interval(c, section, examples)
        rows.append((f"{section}.{name}", c[section][name], steps, consequence, otherwise))
    for name, more in c.eval.more.items():
        consequence = f"split {more.split} is evaluated once, at the end"
        rows.append((f"eval.more.{name}.every", more.every, more.every, consequence, once))
    for key, value, steps, consequence, otherwise in rows:
        if steps > total:
            warning = f"{key}={value} exceeds the {total:,} steps of this run: {consequence}"
            print(f"WARNING: {warning}. Lower {key}, {otherwise}.", file=sys.stderr, flush=True)


def _format_examples(source: data.Source) -> str:
    size = data.size(source)
    return "unlimited" if size is None else f"{size:,}"


def _format_held_out(sources: Mapping[str, data.Source]) -> str:
    parts = (
        f"{_format_examples(source)} evaluation examples{f' ({name})' * bool(name)}" for name, source in sources.items()
    )
    return ", ".join(parts)


def _format_length(setup: TrainSetup) -> str:
    """Return the length of a run in steps, with steps per epoch, tokens and warm-up steps."""
    seen, batch = setup.examples_and_tokens_seen(setup.total), setup.config.batch_size
    parts = [f"{setup.total:,} steps"]
    parts += [f"{setup.examples / batch:.1f} steps/epoch"] if setup.examples else []
    parts += [f"{seen['tokens_seen']:,} tokens"] if "tokens_seen" in seen else []
    return ", ".join([*parts, f"{setup.schedule.warmup} warm-up steps"])


def _format_parameters(setup: TrainSetup) -> str:
    total, trained = count.parameters(setup.state.params), setup.trained_parameters
    return f"{total:,}" if trained == total else f"{total:,}, of which {trained:,} are trained"


def _format_optimizer(o: ConfigDict) -> str:
    parts = [f"{o.name}, peak learning rate {o.lr:g}, {o.schedule} schedule"]
    parts += [f"{o.head_lr:g} for the head"] if o.head_lr is not None else []
    parts += [f"layer-wise decay {o.layer_decay:g}"] if o.layer_decay != 1 else []
    return "; ".join(parts)


def precision(dtype: str, device: Any) -> str:
    """Return the data types of activations and parameters, with a note for GPUs without bfloat16 units."""
    without = hardware.without_bfloat16(device) if dtype == "bfloat16" else None
    return f"{dtype} activations, float32 parameters" + (f". {without}" if without else "")


def dry_run(setup: TrainSetup, workdir: Path) -> str:
    """Return the page of a dry run: processes, devices, mesh, per-device batch, and the step to start or resume from.

    All processes must call it; each contributes its host and devices.
    """
    c, mesh, model = setup.config, setup.mesh, setup.model
    local = jax.local_devices()
    mine = f"{len(local)} x {local[0].device_kind} ({local[0].platform}) on {socket.gethostname()}"
    steps = restoring.steps_in(workdir / "checkpoints")
    origin = c.init_from.path or f"scratch, seed {c.seed}"
    rows: dict[str, Any] = distributed.describe()
    rows |= {f"  process {i}": theirs for i, theirs in enumerate(multihost.all_gather_host(mine))}
    per_process = c.batch_size // multihost.count()
    rows |= {
        "devices": f"{mesh.size}; mesh: {_format_axes(mesh)}",
        "batch": f"{c.batch_size} global = {per_process} read per process = {_format_batch(setup)}",
        "length": _format_length(setup),
        "attention": f"{model.backend} ({model.backend_reason})",
        "XLA_FLAGS": os.environ.get("XLA_FLAGS", ""),
        "workdir": workdir,
        "would start from": f"step {steps[-1]} (checkpoints: {', '.join(map(str, steps))})" if steps else origin,
    }
    return progress.format_page("Dry run: nothing was trained or written.", rows)


def _format_batch(setup: TrainSetup) -> str:
    c, shards = setup.config, meshes.count_batch_shards(setup.mesh)
    examples, tensor = c.batch_size // c.accumulate // shards, setup.mesh.shape["tensor"]
    where = f"per device x {shards} devices" if tensor == 1 else f"per group of {tensor} devices x {shards} groups"
    return f"{examples} {where} x {c.accumulate} gradient accumulation steps"


def _format_axes(mesh: jax.sharding.Mesh) -> str:
    return ", ".join(f"{axis} {size}" for axis, size in mesh.shape.items())


def summarise(run: Run, state: TrainState, memory: int, *, runs: int = 1) -> None:
    """Write summary.json and the plots, and print their paths.

    `memory` is what the training step needs per device, in bytes. If the program trains several `runs`, memory and
    seconds are the totals of all of them.
    """
    setup, workdir, records, step = run.setup, run.workdir, run.recorder.records, int(state.step)
    seconds, score = run.timer.seconds(), run.checkpoints.score
    evaluations = [record for record in records if record["kind"] == "eval"]
    speeds = [record["examples_per_s"] for record in records if record["kind"] == "train"]
    forward, training = setup.flops_per_example
    wall = sum(seconds.values())
    summary = {
        "steps": step,
        **setup.examples_and_tokens_seen(step),
        "stopped_early": step < setup.total,
        "final": evaluations[-1],
        "score": score.record(evaluations[-1][score.name]),
        "best_checkpoint": run.checkpoints.best(),
        "params": count.parameters(setup.state.params),
        "trained_params": setup.trained_parameters,
        "forward_flops": forward,
        "train_flops": training,
        "memory_bytes": memory,
        "vmapped_runs": runs,
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

    with loggers.DRAWING, files.name_file_in_errors(workdir / "plots"):
        drawn = plots.plot_run(records, workdir / "plots")
    final = progress.round_values({key: value for key, value in evaluations[-1].items() if key not in ("step", "kind")})
    phases = ", ".join(f"{name} {spent:.1f}" for name, spent in seconds.items())
    goodput = f"{100 * seconds['steps'] / wall:.1f} % ({phases} s)"
    rows = final | {"wall_s": round(wall, 1), "goodput": goodput, "summary": workdir / "summary.json"}
    print(progress.format_page("Done.", rows))
    print("Plots:", *drawn)


def out_of_memory(c: ConfigDict, problem: str = "Out of device memory.", *, runs: int = 1) -> str:
    """Return a message with settings that need less memory and are valid for this config and the attached devices."""
    settings = oom_suggestions.suggest(c, 1 if runs > 1 else jax.device_count())
    options = [*map(str, settings), "use a smaller model, or more devices"]
    if runs > 1:  # runs of a sweep, on one device
        flags = [option.replace("--config.", "--set=") for option in options]
        options = [
            f"train fewer than {runs} runs at a time: fewer seeds or configs per command",
            "without --vmap: one run at a time",
            *flags,
        ]
    return f"{problem} Change the first of these that you can:\n  " + "\n  ".join(options[:3])


def check_memory(c: ConfigDict, compiled: Any, device: Any, *, runs: int = 1) -> None:
    """Raise TrainingError if the compiled training step needs more memory than the device has. Call before step 1."""
    peak, limit = programs.peak_memory(compiled), _get_memory_limit(device)
    if limit and peak > limit:
        human = count.format_number
        problem = f"The compiled step{f' of {runs} runs' * (runs > 1)} needs {human(float(peak))}B per device, "
        problem += f"{human(float(peak - limit))}B more than the {human(float(limit))}B available."
        raise TrainingError(out_of_memory(c, problem, runs=runs))


@contextlib.contextmanager
def memory_explained(c: ConfigDict, *, runs: int = 1) -> Iterator[None]:
    """Raise TrainingError with settings to try in place of JAX's error if a device is out of memory."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        raise TrainingError(out_of_memory(c, runs=runs)) from error


def _get_memory_limit(device: Any) -> int | None:
    return (device.memory_stats() or {}).get("bytes_limit")
