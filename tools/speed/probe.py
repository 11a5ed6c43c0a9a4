"""Speed of singular values, which the conditioning probe computes: `python -m tools.speed.probe [--json]
[--torch-python=PATH]`

Two tables, in under two minutes:

    spectra     singular values of 12 layers x 8 images at 197 x 1024 (16 heads of 64): ours, NumPy's batched
                `svd(compute_uv=False)` and, if PyTorch can be imported, `torch.linalg.svdvals` on the CPU. Ours and
                NumPy's are float64 inside, PyTorch's is float32.
    algorithms  milliseconds per matrix of JAX's algorithms on this device in float64, and of one in float32, with the
                worst error in float32 epsilons of the largest singular value (see conditioning/spectrum.py).

Each contender is a process, and they alternate in every round, so that other load on the machine affects all equally.
Shown are medians over rounds, and medians of the ratios per round.
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

from leanformer.conditioning import singular_values
from leanformer.conditioning.spectrum import by_gram
from tools.speed import timing


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
# Prints the seconds of one pass for each line of its input.
TORCH = f"""
import sys, time, torch
x = torch.randn({BATCH}, {TOKENS}, {WIDTH}, generator=torch.Generator().manual_seed(0))
for _ in sys.stdin:
    start = time.perf_counter()
    torch.linalg.svdvals(x)
    print(time.perf_counter() - start, flush=True)
"""


def draw_gaussian(batch: int, rows: int, columns: int) -> np.ndarray:
    return np.random.default_rng(0).standard_normal((batch, rows, columns), dtype=np.float32)


def serve_contender(name: str) -> None:
    """Run a contender: print the seconds of one pass for each input line, as `time_pass` expects."""
    x = draw_gaussian(BATCH, TOKENS, WIDTH)
    if name == "numpy":
        run = lambda: np.linalg.svd(x, compute_uv=False)  # noqa: E731
    else:
        on_device = jnp.asarray(x)
        run = lambda: singular_values(on_device).block_until_ready()  # noqa: E731
    for _ in sys.stdin:
        start = time.perf_counter()
        run()
        print(time.perf_counter() - start, flush=True)


def time_pass(process: subprocess.Popen) -> float:
    process.stdin.write("\n")
    process.stdin.flush()
    return float(process.stdout.readline())


@contextlib.contextmanager
def start_contenders(torch_python: str | None) -> Iterator[dict[str, subprocess.Popen]]:
    """Start processes by name; the number of threads is each library's default unless the name states it."""
    default_environ = {k: v for k, v in os.environ.items() if k != "OPENBLAS_NUM_THREADS"}
    one_thread = default_environ | {"OPENBLAS_NUM_THREADS": "1"}
    all_cores = default_environ | {"OPENBLAS_NUM_THREADS": str(os.cpu_count())}
    ours, numpy = ([sys.executable, "-m", "tools.speed.probe", f"--answer={name}"] for name in ("ours", "numpy"))
    commands = {
        "leanformer": (ours, default_environ),
        "NumPy": (numpy, default_environ),
        "NumPy, one BLAS thread": (numpy, one_thread),
        "leanformer, all BLAS threads": (ours, all_cores),
    }
    if torch_python is None and importlib.util.find_spec("torch"):
        torch_python = sys.executable
    if torch_python:
        commands["PyTorch, CPU"] = ([torch_python, "-c", TORCH], default_environ)
    with contextlib.ExitStack() as stack:
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        processes = {
            name: stack.enter_context(subprocess.Popen(command, env=env, **pipes))
            for name, (command, env) in commands.items()
        }
        for process in processes.values():
            time_pass(process)  # imports and compiles
        yield processes
        for process in processes.values():
            process.stdin.close()


def measure_spectra(torch_python: str | None) -> list[dict]:
    with start_contenders(torch_python) as processes:
        rounds = [{name: time_pass(process) for name, process in processes.items()} for _ in range(ROUNDS)]
    return [
        {
            "contender": name,
            "seconds": round(statistics.median(r[name] for r in rounds), 3),
            "ours over it": round(statistics.median(r["leanformer"] / r[name] for r in rounds), 2),
        }
        for name in rounds[0]
    ]


def make_algorithms() -> dict[str, Callable[[jax.Array], jax.Array]]:
    kinds = jax.lax.linalg.SvdAlgorithm
    names = {"D&C": kinds.DEFAULT, "QR iteration": kinds.QR}
    if jax.default_backend() != "cpu":
        names = {"default": kinds.DEFAULT, "QR iteration": kinds.QR, "Jacobi": kinds.JACOBI, "polar": kinds.POLAR}

    def svdvals(x, kind, qr, dtype="float64"):
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
        table[name] = functools.partial(svdvals, kind=kind, qr=False)
        table[f"QR, {name}"] = functools.partial(svdvals, kind=kind, qr=True)
    return table | {"QR, first, float32": functools.partial(svdvals, kind=kinds.DEFAULT, qr=True, dtype="float32")}


def measure_algorithms() -> list[dict]:
    """Return for each shape the milliseconds per matrix and the error of each algorithm."""
    rows = []
    for shape, batch in SHAPES.items():
        x = draw_gaussian(batch, *shape)
        expected = np.linalg.svd(x[:2].astype(np.float64), compute_uv=False)
        on_device = jnp.asarray(x)
        functions = {name: jax.jit(function) for name, function in make_algorithms().items()}
        seconds, errors = {name: [] for name in functions}, {}
        for name, function in functions.items():
            deviation = np.abs(np.asarray(function(on_device))[:2] - expected) / expected[:, :1]
            errors[name] = float(deviation.max() / np.finfo(np.float32).eps)
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
    args = parser.parse_args()
    if args.answer:
        serve_contender(args.answer)
        return
    for rows in (measure_spectra(args.torch_python), measure_algorithms()):
        timing.show(rows, as_json=args.json)
        print()


if __name__ == "__main__":
    main()
