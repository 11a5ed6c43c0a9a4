"""The training step against the machine's own matrix-product rate, and compile time against depth.

    python benchmarks/step.py [--batch=8] [--json]

vit_b_7x16 in float32, for a CPU; benchmarks/gpu.py is for a GPU.

The rate is the best of some large products, measured between the steps, so that both see the same machine.
"""

import argparse
import math
import statistics
import time

import jax
import jax.numpy as jnp
import timing
from timing import batch_of, build, matrix_rate, products, seconds

from leanformer.config.rules import image_sides
from leanformer.costs import count
from leanformer.layers import attention, mlp
from leanformer.runtime import malloc


ROUNDS = 7


def on_cpu(batch: int) -> dict:
    """Share of the matrix rate of the whole step, of loss and gradient, and of the pieces that are not products."""
    run = build("vit_b_7x16", batch, "float32", "xla")
    state = run.initial_state()
    data, key, rated = batch_of(run), run.run_key(), products()
    step = run.compile_train_step()
    c = run.config.model
    tokens = math.prod(side // c.patch_size for side in image_sides(c.image_size)) + 1
    q = jax.random.normal(key, (batch, tokens, c.num_heads, c.head_dim))
    attend = jax.jit(jax.value_and_grad(lambda q, k, v: jnp.sum(attention.attend(q, k, v) * v), argnums=(0, 1, 2)))
    hidden = jax.random.normal(key, (batch, tokens, c.mlp_dim))
    gelu = jax.jit(jax.grad(lambda x: jnp.sum(mlp.gelu(x))))
    update = jax.jit(_adam)
    flat = jnp.ones(count.parameters(run.state.params))
    jax.block_until_ready((attend(q, q, q), gelu(hidden), update(flat, flat, flat, flat)))

    times: dict[str, list[float]] = {"step": [], "rate": [], "attention": [], "gelu": [], "update": []}
    for _ in range(ROUNDS + 1):  # the first warms up
        times["rate"].append(matrix_rate(rated))
        begun = time.perf_counter()
        state, metrics = step(state, data, key)
        jax.block_until_ready((state, metrics))
        times["step"].append(time.perf_counter() - begun)
        times["attention"].append(c.depth * seconds(attend, q, q, q))
        times["gelu"].append(c.depth * seconds(gelu, hidden))
        times["update"].append(seconds(update, flat, flat, flat, flat))
    middle = {name: statistics.median(values[1:]) for name, values in times.items()}
    flops = batch * run.flops_per_example[1]
    products_in_attention = c.depth * 6 * 2 * batch * c.num_heads * tokens**2 * c.head_dim
    return {
        "config": "vit_b_7x16, float32",
        "batch": batch,
        "matrix rate GFLOP/s": round(middle["rate"] / 1e9, 1),
        "step seconds": round(middle["step"], 3),
        "step share of the rate": round(flops / middle["step"] / middle["rate"], 3),
        "of the step: attention above its products' time": round(
            (middle["attention"] - products_in_attention / middle["rate"]) / middle["step"], 3
        ),
        "of the step: GELU and its gradient, alone": round(middle["gelu"] / middle["step"], 3),
        "of the step: AdamW over all parameters, alone": round(middle["update"] / middle["step"], 3),
    }


def _adam(p, g, m, v):
    m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
    return p - 1e-3 * (m / (jnp.sqrt(v) + 1e-8) + 0.3 * p), m, v


def compile_seconds(depths: tuple[int, int] = (6, 24)) -> dict:
    """Seconds to lower and compile the whole training step at two depths, each the best of two."""
    result = {}
    for depth in depths:
        best = []
        for _ in range(2):
            jax.clear_caches()
            run = build("vit_b_7x16", 8, "float32", "xla", depth=depth)
            begun = time.perf_counter()
            run.compile_train_step()
            best.append(time.perf_counter() - begun)
        result[f"compile seconds at depth {depth}"] = round(min(best), 2)
    first, last = result.values()
    return result | {"ratio": round(last / first, 3)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    malloc.keep_freed()  # as every command does
    for row in (on_cpu(options.batch), compile_seconds()):
        timing.show([{"": name, " ": value} for name, value in row.items()], as_json=options.json)


if __name__ == "__main__":
    main()
