"""The wheel: built, installed into an empty folder, and used from another folder."""

import os
import re
import subprocess
import sys

import pytest
from commands import ROOT, environment


pytestmark = pytest.mark.slow


def python(*words, **options):
    """Run Python; returns its standard output."""
    done = subprocess.run([sys.executable, *map(str, words)], capture_output=True, text=True, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_wheel_works_without_the_repository(tmp_path):
    python("-m", "hatchling", "build", "-t", "wheel", "-d", tmp_path, cwd=ROOT)
    (wheel,) = tmp_path.glob("*.whl")
    target, elsewhere = tmp_path / "installed", tmp_path / "elsewhere"
    elsewhere.mkdir()
    python("-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", target, wheel)
    options = {"cwd": elsewhere, "env": environment() | {"PYTHONPATH": os.fspath(target)}}
    assert target.as_posix() in python("-c", "import leanformer; print(leanformer.__file__)", **options)
    assert "train" in python("-m", "leanformer", "--help", **options)
    page = python("-m", "leanformer", "cost", "--config=quickstart", **options)
    assert re.search(r"parameters +269,194\b", page)
    assert re.search(r"model\.num_heads=16 ", python("-m", "leanformer", "keys", "--config=vit_b_7x16", **options))
