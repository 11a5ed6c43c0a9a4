"""Check of cuDNN's attention on the attached GPU: `python -m tools.gpu.attention --config=configs/vit_b_7x16.py`.

Every distinct call in the config's model is run forward and backward on random numbers and compared with the float32
reference. Run it once per card and version of cuDNN: kernels have been wrong before, and cuDNN may refuse a shape.
"""

import contextlib
import dataclasses
import functools
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from leanformer import cli
from leanformer.layers import attention
from leanformer.layers.masks import Mask
from leanformer.training import train_setup
from leanformer.training.train_setup import Setup


BATCH = 2
UNTUNED = {"xla_gpu_autotune_level": 0}  # timing candidates for each matmul takes seconds, and this one runs once
# Errors of JAX when tracing, compiling and running. With deterministic kernels, jax 0.11.2 on an H200 raises IndexError
# if a program calls one kernel's backward pass twice outside of loops.
FAILURES = (RuntimeError, NotImplementedError, ValueError, IndexError)
ROUNDINGS = 8  # largest error of a correct kernel, in roundings of its dtype relative to the largest number


class Call(NamedTuple):
    """Call of attention without the batch size.

    Attributes:
        queries, keys, values: shapes of one example, (T, N, H), (S, K, H) and (S, K, H').
        dtype: dtype of the three arrays.
        mask: mask of the call, with True instead of the array `lengths` if there are key lengths.
        scale: factor of the logits; None for 1/√H.
    """

    queries: tuple[int, ...]
    keys: tuple[int, ...]
    values: tuple[int, ...]
    dtype: Any
    mask: Mask
    scale: float | None


@contextlib.contextmanager
def recorded_calls() -> Iterator[set[Call]]:
    """Yield a set of the calls of cuDNN's attention that are traced within a `with` block."""
    original, calls = jax.nn.dot_product_attention, set()

    def record(q: Any, k: Any, v: Any, **options: Any) -> Any:
        if options.get("implementation") == "cudnn":
            hidden = options.get("key_value_seq_lengths") is not None
            mask = Mask(causal=options["is_causal"], lengths=hidden or None)
            calls.add(Call(*(x.shape[1:] for x in (q, k, v)), jnp.dtype(q.dtype), mask, options["scale"]))
        return original(q, k, v, **options)

    jax.nn.dot_product_attention = record
    try:
        yield calls
    finally:
        jax.nn.dot_product_attention = original


def find_calls(run: Setup) -> list[Call]:
    """Return the distinct calls of cuDNN's attention in a training step; nothing is run."""
    jax.clear_caches()  # what JAX has traced before is not traced again, and would not be recorded
    with recorded_calls() as calls:
        run.lower_train_step()
    return sorted(calls, key=str)


def find_problem(call: Call) -> str | None:
    """Run a call of cuDNN's kernel on random numbers; return its error as a text, or None if the result is right."""
    try:
        error, limit = relative_error(call, "cudnn"), largest_error(call.dtype)
    except FAILURES as failure:
        return f"fails: {failure}"
    return None if error <= limit else f"wrong: relative error {error:.2g}, at most {limit:.2g}"


def largest_error(dtype: Any) -> float:
    """Return the largest `relative_error` of a correct implementation in `dtype`: ROUNDINGS x machine epsilon."""
    return ROUNDINGS * float(jnp.finfo(dtype).eps)


def relative_error(call: Call, backend: str) -> float:
    """Return the largest error of the output and the gradients of a call of attention on random numbers.

    It is relative to the largest number of each array of the float32 reference, and infinite for NaN. One program makes
    the call twice, as a model does, the second time with the examples in reverse order. Raises what JAX raises if the
    backend fails.
    """
    rng = np.random.default_rng(0)
    shapes = (call.queries, call.keys, call.values, (*call.queries[:-1], call.values[-1]))
    arrays = [jnp.asarray(rng.standard_normal((BATCH, *shape), np.float32), call.dtype) for shape in shapes]
    keys = call.keys[0]

    def run_once(backend: str, *arrays: Any, lengths: Any) -> Any:
        mask = dataclasses.replace(call.mask, lengths=lengths)
        out, pull = jax.vjp(
            lambda *qkv: attention.attend(*qkv, mask=mask, scale=call.scale, backend=backend), *arrays[:3]
        )
        return out, *pull(arrays[3])

    def run(backend: str, *arrays: Any) -> Any:
        lengths = jnp.array([keys, (keys + 1) // 2], jnp.int32) if call.mask.lengths else None
        reverse = None if lengths is None else lengths[::-1]
        once = run_once(backend, *arrays, lengths=lengths)
        return *once, *run_once(backend, *(x[::-1] for x in arrays), lengths=reverse)

    with jax.default_matmul_precision("highest"):  # XLA's kernels on a GPU would use TF32
        reference = jax.jit(functools.partial(run, "naive"), compiler_options=UNTUNED)
        expected = reference(*(x.astype(jnp.float32) for x in arrays))
    pairs = zip(jax.device_get(jax.jit(run, static_argnums=0)(backend, *arrays)), jax.device_get(expected), strict=True)
    error = max(np.abs(np.asarray(a, np.float32) - b).max() / np.abs(b).max() for a, b in pairs)
    return float(error) if np.isfinite(error) else float("inf")


def check(run: Setup) -> int:
    """Print a line per call of a training step. Return the exit status: 0 if there is a call and all are right."""
    calls = find_calls(run)
    if not calls:
        print(f"No call of cuDNN's attention in this step, so nothing was checked: {run.model.backend_reason}.")
    problems = [find_problem(call) for call in calls]
    for call, problem in zip(calls, problems, strict=True):
        print(f"{call.queries[0]} x {call.keys[0]} tokens, head dimension {call.keys[-1]}: {problem or 'right'}")
    return int(not calls or any(problems))


@cli.command(cli.CONFIG)
def main(flags: cli.Values) -> None:
    sys.exit(check(train_setup.set_up_training(flags.config, examples=1_281_167)))


if __name__ == "__main__":
    cli.run(main)
