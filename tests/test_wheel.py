"""Test of the wheel: built, installed into an empty folder, and used from another folder."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from commands import ROOT, subprocess_environment


pytestmark = pytest.mark.slow


TORCH = Path(os.environ.get("LEANFORMER_PEER_PYTHON", Path(sys.prefix) / "torch" / "bin" / "python"))


def run(*words, **options):
    """Run a program; return its standard output."""
    result = subprocess.run([*map(str, words)], capture_output=True, text=True, **options)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def run_python(*words, **options):
    """Run Python; return its standard output."""
    return run(sys.executable, *words, **options)


def test_installed_wheel_works_outside_repository(tmp_path):
    run_python("-m", "hatchling", "build", "-t", "wheel", "-d", tmp_path, cwd=ROOT)
    (wheel,) = tmp_path.glob("*.whl")
    target, elsewhere = tmp_path / "installed", tmp_path / "elsewhere"
    elsewhere.mkdir()
    run_python("-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", target, wheel)
    options = {"cwd": elsewhere, "env": subprocess_environment() | {"PYTHONPATH": os.fspath(target)}}
    assert target.as_posix() in run_python("-c", "import leanformer; print(leanformer.__file__)", **options)
    shipped = {path.name for path in (target / "leanformer" / "configs").glob("*.py")}
    assert shipped == {path.name for path in (ROOT / "configs").glob("*.py")}
    assert "train" in run_python("-m", "leanformer", "--help", **options)
    page = run_python("-m", "leanformer", "cost", "--config=quickstart", **options)
    assert re.search(r"parameters +269,194\b", page)
    assert re.search(r"model\.num_heads=16 ", run_python("-m", "leanformer", "keys", "--config=vit_b_7x16", **options))


WATCH = """
import sys, torch, leanformer
model = torch.nn.TransformerEncoder(torch.nn.TransformerEncoderLayer(24, 3, 32, batch_first=True), 2).eval()
with torch.no_grad(), leanformer.watch(model) as w:
    model(torch.randn(8, 11, 24))
print(w)
assert not {"jax", "scipy", "matplotlib"} & {*sys.modules} and all(row["median"] > 1 for row in w.rows[:2])
"""


@pytest.mark.skipif(not TORCH.exists(), reason="needs `make .venv/.torch`")
def test_watch_needs_three_packages(tmp_path):
    """In a new environment, with PyTorch of the one of `make test-all`; training says what to install."""
    run_python("-m", "hatchling", "build", "-t", "wheel", "-d", tmp_path, cwd=ROOT)
    (wheel,) = tmp_path.glob("*.whl")
    python = tmp_path / "new" / "bin" / "python"
    run(TORCH, "-m", "venv", tmp_path / "new")
    run(python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", wheel)
    added = run(python, "-m", "pip", "list")
    print(added)
    names = {line.split()[0].lower() for line in added.splitlines()[2:]} - {"pip", "setuptools"}
    assert names == {"leanformer", "numpy", "array-api-compat", "safetensors"}
    (torch_packages,) = TORCH.parents[1].glob("lib/python*/site-packages")
    report = run(python, "-c", WATCH, env=subprocess_environment() | {"PYTHONPATH": str(torch_packages)})
    assert "layers.1.self_attn" in report
    result = subprocess.run([python, "-m", "leanformer.train", "--config=quickstart"], capture_output=True, text=True)
    assert result.returncode == 2 and "pip install 'leanformer[train]'" in result.stderr
