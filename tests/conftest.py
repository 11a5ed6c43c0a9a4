"""Eight fake CPU devices for every test, strict shapes, and a tiny config."""

import atexit
import gc
import os
import shutil
import tempfile


# Where the commands that tests run keep what they compile: most train one of a few tiny models. One for all workers.
if "LEANFORMER_TEST_CACHE" not in os.environ:
    os.environ["LEANFORMER_TEST_CACHE"] = tempfile.mkdtemp(prefix="leanformer_test_")
    atexit.register(shutil.rmtree, os.environ["LEANFORMER_TEST_CACHE"], ignore_errors=True)

# Before jax starts. The programs run once on tiny shapes: compiling them fast matters more than running them fast.
QUICK_COMPILE = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count=8 {QUICK_COMPILE}"
os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jaxtyping
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache

from leanformer import config
from leanformer.runtime.mesh import make_mesh


jax.config.update("jax_numpy_rank_promotion", "raise")
gc.freeze()  # what was imported stays: looking through it over and over while programs are traced is a 20th of the time
gc.set_threshold(20_000, 20, 20)


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(20505)


@pytest.fixture
def tiny() -> config.ConfigDict:
    """A run of everything that is random, on synthetic images, in seconds."""
    c = config.base()
    c.update(batch_size=16, total_epochs=0.0, total_steps=6, dtype="float32", log_every=2)
    c.model.update(image_size=14, patch_size=7, channels=1, num_classes=5, width=12, depth=3)
    c.model.update(num_heads=3, head_dim=8, mlp_dim=20, drop_path=0.3)
    c.data.update(name="synthetic", mean=(0.5,), std=(0.5,), crop_fraction=1.0, workers=0)
    c.augment.update(erase=0.3)
    c.optim.update(warmup_epochs=0.0, ema=0.9)
    c.eval.batch_size = 16
    return c


@pytest.fixture
def unchecked():
    """Annotated shapes are not checked, a third of tracing: for programs that another test traces with the check."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


@pytest.fixture
def meshes():
    """Builds a mesh on the first data x fsdp x tensor fake devices."""

    def make(data: int, fsdp: int, tensor: int = 1) -> jax.sharding.Mesh:
        return make_mesh(data, fsdp, tensor, devices=jax.devices()[: data * fsdp * tensor])

    return make


@pytest.fixture
def keeping(tmp_path_factory):
    """Programs are compiled once, however often they are asked for."""
    names = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
    before = {name: getattr(jax.config, name) for name in names}
    for name, value in zip(names, (str(tmp_path_factory.mktemp("compiled")), 0.0), strict=True):
        jax.config.update(name, value)
    compilation_cache.reset_cache()
    yield
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()
