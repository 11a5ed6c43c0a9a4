"""Eight fake CPU devices for every test, strict shapes, and a tiny config."""

import atexit
import gc
import os
import shutil
import tempfile


# Where tests and the commands that they run keep what they compile: most train one of a few tiny models. One for all
# workers. What compiles in less is as fast compiled again as read.
if "LEANFORMER_TEST_CACHE" not in os.environ:
    os.environ["LEANFORMER_TEST_CACHE"] = tempfile.mkdtemp(prefix="leanformer_test_")
    atexit.register(shutil.rmtree, os.environ["LEANFORMER_TEST_CACHE"], ignore_errors=True)

# Before jax starts. The programs run once on tiny shapes: compiling them fast matters more than running them fast.
QUICK_COMPILE = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count=8 {QUICK_COMPILE}"
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["JAX_COMPILATION_CACHE_DIR"] = os.environ["LEANFORMER_TEST_CACHE"]
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.3"

import jax
import jaxtyping
import numpy as np
import pytest

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
def plain(tiny) -> config.ConfigDict:
    """The same without mixing and erasing, half of what the step has to compile: for what looks elsewhere in it."""
    tiny.augment.update(mixup=0.0, cutmix=0.0, erase=0.0)
    return tiny


@pytest.fixture
def one_device(monkeypatch):
    """`train` shares nothing out, where over eight devices is another test's subject."""
    from leanformer import train

    monkeypatch.setattr(train.meshes, "make_mesh", lambda **_: make_mesh(devices=jax.devices()[:1]))


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
def keeping():
    """Small programs too are compiled once, however often they are asked for."""
    name = "jax_persistent_cache_min_compile_time_secs"
    before = getattr(jax.config, name)
    jax.config.update(name, 0.0)
    yield
    jax.config.update(name, before)
