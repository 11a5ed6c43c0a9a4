"""Speed of singular values, on which the conditioning probe rests: `python benchmarks/probe.py [--json]
[--torch-python=PATH]`

Two tables, in under two minutes:

    spectra     singular values of 12 layers x 8 images at 197 x 1024 (16 heads of 64): ours, NumPy's batched
                `svd(compute_uv=False)` and, if PyTorch can be imported, `torch.linalg.svdvals` on the CPU. Ours and
                NumPy's are float64 inside, PyTorch's is float32.
    algorithms  milliseconds per matrix of what JAX offers on this device in float64, and one in float32, with the
                worst error in float32 epsilons of the largest singular value (see conditioning/spectrum.py).

Contenders are processes of their own that take turns in every round, so that a busy machine slows all alike; shown are
medians over rounds, and medians of each round's ratio.
"""

import argparse
import contextlib
import functools
import importlib.util
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np
import timing

from leanformer.conditioning import singular_values
from leanformer.conditioning.spectrum import by_gram


BATCH, TOKENS, HEADS, HEAD_DIM = 12 * 8, 197, 16, 64
WIDTH = HEADS * HEAD_DIM
ROUNDS = 5
SHAPES = {  # rows, columns: matrices in a batch
    (49, 64): 96,
    (TOKENS, HEAD_DIM): 96,
    (TOKENS, TOKENS): 24,
    (TOKENS, WIDTH): 24,
    (577, 1920): 2,
}
# Answers every line on its input with the seconds that one pass took.
TORCH = f"""
import sys, time, torch
x = torch.randn({BATCH}, {TOKENS}, {WIDTH}, generator=torch.Generator().manual_seed(0))
for _ in sys.stdin:
    start = time.perf_counter()
    torch.linalg.svdvals(x)
    print(time.perf_counter() - start, flush=True)
"""


def gaussian(batch: int, rows: int, columns: int) -> np.ndarray:
    return np.random.default_rng(0).standard_normal((batch, rows, columns), dtype=np.float32)


def answer(name: str) -> None:
    """The other end of `ask`."""
    x = gaussian(BATCH, TOKENS, WIDTH)
    if name == "numpy":
        run = lambda: np.linalg.svd(x, compute_uv=False)  # noqa: E731
    else:
        on_device = jnp.asarray(x)
        run = lambda: singular_values(on_device).block_until_ready()  # noqa: E731
    for _ in sys.stdin:
        start = time.perf_counter()
        run()
        print(time.perf_counter() - start, flush=True)


def ask(process: subprocess.Popen) -> float:
    process.stdin.write("\n")
    process.stdin.flush()
    return float(process.stdout.readline())


@contextlib.contextmanager
def contenders(torch_python: str | None) -> Iterator[dict[str, subprocess.Popen]]:
    """Processes by name; thread counts as each library chooses by itself unless the name says otherwise."""
    free = {k: v for k, v in os.environ.items() if k != "OPENBLAS_NUM_THREADS"}
    one, all_cores = free | {"OPENBLAS_NUM_THREADS": "1"}, free | {"OPENBLAS_NUM_THREADS": str(os.cpu_count())}
    ours, numpy = ([sys.executable, __file__, f"--answer={name}"] for name in ("ours", "numpy"))
    commands = {
        "leanformer": (ours, free),
        "NumPy": (numpy, free),
        "NumPy, one BLAS thread": (numpy, one),
        "leanformer, all BLAS threads": (ours, all_cores),
    }
    if torch_python is None and importlib.util.find_spec("torch"):
        torch_python = sys.executable
    if torch_python:
        commands["PyTorch, CPU"] = ([torch_python, "-c", TORCH], free)
    with contextlib.ExitStack() as stack:
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        processes = {
            name: stack.enter_context(subprocess.Popen(command, env=env, **pipes))
            for name, (command, env) in commands.items()
        }
        for process in processes.values():
            ask(process)  # imports and compiles
        yield processes
        for process in processes.values():
            process.stdin.close()


def measure_spectra(torch_python: str | None) -> list[dict]:
    with contenders(torch_python) as processes:
        rounds = [{name: ask(process) for name, process in processes.items()} for _ in range(ROUNDS)]
    return [
        {
            "contender": name,
            "seconds": round(statistics.median(r[name] for r in rounds), 3),
            "ours over it": round(statistics.median(r["leanformer"] / r[name] for r in rounds), 2),
        }
        for name in rounds[0]
    ]


def algorithms() -> dict[str, Callable[[jax.Array], jax.Array]]:
    kinds = jax.lax.linalg.SvdAlgorithm
    names = {"D&C": kinds.DEFAULT, "QR iteration": kinds.QR}
    if jax.default_backend() != "cpu":
        names = {"default": kinds.DEFAULT, "QR iteration": kinds.QR, "Jacobi": kinds.JACOBI, "polar": kinds.POLAR}

    def values(x, kind, qr, dtype="float64"):
        x = x if x.shape[-2] >= x.shape[-1] else x.mT
        with jax.enable_x64(True):
            x = x.astype(dtype)
            x = jnp.linalg.qr(x, mode="r") if qr else x
            s = jax.lax.linalg.svd(x, full_matrices=False, compute_uv=False, algorithm=kind)
            return s.astype(jnp.float32)

    def gram(x):
        with jax.enable_x64(True):
            x = x.astype("float64")
            return by_gram(x if x.shape[-2] >= x.shape[-1] else x.mT).astype(jnp.float32)

    table = {"leanformer": singular_values, "Gram": gram}
    for name, kind in names.items():
        table[name] = functools.partial(values, kind=kind, qr=False)
        table[f"QR, {name}"] = functools.partial(values, kind=kind, qr=True)
    return table | {"QR, first, float32": functools.partial(values, kind=kinds.DEFAULT, qr=True, dtype="float32")}


def measure_algorithms() -> list[dict]:
    """Return for each shape the milliseconds per matrix and the error of each algorithm."""
    rows = []
    for shape, batch in SHAPES.items():
        x = gaussian(batch, *shape)
        expected = np.linalg.svd(x[:2].astype(np.float64), compute_uv=False)
        on_device = jnp.asarray(x)
        functions = {name: jax.jit(function) for name, function in algorithms().items()}
        seconds, errors = {name: [] for name in functions}, {}
        for name, function in functions.items():
            off = np.abs(np.asarray(function(on_device))[:2] - expected) / expected[:, :1]
            errors[name] = float(off.max() / np.finfo(np.float32).eps)
        for _ in range(ROUNDS):
            for name, function in functions.items():
                start = time.perf_counter()
                function(on_device).block_until_ready()
                seconds[name].append(time.perf_counter() - start)
        times = {name: 1e3 * statistics.median(values) / batch for name, values in seconds.items()}
        cells = {name: f"{times[name]:.2f} ({errors[name]:.1f})" for name in times}
        rows.append({"ms (error)": f"{shape[0]} x {shape[1]}"} | cells)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--torch-python", help="interpreter of an environment with PyTorch; this one by default")
    parser.add_argument("--answer", choices=("ours", "numpy"), help=argparse.SUPPRESS)
    f = parser.parse_args()
    if f.answer:
        answer(f.answer)
        return
    for rows in (measure_spectra(f.torch_python), measure_algorithms()):
        timing.show(rows, as_json=f.json)
        print()


if __name__ == "__main__":
    main()
