"""Smoke tests of benchmarks with logic beyond timing."""

import importlib
import inspect
import itertools
import json
import math
import os
import subprocess
import sys

import pytest
from commands import ROOT, run_in_process, subprocess_environment
from messages import mentions

from leanformer import cli, train
from leanformer.costs import count
from leanformer.training import model_setup


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
    """It is refused without a GPU; with --tiny a failed measurement is a row, and a killed command resumes."""
    refused = run_benchmark("gpu.py", f"--out={tmp_path}")
    assert refused.returncode == 2 and mentions(refused.stderr, "GPU", "CPU")
    options = [f"--out={tmp_path}", "--tiny", "--only=attention float32,probe vit_b_7x16,peer vit_b_7x16"]
    options += [f"--python={tmp_path}/none"]
    result = run_benchmark("gpu.py", *options, "--minutes=0")
    assert result.returncode == 0, result.stderr
    rows = json.loads((tmp_path / "results.json").read_text())["rows"]
    assert {row["status"] for row in rows.values()} == {"no time left"} and len(rows) == 3

    command = [sys.executable, ROOT / "benchmarks" / "gpu.py", *options, "--minutes=5"]
    variables = subprocess_environment() | {"PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=variables, cwd=ROOT)
    first = json.loads(process.stdout.readline())  # written and printed as soon as it is measured
    process.kill()
    process.communicate()
    written = json.loads((tmp_path / "results.json").read_text())["rows"]["attention float32"]
    assert written == first and first["status"] == "measured"
    assert all(row["xla"] <= row["limit"] and mentions(row["cudnn"], "refused") for row in first["rows"])

    result = run_benchmark("gpu.py", *options, "--minutes=5")
    assert result.returncode == 0, result.stderr
    rows = json.loads((tmp_path / "results.json").read_text())["rows"]
    assert rows["attention float32"] == first and rows["probe vit_b_7x16"]["status"] == "measured"
    assert rows["peer vit_b_7x16"]["status"] == "failed"
    page = (tmp_path / "table.md").read_text()
    assert mentions(page, "## attention", "## probe") and mentions(page.splitlines()[4], "peer vit_b_7x16")


@pytest.fixture
def gpu(monkeypatch):
    """Return the module benchmarks/gpu.py."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    return importlib.import_module("gpu")


def test_gpu_measurements_exist_and_start_with_what_is_learned_first(gpu, tmp_path):
    every, tiny = (gpu.measurements(tmp_path, "python", tiny) for tiny in (False, True))
    assert [*every][: len(tiny)] == [*tiny] and {kind for kind, _ in tiny.values()} == {*gpu.gpu_rows.FUNCTIONS} - {
        "machine"
    }
    for function, arguments in every.values():
        inspect.signature(gpu.gpu_rows.FUNCTIONS[function]).bind(**arguments, tiny=True)
        assert "config" not in arguments or (ROOT / "configs" / f"{arguments['config']}.py").is_file()
    assert [*every][:2] == ["attention bfloat16", "attention float32"]
    checks, *single = gpu.split(every)
    while len(single[0]) > 1 or single[0][0].partition(" ")[0] in gpu.CHECKS:  # with few cores
        checks += single.pop(0)
    assert {every[name][0] for name in checks} == {*gpu.CHECKS}
    assert single[:2] == [("train vit_b_7x16 256 auto",), ("peer vit_b_7x16",)]
    assert sorted([*checks, *itertools.chain(*single)]) == sorted(every)


def test_commands_of_the_study_are_accepted(gpu, tmp_path):
    commands, counts = {name: gpu.study_command(name, tmp_path) for name in gpu.STUDY}, set()
    status, _, err = run_in_process([*commands.pop("gpt2"), "--arms=none"])  # ends before it trains
    assert status == 2 and mentions(err, "--arms=none", "4x16_wide")
    for name, command in commands.items():
        c = cli.parse(train.main.flags, command[3:]).config
        counts.add(count.parameters(model_setup.abstract_model(c)[2][0]))
        assert c.seed == int(name[-1])
    assert len(counts) == 1  # whatever the rank


def make_results(**rows):
    """Return results of gpu.py: rows by the name of their measurement, `_` for spaces."""
    results = {name.replace("_", " "): {"table": name.split("_")[0], "rows": [row]} for name, row in rows.items()}
    results = {name: {"name": name, "status": "measured"} | result for name, result in results.items()}
    return {"machine": {"share of peak": 0.8}, "rows": results}


RIGHT = {
    "attention_b": {"attention": "A", "dtype": "bfloat16", "limit": 0.06, "xla": 0.01, "cudnn": 0.01},
    "agree_v": {"config": "v", "agrees": True, "largest difference": "1e-5", "limit": 1e-3},
    "watch_m": {"model": "m", "agrees": True, "largest difference": "3e-6", "limit": 1e-3},
    "resume_d": {"deterministic": True, "arrays": 3, "equal arrays": 3},
    "train_v_8_auto": {"config": "v", "examples/s": 100.0},
    "train_v_8_auto_unroll=1": {"config": "v", "examples/s": 101.0},
    "train_v_8_xla": {"config": "v", "examples/s": None},
    "peer_v": {"config": "v", "ours : best": 1.2},
    "pipeline_v": {"config": "v", "fed/s": 99.0, "workers": 4},
}


@pytest.mark.parametrize(
    ("name", "changes", "parts"),
    [
        ("attention_b", {"cudnn": 0.5}, ["cudnn", 0.5, 0.06]),
        ("attention_b", {"xla": math.inf}, ["xla", "inf"]),
        ("attention_b", {"cudnn": "refused: x"}, ["refused: x"]),
        ("agree_v", {"agrees": False}, ["1e-5", 0.001]),
        ("watch_m", {"agrees": False, "largest difference": "2e-2"}, ["m", "2e-2", 0.001]),
        ("resume_d", {"equal arrays": 2}, ["deterministic=True"]),
        ("resume_d", {"deterministic": False}, ["deterministic=True"]),
        ("train_v_8_auto_unroll=1", {"examples/s": 120.0}, ["train v 8 auto unroll=1", "1.20"]),
        ("peer_v", {"ours : best": 0.9}, [0.9]),
        ("pipeline_v", {"fed/s": 50.0}, [50, 100, 4]),
    ],
)
def test_page_says_what_to_change(gpu, name, changes, parts):
    (nothing,) = gpu.gpu_advice.advise(make_results(**RIGHT))
    (sentence,) = gpu.gpu_advice.advise(make_results(**RIGHT | {name: RIGHT[name] | changes}))
    assert mentions(sentence, *parts) and sentence != nothing


def test_page_names_failures_and_slow_machines(gpu):
    results = make_results(**RIGHT)
    results["rows"]["probe v"] = {"name": "probe v", "table": "probe", "status": "failed", "note": "status 9"}
    results["machine"]["share of peak"] = 0.3
    failed, slow = gpu.gpu_advice.advise(results)
    assert mentions(failed, "probe v", "status 9") and mentions(slow, "30%")
    results["machine"]["tiny"] = True
    assert "30%" not in " ".join(gpu.gpu_advice.advise(results))
