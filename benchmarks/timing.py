"""What the benchmarks of training steps share: a config's pieces, the machine's matrix-product rate, clocks, processes
that step in turn, tables."""

import argparse
import dataclasses
import functools
import json
import runpy
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from leanformer.costs import hardware
from leanformer.errors import USER_ERROR, ConfigError, LeanformerError
from leanformer.runtime import mesh as meshes
from leanformer.training import train_setup


CONFIGS = Path(__file__).parents[1] / "configs"
WARM_UP, STEPS = 5, 30  # of `trained`
PRODUCTS = [(2048, 2048, 2048), (1576, 768, 1536), (1576, 1024, 768), (4096, 1024, 1024)]


def build(name: str, batch: int, dtype: str, backend: str, **model: Any) -> train_setup.TrainSetup:
    """The experiment of a config, at another batch, in one piece, dtype, attention backend and `model` sizes."""
    c = runpy.run_path(str(CONFIGS / f"{name}.py"))["get_config"]()
    c.update(batch_size=batch, accumulate=1, dtype=dtype)
    c.eval.batch_size = jax.device_count()
    c.model.update(backend=backend, **model)
    return train_setup.build(c, examples=1_281_167, mesh=meshes.make_mesh())


def batch_of(run: train_setup.TrainSetup) -> dict[str, jax.Array]:
    """A batch of random pixels, labels, tokens, targets and places of these, where the run wants it."""
    m, rng = run.config.model, np.random.default_rng(0)
    above = {"image": 256, "label": m.get("num_classes")}
    above |= {"tokens": m.get("vocabulary"), "targets": m.get("vocabulary"), "places": m.get("max_length")}
    shapes = run.abstract_batch().items()
    found = {name: rng.integers(0, above[name], leaf.shape).astype(leaf.dtype) for name, leaf in shapes}
    return meshes.put_batch(run.mesh, found)


def trained(run: train_setup.TrainSetup, steps: int = STEPS) -> dict[str, Any]:
    """Seconds to lower and compile the training step, examples a second, their share of the bfloat16 peak, and the peak
    of memory, from a process that does nothing else. None's for what the device does not tell, or has no memory for."""
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
    """Of one call, to the end of its work."""
    begun = time.perf_counter()
    jax.block_until_ready(function(*args))
    return time.perf_counter() - begun


def products() -> list[tuple[Callable, int]]:
    """Jitted matrix products with their operands, and their FLOPs."""
    key = jax.random.key(0)
    multiply = jax.jit(jnp.matmul)
    made = []
    for m, k, n in PRODUCTS:
        a, b = jax.random.normal(key, (m, k)), jax.random.normal(key, (k, n))
        multiply(a, b).block_until_ready()
        made.append((functools.partial(multiply, a, b), 2 * m * k * n))
    return made


def matrix_rate(rated: list[tuple[Callable, int]]) -> float:
    """FLOP/s of the fastest of some products, each the best of three, now."""
    return max(flops / min(seconds(product) for _ in range(3)) for product, flops in rated)


@dataclasses.dataclass
class Least:
    """The least wall and CPU seconds of anything done several times."""

    wall: float = float("inf")
    cpu: float = float("inf")

    def of(self, function, *args):
        """What `function(*args)` gives, its work done and timed."""
        wall, cpu = time.perf_counter(), time.process_time()
        result = jax.block_until_ready(function(*args))
        self.wall = min(self.wall, time.perf_counter() - wall)
        self.cpu = min(self.cpu, time.process_time() - cpu)
        return result


class Member:
    """A config's training step on its data, in float32, and what its compilation and its steps took."""

    def __init__(self, name: str, batch: int, **model: Any):
        self.run = run = build(name, batch, "float32", "xla", **model)
        self.name, self.flops = name, batch * run.flops_per_example[1]
        self.compilation, self.least = Least(), Least()
        self.step = self.compilation.of(run.compile_train_step)
        self.state, self.data, self.key = run.initial_state(), batch_of(run), run.run_key()

    def train(self) -> None:
        self.state, _ = self.least.of(self.step, self.state, self.data, self.key)

    def shares(self, rate: float, cpu_rate: float) -> tuple[float, float]:
        """Of FLOP/s, and of FLOPs a CPU second."""
        return self.flops / self.least.wall / rate, self.flops / self.least.cpu / cpu_rate


class Rate:
    """The machine's rates of products: those of the fastest, each the least of all its turns."""

    def __init__(self):
        self.rated = [(product, flops, Least()) for product, flops in products()]

    def measure(self) -> None:
        for product, _, least in self.rated:
            for _ in range(3):
                least.of(product)

    def found(self) -> tuple[float, float]:
        """FLOP/s, and FLOPs a CPU second."""
        return tuple(max(flops / getattr(least, clock) for _, flops, least in self.rated) for clock in ("wall", "cpu"))


class Worker:
    """A process that says in a line what it is, and answers each line with a step's seconds."""

    def __init__(self, *command: str):
        self.command = command
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)
        self.about = self._answer()

    def step(self) -> float:
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return self._answer()

    def close(self) -> str:
        """Ends it; what it says last."""
        return self.process.communicate()[0]

    def _answer(self) -> Any:
        if line := self.process.stdout.readline():
            return json.loads(line)
        raise LeanformerError(f"{' '.join(self.command[:2])} ended; what it said stands above.")


def ours(script: Path, name: str, options: argparse.Namespace) -> Worker:
    """Our side of a benchmark beside a peer, with the options of `main` that are of it."""
    told = [f"--{flag}={value}" for flag in ("batch", "unroll") if (value := getattr(options, flag))]
    return Worker(sys.executable, str(script), f"--worker={name}", *told, *(["--tiny"] if options.tiny else []))


@dataclasses.dataclass
class Pair:
    """A config's two workers that step in turn, and the seconds of their rounds.

    Attributes:
        name: of the peer's library.
    """

    name: str
    ours: Worker
    peer: Worker
    times: list[tuple[float, float]] = dataclasses.field(default_factory=list)  # ours, the peer's

    def check(self, config: str) -> None:
        """Raises ConfigError where the two are not of the same number of parameters."""
        found = self.ours.about["parameters"], self.peer.about["parameters"]
        if found[0] != found[1]:
            for worker in (self.ours, self.peer):
                worker.close()  # or their last words find nobody who reads
            raise ConfigError(
                f"{config} has {found[0]:,} parameters here and {found[1]:,} in {self.name}: not the same model."
            )

    def step(self, rounds: int) -> dict[str, Any]:
        """The row of so many rounds, in which they change places; ratios are taken round by round."""
        for turn in range(rounds):
            found = {}
            for worker in (self.ours, self.peer)[:: 1 if turn % 2 else -1]:
                time.sleep(0.2)  # or threads of the other still spin
                found[worker] = worker.step()
            self.times.append((found[self.ours], found[self.peer]))
        ours, peer = zip(*self.times, strict=True)
        faster = [theirs / own for own, theirs in self.times]
        return {
            "ours s": round(statistics.median(ours), 3),
            f"{self.name} s": round(statistics.median(peer), 3),
            "faster": round(statistics.median(faster), 2),
            "least": round(min(faster), 2),
            "most": round(max(faster), 2),
            "at best": round(min(peer) / min(ours), 2),
        }


def check_python(python: str, needed: Sequence[str]) -> None:
    """Raises ConfigError where `python` is none, or has not the packages that are needed."""
    install = (
        f"Install them, as by `pip install {' '.join(needed)}`, or name an environment that has them: "
        "--python=/path/to/python."
    )
    names = tuple(needed)
    program = f"import importlib.util as u; print(*(name for name in {names} if u.find_spec(name) is None))"
    try:
        missing = subprocess.run([python, "-c", program], capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError) as error:
        raise ConfigError(f"--python={python} cannot be run: {error}. {install}") from error
    if missing:
        raise ConfigError(f"--python={python} has no {' and no '.join(missing.split())}. {install}")


def show(rows: list[dict[str, Any]]) -> None:
    """Prints rows of the same names as a table; None as a dash."""
    cells = [list(rows[0]), *(["-" if value is None else str(value) for value in row.values()] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for line in cells:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())


def main(
    about: str,
    names: Sequence[str],
    work: Callable[..., None],
    measure: Callable[..., None],
    *,
    python: str | None = None,
) -> None:
    """The command of a benchmark beside a peer: `measure` of names and options, or `work` in a process of its own.

    Args:
        about: its docstring.
        names: configs that it knows.
        python: of the peer if not told.
    """
    parser = argparse.ArgumentParser(description=about.splitlines()[0])
    parser.add_argument("--python", default=python, help="of an environment with what the peer needs")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", help="names of configs, by commas")
    parser.add_argument("--batch", type=int, help="examples a step, of both; by config if not told")
    parser.add_argument("--unroll", type=int, help="model.unroll of ours")
    parser.add_argument("--tiny", action="store_true", help="small shapes, whose seconds say nothing")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--worker", choices=names, help=argparse.SUPPRESS)
    options = parser.parse_args()
    try:
        if options.worker:
            told = {"unroll": options.unroll} if options.unroll else {}
            work(options.worker, batch=options.batch, tiny=options.tiny, **told)
        else:
            measure(_chosen(names, options), options)
    except LeanformerError as error:
        print(f"Error: {error}", file=sys.stderr)
        sys.exit(USER_ERROR)


def _chosen(names: Sequence[str], options: argparse.Namespace) -> list[str]:
    """Of the names those of --only. Raises ConfigError for others, and for too few rounds or examples."""
    chosen = options.only.split(",") if options.only else list(names)
    if unknown := [name for name in chosen if name not in names]:
        raise ConfigError(f"--only={options.only}: {', '.join(unknown)} is none of {', '.join(names)}.")
    for flag in ("rounds", "batch"):
        if (value := getattr(options, flag)) is not None and value < 1:
            raise ConfigError(f"--{flag}={value}: 1 at least.")
    return chosen
