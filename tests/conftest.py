"""Eight fake CPU devices for every test, strict shapes, and a tiny config."""

import atexit
import contextlib
import gc
import os
import shutil
import tempfile
import time
import zlib
from pathlib import Path


def compiled_programs():
    """Return the folder that keeps what tests compile: one for all workers and commands, and for the next run too.

    On CI, and where the home folder cannot be written to, it is empty at the start and deleted at the end. Entries that
    nothing has read for two weeks are deleted, and those that a killed process left half written.
    """
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "leanformer" / "tests"
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
    if os.environ.get("CI") or not os.access(folder, os.W_OK):
        temporary = tempfile.mkdtemp(prefix="leanformer_test_")
        atexit.register(shutil.rmtree, temporary, ignore_errors=True)
        return temporary
    for path in folder.iterdir():
        with contextlib.suppress(FileNotFoundError):  # another run deletes it too
            if time.time() - path.stat().st_atime > 14 * 86_400 or is_damaged(path.read_bytes()):
                path.unlink()
    return str(folder)


def is_damaged(program):
    """Return whether a compiled program in JAX's cache is incomplete; it is compressed by zlib, or not looked at."""
    try:
        return program[:1] in (b"", b"x") and not zlib.decompress(program)
    except zlib.error:
        return True


if "LEANFORMER_TEST_CACHE" not in os.environ:
    os.environ["LEANFORMER_TEST_CACHE"] = compiled_programs()

# Before jax starts. The programs run once on tiny shapes: compiling them fast matters more than running them fast.
# Flags from outside stay (tests/stress/processors.py sets the instruction set); workers inherit them from here.
GIVEN = os.environ.setdefault("LEANFORMER_TEST_XLA_FLAGS", os.environ.get("XLA_FLAGS", ""))
QUICK_COMPILE = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count=8 {QUICK_COMPILE} {GIVEN}".strip()
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
MEMORY = 1.5e9  # bytes of a worker from which on the programs of finished files are dropped


def resident_bytes():
    """Return the memory of this process; 0 on systems without /proc."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except FileNotFoundError:
        return 0


def pytest_runtest_teardown(item, nextitem):
    """Drop compiled programs between files, so that a worker stays below 2 GB."""
    if (nextitem is None or nextitem.path != item.path) and resident_bytes() > MEMORY:
        jax.clear_caches()
        gc.collect()


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(20505)


def tiny_config() -> config.ConfigDict:
    """Return the config of a run of everything that is random, on synthetic images, in seconds."""
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
def tiny() -> config.ConfigDict:
    """The config of `tiny_config`, for a test to change."""
    return tiny_config()


@pytest.fixture(scope="session")
def make_tiny():
    """The function that makes `tiny`, for fixtures of a whole file."""
    return tiny_config


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


@pytest.fixture(scope="session")
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
