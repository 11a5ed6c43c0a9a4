"""benchmarks/gpu.py: a failed measurement is a row, every row is on disk at once, and the next call resumes."""

import importlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from messages import mentions

from leanformer.costs import count


BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
# Stands in for gpu_rows.py: what its measurements can do, without a device.
ROWS = """
import json, os, subprocess, sys, time
name, arguments = sys.argv[1], json.loads(sys.argv[2])
folder = arguments["folder"]
with open(folder + "/called", "a") as file:
    print(name, file=file)
if name == "slow":
    other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    with open(folder + "/pids", "w") as file:
        print(os.getpid(), other.pid, file=file)
    print("waiting", flush=True)
    time.sleep(60)
if name == "broken" and not os.path.exists(folder + "/mended"):
    raise ValueError("no such kernel")
known = folder + "/results.json"
rows = json.load(open(known))["rows"] if os.path.exists(known) else []
print("RESULT " + json.dumps({"device": "none", "examples/s": 200.0, "before": len(rows)}))
"""


@pytest.fixture
def gpu(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    module = importlib.import_module("gpu")
    script = tmp_path / "rows.py"
    script.write_text(ROWS)
    monkeypatch.setattr(module, "SCRIPT", script)
    return module


def measurement(gpu, function, tmp_path, **more):
    return gpu.Measurement(f"peer {function}", "peer", function, {"folder": str(tmp_path)}, **({"needs": 0} | more))


def running(pid):
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


def ended(pids, within=30):
    """A signal that was sent has not yet been delivered; only the child itself was waited for."""
    end = time.monotonic() + within
    while any(map(running, pids)) and time.monotonic() < end:
        time.sleep(0.05)
    return not any(map(running, pids))


def test_whatever_becomes_of_a_measurement_is_a_row(gpu, tmp_path):
    def row(function, left=60, **more):
        found = gpu.measure(measurement(gpu, function, tmp_path, **more), tmp_path / "log", left, tiny=False)
        return {key: value for key, value in found.items() if key not in ("name", "table", "seconds")}

    assert row("good") == {"status": gpu.MEASURED, "device": "none", "examples/s": 200.0, "before": 0}
    assert row("broken") == {"status": gpu.FAILED, "note": "ended with status 1: ValueError: no such kernel"}
    assert row("slow", limit=2) == {"status": gpu.FAILED, "note": "stopped after 2 s, its limit"}
    pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
    assert len(pids) == 2
    assert ended(pids)  # it, and what it started, which sleep for longer than that
    assert row("slow", left=2) == {"status": gpu.NO_TIME, "note": "stopped after 2 s"}
    called = (tmp_path / "called").read_text()
    assert row("good", left=44, needs=45) == {"status": gpu.NO_TIME}
    assert (tmp_path / "called").read_text() == called  # it was not begun


def test_every_row_is_on_disk_at_once_and_the_next_call_goes_on(gpu, tmp_path):
    todo = [measurement(gpu, name, tmp_path) for name in ("broken", "first", "second")]
    facts = {"device": "a device", "git": "abc", "runtime": "none", "versions": {"jax": "1"}}
    facts |= {"memory GB": None, "products TFLOP/s": 1.0, "share of peak": None}
    found = {"machine": facts, "tiny": False, "rows": []}
    gpu.go(tmp_path, todo[:2], time.monotonic() + 60, False, found)
    found = json.loads((tmp_path / "results.json").read_text())
    assert [(row["status"], row.get("before")) for row in found["rows"]] == [("failed", None), ("measured", 1)]
    page = (tmp_path / "table.md").read_text()
    assert "| none | 200.0 | 1 |" in page
    assert "- peer broken: failed. ended with status 1: ValueError: no such kernel" in page

    (tmp_path / "mended").touch()
    gpu.go(tmp_path, todo, time.monotonic() + 60, False, found)
    assert (tmp_path / "called").read_text().split() == ["broken", "first", "second", "broken"]
    rows = json.loads((tmp_path / "results.json").read_text())["rows"]
    assert {row["name"]: row["status"] for row in rows} == dict.fromkeys((m.name for m in todo), "measured")


def test_figures_beside_others(gpu):
    def row(name, **figures):
        return {"name": name, "table": name.split()[0], "status": gpu.MEASURED} | figures

    rows = [
        row("training vit_b_12x12 256 cudnn", config="vit_b_12x12", **{"examples/s": 1000.0}),
        row("training vit_b_12x12 256 xla", config="vit_b_12x12", **{"examples/s": 1.0}),
        row("peer timm 256 eager", **{"examples/s": 800.0}),
        row("probe vit_b_12x12", config="vit_b_12x12", every=100, **{"probe s": 0.4}),
        row("probe vit_b_7x16", config="vit_b_7x16", every=100, **{"probe s": 0.4}),
        row("pipeline", config="vit_b_12x12", **{"fed examples/s": 250.0}),
    ]
    about = {r["name"]: r for r in rows}
    assert gpu.beside("peer", rows[2:3], about)[0]["it over ours"] == 0.8
    shares = [r["share at batch 256"] for r in gpu.beside("probe", rows[3:5], about)]
    assert shares == ["1.538 %", None]  # 0.4 s of 100 steps of 0.256 s and itself; no rate for the other
    assert gpu.beside("pipeline", rows[5:], about)[0]["of the step alone"] == 0.25  # data


def test_every_measurement_has_a_function_a_table_and_a_name_of_its_own(gpu, tmp_path):
    wanted = gpu.wanted(tmp_path)
    functions = importlib.import_module("gpu_rows").FUNCTIONS
    assert {m.function for m in wanted} == set(functions) - {"machine"}
    assert {m.table for m in wanted} == set(gpu.TABLES)
    assert len({m.name for m in wanted}) == len(wanted)


@pytest.mark.parametrize("config", ["xcit_m_12x16", "tnt_b_8x16", "volo_d3_lean", "davit_b_lean"])
def test_families_have_tiny_shapes(gpu, config):
    run = importlib.import_module("gpu_rows").build(config, 128, "auto", tiny=True)
    assert count.parameters(run.state.params) < 100_000


@pytest.mark.slow
def test_the_command_on_a_cpu(tmp_path):
    """Without a GPU it refuses; with --tiny it measures, marks every row, and stops at its limit."""
    plain = {"PYTHONPATH": str(BENCHMARKS.parent), "XLA_FLAGS": os.environ["XLA_FLAGS"].split(maxsplit=1)[1]}

    def call(*options):
        command = [sys.executable, str(BENCHMARKS / "gpu.py"), f"--out={tmp_path / 'out'}", *options]
        return subprocess.run(command, env=os.environ | plain, capture_output=True, text=True, check=False)

    refused = call()
    assert refused.returncode == 2
    assert mentions(refused.stderr, "GPU", "CPU")
    assert not (tmp_path / "out" / "results.json").exists()
    done = call("--tiny", "--minutes=5", "--only=training vit_b_7x16 256 *,factorisations")
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "out" / "results.json").read_text())
    rows = {row["name"]: row for row in found["rows"]}
    assert all(row["tiny"] for row in rows.values())
    assert mentions(rows["training vit_b_7x16 256 cudnn"]["note"], "cpu", "GPU")
    measured = rows["training vit_b_7x16 256 xla"]
    assert (measured["device"], measured["attention"], measured["MFU"]) == ("cpu", "xla", None)
    assert measured["examples/s"] > 0
    assert rows["factorisations"]["leanformer ms"] > 0
    late = call("--tiny", "--minutes=0", "--only=probe vit_b_7x16")
    assert mentions(late.stdout, "probe vit_b_7x16")
