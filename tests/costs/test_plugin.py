"""Cross-compilation targets: descriptions found in a library's bytes, and one message if the library is missing."""

import importlib.util
import types

import pytest
from messages import refuses

from leanformer.costs import hardware, plugin
from leanformer.runtime import target


installed = pytest.mark.skipif(
    importlib.util.find_spec("jax_plugins") is None, reason="needs the extra gpu-compile: XLA's CUDA plugin"
)


@pytest.fixture
def library(tmp_path, monkeypatch):
    """A plugin's file of this jaxlib's version, with two GPUs described among other bytes."""
    texts = [
        f'gpu_device_info {{\n  core_count: {i}\n  device_memory_size: {i}00\n}}\ndevice_description_str: "{kind}"\n'
        for i, kind in ((7, "NVIDIA H100 80GB HBM3"), (3, "MI250"))
    ]
    noise = b"\0\x01gpu_device_info \x80" + b"gpu_device_info {\n  core_count: 5\n}\n\0"  # one says of what
    content = noise + b"\0\xff".join(text.encode() for text in texts) + b"\0" * 9
    (tmp_path / "xla_cuda_plugin.so").write_bytes(content)
    spec = types.SimpleNamespace(submodule_search_locations=[str(tmp_path)])
    monkeypatch.setattr(plugin.importlib.util, "find_spec", lambda name: spec if "13" not in name else None)
    monkeypatch.setattr(plugin.importlib.metadata, "version", lambda _: plugin.jaxlib.__version__)
    return texts


def test_a_description_is_found_whole(library):
    assert plugin.description("h100") == library[0]
    assert plugin.memory("h100") == 700


def test_a_device_that_this_plugin_does_not_describe(library):
    with refuses("b200", "MI250", "NVIDIA H100 80GB HBM3"):
        plugin.description("b200")


def test_an_unknown_device(library):
    with refuses("--device=h1000", "b200", "a100"):
        plugin.devices("h1000", 1)


def test_a_plugin_of_another_version(library, monkeypatch):
    monkeypatch.setattr(plugin.importlib.metadata, "version", lambda _: "0.4.1")
    with refuses("jax-cuda12-pjrt", "0.4.1", plugin.jaxlib.__version__, "gpu-compile"):
        plugin.description("h100")


@pytest.mark.parametrize("missing", ["jax_plugins", "jax_plugins.xla_cuda"])
def test_without_the_plugin_one_message_tells_how_to_install_it(monkeypatch, missing):
    find = lambda name: None if name.startswith(missing) else types.SimpleNamespace()  # noqa: E731
    monkeypatch.setattr(plugin.importlib.util, "find_spec", find)
    with refuses("pip install", "gpu-compile", "0.2 GB", "0.5 GB"):
        plugin.devices("h100", 1)


def test_every_device_has_a_line_in_the_table():
    for kind in plugin.DEVICES.values():
        assert hardware.data_sheet(kind) is not None, kind


@installed
@pytest.mark.parametrize("name", plugin.DEVICES)
def test_the_plugin_and_the_table_agree(name):
    device, *_ = plugin.devices(name, 2)
    assert device.device_kind == plugin.DEVICES[name] and device.platform == "gpu"
    assert float(device.compute_capability) == hardware.data_sheet(device.device_kind).capability
    assert (hardware.without_bfloat16(device) is None) == (target.capability(device) >= (8, 0))
    assert 16e9 < plugin.memory(name) < 300e9


@installed
def test_hosts_of_eight():
    assert [device.process_index for device in plugin.devices("h100", 16)] == [0] * 8 + [1] * 8
    assert {device.process_index for device in plugin.devices("h100", 6)} == {0}
