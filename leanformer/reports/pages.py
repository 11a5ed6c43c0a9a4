"""What a training run prints at its start and at its end, and writes as its summary."""

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

from leanformer import data, tasks
from leanformer.costs import count, hardware, remedies
from leanformer.errors import TrainingError
from leanformer.runtime import distributed, files, peers
from leanformer.runtime import mesh as meshes
from leanformer.training import loggers, report, restoring
from leanformer.training.run import Run
from leanformer.training.state import TrainState
from leanformer.training.timer import Timer
from leanformer.training.train_setup import TrainSetup


def start(
    setup: TrainSetup, train: data.Source, held_out: Mapping[str, data.Source], compiled: Any, timer: Timer
) -> str:
    """The start-up page: what will be trained, on what, where, and what it will take."""
    c, mesh, model = setup.config, setup.mesh, setup.model
    forward, training = setup.flops_per_example
    memory, device = count.peak_memory(compiled), jax.local_devices()[0]
    limit = _limit(device)
    shape = ", ".join(f"{key} {value}" for key, value in c.model.items() if key != "name" and value is not None)
    devices = f"{mesh.size} x {device.device_kind} ({device.platform})"
    rows = {
        "model": f"{c.model.name}: {shape}",
        "parameters": _parameters(setup),
        "FLOPs per example": f"{count.human(forward)} forward, {count.human(training)} training",
        "peak memory": f"{count.human(memory)}B a device, by the step compiled for it"
        + (f"; the device has {count.human(limit)}B" if limit else ""),
        "data": f"{c.data.name}: {_examples(train)} to train on, {_held_out(held_out)}",
        **({"classes": data.shown(names)} if (names := tasks.names(train)) else {}),
        "batch": f"{c.batch_size} global = {_share(setup)}",
        "length": _length(setup),
        "optimizer": _optimizer(c.optim),
        "devices": f"{devices}; mesh: {_axes(mesh)}; {jax.process_count()} process(es)",
        "precision": precision(c.dtype, device),
        "attention": f"{model.backend} ({model.backend_reason})",
        **setup.task.data.notes(),
        "compiled in": f"{timer.seconds()['compile']:.1f} s",
    }
    return report.page("leanformer", rows)


def warn_intervals(c: ConfigDict, total: int) -> None:
    """Warn of intervals that are longer than the run."""
    once = "or set it to 0 if once is enough"
    rows = {
        "eval.every": (c.eval.every, "the run is evaluated once, at its end", once),
        "probe.every": (c.probe.every, "conditioning is measured at step 0 and at the end alone", "or to 0 for never"),
        "checkpoint.every": (c.checkpoint.every, "only the best and the last state are saved", once),
    }
    for name, more in c.eval.more.items():
        rows[f"eval.more.{name}.every"] = more.every, f"split {more.split} is evaluated once, at the end", once
    for key, (every, consequence, otherwise) in rows.items():
        if every > total:
            warning = f"{key}={every} exceeds the {total:,} steps of this run: {consequence}"
            print(f"WARNING: {warning}. Lower {key}, {otherwise}.", file=sys.stderr, flush=True)


def _examples(source: data.Source) -> str:
    known = data.size(source)
    return "endless" if known is None else f"{known:,}"


def _held_out(sources: Mapping[str, data.Source]) -> str:
    named = (f"{_examples(source)} to evaluate on{f' as {name}' * bool(name)}" for name, source in sources.items())
    return ", ".join(named)


def _length(setup: TrainSetup) -> str:
    """Return the length of a run in steps, and in whatever else it can be measured in."""
    seen, batch = setup.seen(setup.total), setup.config.batch_size
    parts = [f"{setup.total:,} steps"]
    parts += [f"{setup.examples / batch:.1f} per epoch"] if setup.examples else []
    parts += [f"{seen['tokens_seen']:,} tokens"] if "tokens_seen" in seen else []
    return ", ".join([*parts, f"{setup.schedule.warmup} of warm-up"])


def _parameters(setup: TrainSetup) -> str:
    total, trained = count.parameters(setup.state.params), setup.trained_parameters
    return f"{total:,}" if trained == total else f"{total:,}, of which {trained:,} are trained"


def _optimizer(o: ConfigDict) -> str:
    said = [f"{o.name}, learning rate {o.lr:g} at its peak, {o.schedule}"]
    said += [f"{o.head_lr:g} for the head"] if o.head_lr is not None else []
    said += [f"times {o.layer_decay:g} for each layer down"] if o.layer_decay != 1 else []
    return "; ".join(said)


def precision(dtype: str, device: Any) -> str:
    """What is computed in what, and on a GPU without bfloat16 units what becomes of it."""
    without = hardware.without_bfloat16(device) if dtype == "bfloat16" else None
    return f"{dtype} activations, float32 parameters" + (f". {without}" if without else "")


def dry_run(setup: TrainSetup, workdir: Path) -> str:
    """What a launcher and the environment came to: processes, devices, mesh, shares of the batch, where it would start.

    All processes must call it; each contributes its host and devices.
    """
    c, mesh, model = setup.config, setup.mesh, setup.model
    local = jax.local_devices()
    mine = f"{len(local)} x {local[0].device_kind} ({local[0].platform}) on {socket.gethostname()}"
    found = restoring.steps_in(workdir / "checkpoints")
    begin = c.init_from.path or f"scratch, seed {c.seed}"
    rows = distributed.describe()
    rows |= {f"  process {i}": theirs for i, theirs in enumerate(peers.each(mine))}
    rows |= {
        "devices": f"{mesh.size}; mesh: {_axes(mesh)}",
        "batch": f"{c.batch_size} global = {c.batch_size // peers.count()} read by each process = {_share(setup)}",
        "length": _length(setup),
        "attention": f"{model.backend} ({model.backend_reason})",
        "XLA_FLAGS": os.environ.get("XLA_FLAGS", ""),
        "workdir": workdir,
        "would go on from": f"step {found[-1]} (checkpoints: {', '.join(map(str, found))})" if found else begin,
    }
    return report.page("Dry run: nothing was trained or written.", rows)


def _share(setup: TrainSetup) -> str:
    c, shares = setup.config, meshes.shares(setup.mesh)
    each, tensor = c.batch_size // c.accumulate // shares, setup.mesh.shape["tensor"]
    where = f"a device x {shares} devices" if tensor == 1 else f"a group of {tensor} devices x {shares} groups"
    return f"{each} {where} x {c.accumulate} accumulated"


def _axes(mesh: jax.sharding.Mesh) -> str:
    return ", ".join(f"{axis} {size}" for axis, size in mesh.shape.items())


def summarise(run: Run, state: TrainState, memory: int, *, runs: int = 1) -> None:
    """Write summary.json and the plots, and print where they are.

    Args:
        run: the run, at its end.
        state: its last state.
        memory: bytes that the training step needs per device.
        runs: number of runs that the program trains; its memory and its seconds are those of all of them.
    """
    setup, workdir, records, step = run.setup, run.workdir, run.recorder.records, int(state.step)
    seconds, score = run.timer.seconds(), run.checkpoints.score
    evaluations = [record for record in records if record["kind"] == "eval"]
    speeds = [record["examples_per_s"] for record in records if record["kind"] == "train"]
    forward, training = setup.flops_per_example
    wall = sum(seconds.values())
    summary = {
        "steps": step,
        **setup.seen(step),
        "stopped_early": step < setup.total,
        "final": evaluations[-1],
        "score": score.record(evaluations[-1][score.name]),
        "best_checkpoint": run.checkpoints.best(),
        "params": count.parameters(setup.state.params),
        "trained_params": setup.trained_parameters,
        "forward_flops": forward,
        "train_flops": training,
        "memory_bytes": memory,
        "together": runs,
        "skipped_steps": int(state.skipped),
        "unreadable_examples": len(run.corrupt.seen),
        "examples_per_s": statistics.median(speeds) if speeds else None,
        "wall_s": round(wall, 1),
        "probe_share": round(seconds.get("probe", 0.0) / wall, 4),
        "goodput": round(seconds["steps"] / wall, 4),
        "seconds": {name: round(spent, 1) for name, spent in seconds.items()},
    }
    report.write_json(workdir / "summary.json", summary)
    from leanformer.reports import plots  # with matplotlib, slow to import, and needed here alone

    with loggers.DRAWING, files.named(workdir / "plots"):
        drawn = plots.plot_run(records, workdir / "plots")
    final = report.rounded({key: value for key, value in evaluations[-1].items() if key not in ("step", "kind")})
    phases = ", ".join(f"{name} {spent:.1f}" for name, spent in seconds.items())
    goodput = f"{100 * seconds['steps'] / wall:.1f} % ({phases} s)"
    rows = final | {"wall_s": round(wall, 1), "goodput": goodput, "summary": workdir / "summary.json"}
    print(report.page("Done.", rows))
    print("Plots:", *drawn)


def out_of_memory(c: ConfigDict, found: str = "Out of device memory.", *, runs: int = 1) -> str:
    """What to change, with values that fit this config and the devices at hand; `runs` are one program."""
    settings = remedies.settings(c, 1 if runs > 1 else jax.device_count())
    knobs = [*map(str, settings), "a smaller model, or more devices"]
    if runs > 1:  # members of a sweep, on one device
        own = [knob.replace("--config.", "--set=") for knob in knobs]
        knobs = [f"fewer than {runs} at a time: fewer seeds or configs a command", "one: without --vmap", *own]
    return f"{found} Change one of these, the first that you can:\n  " + "\n  ".join(knobs[:3])


def check_memory(c: ConfigDict, compiled: Any, device: Any, *, runs: int = 1) -> None:
    """Raises TrainingError, before the first step, if the compiled one needs more than the device can give."""
    peak, limit = count.peak_memory(compiled), _limit(device)
    if limit and peak > limit:
        human = count.human
        found = f"The compiled step{f' of {runs} runs' * (runs > 1)} needs {human(float(peak))}B a device, "
        found += f"{human(float(peak - limit))}B more than the {human(float(limit))}B that it can have."
        raise TrainingError(out_of_memory(c, found, runs=runs))


@contextlib.contextmanager
def memory_explained(c: ConfigDict, *, runs: int = 1) -> Iterator[None]:
    """Raises TrainingError in place of JAX's error where a device has no room left."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        raise TrainingError(out_of_memory(c, runs=runs)) from error


def _limit(device: Any) -> int | None:
    return (device.memory_stats() or {}).get("bytes_limit")
