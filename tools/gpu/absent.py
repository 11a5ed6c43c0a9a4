"""Tracing and lowering for a GPU that is not attached. Tests use it, since CI has no GPU.

with pretend_attached(Gpu("9.0")) as gpu:
    train_setup.set_up_training(config, examples=1_281_167, device=gpu).lower_train_step().as_text()
"""

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

from jax._src.cudnn import fused_attention_stablehlo as checks

from leanformer.costs import devices


CUDNN = 91100  # assumed version of cuDNN; JAX's interface uses 9.11 on every GPU of compute capability 8.0 or higher


@dataclasses.dataclass(frozen=True)
class Gpu:
    """NVIDIA GPU with those attributes of a JAX device that programs depend on."""

    compute_capability: str
    device_kind: str = "NVIDIA GPU"
    platform: str = "gpu"


@contextlib.contextmanager
def pretend_attached(device: Any, cudnn: int = CUDNN) -> Iterator[Any]:
    """Make JAX's checks before a call of cuDNN answer for `device` instead of the attached devices; yield `device`.

    Args:
        device: a `Gpu`, or a GPU of `jax.experimental.topologies`.
        cudnn: version of cuDNN to report.
    """
    capability = devices.capability(device)
    answers = {
        "check_cudnn_version": lambda: cudnn,
        "check_compute_capability": lambda least: capability >= float(least),
        "is_cuda_compute_capability_equal": lambda one: capability == float(one),
    }
    originals = {name: getattr(checks, name) for name in answers}
    try:
        for name, answer in answers.items():
            setattr(checks, name, answer)
        yield device
    finally:
        for name, original in originals.items():
            setattr(checks, name, original)
