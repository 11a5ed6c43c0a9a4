"""Nyström attention against exact attention over lengths.

    python -m tools.speed.nystrom [--batch=4] [--lengths=256,512,1024,2048,4096,8192] [--json]

One step is the loss and its gradient of the Long Range Arena's model, 2 layers x 2 heads, float32. Times are
minima over rounds in which the programs alternate; memory is the compiled program's workspace.
"""

import argparse
import functools
import time

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from leanformer import models
from leanformer.tasks.classification import classify
from tools.speed import timing


SHAPE = {"vocabulary": 32, "num_classes": 10, "width": 64, "depth": 2, "num_heads": 2, "head_dim": 32, "mlp_dim": 128}
LANDMARKS, ITERATIONS, TAPS = 64, 6, 35
ROUNDS = 7
LARGEST = 6e9  # bytes of workspace above which a program is compiled but not run


def make_models(length: int) -> dict:
    """Return {attention: (logits as a function of (params, tokens), parameters)} for both types of attention."""
    options = {"nystrom": {"landmarks": LANDMARKS, "iterations": ITERATIONS, "convolution": TAPS}, "softmax": {}}
    result = {}
    for kind in options:
        model = models.build(
            "nystromformer", **SHAPE, max_length=length, attention=kind, **options[kind], rngs=nnx.Rngs(0)
        )
        graphdef, params = nnx.split(model, nnx.Param)
        result[kind] = (functools.partial(_logits, graphdef), nnx.to_pure_dict(params))
    return result


def _logits(graphdef, params, tokens):
    return nnx.merge(graphdef, nnx.State(params))(tokens)[0]


def compile_step(logits, params, tokens, targets):
    """Compile the loss and its gradient as a function of (params, tokens)."""
    loss = jax.value_and_grad(lambda p, t: classify(logits(p, t), targets, "softmax").mean())
    return jax.jit(loss).lower(params, tokens).compile()


def measure_seconds(programs: dict) -> dict[str, float]:
    """Return the minimum time of each program over rounds in which the programs alternate."""
    least = dict.fromkeys(programs, np.inf)
    for _ in range(ROUNDS + 1):
        for name, program in programs.items():
            start = time.perf_counter()
            jax.block_until_ready(program())
            least[name] = min(least[name], time.perf_counter() - start)
    return least


def workspace_bytes(program: jax.stages.Compiled) -> float:
    return program.memory_analysis().temp_size_in_bytes


def make_batch(batch: int, length: int) -> tuple[jax.Array, jax.Array]:
    rng = np.random.default_rng(0)
    tokens = rng.integers(1, SHAPE["vocabulary"], (batch, length), dtype=np.int32)
    return jnp.asarray(tokens), jax.nn.one_hot(rng.integers(0, SHAPE["num_classes"], batch), SHAPE["num_classes"])


def measure_lengths(batch: int, lengths: list[int]) -> tuple[list[dict], dict]:
    """Return rows of time and workspace at each length, and straight-line fits to Nyström attention's."""
    rows, times, workspaces = [], {"nystrom": [], "softmax": []}, []
    for length in lengths:
        tokens, targets = make_batch(batch, length)
        steps = {}
        for kind, (logits, params) in make_models(length).items():
            steps[kind] = (compile_step(logits, params, tokens, targets), params)
        memory = {kind: workspace_bytes(step) for kind, (step, _) in steps.items()}
        programs = {
            kind: functools.partial(step, params, tokens)
            for kind, (step, params) in steps.items()
            if memory[kind] < LARGEST
        }
        least = measure_seconds(programs)
        row = {"tokens": length, "batch": batch}
        for kind in times:
            times[kind].append(least.get(kind, np.nan))
            row |= {f"{kind} seconds": _round(least.get(kind)), f"{kind} workspace MB": round(memory[kind] / 1e6)}
        rows.append(row)
        workspaces.append(memory["nystrom"])
    return rows, _fit_lines(np.array(lengths), *map(np.array, times.values()), np.array(workspaces))


def _fit_lines(lengths: np.ndarray, nystrom: np.ndarray, softmax: np.ndarray, workspaces: np.ndarray) -> dict:
    slope, intercept, error = _fit_line(lengths, nystrom)
    per_token, base, memory_error = _fit_line(lengths, workspaces)
    finite = np.isfinite(nystrom) & np.isfinite(softmax)
    ratio = np.log(softmax[finite] / nystrom[finite])
    crosses = ratio.min(initial=np.inf) < 0 < ratio.max(initial=-np.inf)
    crossing = np.exp(np.interp(0, ratio, np.log(lengths[finite]))) if crosses else None
    return {
        "nystrom, straight line": f"{1e3 * intercept:.1f} ms + {1e6 * slope:.2f} us/token, error at most {error:.0%}",
        "its workspace": f"{base / 1e6:.0f} MB + {per_token / 1e3:.1f} KB/token, error at most {memory_error:.0%}",
        "softmax takes longer from": crossing and f"{crossing:.0f} tokens",
    }


def _fit_line(x: np.ndarray, y: np.ndarray) -> tuple[float, float, float]:
    """Return slope and intercept of the line with the least relative squared error, and the largest relative error."""
    finite = np.isfinite(y)
    if finite.sum() < 2:
        return (np.nan,) * 3
    slope, intercept = np.polyfit(x[finite], y[finite], 1, w=1 / y[finite])
    return slope, intercept, np.abs((intercept + slope * x[finite]) / y[finite] - 1).max()


def _round(seconds: float | None) -> float | None:
    return seconds and float(f"{seconds:.3g}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--lengths", default="256,512,1024,2048,4096,8192")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    rows, fits = measure_lengths(args.batch, [int(n) for n in args.lengths.split(",")])
    timing.show(rows, as_json=args.json)
    timing.show([fits], as_json=args.json)


if __name__ == "__main__":
    main()
