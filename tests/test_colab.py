"""Set-up of notebooks on Colab, without installing anything."""

import importlib.metadata
import importlib.util
import subprocess

import pytest
from commands import ROOT
from messages import mentions


@pytest.fixture
def colab():
    """Return the module notebooks/colab.py."""
    spec = importlib.util.spec_from_file_location("colab", ROOT / "notebooks" / "colab.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(("gpu", "target"), [(True, f"{ROOT}[cuda]"), (False, f"{ROOT}[train]")])
def test_gpu_runtimes_install_jax_for_cuda(gpu, target, colab, monkeypatch):
    installed = []
    monkeypatch.setattr(
        subprocess, "run", lambda words, **_: installed.append(words) or subprocess.CompletedProcess([], 0)
    )
    colab.install(gpu=gpu)
    assert [words[-2:] for words in installed] == [[target, colab.NUMPY]]


def test_cpu_backend_on_a_gpu_runtime_is_refused(colab, capsys):
    with pytest.raises(RuntimeError) as caught:
        colab.check(gpu=True)
    assert mentions(str(caught.value), "GPU", "CPU")
    colab.check(gpu=False)
    assert mentions(capsys.readouterr().out, "leanformer 0.1.0")
