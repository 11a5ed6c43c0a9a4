"""Nyström attention against exact attention over lengths.

    python benchmarks/nystrom.py [--batch=4] [--lengths=256,512,1024,2048,4096,8192] [--json]

One step is the loss and its gradient of the Long Range Arena's model, 2 layers x 2 heads, float32. Times are the least
of some rounds in which the programs take turns; memory is the compiled program's workspace.
"""

import argparse
import functools
import time

import jax
import jax.numpy as jnp
import numpy as np
import timing
from flax import nnx

from leanformer import models
from leanformer.tasks import losses


SHAPE = {"vocabulary": 32, "num_classes": 10, "width": 64, "depth": 2, "num_heads": 2, "head_dim": 32, "mlp_dim": 128}
LANDMARKS, ITERATIONS, TAPS = 64, 6, 35
ROUNDS = 7
LARGEST = 6e9  # bytes of workspace above which a program is compiled and not run


def nystrom_and_exact(length: int) -> dict:
    """The model's logits with either attention, as functions of (params, tokens), and the parameters of the first."""
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


def compiled(logits, params, tokens, targets):
    """Loss and gradient, ready to be called as (params, tokens)."""
    loss = jax.value_and_grad(lambda p, t: losses.classify(logits(p, t), targets, "softmax").mean())
    return jax.jit(loss).lower(params, tokens).compile()


def least_seconds(programs: dict) -> dict[str, float]:
    """The least time of each program over rounds in which they take turns."""
    least = dict.fromkeys(programs, np.inf)
    for _ in range(ROUNDS + 1):
        for name, program in programs.items():
            begun = time.perf_counter()
            jax.block_until_ready(program())
            least[name] = min(least[name], time.perf_counter() - begun)
    return least


def workspace(program: jax.stages.Compiled) -> float:
    return program.memory_analysis().temp_size_in_bytes


def batch_of(batch: int, length: int) -> tuple[jax.Array, jax.Array]:
    rng = np.random.default_rng(0)
    tokens = rng.integers(1, SHAPE["vocabulary"], (batch, length), dtype=np.int32)
    return jnp.asarray(tokens), jax.nn.one_hot(rng.integers(0, SHAPE["num_classes"], batch), SHAPE["num_classes"])


def over_lengths(batch: int, lengths: list[int]) -> tuple[list[dict], dict]:
    """Time and workspace of both kinds at each length, then the straight line through Nyström's times."""
    rows, times, workspaces = [], {"nystrom": [], "softmax": []}, []
    for length in lengths:
        tokens, targets = batch_of(batch, length)
        steps = {}
        for kind, (logits, params) in nystrom_and_exact(length).items():
            steps[kind] = (compiled(logits, params, tokens, targets), params)
        memory = {kind: workspace(step) for kind, (step, _) in steps.items()}
        programs = {
            kind: functools.partial(step, params, tokens)
            for kind, (step, params) in steps.items()
            if memory[kind] < LARGEST
        }
        least = least_seconds(programs)
        row = {"tokens": length, "batch": batch}
        for kind in times:
            times[kind].append(least.get(kind, np.nan))
            row |= {f"{kind} seconds": _round(least.get(kind)), f"{kind} workspace MB": round(memory[kind] / 1e6)}
        rows.append(row)
        workspaces.append(memory["nystrom"])
    return rows, _fits(np.array(lengths), *map(np.array, times.values()), np.array(workspaces))


def _fits(lengths: np.ndarray, nystrom: np.ndarray, softmax: np.ndarray, workspaces: np.ndarray) -> dict:
    slope, start, off = _line(lengths, nystrom)
    more, least, apart = _line(lengths, workspaces)
    both = np.isfinite(nystrom) & np.isfinite(softmax)
    ratio = np.log(softmax[both] / nystrom[both])
    crosses = ratio.min(initial=np.inf) < 0 < ratio.max(initial=-np.inf)
    crossing = np.exp(np.interp(0, ratio, np.log(lengths[both]))) if crosses else None
    return {
        "nystrom, straight line": f"{1e3 * start:.1f} ms + {1e6 * slope:.2f} us a token, off by {off:.0%} at most",
        "its workspace": f"{least / 1e6:.0f} MB + {more / 1e3:.1f} KB a token, off by {apart:.0%} at most",
        "softmax takes longer from": crossing and f"{crossing:.0f} tokens",
    }


def _line(x: np.ndarray, y: np.ndarray) -> tuple[float, float, float]:
    """Slope and start of the line that is relatively nearest to what was measured, and the largest distance from it."""
    ran = np.isfinite(y)
    if ran.sum() < 2:
        return (np.nan,) * 3
    slope, start = np.polyfit(x[ran], y[ran], 1, w=1 / y[ran])
    return slope, start, np.abs((start + slope * x[ran]) / y[ran] - 1).max()


def _round(seconds: float | None) -> float | None:
    return seconds and float(f"{seconds:.3g}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--lengths", default="256,512,1024,2048,4096,8192")
    parser.add_argument("--json", action="store_true")
    f = parser.parse_args()
    rows, line = over_lengths(f.batch, [int(n) for n in f.lengths.split(",")])
    timing.show(rows, as_json=f.json)
    timing.show([line], as_json=f.json)


if __name__ == "__main__":
    main()
