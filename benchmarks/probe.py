"""Speed and memory of the conditioning probe here: `python benchmarks/probe.py [--json] [--torch-python=PATH]`.

Three tables, in under two minutes:

    spectra     singular values of 12 layers x 8 images at 197 x 1024 (16 heads of 64): ours, NumPy's batched
                `svd(compute_uv=False)` and, where PyTorch can be imported, `torch.linalg.svdvals` on the CPU. Ours is
                meant to take at most half of NumPy's time and no longer than PyTorch's. Ours and NumPy's are float64
                inside, PyTorch's is float32.
    algorithms  what JAX offers on this device in float64, at the shapes that measures have, and one in float32: the
                choice in `leanformer.conditioning.spectrum` rests on it.
    memory      temporaries of a forward pass with a tap, by depth: a tap reduces inside its layer, so they stay.

Contenders live in processes of their own and take turns in every round, so that a busy machine slows all alike;
medians over rounds are shown, and ratios are medians of each round's.
"""

import argparse
import contextlib
import functools
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from leanformer import models
from leanformer.conditioning import singular_values, tap
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
TAPPED = ("attention_output", "head_output", "attention_probabilities", "tokens", "block_output")

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
            "seconds": statistics.median(r[name] for r in rounds),
            "ours_over_it": statistics.median(r["leanformer"] / r[name] for r in rounds),
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
    """Milliseconds a matrix, and the worst error of any singular value in float32 epsilons of the largest."""
    rows = []
    for shape, batch in SHAPES.items():
        x = gaussian(batch, *shape)
        expected = np.linalg.svd(x[:2].astype(np.float64), compute_uv=False)
        on_device = jnp.asarray(x)
        functions = {name: jax.jit(function) for name, function in algorithms().items()}
        row = {"shape": f"{shape[0]} x {shape[1]}"}
        seconds = {name: [] for name in functions}
        for name, function in functions.items():
            errors = np.abs(np.asarray(function(on_device))[:2] - expected) / expected[:, :1]
            row[name] = {"error": float(errors.max() / np.finfo(np.float32).eps)}
        for _ in range(ROUNDS):
            for name, function in functions.items():
                start = time.perf_counter()
                function(on_device).block_until_ready()
                seconds[name].append(time.perf_counter() - start)
        for name, values in seconds.items():
            row[name]["milliseconds"] = 1e3 * statistics.median(values) / batch
        rows.append(row)
    return rows


def measure_memory() -> list[dict]:
    """Temporaries of a forward pass of 8 images, as the compiler plans them, without parameters and results."""
    rows = []
    for depth in (4, 16):
        model = nnx.eval_shape(
            lambda depth=depth: models.build(
                "vit",
                **{"image_size": 224, "patch_size": 16, "channels": 3, "num_classes": 10, "width": 768, "depth": depth},
                **{"num_heads": HEADS, "head_dim": HEAD_DIM, "mlp_dim": 1536},
                rngs=nnx.Rngs(0),
            )
        )
        graphdef, params = nnx.split(model)
        images = jax.ShapeDtypeStruct((8, 224, 224, 3), jnp.float32)
        row = {"depth": depth}
        for name, used in (("without tap", None), ("with tap", tap(TAPPED))):

            def forward(params, images, graphdef=graphdef, used=used):
                return nnx.merge(graphdef, params)(images, tap=used)

            plan = jax.jit(forward).lower(params, images).compile().memory_analysis()
            row[name] = {"temporary_bytes": plan.temp_size_in_bytes, "result_bytes": plan.output_size_in_bytes}
        rows.append(row)
    return rows


def show(report: dict) -> None:
    print(f"Singular values of {BATCH} matrices of {TOKENS} x {WIDTH}, on {report['device']}")
    for row in report["spectra"]:
        print(f"{row['contender']:>30} {row['seconds']:8.3f} s    leanformer / it {row['ours_over_it']:5.2f}")
    names = [name for name in report["algorithms"][0] if name != "shape"]
    print("\nMilliseconds a matrix (worst error, in float32 epsilons of the largest singular value)")
    print(f"{'shape':>12}" + "".join(f"{name:>20}" for name in names))
    for row in report["algorithms"]:
        cells = (f"{row[name]['milliseconds']:.2f} ({row[name]['error']:.1f})" for name in names)
        print(f"{row['shape']:>12}" + "".join(f"{cell:>20}" for cell in cells))
    print(f"\nForward pass of 8 images at 224, tapped for {', '.join(TAPPED)}")
    for row in report["memory"]:
        cells = (
            f"{name}: temporaries {row[name]['temporary_bytes'] / 2**20:7.1f} MiB, "
            f"results {row[name]['result_bytes'] / 2**10:6.1f} KiB"
            for name in ("without tap", "with tap")
        )
        print(f"{row['depth']:>4} layers   " + "    ".join(cells))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    parser.add_argument("--torch-python", help="interpreter of an environment with PyTorch; this one by default")
    parser.add_argument("--answer", choices=("ours", "numpy"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.answer:
        answer(arguments.answer)
        return
    device = jax.devices()[0]
    report = {
        "device": f"{device.platform} ({device.device_kind}), {os.cpu_count()} CPU cores",
        "spectra": measure_spectra(arguments.torch_python),
        "algorithms": measure_algorithms(),
        "memory": measure_memory(),
    }
    if arguments.json:
        print(json.dumps(report))
        return
    show(report)


if __name__ == "__main__":
    main()
