"""Test of the wheel: built, installed into an empty folder, and used from another folder."""

import os
import re
import subprocess
import sys

import pytest
from commands import ROOT, subprocess_environment


pytestmark = pytest.mark.slow


def run_python(*words, **options):
    """Run Python; return its standard output."""
    result = subprocess.run([sys.executable, *map(str, words)], capture_output=True, text=True, **options)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


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
