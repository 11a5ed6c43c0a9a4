"""What to run on a GPU that is lent for some minutes, most useful first.

    python -m tools.gpu.queue --out=DIR [--minutes=8]      # the next item that has rows missing
    python -m tools.gpu.queue --out=DIR --items=speed      # these items
    python -m tools.gpu.queue --out=DIR --tiny             # tiny models, to try it, on a CPU too
    python -m tools.gpu.queue --list

Each measurement runs in a process with a time limit and becomes a row of DIR/ITEM.json as soon as it ends; a failed one
is a row with the reason. The same command runs what is missing or failed, also if it was killed. Rows in tools/gpu/rows
count as measured. Runs of the study are rows of DIR/TABLE.csv, to be appended to the table of that name in study/data.
Logs are in DIR/logs. With several GPUs, the first one of CUDA_VISIBLE_DEVICES is used.

Before the minutes count, make the wheels that the machine lacks and take them along:

    pip wheel --no-deps --wheel-dir=wheels --requirement=tools/gpu/wheels.txt --constraint=constraints.txt
    pip install --no-index --no-deps wheels/*.whl      # there

compile s is the time to trace, lower and compile the training step without a cache; MFU the share of the data sheet's
bfloat16 peak, to be compared with the matmuls' share in the row `machine`; peak GB the peak device memory in 1e9 bytes.
A step that runs out of memory is listed without values.
"""

import argparse
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from leanformer import cli
from leanformer.runtime import files
from tools.gpu import rows
from tools.speed import timing


KNOWN = Path(__file__).with_name("rows")  # rows measured before, a file per item
RESULT_PREFIX = "RESULT "  # of the last output line of a measurement
VIT, BATCH, NYSTROM = ("vit_b_7x16", "vit_b_12x12"), 256, "nystromformer_text"  # of 4,096 tokens
GPT = ("gpt2_tinystories_4x16", "gpt2_tinystories_12x12")
LEANS = ("xcit_m_12x16", "tnt_b_8x16", "volo_d3_lean", "davit_b_lean")
FAMILIES = (VIT[0], "deit_b_7x16", *LEANS, GPT[0], "bert_crammed_10x24", NYSTROM)
XLA_FLAGS = {
    "latency hiding": "--xla_gpu_enable_latency_hiding_scheduler=true",
    "no Triton GEMM": "--xla_gpu_enable_triton_gemm=false",
}
CHECKS = ("attention", "resume", "agree", "watch")  # functions whose result does not depend on what else runs
STUDY = "study"
MEASURED, FAILED = "measured", "failed"
MIN_SECONDS, MAX_SECONDS = 45, 240  # time left that a measurement needs to start, and its time limit
CORES = 4  # for each check that runs at the same time: XLA compiles candidates of each matmul side by side
Measurements = dict[str, tuple[str, dict[str, Any]]]


def items(out: Path, python: str, tiny: bool) -> dict[str, Measurements]:
    """Return the items in order: function in `rows` and arguments of each measurement, by name."""

    def step(config: str, batch: int, flags: str = "", **model: Any) -> tuple[str, tuple[str, dict[str, Any]]]:
        words = [config, batch, *(f"{name}={value}" for name, value in model.items()), *flags.split()]
        name = f"train {' '.join(map(str, words))}"
        return name, ("train", {"config": config, "batch": batch, "flags": flags} | model)

    def peer(config: str, batch: int) -> tuple[str, tuple[str, dict[str, Any]]]:
        return f"peer {config}", ("peer", {"config": config, "batch": batch, "python": python})

    def study(module: str, table: str, *words: str) -> Measurements:
        words = (f"--rows={out / table}", *words, *(["--tiny"] if tiny else []))
        return {module: (STUDY, {"module": module, "words": words})}

    speed = [(config, BATCH) for config in VIT] + [(config, 128) for config in (*GPT, "bert_crammed_10x24", *LEANS)]
    flags = [step(config, BATCH, flag) for flag in XLA_FLAGS.values() for config in VIT[:1]]
    runs = out / "runs"
    return {
        "speed": dict(itertools.chain(*((step(*one), peer(*one)) for one in speed), [step(NYSTROM, 32)])),
        "profile": {
            f"profile {config}": ("profile", {"config": config, "batch": b}) for config, b in (speed[0], speed[3])
        }
        | dict([step(VIT[0], 512), *flags, step(VIT[0], BATCH, unroll=1)])
        | dict(step(VIT[0], BATCH, remat=remat) for remat in ("none", "block")),
        "gpt2": study("gpt2", "study_gpt2.csv", f"--out={runs}", "--arms=12x12,4x16,4x16_wide,4x12"),
        "mechanism": study("mechanism", "mechanism.csv", "train", "--together", *(["--arms=32 fast"] if tiny else []))
        | study("late", "late.csv", "train"),
        "listops": study("listops", "listops.csv", f"--out={runs}", "--published", "--seeds=5"),
        "watch": {f"watch {name}": ("watch", {"model": name}) for name in ("vit_small_patch16_224", "gpt2", "llama")}
        | {f"probe {config}": ("probe", {"config": config}) for config in VIT},
        "input": {
            f"pipeline {VIT[0]}": ("pipeline", {"config": VIT[0], "batch": BATCH, "folder": str(out / "images")})
        },
        "checks": {f"attention {dtype}": ("attention", {"dtype": dtype}) for dtype in ("bfloat16", "float32")}
        | {f"resume {'deterministic' * d or 'default'}": ("resume", {"deterministic": d}) for d in (True, False)}
        | {f"agree {config}": ("agree", {"config": config}) for config in FAMILIES},
    }


class Measurement:
    """A measurement in a process of its own.

    Args:
        name: name of the row.
        function: name of the function in `rows`.
        arguments: its keyword arguments, and `flags` for XLA.
        out: folder of the results; the process writes to its `logs`.
        limit: seconds after which the process is killed.
    """

    def __init__(self, name: str, function: str, arguments: dict[str, Any], out: Path, limit: float):
        self.row: dict[str, Any] = {"name": name, "table": function}
        self.log = out / "logs" / f"{name.replace(' ', '_')}.log"
        self.limit, self.deadline, self.stopped = limit, time.monotonic() + limit, False
        environ = {key: value for key, value in os.environ.items() if key != "JAX_COMPILATION_CACHE_DIR"}
        environ["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0]
        environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {arguments.pop('flags', '')}".strip()
        if function in (*CHECKS, "peer"):  # they share the GPU's memory, with each other or with PyTorch
            environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
        if function in ("train", "peer"):  # a peer's row finds the program of the step before it compiled
            environ["JAX_COMPILATION_CACHE_DIR"] = str(out / "programs")
        if function == "train":
            shutil.rmtree(out / "programs", ignore_errors=True)
        if function == "peer":  # PyTorch cannot load what a killed compilation left in its cache
            shutil.rmtree(out / "inductor", ignore_errors=True)
            environ["TORCHINDUCTOR_CACHE_DIR"] = str(out / "inductor")
        command = [sys.executable, "-m", "tools.gpu.queue"]
        command += ["--measure", function, json.dumps(arguments), str(os.getpid())]
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("w") as file:
            self.process = subprocess.Popen(command, stdout=file, stderr=file, env=environ, start_new_session=True)

    def is_running(self) -> bool:
        """Return whether the process runs and may go on; kill it if it is at its limit."""
        if self.process.poll() is not None:
            return False
        if time.monotonic() < self.deadline:
            return True
        os.killpg(self.process.pid, signal.SIGKILL)
        self.stopped = True
        return False

    def read(self) -> dict[str, Any]:
        """Return the row of a process that has ended; a failure is one too."""
        status = self.process.wait()
        reason = f"none after {self.limit:.0f} s" if self.stopped else status
        lines = [line for line in self.log.read_text(errors="replace").splitlines() if line.strip()]
        if lines and lines[-1].startswith(RESULT_PREFIX):
            result = json.loads(lines[-1].removeprefix(RESULT_PREFIX))
            return self.row | {"status": MEASURED, "rows": result if isinstance(result, list) else [result]}
        note = f"status {reason}: {lines[-1][:300] if lines else 'no output'}"
        return self.row | {"status": FAILED, "note": note}


def finish(started: Collection[Measurement]) -> Iterator[dict[str, Any]]:
    """Yield the rows of measurements as they end."""
    running = list(started)
    while running:
        for measurement in [m for m in running if not m.is_running()]:
            running.remove(measurement)
            yield measurement.read()
        time.sleep(0.1)


def split(todo: Measurements) -> Iterator[tuple[str, ...]]:
    """Yield the names of measurements that run at the same time: some checks, then single ones."""
    checks = [name for name, (function, _) in todo.items() if function in CHECKS and function != "watch"]
    yield from itertools.batched(checks, max(1, len(os.sched_getaffinity(0)) // CORES))
    yield from ((name,) for name in todo if name not in checks)


def end_with_parent(parent: int) -> None:
    """End this process and its children if the command is killed, so that they do not keep the GPU's memory.

    Args:
        parent: process ID of the command, which may have ended while this process loaded JAX.
    """

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os.killpg(os.getpid(), signal.SIGKILL)  # of a session of its own

    threading.Thread(target=watch, daemon=True).start()


def read_rows(item: str, folders: Collection[Path]) -> dict[str, dict[str, Any]]:
    """Return the rows of an item by name, from the files of several folders."""
    paths = [folder / f"{item}.json" for folder in folders]
    return {name: row for path in paths if path.is_file() for name, row in files.read_json(path).items()}


def missing(measurements: Measurements, found: dict[str, dict[str, Any]]) -> Measurements:
    """Return the measurements without a row, or whose row is a failure."""
    return {name: x for name, x in measurements.items() if found.get(name, {}).get("status") != MEASURED}


def run(item: str, todo: Measurements, out: Path, deadline: float, tiny: bool) -> None:
    """Run measurements of an item until the deadline, write its rows, and print them as tables."""
    found = read_rows(item, [out])

    def keep(row: dict[str, Any]) -> None:
        found[row["name"]] = row
        files.write_json(out / f"{item}.json", found)
        print(json.dumps(row), flush=True)

    for names in [("machine",), *split(todo)]:
        left = deadline - time.monotonic()
        if left < MIN_SECONDS:
            print(f"{item}: no time left for {names[0]} and what follows; the same command continues.")
            break
        started = []
        for name in names:
            function, arguments = todo.get(name, ("machine", {}))
            limit = left if function == STUDY else min(MAX_SECONDS, left)
            started.append(Measurement(name, function, {"tiny": tiny} | arguments, out, limit))
        for row in finish(started):
            keep(row)
        if names == ("machine",) and found["machine"]["status"] != MEASURED:
            return
    for table in dict.fromkeys(row["table"] for row in found.values()):
        shown = [x for row in found.values() if row["table"] == table for x in row.get("rows", ())]
        print(f"\n## {item}: {table}\n\n{timing.format_markdown(shown)}" if shown else "")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("gpu"), help="folder of the rows")
    parser.add_argument("--minutes", type=float, default=8)
    parser.add_argument("--items", help="names, separated by commas; by default the first with missing rows")
    parser.add_argument("--python", default=sys.executable, help="interpreter with torch, timm and transformers")
    parser.add_argument("--tiny", action="store_true", help="tiny models and few steps; runs on a CPU too")
    parser.add_argument("--list", action="store_true", help="print the items and what is missing, and exit")
    parser.add_argument("--measure", nargs=3, help=argparse.SUPPRESS)
    f = parser.parse_args()
    if f.measure:
        end_with_parent(int(f.measure[2]))
        cli.keep_freed_memory()  # as every command does
        print(RESULT_PREFIX + json.dumps(rows.FUNCTIONS[f.measure[0]](**json.loads(f.measure[1]))), flush=True)
        return
    out, deadline = f.out.expanduser().resolve(), time.monotonic() + 60 * f.minutes
    known = [out] if f.tiny else [KNOWN, out]
    todo = {name: missing(x, read_rows(name, known)) for name, x in items(out, f.python, f.tiny).items()}
    if f.list:
        print("\n".join(f"{item}: {', '.join(names) or 'measured'}" for item, names in todo.items()))
        return
    for item in f.items.split(",") if f.items else [name for name, names in todo.items() if names][:1]:
        run(item, todo[item], out, deadline, f.tiny)


if __name__ == "__main__":
    main()
