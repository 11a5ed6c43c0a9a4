"""What the benchmarks of training steps share: a config's pieces, the machine's matrix-product rate, clocks."""

import functools
import runpy
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from leanformer.costs import hardware
from leanformer.runtime import mesh as meshes
from leanformer.training import experiment


CONFIGS = Path(__file__).parents[1] / "configs"
WARM_UP, STEPS = 5, 30  # of `trained`
PRODUCTS = [(2048, 2048, 2048), (1576, 768, 1536), (1576, 1024, 768), (4096, 1024, 1024)]


def build(name: str, batch: int, dtype: str, backend: str, **model: Any) -> experiment.Experiment:
    """The experiment of a config, at another batch, dtype, attention backend and `model` sizes."""
    c = runpy.run_path(str(CONFIGS / f"{name}.py"))["get_config"]()
    c.update(batch_size=batch, dtype=dtype)
    c.eval.batch_size = jax.device_count()
    c.model.update(backend=backend, **model)
    return experiment.build(c, examples=1_281_167, mesh=meshes.make_mesh())


def batch_of(run: experiment.Experiment) -> dict[str, jax.Array]:
    """A batch of random images and labels, where the run wants it."""
    shapes, rng = run.abstract_batch(), np.random.default_rng(0)
    images = rng.integers(0, 256, shapes["image"].shape, dtype=np.uint8)
    labels = rng.integers(0, run.config.model.num_classes, shapes["label"].shape).astype(np.int32)
    return meshes.put_batch(run.mesh, {"image": images, "label": labels})


def trained(run: experiment.Experiment, steps: int = STEPS) -> dict[str, Any]:
    """Seconds to lower and compile the training step, examples a second, their share of the bfloat16 peak, and the peak
    of memory, from a process that does nothing else. None's for what the device does not tell, or has no memory for."""
    device, batch = jax.devices()[0], run.config.batch_size
    row = dict.fromkeys(("compile s", "examples/s", "MFU", "peak GB"))
    row = {"device": device.device_kind, "attention": run.backend, "batch": batch} | row
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
