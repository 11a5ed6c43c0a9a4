"""Helpers of the benchmarks: configs, the machine's matmul throughput, clocks, alternating processes, tables."""

import functools
import json
import runpy
import statistics
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from leanformer.costs import devices
from leanformer.errors import LeanformerError
from leanformer.runtime import mesh as meshes
from leanformer.training import train_setup


CONFIGS = Path(__file__).parents[2] / "configs"
WARM_UP, STEPS = 5, 30  # of `measure_training`
MATMUL_SHAPES = [(2048, 2048, 2048), (1576, 768, 1536), (1576, 1024, 768), (4096, 1024, 1024)]


def build(name: str, batch: int, dtype: str, backend: str, **model: Any) -> train_setup.Setup:
    """Return the training setup of a config with another batch, dtype, attention backend and `model` sizes."""
    c = runpy.run_path(str(CONFIGS / f"{name}.py"))["get_config"]()
    c.update(batch_size=batch, accumulate=1, dtype=dtype)
    c.eval.batch_size = jax.device_count()
    c.model.update(backend=backend, **model)
    return train_setup.set_up_training(c, examples=1_281_167, mesh=meshes.make_mesh())


def make_batch(run: train_setup.Setup) -> dict[str, jax.Array]:
    """Return a batch of random pixels, labels, tokens, lengths, targets and their positions, as the run requires."""
    m, rng = run.config.model, np.random.default_rng(0)
    limits = {"image": 256, "label": m.get("num_classes")}
    limits |= {"tokens": m.get("vocabulary"), "targets": m.get("vocabulary"), "places": m.get("max_length")}
    limits["lengths"] = m.get("max_length")
    shapes = run.batch.items()
    result = {
        name: rng.integers(name == "lengths", limits[name], leaf.shape).astype(leaf.dtype) for name, leaf in shapes
    }
    return meshes.put_batch(run.model.mesh, result)


def measure_training(run: train_setup.Setup, steps: int = STEPS) -> dict[str, Any]:
    """Return the seconds to lower and compile the training step, examples/s, MFU in bfloat16, and peak memory.

    A value is None if the device does not report it, or if the step runs out of memory. Call it in a new process.
    """
    device, batch = jax.devices()[0], run.config.batch_size
    row = dict.fromkeys(("compile s", "examples/s", "MFU", "peak GB"))
    row = {"device": device.device_kind, "attention": run.model.backend, "batch": batch} | row
    try:
        start = time.perf_counter()
        step = run.compile_train_step()
        row["compile s"] = round(time.perf_counter() - start, 1)
        state, data, key = run.initial_state(), make_batch(run), run.run_key()
        for turn in range(WARM_UP + steps):
            if turn == WARM_UP:
                jax.block_until_ready(state)
                start = time.perf_counter()
            state, _ = step(state, data, key)
        jax.block_until_ready(state)
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return row  # out of memory
    rate = steps * batch / (time.perf_counter() - start)
    peak, memory = devices.peak_flops(device), device.memory_stats() or {}
    used = memory.get("peak_bytes_in_use")
    return row | {
        "examples/s": round(rate, 1),
        "MFU": peak and round(rate * run.flops_per_example[1] / peak / jax.device_count(), 3),
        "peak GB": used and round(used / 1e9, 2),
    }


def time_call(function: Callable, *args) -> float:
    """Return the seconds of a call until its results are ready."""
    start = time.perf_counter()
    jax.block_until_ready(function(*args))
    return time.perf_counter() - start


def make_matmuls() -> list[tuple[Callable, int]]:
    """Return jitted matmuls with their operands, each with its FLOPs."""
    key = jax.random.key(0)
    multiply = jax.jit(jnp.matmul)
    matmuls = []
    for m, k, n in MATMUL_SHAPES:
        a, b = jax.random.normal(key, (m, k)), jax.random.normal(key, (k, n))
        multiply(a, b).block_until_ready()
        matmuls.append((functools.partial(multiply, a, b), 2 * m * k * n))
    return matmuls


def matmul_throughput(matmuls: list[tuple[Callable, int]]) -> float:
    """Return the FLOP/s of the fastest of several matmuls, each the best of three calls."""
    return max(flops / min(time_call(matmul) for _ in range(3)) for matmul, flops in matmuls)


class TimedStep:
    """Training step of a config on random data, in float32."""

    def __init__(self, name: str, batch: int, **model: Any):
        self.run = build(name, batch, "float32", "xla", **model)
        self.step = self.run.compile_train_step()
        self.state, self.data, self.key = self.run.initial_state(), make_batch(self.run), self.run.run_key()

    def train(self) -> None:
        self.state, _ = jax.block_until_ready(self.step(self.state, self.data, self.key))


class Worker:
    """Worker process that prints one line about itself, then the seconds of a step for each input line."""

    def __init__(self, *command: str):
        self.command = command
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)
        self.description = self._read()

    def step(self) -> float:
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return self._read()

    def close(self) -> None:
        """End the process."""
        self.process.communicate()

    def _read(self) -> Any:
        if line := self.process.stdout.readline():
            return json.loads(line)
        raise LeanformerError(f"{' '.join(self.command[:2])} ended; its output is above.")


def compare_workers(ours: Worker, peer: Worker, rounds: int) -> dict[str, Any]:
    """Step two workers alternately, and return their seconds and the ratios per round."""
    times = []
    for turn in range(rounds):
        result = {}
        for worker in (ours, peer)[:: 1 if turn % 2 else -1]:
            time.sleep(0.2)  # otherwise threads of the other process still spin
            result[worker] = worker.step()
        times.append((result[ours], result[peer]))
    our_seconds, peer_seconds = zip(*times, strict=True)
    faster = [b / a for a, b in times]
    return {
        "ours s": round(statistics.median(our_seconds), 3),
        "peer s": round(statistics.median(peer_seconds), 3),
        "faster": round(statistics.median(faster), 2),
        "least": round(min(faster), 2),
        "most": round(max(faster), 2),
        "at best": round(min(peer_seconds) / min(our_seconds), 2),
    }


def show(rows: Sequence[dict[str, Any]], *, as_json: bool = False) -> None:
    """Print rows with the same names as a table, None as a dash, or as JSON with the device and the version of JAX."""
    if as_json:
        facts = {"device": jax.devices()[0].device_kind, "jax": jax.__version__}
        print(json.dumps(facts | {"rows": rows}))
        return
    cells = [list(rows[0]), *(["-" if value is None else str(value) for value in row.values()] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for line in cells:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())


def format_markdown(rows: Sequence[dict[str, Any]]) -> str:
    """Format rows as a Markdown table, missing values as a dash."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    cells = [["-" if row.get(column) is None else str(row[column]) for column in columns] for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in (columns, ["---"] * len(columns), *cells))
