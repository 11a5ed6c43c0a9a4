"""Speed and memory on one GPU, most useful measurements first, within a time limit.

    python benchmarks/gpu.py --minutes=20 --out=DIR [--only=PATTERN,...]     # shell patterns of names
    python benchmarks/gpu.py --minutes=20 --out=DIR --tiny                   # tiny models, to try it, on a CPU too
    python benchmarks/gpu.py --list

Each measurement runs in a process with a time limit. A failed measurement becomes a row with the reason, and the others
still run. DIR/results.json and DIR/table.md are updated after each row; the same command resumes with missing and
failed measurements. With several GPUs, the first one of CUDA_VISIBLE_DEVICES is used. Logs are in DIR/logs.

peak GB is the peak device memory in 1e9 bytes; compile s the time to trace, lower and compile the training step,
without a cache; MFU the fraction of the vendor's bfloat16 peak. A step that runs out of memory has no values.
"""

import argparse
import contextlib
import fnmatch
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import timing
import zoo

from leanformer import data
from leanformer.costs import hardware
from leanformer.errors import ConfigError
from leanformer.runtime import files, malloc
from leanformer.runtime import mesh as meshes
from leanformer.training import run_files
from leanformer.training.run import Run


RESULT_PREFIX = "RESULT "  # of the last output line of a measurement
ORIGINAL, LEAN, BATCH = "vit_b_12x12", "vit_b_7x16", 256
MEASURED, FAILED, NO_TIME = "measured", "failed", "no time left"
MIN_SECONDS, MAX_SECONDS = 45, 240  # time left that a measurement needs to start, and its time limit
JPEG, LINKS = (500, 375), 40  # typical size of ImageNet files; links to each file, since the content does not matter
STAGES = {"num_heads": (2, 3), "head_dim": (8, 8), "image_size": 32}
BLOCK = {"width": 24, "depth": 2, "num_heads": 3, "head_dim": 8, "mlp_dim": 36, "image_size": 28}
TINY = {  # keys of `model`, by architecture
    "vit": BLOCK | {"patch_size": 7},
    "xcit": BLOCK | {"patch_size": 4, "class_heads": 2, "class_head_dim": 8},
    "tnt": BLOCK
    | {"patch_size": 14, "pixel_stride": 7, "inner_width": 8}
    | {"inner_heads": 2, "inner_head_dim": 8, "inner_mlp_dim": 16},
    "volo": STAGES
    | {"patch_size": 4, "width": (16, 24), "depth": (1, 1), "mlp_dim": (24, 36), "stem_width": 8}
    | {"class_heads": 2, "class_head_dim": 8},
    "davit": STAGES
    | {"channel_head_dim": (4, 4), "width": (8, 16), "depth": (1, 1), "mlp_dim": (16, 24), "window_size": 3},
}


def build(config: str, batch: int, attention: str, tiny: bool) -> Run:
    """Return the training setup of a config in bfloat16."""
    sizes = TINY[config.partition("_")[0]] if tiny else {}
    return timing.build(config, 8 if tiny else batch, "bfloat16", attention, **sizes)


def machine(tiny: bool) -> dict[str, Any]:
    """Describe the device and its throughput of plain bfloat16 matmuls."""
    device, size = jax.devices()[0], 256 if tiny else 8192
    if device.platform == "cpu" and not tiny:
        raise ConfigError("No GPU was found: JAX runs on a CPU. Use --tiny to try the command on it.")
    x = jax.random.normal(jax.random.key(0), (size, size), jnp.bfloat16)
    matmul = jax.jit(jnp.matmul)
    rate = 2 * size**3 / min(timing.time_call(matmul, x, x) for _ in range(10))
    peak = hardware.peak_flops(device)
    facts = {"device": device.device_kind, "runtime": device.client.platform_version.replace("\n", " ")}
    facts |= {"products TFLOP/s": round(rate / 1e12, 1), "share of peak": peak and round(rate / peak, 3), "tiny": tiny}
    return run_files.provenance() | facts


def train(config: str, batch: int, attention: str, tiny: bool) -> dict[str, Any]:
    """Measure a training step."""
    row = {"config": config} | timing.measure_training(
        build(config, batch, attention, tiny), 2 if tiny else timing.STEPS
    )
    return row if row["examples/s"] else row | {"note": "out of memory"}


def probe(config: str, tiny: bool) -> dict[str, Any]:
    """Measure the conditioning probe as in training: the default measures of 16 images in all layers."""
    run = build(config, 8, "auto", tiny)
    weights, shape = run.model.random_weights(0), run.batch["image"].shape[1:]
    images = np.random.default_rng(0).integers(0, 256, (run.config.probe.examples, *shape), dtype=np.uint8)
    batch, start = meshes.put_batch(run.model.mesh, {"image": images}), time.perf_counter()
    probe_step = run.model.probe_step(run.task.objective, run.config.probe.measures)
    step = jax.jit(probe_step).lower(weights, batch).compile()
    compile_s = time.perf_counter() - start
    seconds = statistics.median([timing.time_call(step, weights, batch) for _ in range(6)][1:])
    return {"config": config, "compile s": round(compile_s, 1), "probe s": round(seconds, 4)}


def pipeline(config: str, batch: int, folder: str, tiny: bool) -> dict[str, Any]:
    """Measure JPEG files of typical size, decoded and augmented by one worker per core, without and with training."""
    from input import write_images  # benchmarks/input.py

    classes = Path(folder) / "train" / "one"
    classes.mkdir(parents=True, exist_ok=True)
    for path in write_images(Path(folder), *JPEG):
        for i in range(LINKS):
            link = classes / f"{path.stem}_{i}.jpg"
            link.unlink(missing_ok=True)
            link.symlink_to(path.resolve())
    run = build(config, batch, "auto", tiny)
    c = run.config
    c.data.update(workers=1 if tiny else os.cpu_count())
    size = {"image_size": c.model.image_size, "channels": c.model.channels, "num_classes": c.model.num_classes}
    source, batch_count = data.open_images(f"folder:{folder}", "train", **size), 4 * c.data.workers
    with contextlib.closing(run.stream(source, 0)) as batches:
        read_s = _time_calls(lambda _: next(batches), batch_count, None)
        step, key = run.compile_train_step(), run.run_key()
        for _ in range(c.data.workers * (c.data.prefetch + 1)):
            next(batches)  # prefetched while the step was compiled
        train_s = _time_calls(
            lambda state: step(state, run.put(next(batches)), key)[0], batch_count, run.initial_state()
        )
    rates = [round(batch_count * c.batch_size / seconds, 1) for seconds in (read_s, train_s)]
    return {"config": config, "batch": c.batch_size, "workers": c.data.workers, "read/s": rates[0], "fed/s": rates[1]}


def _time_calls(function: Callable[[Any], Any], calls: int, state: Any) -> float:
    """Return the seconds of `calls` calls after a warm-up; each call gets the result of the one before."""
    for i in range(timing.WARM_UP + calls):
        if i == timing.WARM_UP:
            jax.block_until_ready(state)
            start = time.perf_counter()
        state = function(state)
    jax.block_until_ready(state)
    return time.perf_counter() - start


FUNCTIONS = {f.__name__: f for f in (machine, train, probe, pipeline)}


def measurements(out: Path) -> dict[str, tuple[str, dict[str, Any]]]:
    """Return the function and the arguments of each measurement by name, most useful first."""
    steps = [(config, BATCH, "cudnn") for config in (LEAN, ORIGINAL)] + [(c, BATCH, "xla") for c in (LEAN, ORIGINAL)]
    steps += [(config, 128, "auto") for config in (*zoo.LEAN[1:], *zoo.ORIGINAL[1:])]
    steps += [(c, batch, kind) for kind in ("cudnn", "xla") for batch in (512, 128, 64) for c in (LEAN, ORIGINAL)]
    training = {f"train {c} {b} {a}": ("train", {"config": c, "batch": b, "attention": a}) for c, b, a in steps}
    first, rest = [*training.items()][:2], [*training.items()][2:]
    pipeline_arguments = {"config": LEAN, "batch": BATCH, "folder": str(out / "images")}
    probe_runs = {f"probe {config}": ("probe", {"config": config}) for config in (LEAN, ORIGINAL)}
    return dict(first) | probe_runs | {f"pipeline {LEAN}": ("pipeline", pipeline_arguments)} | dict(rest)


def measure(name: str, function: str, arguments: dict[str, Any], log: Path, seconds_left: float) -> dict[str, Any]:
    """Run a measurement in a process with at most `seconds_left`, and return its row; a failure is a row too."""
    row = {"name": name, "table": function}
    if seconds_left < MIN_SECONDS:
        return row | {"status": NO_TIME}
    environ = {key: value for key, value in os.environ.items() if key != "JAX_COMPILATION_CACHE_DIR"}
    environ["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0]
    command = [sys.executable, __file__, "--measure", function, json.dumps(arguments)]
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w") as file:
        process = subprocess.Popen(command, stdout=file, stderr=file, env=environ, start_new_session=True)
        try:
            status = str(process.wait(min(MAX_SECONDS, seconds_left)))
        except subprocess.TimeoutExpired:
            status = f"none after {min(MAX_SECONDS, seconds_left):.0f} s"
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    if lines and lines[-1].startswith(RESULT_PREFIX):
        return row | {"status": MEASURED} | json.loads(lines[-1].removeprefix(RESULT_PREFIX))
    return row | {"status": FAILED, "note": f"status {status}: {lines[-1][:300] if lines else 'no output'}"}


def format_page(results: dict[str, Any]) -> str:
    """Format all rows as Markdown tables; failed measurements are listed below their table, with the reason."""
    lines = [f"# {results['machine']['device']}", "", json.dumps(results["machine"]), ""]
    for name in FUNCTIONS:
        rows = [row for row in results["rows"].values() if row["table"] == name]
        shown = [{k: v for k, v in row.items() if k not in ("name", "table", "status")} for row in rows
                 if row["status"] == MEASURED]  # fmt: skip
        lines += [f"## {name}", "", timing.format_markdown(shown), ""] if shown else []
        lines += [f"- {r['name']}: {r['status']}. {r.get('note', '')}" for r in rows if r["status"] != MEASURED]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=20)
    parser.add_argument("--out", type=Path, default=Path("gpu"), help="folder of the results")
    parser.add_argument("--only", default="*", help="name patterns, separated by commas")
    parser.add_argument("--tiny", action="store_true", help="tiny models and few steps; runs on a CPU too")
    parser.add_argument("--list", action="store_true", help="print the names and exit")
    parser.add_argument("--measure", nargs=2, help=argparse.SUPPRESS)
    f = parser.parse_args()
    if f.measure:
        malloc.keep_freed()  # as every command does
        print(RESULT_PREFIX + json.dumps(FUNCTIONS[f.measure[0]](**json.loads(f.measure[1]))), flush=True)
        return
    out, deadline = f.out.expanduser().resolve(), time.monotonic() + 60 * f.minutes
    todo = {n: m for n, m in measurements(out).items() if any(fnmatch.fnmatch(n, p) for p in f.only.split(","))}
    if f.list:
        print("\n".join(todo))
        return
    facts = measure("machine", "machine", {"tiny": f.tiny}, out / "logs" / "machine.log", MAX_SECONDS)
    if facts["status"] != MEASURED:
        parser.error(f"The device cannot be used: {facts['note']}")
    result: dict[str, Any] = {"machine": facts, "rows": {}}
    if (path := out / "results.json").is_file():
        result["rows"] = files.read_json(path)["rows"]
    for name, (function, arguments) in todo.items():
        if result["rows"].get(name, {}).get("status") != MEASURED:
            log = out / "logs" / f"{name.replace(' ', '_')}.log"
            row = measure(name, function, arguments | {"tiny": f.tiny}, log, deadline - time.monotonic())
            result["rows"][name] = row
            files.write_json(path, result)
            files.write_text(out / "table.md", format_page(result))
            print(", ".join(f"{key} {value}" for key, value in row.items()), flush=True)
    print(f"\n{format_page(result)}\nIn {out}: results.json and table.md")


if __name__ == "__main__":
    main()
