"""Cross-compilation targets: descriptions found in a library's bytes, and one message if the library is missing."""

import importlib.util
import types

import pytest
from messages import refuses

from leanformer.costs import hardware
from leanformer.programs import plugin, target


needs_plugin = pytest.mark.skipif(
    importlib.util.find_spec("jax_plugins") is None, reason="needs the extra gpu-compile: XLA's CUDA plugin"
)


@pytest.fixture
def library(tmp_path, monkeypatch):
    """Write a plugin file of this jaxlib's version with two GPU descriptions among other bytes; return these."""
    texts = [
        f'gpu_device_info {{\n  core_count: {i}\n  device_memory_size: {i}00\n}}\ndevice_description_str: "{kind}"\n'
        for i, kind in ((7, "NVIDIA H100 80GB HBM3"), (3, "MI250"))
    ]
    noise = b"\0\x01gpu_device_info \x80" + b"gpu_device_info {\n  core_count: 5\n}\n\0"  # one without a name
    content = noise + b"\0\xff".join(text.encode() for text in texts) + b"\0" * 9
    (tmp_path / "xla_cuda_plugin.so").write_bytes(content)
    spec = types.SimpleNamespace(submodule_search_locations=[str(tmp_path)])
    monkeypatch.setattr(plugin.importlib.util, "find_spec", lambda name: spec if "13" not in name else None)
    monkeypatch.setattr(plugin.importlib.metadata, "version", lambda _: plugin.jaxlib.__version__)
    return texts


def test_complete_description_is_read(library):
    assert plugin.description("h100") == library[0]
    assert plugin.memory("h100") == 700


def test_device_without_description_is_refused(library):
    with refuses("b200", "MI250", "NVIDIA H100 80GB HBM3"):
        plugin.description("b200")


def test_unknown_device_is_refused(library):
    with refuses("--device=h1000", "b200", "a100"):
        plugin.devices("h1000", 1)


def test_plugin_of_another_version_is_refused(library, monkeypatch):
    monkeypatch.setattr(plugin.importlib.metadata, "version", lambda _: "0.4.1")
    with refuses("jax-cuda12-pjrt", "0.4.1", plugin.jaxlib.__version__, "gpu-compile"):
        plugin.description("h100")


@pytest.mark.parametrize("missing", ["jax_plugins", "jax_plugins.xla_cuda"])
def test_message_without_plugin_explains_installation(monkeypatch, missing):
    find = lambda name: None if name.startswith(missing) else types.SimpleNamespace()  # noqa: E731
    monkeypatch.setattr(plugin.importlib.util, "find_spec", find)
    with refuses("pip install", "gpu-compile", "0.2 GB", "0.5 GB"):
        plugin.devices("h100", 1)


def test_every_device_is_in_the_table():
    for kind in plugin.DEVICES.values():
        assert hardware.data_sheet(kind) is not None, kind


@needs_plugin
@pytest.mark.parametrize("name", plugin.DEVICES)
def test_plugin_and_table_agree(name):
    device, *_ = plugin.devices(name, 2)
    assert device.device_kind == plugin.DEVICES[name] and device.platform == "gpu"
    assert float(device.compute_capability) == hardware.data_sheet(device.device_kind).capability
    assert hardware.without_bfloat16(device) is None and target.capability(device) >= (8, 0)
    assert 16e9 < plugin.memory(name) < 300e9


@needs_plugin
def test_hosts_have_eight_devices():
    assert [device.process_index for device in plugin.devices("h100", 16)] == [0] * 8 + [1] * 8
    assert {device.process_index for device in plugin.devices("h100", 6)} == {0}
