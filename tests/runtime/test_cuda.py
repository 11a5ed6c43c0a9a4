"""CUDA packages that JAX would silently not use: refused with the command that installs the right ones."""

import jax
import pytest
from messages import refuses

from leanformer.runtime import cuda, environment
from leanformer.runtime import mesh as meshes


PLUGIN = {"jax-cuda12-plugin": "1.2.3", "jax-cuda12-pjrt": "1.2.3"}
NEWEST = {"jax-cuda13-plugin": "1.2.3", "jax-cuda13-pjrt": "1.2.3.post1"}


@pytest.fixture
def host(monkeypatch):
    """Return a function that pretends a host with GPUs, a driver and CUDA packages, and jaxlib 1.2.3."""

    def pretend(packages, driver="580.65.06", gpus=1):
        monkeypatch.setattr(cuda, "packages", lambda: packages)
        monkeypatch.setattr(cuda, "driver_version", lambda: driver)
        monkeypatch.setattr(cuda, "gpus", lambda: gpus)
        monkeypatch.setattr(cuda.metadata, "version", lambda _: "1.2.3")

    return pretend


@pytest.mark.parametrize(
    ("packages", "driver", "parts"),
    [
        ({}, "580.65.06", ["580.65.06", ".[cuda13]", "JAX_PLATFORMS=cpu"]),
        ({}, "550.54.15", ["550.54.15", ".[cuda12]"]),
        ({}, None, [".[cuda13]"]),
        (PLUGIN | {"jax-cuda12-pjrt": "1.2.4"}, "580.1", ["jax-cuda12-pjrt==1.2.4", "jaxlib 1.2.3", ".[cuda12]"]),
        (NEWEST | {"jax-cuda13-plugin": "1.2"}, "580.1", ["jax-cuda13-plugin==1.2", "jaxlib 1.2.3", ".[cuda13]"]),
        (NEWEST, "575.57.08", ["575.57.08", 580, ".[cuda12]"]),
        (PLUGIN | NEWEST, "580.1", ["pip uninstall jax-cuda12-pjrt jax-cuda12-plugin"]),
        (PLUGIN | NEWEST, "550.1", ["pip uninstall jax-cuda13-pjrt jax-cuda13-plugin"]),
    ],
)
def test_packages_that_jax_would_not_use_are_refused(host, packages, driver, parts):
    host(packages, driver)
    with refuses(*parts):
        cuda.check({})
    with refuses(*parts):  # as every command does before it imports JAX
        environment.check({})
    for environ in ({"JAX_PLATFORMS": "cpu"}, {"CUDA_VISIBLE_DEVICES": ""}, {"CUDA_VISIBLE_DEVICES": "-1"}):
        cuda.check(environ)
    host(packages, driver, gpus=0)
    cuda.check({})


@pytest.mark.parametrize(
    ("packages", "driver"), [(PLUGIN, "525.1"), (PLUGIN, "580.1"), (NEWEST, "580.1"), (NEWEST, None)]
)
def test_matching_packages_are_accepted(host, packages, driver):
    host(packages, driver)
    cuda.check({})


def test_fallback_to_the_cpu_is_refused(host, monkeypatch):
    host(PLUGIN, "550.54.15")
    meshes.make_mesh()  # the tests run with JAX_PLATFORMS=cpu
    monkeypatch.setattr(cuda, "is_wanted", lambda environ: environ["JAX_PLATFORMS"] == "cpu")  # as if it were unset
    with refuses("550.54.15", "nvidia-smi", "JAX_PLATFORMS=cpu"):
        meshes.make_mesh()
    meshes.make_mesh(devices=jax.devices())  # chosen explicitly
    host(PLUGIN, gpus=0)
    meshes.make_mesh()


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("NVRM version: x86_64 Kernel Module  550.54.15  Tue Mar  5\n", "550.54.15"),
        ("NVRM: Open Module  580.65.06  Release", "580.65.06"),
        ("", None),
    ],
)
def test_driver_and_devices_are_read_from_the_system(tmp_path, text, version):
    (tmp_path / "version").write_text(text)
    assert cuda.driver_version(tmp_path / "version") == version and cuda.driver_version(tmp_path / "none") is None
    for name in ("nvidia0", "nvidia11", "nvidiactl", "nvidia-uvm", "null"):
        (tmp_path / name).touch()
    assert cuda.gpus(tmp_path) == 2


def test_installed_packages_are_found(tmp_path, monkeypatch):
    folder = tmp_path / "jax_cuda13_pjrt-0.99.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: jax-cuda13-pjrt\nVersion: 0.99\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert cuda.packages()["jax-cuda13-pjrt"] == "0.99"


@pytest.mark.parametrize(
    ("visible", "chosen", "expected"),
    [
        *((None, (), ["GPU-a", "GPU-b", "GPU-c"]), ("2,0", (), ["GPU-c", "GPU-a"]), ("2,0", (1,), ["GPU-a"])),
        *(("GPU-b", (0,), ["GPU-b"]), (None, (1,), ["GPU-b"]), (None, None, []), ("", (), [])),
    ],
)
def test_gpus_of_a_process(visible, chosen, expected, tmp_path, monkeypatch):
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\nprintf 'GPU-a\\nGPU-b\\nGPU-c\\n'\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    environ = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert cuda.uuids(environ, chosen) == expected
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\nexit 9\n")  # no driver
    assert cuda.uuids(environ, chosen) == []


def test_processes_that_share_a_gpu_are_refused():
    cuda.check_shared([("n1", ["a", "b"]), ("n2", ["c", "d"])])
    cuda.check_shared([("n1", []), ("n2", [])])
    with refuses("GPU-a", "processes 0 and 2", "n1", "JAX_LOCAL_DEVICE_IDS"):
        cuda.check_shared([("n1", ["GPU-a"]), ("n1", ["GPU-b"]), ("n1", ["GPU-a"])])
    with refuses("process 0 on n1 2", "process 1 on n2 1", "CUDA_VISIBLE_DEVICES"):
        cuda.check_shared([("n1", ["a", "b"]), ("n2", ["c"])])
