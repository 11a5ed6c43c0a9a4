"""Helpers of the benchmarks: configs, the machine's matrix-product rate, clocks, processes in turn, tables."""

import dataclasses
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

from leanformer.costs import hardware
from leanformer.errors import LeanformerError
from leanformer.runtime import mesh as meshes
from leanformer.training import train_setup


CONFIGS = Path(__file__).parents[1] / "configs"
WARM_UP, STEPS = 5, 30  # of `trained`
PRODUCTS = [(2048, 2048, 2048), (1576, 768, 1536), (1576, 1024, 768), (4096, 1024, 1024)]


def build(name: str, batch: int, dtype: str, backend: str, **model: Any) -> train_setup.TrainSetup:
    """Return the experiment of a config with another batch, dtype, attention backend and `model` sizes."""
    c = runpy.run_path(str(CONFIGS / f"{name}.py"))["get_config"]()
    c.update(batch_size=batch, accumulate=1, dtype=dtype)
    c.eval.batch_size = jax.device_count()
    c.model.update(backend=backend, **model)
    return train_setup.build(c, examples=1_281_167, mesh=meshes.make_mesh())


def batch_of(run: train_setup.TrainSetup) -> dict[str, jax.Array]:
    """Return a batch of random pixels, labels, tokens, targets and their positions, as the run needs them."""
    m, rng = run.config.model, np.random.default_rng(0)
    above = {"image": 256, "label": m.get("num_classes")}
    above |= {"tokens": m.get("vocabulary"), "targets": m.get("vocabulary"), "places": m.get("max_length")}
    shapes = run.abstract_batch().items()
    result = {name: rng.integers(0, above[name], leaf.shape).astype(leaf.dtype) for name, leaf in shapes}
    return meshes.put_batch(run.mesh, result)


def trained(run: train_setup.TrainSetup, steps: int = STEPS) -> dict[str, Any]:
    """Return seconds to lower and compile the training step, examples/s, their share of the bfloat16 peak, and the peak
    of memory; None for what the device does not tell, or does not fit. Call it in a process of its own."""
    device, batch = jax.devices()[0], run.config.batch_size
    row = dict.fromkeys(("compile s", "examples/s", "MFU", "peak GB"))
    row = {"device": device.device_kind, "attention": run.model.backend, "batch": batch} | row
    try:
        begun = time.perf_counter()
        step = run.compile_train_step()
        row["compile s"] = round(time.perf_counter() - begun, 1)
        state, data, key = run.initial_state(), batch_of(run), run.run_key()
        for turn in range(WARM_UP + steps):
            if turn == WARM_UP:
                jax.block_until_ready(state)
                begun = time.perf_counter()
            state, _ = step(state, data, key)
        jax.block_until_ready(state)
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return row  # it does not fit
    rate = steps * batch / (time.perf_counter() - begun)
    peak, memory = hardware.peak_flops(device), device.memory_stats() or {}
    used = memory.get("peak_bytes_in_use")
    return row | {
        "examples/s": round(rate, 1),
        "MFU": peak and round(rate * run.flops_per_example[1] / peak / jax.device_count(), 3),
        "peak GB": used and round(used / 1e9, 2),
    }


def seconds(function: Callable, *args) -> float:
    """Return the seconds of a call, to the end of its work."""
    begun = time.perf_counter()
    jax.block_until_ready(function(*args))
    return time.perf_counter() - begun


def products() -> list[tuple[Callable, int]]:
    """Return jitted matrix products with their operands, and their FLOPs."""
    key = jax.random.key(0)
    multiply = jax.jit(jnp.matmul)
    made = []
    for m, k, n in PRODUCTS:
        a, b = jax.random.normal(key, (m, k)), jax.random.normal(key, (k, n))
        multiply(a, b).block_until_ready()
        made.append((functools.partial(multiply, a, b), 2 * m * k * n))
    return made


def matrix_rate(rated: list[tuple[Callable, int]]) -> float:
    """Return the FLOP/s of the fastest of some products, each the best of three."""
    return max(flops / min(seconds(product) for _ in range(3)) for product, flops in rated)


@dataclasses.dataclass
class Least:
    """Least wall and CPU seconds of something done several times."""

    wall: float = float("inf")
    cpu: float = float("inf")

    def of(self, function, *args):
        """Return `function(*args)`, timed to the end of its work."""
        wall, cpu = time.perf_counter(), time.process_time()
        result = jax.block_until_ready(function(*args))
        self.wall = min(self.wall, time.perf_counter() - wall)
        self.cpu = min(self.cpu, time.process_time() - cpu)
        return result


class Member:
    """A config's training step on random data, in float32, with the time of its compilation and its steps."""

    def __init__(self, name: str, batch: int, **model: Any):
        self.run = run = build(name, batch, "float32", "xla", **model)
        self.name, self.flops = name, batch * run.flops_per_example[1]
        self.compilation, self.least = Least(), Least()
        self.step = self.compilation.of(run.compile_train_step)
        self.state, self.data, self.key = run.initial_state(), batch_of(run), run.run_key()

    def train(self) -> None:
        self.state, _ = self.least.of(self.step, self.state, self.data, self.key)

    def shares(self, rate: float, cpu_rate: float) -> tuple[float, float]:
        """Return the shares of a rate in FLOP/s, and in FLOPs per CPU second."""
        return self.flops / self.least.wall / rate, self.flops / self.least.cpu / cpu_rate


class Rate:
    """The machine's rate of matrix products: the fastest, each by the least of its turns."""

    def __init__(self):
        self.rated = [(product, flops, Least()) for product, flops in products()]

    def measure(self) -> None:
        for product, _, least in self.rated:
            for _ in range(3):
                least.of(product)

    def found(self) -> tuple[float, float]:
        """Return FLOP/s, and FLOPs per CPU second."""
        return tuple(max(flops / getattr(least, clock) for _, flops, least in self.rated) for clock in ("wall", "cpu"))


class Worker:
    """A process that describes itself in a line, and answers each line with the seconds of a step."""

    def __init__(self, *command: str):
        self.command = command
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)
        self.about = self._answer()

    def step(self) -> float:
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return self._answer()

    def close(self) -> None:
        """End the process."""
        self.process.communicate()

    def _answer(self) -> Any:
        if line := self.process.stdout.readline():
            return json.loads(line)
        raise LeanformerError(f"{' '.join(self.command[:2])} ended; its output is above.")


def pair(ours: Worker, peer: Worker, rounds: int) -> dict[str, Any]:
    """Step two workers in turn and return their seconds; ratios are taken round by round."""
    times = []
    for turn in range(rounds):
        result = {}
        for worker in (ours, peer)[:: 1 if turn % 2 else -1]:
            time.sleep(0.2)  # or threads of the other still spin
            result[worker] = worker.step()
        times.append((result[ours], result[peer]))
    own, other = zip(*times, strict=True)
    faster = [b / a for a, b in times]
    return {
        "ours s": round(statistics.median(own), 3),
        "peer s": round(statistics.median(other), 3),
        "faster": round(statistics.median(faster), 2),
        "least": round(min(faster), 2),
        "most": round(max(faster), 2),
        "at best": round(min(other) / min(own), 2),
    }


def show(rows: Sequence[dict[str, Any]], *, as_json: bool = False) -> None:
    """Print rows with the same names as a table, None as a dash; or as JSON with the device and jax's version."""
    if as_json:
        about = {"device": jax.devices()[0].device_kind, "jax": jax.__version__}
        print(json.dumps(about | {"rows": rows}))
        return
    cells = [list(rows[0]), *(["-" if value is None else str(value) for value in row.values()] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for line in cells:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())


def markdown(rows: Sequence[dict[str, Any]]) -> str:
    """Format rows as a Markdown table; a dash stands for what is not known."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    cells = [["-" if row.get(column) is None else str(row[column]) for column in columns] for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in (columns, ["---"] * len(columns), *cells))
