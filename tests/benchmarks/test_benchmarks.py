"""Smoke tests of benchmarks with logic beyond timing."""

import json
import os
import subprocess
import sys

import pytest
from commands import ROOT, subprocess_environment
from messages import mentions


PEER = """#!{python}
import json, sys
if sys.argv[1] == "-c":  # the check for missing packages
    print("")
else:
    arguments = json.loads(sys.argv[2])
    versions = f"a peer of {{arguments['model']['unroll']}} layers at once"
    print(json.dumps({{"versions": versions, "parameters": {parameters}}}), flush=True)
    for _, seconds in zip(sys.stdin, (50.0, 10.0, 20.0)):
        print(seconds, flush=True)
"""


def run_benchmark(script, *options):
    command = [sys.executable, ROOT / "benchmarks" / script, *options]
    variables = subprocess_environment() | {"PYTHONPATH": str(ROOT)}
    return subprocess.run(command, capture_output=True, text=True, env=variables, cwd=ROOT, check=False)


@pytest.mark.slow
def test_peers_against_a_peer_with_fixed_times(tmp_path):
    width, mlp, inner, depth, classes, tokens, patch = 12, 24, 24, 2, 1000, 5, 768
    block = 4 * width * inner + 3 * inner + width + 2 * width * mlp + mlp + width + 4 * width
    parameters = depth * block + (patch + 1) * width + (tokens + 1) * width + 2 * width + (width + 1) * classes
    python, options = tmp_path / "python", ["--tiny", "--only=vit_b_7x16", "--rounds=3", f"--python={tmp_path}/python"]
    for number, status in ((parameters, 0), (parameters + 1, 2)):
        python.write_text(PEER.format(python=sys.executable, parameters=number))
        python.chmod(0o755)
        result = run_benchmark("peers.py", *options, "--batch=3", "--unroll=2", "--json")
        assert result.returncode == status, result.stderr
        if status:
            assert mentions(result.stderr, parameters, parameters + 1)
        else:
            (row,) = json.loads(result.stdout)["rows"]
            assert row["parameters"] == parameters and row["batch"] == 3 and row["peer s"] == 20 and row["ours s"] < 5
            assert row["least"] < row["faster"] < row["most"] and "2 layers" in row["versions"]


@pytest.mark.slow
@pytest.mark.skipif(
    "LEANFORMER_PEER_PYTHON" not in os.environ, reason="needs an environment with PyTorch and the peers"
)
def test_real_peers_have_equal_parameter_counts():
    """The command fails if a config and its peer have different numbers of parameters."""
    result = run_benchmark(
        "peers.py", "--tiny", f"--python={os.environ['LEANFORMER_PEER_PYTHON']}", "--rounds=1", "--json"
    )
    assert result.returncode == 0, result.stderr


@pytest.mark.slow
def test_gpu_benchmark_on_a_cpu(tmp_path):
    """It is refused without a GPU; with --tiny a failed measurement is a row, and the next call resumes."""
    refused = run_benchmark("gpu.py", f"--out={tmp_path}")
    assert refused.returncode == 2 and mentions(refused.stderr, "GPU", "CPU")
    options = [f"--out={tmp_path}", "--tiny", "--only=train vit_b_7x16 256 *,probe vit_b_7x16"]
    for minutes in (0, 5):
        result = run_benchmark("gpu.py", *options, f"--minutes={minutes}")
        assert result.returncode == 0, result.stderr
        rows = json.loads((tmp_path / "results.json").read_text())["rows"]
        statuses = {name: row["status"] for name, row in rows.items()}
        if not minutes:
            assert set(statuses.values()) == {"no time left"} and len(statuses) == 3
    cudnn, xla = (rows[f"train vit_b_7x16 256 {kind}"] for kind in ("cudnn", "xla"))
    assert cudnn["status"] == "failed" and xla["attention"] == "xla" and xla["examples/s"] > 0
    assert statuses["probe vit_b_7x16"] == "measured" and "## train" in (tmp_path / "table.md").read_text()
