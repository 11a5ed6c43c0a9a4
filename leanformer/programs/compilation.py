"""Compilation of programs that are read and never run."""

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path

import jax
from jax.experimental.compilation_cache import compilation_cache

from leanformer.errors import ConfigError
from leanformer.runtime import determinism


# The program is never run, so machine code is generated with as few optimisations as possible.
QUICK = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
# Where kernels must be deterministic, XLA asks cuBLAS for those of Triton's matmuls, which takes a GPU.
DETERMINISTIC = {"xla_gpu_enable_triton_gemm": False}
AFTER = "spmd-partitioning"


def compile_for_gpu(lowered: jax.stages.Lowered) -> jax.stages.Compiled:
    """Compile a program for the devices it was lowered for, without JAX's persistent cache.

    The cache cannot read back programs for devices that are not attached. Where deterministic kernels are required,
    Triton matmuls are off, which need an attached GPU.

    Raises:
        ConfigError: XLA_FLAGS contains `launches.ASK_CUDNN`, and cuDNN does not support a call of the program.
    """
    try:
        with uncached():
            return lowered.compile(DETERMINISTIC if determinism.is_required() else None)
    except jax.errors.JaxRuntimeError as error:
        reason, separator, _ = str(error).partition(" in external/xla")
        if not separator or "cuda_dnn" not in str(error):
            raise
        raise ConfigError(f'cuDNN does not support a call: {reason}. Use --config.model.backend="xla".') from error


def compile_and_read(lowered: jax.stages.Lowered) -> tuple[jax.stages.Compiled, str]:
    """Compile a program for CPU devices; return it and the text of the program of one device after partitioning.

    It is compiled with as few optimisations as possible, because it is never run.

    Raises:
        NotImplementedError: this version of XLA does not write the text.
    """
    with tempfile.TemporaryDirectory() as folder:
        options = {"xla_dump_to": folder, "xla_dump_hlo_as_text": True, "xla_dump_hlo_pass_re": f"^{AFTER}$"}
        with uncached():
            compiled = lowered.compile(options | QUICK)
        paths = list(Path(folder).glob(f"*after_{AFTER}*.txt"))
        if not paths and len(jax.tree.leaves(compiled.input_shardings)[0].device_set) == 1:
            paths = list(Path(folder).glob("*before_optimizations.txt"))  # a single device needs no partitioning
        if len(paths) != 1:
            raise NotImplementedError(f"This version of XLA ({jax.__version__=}) writes no program after {AFTER}.")
        return compiled, paths[0].read_text(encoding="utf-8")


@contextlib.contextmanager
def uncached() -> Iterator[None]:
    """Disable JAX's persistent compilation cache within a `with` block.

    A program from the cache writes no text, because dump options are not part of the cache's key. A program for devices
    that are not attached cannot be read back. JAX reads the cache's setting once per process, hence the resets.
    """
    before = jax.config.jax_enable_compilation_cache
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()
    try:
        yield
    finally:
        jax.config.update("jax_enable_compilation_cache", before)
        compilation_cache.reset_cache()
