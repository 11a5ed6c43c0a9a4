"""Training-step time relative to the machine's matmul throughput, and compile time against depth.

    python -m tools.speed.step [--batch=8] [--json]

vit_b_7x16 in float32, for a CPU; tools/gpu/queue.py is for a GPU.

The throughput ("rate") is the best of several large matmuls, measured between the steps, so that both see the same load
on the machine.
"""

import argparse
import math
import statistics
import time

import jax
import jax.numpy as jnp

from leanformer import cli
from leanformer.config.rules import image_sides
from leanformer.costs import count
from leanformer.layers import attention, blocks
from tools.speed import timing
from tools.speed.timing import build, make_batch, make_matmuls, matmul_throughput, time_call


ROUNDS = 7


def measure_step(batch: int) -> dict:
    """Return the share of the matmul throughput that the step reaches, and of its time that other parts take."""
    run = build("vit_b_7x16", batch, "float32", "xla")
    state = run.initial_state()
    data, key, matmuls = make_batch(run), run.run_key(), make_matmuls()
    step = run.compile_train_step()
    c = run.config.model
    tokens = math.prod(side // c.patch_size for side in image_sides(c.image_size)) + 1
    q = jax.random.normal(key, (batch, tokens, c.num_heads, c.head_dim))
    attend = jax.jit(jax.value_and_grad(lambda q, k, v: jnp.sum(attention.attend(q, k, v) * v), argnums=(0, 1, 2)))
    hidden = jax.random.normal(key, (batch, tokens, c.mlp_dim))
    gelu = jax.jit(jax.grad(lambda x: jnp.sum(blocks.gelu(x))))
    update = jax.jit(_adam_update)
    flat = jnp.ones(count.parameters(run.state.params))
    jax.block_until_ready((attend(q, q, q), gelu(hidden), update(flat, flat, flat, flat)))

    times: dict[str, list[float]] = {"step": [], "rate": [], "attention": [], "gelu": [], "update": []}
    for _ in range(ROUNDS + 1):  # the first warms up
        times["rate"].append(matmul_throughput(matmuls))
        start = time.perf_counter()
        state, metrics = step(state, data, key)
        jax.block_until_ready((state, metrics))
        times["step"].append(time.perf_counter() - start)
        times["attention"].append(c.depth * time_call(attend, q, q, q))
        times["gelu"].append(c.depth * time_call(gelu, hidden))
        times["update"].append(time_call(update, flat, flat, flat, flat))
    medians = {name: statistics.median(values[1:]) for name, values in times.items()}
    flops = batch * run.flops_per_example[1]
    attention_matmul_flops = c.depth * 6 * 2 * batch * c.num_heads * tokens**2 * c.head_dim
    return {
        "config": "vit_b_7x16, float32",
        "batch": batch,
        "matrix rate GFLOP/s": round(medians["rate"] / 1e9, 1),
        "step seconds": round(medians["step"], 3),
        "step share of the rate": round(flops / medians["step"] / medians["rate"], 3),
        "of the step: attention above its products' time": round(
            (medians["attention"] - attention_matmul_flops / medians["rate"]) / medians["step"], 3
        ),
        "of the step: GELU and its gradient, alone": round(medians["gelu"] / medians["step"], 3),
        "of the step: AdamW over all parameters, alone": round(medians["update"] / medians["step"], 3),
    }


def _adam_update(p, g, m, v):
    m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
    return p - 1e-3 * (m / (jnp.sqrt(v) + 1e-8) + 0.3 * p), m, v


def measure_compile(depths: tuple[int, int] = (6, 24)) -> dict:
    """Return the seconds to lower and compile the training step at two depths, each the best of two."""
    result = {}
    for depth in depths:
        times = []
        for _ in range(2):
            jax.clear_caches()
            run = build("vit_b_7x16", 8, "float32", "xla", depth=depth)
            start = time.perf_counter()
            run.compile_train_step()
            times.append(time.perf_counter() - start)
        result[f"compile seconds at depth {depth}"] = round(min(times), 2)
    first, last = result.values()
    return result | {"ratio": round(last / first, 3)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    cli.keep_freed_memory()  # as every command does
    for row in (measure_step(options.batch), measure_compile()):
        timing.show([{"": name, " ": value} for name, value in row.items()], as_json=options.json)


if __name__ == "__main__":
    main()
