"""Check of cuDNN's attention on the GPU of a run, before the first step.

cuDNN may refuse a shape on one card or with one version of CUDA, and a kernel has been wrong before. Each call in the
model is run forward and backward on random numbers and compared with the float32 reference.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from leanformer.errors import ConfigError, first_line
from leanformer.layers import attention
from leanformer.layers.attention import FusedCall
from leanformer.runtime import multihost, phases
from leanformer.tasks import Task
from leanformer.training import model_setup
from leanformer.training import state as states
from leanformer.training.model_setup import ModelSetup


BATCH = 2
UNTUNED = {"xla_gpu_autotune_level": 0}  # timing candidates for each matmul takes seconds, and this one runs once
# Errors of JAX when tracing, compiling and running. With deterministic kernels, jax 0.11.2 on an H200 raises IndexError
# if a program calls one kernel's backward pass twice outside of loops.
FAILURES = (RuntimeError, NotImplementedError, ValueError, IndexError)
ROUNDINGS = 8  # largest error of a correct kernel, in roundings of its dtype relative to the largest number


def with_working_attention(model: ModelSetup, task: Task) -> ModelSetup:
    """Return the model setup, with XLA's attention instead of cuDNN's if that fails or is wrong on this GPU.

    A setup with another backend, or for a GPU that is not attached, is returned unchanged. All processes must call
    this, and get the same result.

    Raises:
        ConfigError: cuDNN is configured, and fails or is wrong.
    """
    if model.backend != "cudnn" or not any(model.device is device for device in jax.devices()):
        return model
    with phases.announce("Checking cuDNN's attention on this GPU"):
        problem = next(filter(None, multihost.all_gather_host(_first_problem(model, task))), None)
    if problem is None:
        reason = f"{model.backend_reason}; checked on this device"
        return dataclasses.replace(model, backend_reason=reason)
    if model.config.model.backend == "cudnn":
        raise ConfigError(f'model.backend="cudnn": {problem}. Use model.backend="xla".')
    unroll = model_setup.select_unroll(model.config, model.mesh, model.device)
    graphdef, init, _ = model_setup.abstract_model(model.config, "xla", unroll)
    changes = {"backend": "xla", "backend_reason": f"no cuDNN: {problem}", "graphdef": graphdef, "init": init}
    return dataclasses.replace(model, **changes)


def _first_problem(model: ModelSetup, task: Task) -> str | None:
    try:
        calls = find_calls(model, task)
    except FAILURES as error:
        return f"it fails here: {first_line(error)}"
    return next(filter(None, map(find_problem, calls)), None)


def find_calls(model: ModelSetup, task: Task) -> list[FusedCall]:
    """Return the distinct calls of cuDNN's attention kernel in a model, for an evaluation batch; nothing is run.

    Args:
        model: setup of the model.
        task: task whose data determine the shapes.
    """
    batch = model.abstract_batch(model.config.eval.batch_size, task.data.specs(train=False))
    step = model.eval_step(task.objective)
    with attention.recorded_calls() as calls:
        jax.eval_shape(step, states.without_shardings(model.weights), states.without_shardings(batch))
    return sorted(calls, key=str)


def find_problem(call: FusedCall) -> str | None:
    """Run a call of cuDNN's kernel on random numbers, and return the problem as text; None if the result is right.

    The problem is an error of the kernel, or a `relative_error` above `largest_error`.
    """
    tokens = f"{call.queries[0]} x {call.keys[0]} tokens, head dimension {call.keys[-1]}"
    try:
        error, limit = relative_error(call, "cudnn"), largest_error(call.dtype)
    except FAILURES as failure:
        return f"it fails here ({tokens}): {first_line(failure)}"
    return None if error <= limit else f"it is wrong here ({tokens}): relative error {error:.2g}, at most {limit:.2g}"


def largest_error(dtype: Any) -> float:
    """Return the largest `relative_error` of a correct implementation in `dtype`: ROUNDINGS x machine epsilon."""
    return ROUNDINGS * float(jnp.finfo(dtype).eps)


def relative_error(call: FusedCall, backend: str) -> float:
    """Return the largest error of the output and the gradients of a call of attention on random numbers.

    It is relative to the largest number of each array of the float32 reference, and infinite for NaN. One program makes
    the call twice, as that of a model does, the second time with the examples in reverse order. Raises what JAX raises
    if the backend fails.

    Args:
        call: shapes, dtype, mask and scale.
        backend: attention backend to run, "cudnn", "xla" or "naive".
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
