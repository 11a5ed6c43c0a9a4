"""The benchmark against timm: its table with a peer of known seconds, and its refusals."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from messages import mentions
from processes import QUICK


pytestmark = pytest.mark.slow  # processes, each of which imports JAX and times a model
BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "peers.py"

PEER = """#!{python}
import json, sys
if sys.argv[1] == "-c":  # the question what is missing
    print("")
else:
    told = json.loads(sys.argv[2])
    versions = f"a peer of {{told['model']['unroll']}} layers a turn, {{told['batch']}} at once"
    print(json.dumps({{"versions": versions, "parameters": {parameters}}}), flush=True)
    for _, seconds in zip(sys.stdin, (50.0, 10.0, 20.0)):
        print(seconds, flush=True)
"""


def compare(*options: str) -> subprocess.CompletedProcess:
    one_device = os.environ | {"XLA_FLAGS": QUICK, "JAX_COMPILATION_CACHE_DIR": os.environ["LEANFORMER_TEST_CACHE"]}
    command = [sys.executable, BENCHMARK, "--tiny", *options]
    return subprocess.run(command, capture_output=True, text=True, env=one_device)


@pytest.fixture
def peer(tmp_path):
    def make(parameters: int) -> str:
        path = tmp_path / "python"
        path.write_text(PEER.format(python=sys.executable, parameters=parameters))
        path.chmod(0o755)
        return f"--python={path}"

    return make


def test_table_and_another_model(peer):
    """Ratios are taken round by round, so their extremes are those of rounds."""
    width, mlp, inner, depth, classes, tokens, patch = 12, 24, 24, 2, 1000, 5, 768
    block = 4 * width * inner + 3 * inner + width + 2 * width * mlp + mlp + width + 4 * width
    parameters = depth * block + (patch + 1) * width + (tokens + 1) * width + 2 * width + (width + 1) * classes
    found = compare(peer(parameters), "--only=vit_b_7x16", "--rounds=3", "--batch=3", "--unroll=2", "--json")
    assert not found.returncode, found.stderr
    told = json.loads(found.stdout)
    (row,) = told["rows"]
    assert told["versions"][1] == "a peer of 2 layers a turn, 3 at once"
    assert row["parameters"] == parameters and row["batch"] == 3 and row["timm s"] == 20 and row["ours s"] < 5
    assert row["least"] < row["faster"] < row["most"]

    found = compare(peer(parameters + 1), "--only=vit_b_7x16")
    assert found.returncode == 2 and mentions(found.stderr, parameters, parameters + 1)
    assert "Traceback" not in found.stderr


def test_what_is_missing_is_named(tmp_path):
    bare = tmp_path / "python"
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"')  # without installed packages
    bare.chmod(0o755)
    found = compare(f"--python={bare}")
    assert found.returncode == 2 and mentions(found.stderr, "torch", "timm", "pip install")


@pytest.mark.parametrize(
    ("option", "parts"),
    [
        ("--python=/nowhere/python", []),
        ("--only=vit_b_7x16,vit", ["vit_b_7x16"]),
        ("--rounds=0", [1]),
        ("--batch=0", [1]),
    ],
)
def test_refused(option, parts):
    found = compare(option)
    assert found.returncode == 2 and "Traceback" not in found.stderr and not found.stdout
    assert mentions(found.stderr, option.rpartition("=")[2], *parts), found.stderr


@pytest.mark.skipif("LEANFORMER_PEER_PYTHON" not in os.environ, reason="wants the python of a PyTorch with timm")
def test_timm_itself():
    """Every family has as many parameters as timm's, which the command checks."""
    found = compare(f"--python={os.environ['LEANFORMER_PEER_PYTHON']}", "--rounds=1", "--json")
    assert not found.returncode, found.stderr
    assert len(json.loads(found.stdout)["rows"]) == 5
