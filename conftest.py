"""Test setup: eight fake CPU devices, strict shapes, a compilation cache, and fixtures with a tiny config."""

import atexit
import contextlib
import gc
import os
import shutil
import signal
import tempfile
import time
from pathlib import Path


def compilation_cache_folder():
    """Return the folder of JAX's compilation cache for tests, shared by all workers, commands and later test runs.

    On CI, and if the home folder is not writable, it is a temporary folder that is deleted at the end. Entries that
    were not read for two weeks are deleted.
    """
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "leanformer" / "tests"
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
    if os.environ.get("CI") or not os.access(folder, os.W_OK):
        temporary = tempfile.mkdtemp(prefix="leanformer_test_")
        atexit.register(shutil.rmtree, temporary, ignore_errors=True)
        return temporary
    for path in folder.iterdir():
        with contextlib.suppress(FileNotFoundError):  # another test run deletes it too
            if time.time() - path.stat().st_atime > 14 * 86_400:
                path.unlink()
    return str(folder)


# A shell starts background jobs with SIGINT ignored, and training then ignores it too: the tests may be such a job.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if "LEANFORMER_TEST_CACHE" not in os.environ:
    os.environ["LEANFORMER_TEST_CACHE"] = compilation_cache_folder()

# Set before JAX is imported. Programs run once on tiny shapes: fast compilation matters more than fast execution.
# External flags are kept; workers inherit them.
EXTERNAL_FLAGS = os.environ.setdefault("LEANFORMER_TEST_XLA_FLAGS", os.environ.get("XLA_FLAGS", ""))
FAST_COMPILE = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count=8 {FAST_COMPILE} {EXTERNAL_FLAGS}".strip()
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["COLUMNS"] = "1000"  # stored pages are not wrapped: where lines break depends on the numbers in them
os.environ["JAX_COMPILATION_CACHE_DIR"] = os.environ["LEANFORMER_TEST_CACHE"]
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"  # single operations too, for the other workers

import jax
import jaxtyping
import numpy as np
import pytest

from leanformer import config
from leanformer.runtime import timing
from leanformer.runtime.mesh import make_mesh


jax.config.update("jax_numpy_rank_promotion", "raise")
timing.SLOW = 1e6  # seconds; no lines about slow phases, which would depend on the load of the machine
gc.freeze()  # imported modules stay alive: scanning them repeatedly during tracing takes 5 % of the time
gc.set_threshold(20_000, 20, 20)
MEMORY_LIMIT = 3e9  # bytes; above it a worker drops the compiled programs of finished files


def resident_bytes():
    """Return the resident memory of this process in bytes; 0 on systems without /proc."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except FileNotFoundError:
        return 0


def pytest_runtest_teardown(item, nextitem):
    """Drop compiled programs between files, so that a worker stays below 4 GB."""
    if (nextitem is None or nextitem.path != item.path) and resident_bytes() > MEMORY_LIMIT:
        jax.clear_caches()
        gc.collect()


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(20505)


def tiny_config() -> config.ConfigDict:
    """Return the config of a run on synthetic images that takes seconds, with every random feature enabled."""
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
    """Return the config of `tiny_config`, which a test may modify."""
    return tiny_config()


@pytest.fixture(scope="session")
def make_tiny():
    """Return the function that makes `tiny`, for module-scoped fixtures."""
    return tiny_config


@pytest.fixture
def plain(tiny) -> config.ConfigDict:
    """Return `tiny` without MixUp, CutMix and erasing, which halves the compilation of the training step."""
    tiny.augment.update(mixup=0.0, cutmix=0.0, erase=0.0)
    return tiny


@pytest.fixture
def one_device(monkeypatch):
    """Make `train` use a single device, for tests that do not test sharding over the eight devices."""
    from leanformer.runtime import mesh

    monkeypatch.setattr(mesh, "make_mesh", lambda **_: make_mesh(devices=jax.devices()[:1]))


@pytest.fixture
def no_shape_checks():
    """Disable the checks of annotated shapes (a third of tracing), for programs that another test traces with them."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


@pytest.fixture(scope="session")
def meshes():
    """Return a function that builds a mesh on the first data x fsdp x tensor fake devices."""

    def make(data: int, fsdp: int, tensor: int = 1) -> jax.sharding.Mesh:
        return make_mesh(data, fsdp, tensor, devices=jax.devices()[: data * fsdp * tensor])

    return make
