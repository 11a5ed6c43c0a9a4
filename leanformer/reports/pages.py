"""Pages of a training run: start, dry run, and final report with summary.json."""

import math
import os
import socket
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

from leanformer import data, tasks, text
from leanformer.config.rules import LENGTHS
from leanformer.costs import count, devices
from leanformer.costs.devices import memory_limit
from leanformer.runtime import multihost
from leanformer.runtime.mesh import count_batch_shards
from leanformer.runtime.timing import training_seconds
from leanformer.text import lookup
from leanformer.training import run_files
from leanformer.training.checkpoint import steps_in
from leanformer.training.step import TrainState
from leanformer.training.train_setup import Setup
from leanformer.training.trainer import Trainer


def start(trainer: Trainer, memory: int) -> str:
    """Return the start page of a run, whose training step needs `memory` bytes per device."""
    setup = trainer.setup
    config, model, score = setup.config, setup.model, trainer.checkpoints.score
    device, optim = jax.local_devices()[0], config.optim
    limit = memory_limit(device)
    shape = ", ".join(f"{key} {value}" for key, value in config.model.items() if key != "name" and value is not None)
    total, trained = count.parameters(setup.state.params), setup.freezing.count(setup.state.params)
    names, compiling = tasks.class_names(trainer.source), trainer.timer.seconds()["compile"]
    rows = {
        "model": f"{config.model.name}: {shape}",
        "parameters": f"{total:,}" + (f", of which {trained:,} are trained" if trained < total else ""),
        "peak memory": f"{count.format_number(memory)}B per device (compiled step)"
        + (f"; device limit {count.format_number(limit)}B" if limit else ""),
        "data": f"{config.data.name}: {_format_examples(trainer.source)} training examples, "
        + _format_held_out(trainer.held_out),
        **({"classes": data.quote(names)} if names else {}),
        "batch": f"{config.batch_size} global = {_format_batch(setup)}",
        "length": _format_length(setup),
        "events": _format_events(setup),
        "optimizer": f"{optim.name}, peak learning rate {optim.lr:g}, {optim.schedule} schedule",
        "devices": f"{model.mesh.size} x {device.device_kind} ({device.platform}); mesh: {_format_axes(model.mesh)}; "
        f"{jax.process_count()} process{'es' * (jax.process_count() > 1)}",
        "precision": precision(config.dtype, device),
        "attention": f"{model.backend} ({model.backend_reason})",
        **setup.task.data.notes(),
        "score": f"{lookup(score.name).label}, {'higher' if score.higher else 'lower'} is better",
        "compiled in": f"{compiling:.1f} s{', with earlier attempts' if trainer.first_step else ''}",
    }
    return text.page("leanformer", rows)


def _format_examples(source: data.Source) -> str:
    size = data.size(source)
    return "unlimited" if size is None else f"{size:,}"


def _format_held_out(sources: Mapping[str, Any]) -> str:
    parts = (
        f"{_format_examples(source)} evaluation examples{f' ({name})' * bool(name)}" for name, source in sources.items()
    )
    return ", ".join(parts)


def _format_length(setup: Setup) -> str:
    config, total = setup.config, setup.intervals.total
    parts = [f"{total:,} steps"]
    parts += [f"{setup.examples / config.batch_size:.1f} steps/epoch"] if setup.examples else []
    parts += [f"{total * config.batch_size * config.model.max_length:,} tokens"] if "total_tokens" in config else []
    return ", ".join([*parts, f"{setup.schedule.warmup} warm-up steps"])


def _format_events(setup: Setup) -> str:
    every = setup.intervals
    steps = {"evaluation": every.eval[""], "probe": every.probe, "checkpoint": every.checkpoint}
    shown = {name: f"every {n:,} steps" if 0 < n < every.total else "at the end" for name, n in steps.items()}
    shown |= {} if every.probe else {"probe": "off"}
    return ", ".join(f"{name} {when}" for name, when in shown.items())


def precision(dtype: str, device: Any) -> str:
    """Return the data types as text, with a note for a GPU without bfloat16 units, or with TF32 for float32."""
    note = devices.without_bfloat16(device) if dtype == "bfloat16" else None
    if dtype == "float32" and devices.has_tensor_float32(device) and not jax.config.jax_default_matmul_precision:
        note = "Matmuls in TF32, with 10 bits of mantissa; JAX_DEFAULT_MATMUL_PRECISION=highest keeps all 23"
    return f"{dtype} activations, float32 parameters" + (f". {note}" if note else "")


def dry_run(setup: Setup, workdir: Path) -> str:
    """Return the page of a dry run. All processes must call it; each contributes its host and devices."""
    config, model, local = setup.config, setup.model, jax.local_devices()
    mine = f"{len(local)} x {local[0].device_kind} ({local[0].platform}) on {socket.gethostname()}"
    steps = steps_in(workdir / "checkpoints")
    origin = config.init_from.path or f"scratch, seed {config.seed}"
    if steps:
        origin = f"step {steps[-1]}, if its files are intact (checkpoints: {', '.join(map(str, steps))})"
    rows: dict[str, Any] = multihost.describe()
    rows |= {f"  process {i}": theirs for i, theirs in enumerate(multihost.all_gather_host(mine))}
    per_process = config.batch_size // multihost.count()
    rows |= {
        "devices": f"{model.mesh.size}; mesh: {_format_axes(model.mesh)}",
        "batch": f"{config.batch_size} global = {per_process} read per process = {_format_batch(setup)}",
        "length": _format_length(setup),
        "events": _format_events(setup),
        "attention": f"{model.backend} ({model.backend_reason})",
        "XLA_FLAGS": os.environ.get("XLA_FLAGS", ""),
        "workdir": workdir,
        "would start from": origin,
    }
    return text.page("Dry run: nothing was trained, and the workdir was not written.", rows)


def _format_batch(setup: Setup) -> str:
    config, shards, tensor = setup.config, count_batch_shards(setup.model.mesh), setup.model.mesh.shape["tensor"]
    examples = config.batch_size // config.accumulate // shards
    where = f"per device x {shards} devices" if tensor == 1 else f"per group of {tensor} devices x {shards} groups"
    return f"{examples} {where} x {config.accumulate} gradient accumulation steps"


def _format_axes(mesh: jax.sharding.Mesh) -> str:
    return ", ".join(f"{axis} {size}" for axis, size in mesh.shape.items())


def origin(trainer: Trainer) -> str:
    """Describe where training starts: step, initial weights, workdir."""
    path, workdir = trainer.setup.config.init_from.path, trainer.workdir
    if trainer.first_step:
        return f"Resuming from step {trainer.first_step} in {workdir}.{_new_rate(trainer)}"
    return f"Starting from {f'the weights of {path}' if path else 'scratch'} in {workdir}."


def _new_rate(trainer: Trainer) -> str:
    """Return a sentence if the schedule has another learning rate than the newest training record, else ""."""
    records = [record for record in trainer.recorder.records if record["kind"] == "train"]
    if not records:
        return ""
    step, was, total = records[-1]["step"], records[-1]["lr"], trainer.setup.intervals.total
    now = float(trainer.setup.schedule.learning_rate(step - 1))
    if math.isclose(was, now, rel_tol=0.01):
        return ""
    return f" The learning rate was {was:.2g} at step {step}; the schedule of {total:,} steps has {now:.2g} there."


def complete(trainer: Trainer) -> str:
    """Return the message about a run that has nothing left to train."""
    key = next(key for key in LENGTHS if trainer.setup.config.get(key))
    done = f"This run is complete: {trainer.first_step} steps in {trainer.workdir}."
    return f"{done} Raise {key} to train longer."


def summarise(trainer: Trainer, state: TrainState, memory: int) -> None:
    """Write summary.json and the plots of a finished run, in process 0, and print its final scores."""
    setup, workdir, records, step = trainer.setup, trainer.workdir, trainer.recorder.records, int(state.step)
    seconds, score = trainer.timer.seconds(), trainer.checkpoints.score
    evaluations = [record for record in records if record["kind"] == "eval"]
    speeds = [record["examples_per_s"] for record in records if "examples_per_s" in record]
    forward, training = setup.flops_per_example
    wall, useful = sum(seconds.values()), training_seconds(seconds)
    summary = {
        "steps": step,
        **trainer.count_seen(step),
        "final": evaluations[-1],
        "score": score.record(evaluations[-1][score.name]),
        "best_checkpoint": trainer.checkpoints.best(),
        "params": count.parameters(setup.state.params),
        "trained_params": setup.freezing.count(setup.state.params),
        "forward_flops": forward,
        "train_flops": training,
        "memory_bytes": memory,
        "skipped_steps": int(state.skipped),
        "unreadable_examples": len(trainer.unreadable.seen),
        "examples_per_s": statistics.median(speeds) if speeds else None,
        "wall_s": round(wall, 1),
        "probe_share": round(seconds.get("probe", 0.0) / wall, 4),
        "goodput": round(useful / wall, 4),
        "seconds": {name: round(spent, 1) for name, spent in seconds.items()},
    }
    run_files.write_json(workdir / "summary.json", summary)
    from leanformer.reports import plots  # imports matplotlib, which is slow and needed only here

    drawn = plots.plot_run(records, workdir / "plots")
    final = text.format_scores({key: value for key, value in evaluations[-1].items() if key not in ("step", "kind")})
    phases = ", ".join(f"{name} {spent:.1f}" for name, spent in seconds.items())
    goodput = f"{100 * useful / wall:.1f} % ({phases} s)"
    rows = final | {lookup("wall_s").axis: round(wall, 1), lookup("goodput").label: goodput}
    print(text.page("Done.", rows | {"summary": workdir / "summary.json"}))
    print(text.wrap(f"Plots in {workdir / 'plots'}: {', '.join(path.name for path in drawn)}."))
