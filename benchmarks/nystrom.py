"""Nyström attention against exact attention over lengths, and against its three matrices written out plainly.

    python benchmarks/nystrom.py [--batch=4] [--lengths=256,512,1024,2048,4096,8192] [--plain-batch=32] [--json]

One step is the loss and its gradient of the Long Range Arena's model, 2 layers x 2 heads, float32. Times are the least
of some rounds in which the programs take turns; memory is the compiled program's workspace.
"""

import argparse
import functools
import json
import time

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from leanformer import models
from leanformer.layers.nystrom import convolve
from leanformer.tasks import losses


SHAPE = {"vocabulary": 32, "num_classes": 10, "width": 64, "depth": 2, "num_heads": 2, "head_dim": 32, "mlp_dim": 128}
LANDMARKS, ITERATIONS, TAPS = 64, 6, 35
ROUNDS = 7
LARGEST = 6e9  # bytes of workspace above which a program is compiled and not run


def nystrom_and_exact(length: int) -> dict:
    """The model's logits with either attention, as functions of (params, tokens), and the parameters of the first."""
    options = {"nystrom": {"landmarks": LANDMARKS, "iterations": ITERATIONS, "convolution": TAPS}, "softmax": {}}
    found = {}
    for kind in options:
        model = models.build(
            "nystromformer", **SHAPE, max_length=length, attention=kind, **options[kind], rngs=nnx.Rngs(0)
        )
        graphdef, params = nnx.split(model, nnx.Param)
        found[kind] = (functools.partial(_logits, graphdef), nnx.to_pure_dict(params))
    return found


def _logits(graphdef, params, tokens):
    return nnx.merge(graphdef, nnx.State(params))(tokens)[0]


def plain(params: dict, tokens: jax.Array, *, banded: bool = False) -> jax.Array:
    """The same logits as the paper writes them, one example and one head at a time under `vmap`.

    `banded` gives it the library's convolution instead of the compiler's.
    """
    x = params["embed"][tokens] + params["pos_embed"][None, : tokens.shape[1]]
    for layer in range(SHAPE["depth"]):
        p = jax.tree.map(lambda leaf, layer=layer: leaf[layer], params["blocks"]["layers"])
        normed = _norm(p["norm1"], x)
        q, k, v = (
            jnp.einsum("btd,dnh->bnth", normed, p["attention"][name]["kernel"])
            + p["attention"][name]["bias"][None, :, None]
            for name in ("query", "key", "value")
        )
        heads = jax.vmap(jax.vmap(_three_matrices))(q, k, v)
        taps = p["attention"]["skip"]
        if banded:
            heads += convolve(v.swapaxes(1, 2), taps).swapaxes(1, 2)
        else:
            heads += jax.lax.conv_general_dilated(
                *(v, taps.T[:, None, :, None], (1, 1), ((TAPS // 2, TAPS // 2), (0, 0))),
                feature_group_count=SHAPE["num_heads"],
                dimension_numbers=("NCHW", "OIHW", "NCHW"),
            )
        x += (
            jnp.einsum("bnth,nhd->btd", heads, p["attention"]["out"]["kernel"])
            + p["attention"]["out"]["bias"][None, None]
        )
        hidden = jax.nn.gelu(_linear(p["mlp"]["up"], _norm(p["norm2"], x)), approximate=False)
        x += _linear(p["mlp"]["down"], hidden)
    return _linear(params["head"], jax.nn.relu(_linear(params["hidden"], _norm(params["norm"], x).mean(axis=1))))


def _three_matrices(q, k, v):  # T H of one head
    landmarks = [x.reshape(LANDMARKS, -1, x.shape[-1]).mean(axis=1) for x in (q, k)]
    root = q.shape[-1] ** 0.5
    f1 = jax.nn.softmax(q @ landmarks[1].T / root)
    f2 = jax.nn.softmax(landmarks[0] @ landmarks[1].T / root)
    f3 = jax.nn.softmax(landmarks[0] @ k.T / root)
    z, eye = f2.T / (f2.sum(axis=0).max() * f2.sum(axis=1).max()), jnp.eye(LANDMARKS)
    for _ in range(ITERATIONS):
        fz = f2 @ z
        z = 0.25 * z @ (13 * eye - fz @ (15 * eye - fz @ (7 * eye - fz)))
    return (f1 @ z) @ (f3 @ v)


def _norm(p, x):
    x = x - x.mean(axis=-1, keepdims=True)
    x /= jnp.sqrt((x**2).mean(axis=-1, keepdims=True) + 1e-5)
    return x * p["scale"].reshape(*(1,) * (x.ndim - 1), -1) + p["bias"].reshape(*(1,) * (x.ndim - 1), -1)


def _linear(p, x):
    return x @ p["kernel"] + p["bias"].reshape(*(1,) * (x.ndim - 1), -1)


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


def over_lengths(batch: int, lengths: list[int]) -> list[dict]:
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
    return rows + [_fits(np.array(lengths), *map(np.array, times.values()), np.array(workspaces))]


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


def against_plain(batch: int, length: int = 2048) -> dict:
    """Seconds of the library's step and of the plain one's, which must give the same gradient."""
    tokens, targets = batch_of(batch, length)
    logits, params = nystrom_and_exact(length)["nystrom"]
    functions = {
        "library": logits,
        "plain": plain,
        "plain, banded convolution": functools.partial(plain, banded=True),
    }
    steps = {name: compiled(function, params, tokens, targets) for name, function in functions.items()}
    grads = [jax.tree.leaves(steps[name](params, tokens)[1]) for name in ("library", "plain")]
    largest = max(float(jnp.abs(g).max()) for g in grads[1])
    apart = max(float(jnp.abs(a - b).max()) for a, b in zip(*grads, strict=True)) / largest
    least = least_seconds({name: functools.partial(step, params, tokens) for name, step in steps.items()})
    row = {"tokens": length, "batch": batch, "gradients apart, of the largest": f"{apart:.1e}"}
    for name, step in steps.items():
        row |= {f"{name}, seconds": _round(least[name]), f"{name}, workspace MB": round(workspace(step) / 1e6)}
    return row | {"plain / library": round(least["plain"] / least["library"], 2)}


def _round(seconds: float | None) -> float | None:
    return seconds and float(f"{seconds:.3g}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--lengths", default="256,512,1024,2048,4096,8192")
    parser.add_argument("--plain-batch", type=int, default=32)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    rows = over_lengths(options.batch, [int(n) for n in options.lengths.split(",")])
    rows.append(against_plain(options.plain_batch))
    if options.json:
        print(json.dumps({"device": jax.devices()[0].device_kind, "jax": jax.__version__, "rows": rows}))
        return
    for row in rows:
        print("\n".join(f"{name:<36}{value}" for name, value in row.items()), end="\n\n")


if __name__ == "__main__":
    main()
