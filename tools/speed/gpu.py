"""The first hour on a GPU: checks, speed and memory, most useful measurements first, within a time limit.

    python tools/speed/gpu.py --minutes=45 --out=DIR [--only=PATTERN,...]     # shell patterns of names
    python tools/speed/gpu.py --minutes=45 --out=DIR --study                  # then the runs of the study
    python tools/speed/gpu.py --minutes=10 --out=DIR --tiny                   # tiny models, to try it, on a CPU too
    python tools/speed/gpu.py --list [--study]

Order: checks, several at a time if there are cores to compile them: attention backends against the float32 reference,
resuming bit for bit, ten steps of every architecture and `leanformer.watch` of PyTorch models against the CPU. Then,
one at a time: the training steps of four configs, each followed by PyTorch's, eager and compiled (--python=INTERPRETER
of an environment that has it); Nyströmformer; model.unroll, model.remat and XLA's attention; the probe; JPEG files;
other models and batch sizes. On an H200 with 16 CPU cores, four checks took 100 s, and two training steps and one
comparison with PyTorch 180 s.

--study: then the runs of part 6 of study/heads/PLAN.md, in the minutes that are left.

Each measurement runs in a process with a time limit. A failed measurement becomes a row with the reason, and the others
still run. DIR/results.json and DIR/table.md are updated after each row; the same command runs what is missing or
failed, also if it was killed. With several GPUs, the first one of
CUDA_VISIBLE_DEVICES is used. Logs are in DIR/logs. `agree`, `attention`, `resume` and `watch` are the only tests that
need a GPU: the test suite runs on CPUs.

peak GB is the peak device memory in 1e9 bytes; compile s is the time to trace, lower and compile the training
step, without a cache; MFU the fraction of the vendor's bfloat16 peak. A step that runs out of memory is listed without
values.
"""

import argparse
import fnmatch
import itertools
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import gpu_rows
import timing

from leanformer.runtime import files, startup


RESULT_PREFIX = "RESULT "  # of the last output line of a measurement
ORIGINAL, LEAN, BATCH = "vit_b_12x12", gpu_rows.LEAN, 256
LEANS = ("xcit_m_12x16", "tnt_b_8x16", "volo_d3_lean", "davit_b_lean")
ORIGINALS = ("xcit_m_24x8", "tnt_b_12x10", "volo_d3_original", "davit_b_original")
GPT = ("gpt2_tinystories_4x16", "gpt2_tinystories_12x12")
NYSTROM = "nystromformer_text"  # 4,096 tokens
CHECKS = ("attention", "resume", "agree", "watch")  # functions whose result does not depend on what else runs
MEASURED, FAILED, NO_TIME = "measured", "failed", "no time left"
MIN_SECONDS, MAX_SECONDS = 45, 240  # time left that a measurement needs to start, and its time limit
CORES = 4  # for each check that runs at the same time: XLA compiles candidates of each matmul side by side
GRACE = 120  # seconds that a run of the study has to save after SIGTERM
STUDY = {  # commands of the study on a GPU (study/heads/PLAN.md, part 6), without the folder of their runs
    "gpt2": ("study.heads.gpt2",)
} | {
    f"nearest_rank{rank}_{seed}": (
        *("leanformer.train", f"--config=configs/rank_nn.py:rank={rank}", "--config.optim.lr=0.01"),
        *(f"--config.seed={seed}", "--config.data.workers=8"),  # making a batch takes 13 ms of a core
    )
    for seed in range(3)
    for rank in (64, 32)
}


def measurements(out: Path, python: str, tiny: bool = False) -> dict[str, tuple[str, dict[str, Any]]]:
    """Return the function and the arguments of each measurement by name, most useful first."""

    def step(config: str, batch: int, attention: str = "auto", **model: Any) -> tuple[str, tuple[str, dict[str, Any]]]:
        words = [config, batch, attention, *(f"{name}={value}" for name, value in model.items())]
        return f"train {' '.join(map(str, words))}", (
            "train",
            {"config": config, "batch": batch, "attention": attention} | model,
        )

    families = ("vit_b_7x16", "deit_b_7x16", *LEANS, GPT[0], "bert_crammed_10x24", NYSTROM)
    rows = {f"attention {dtype}": ("attention", {"dtype": dtype}) for dtype in ("bfloat16", "float32")}
    rows |= {f"resume {'deterministic' * d or 'default'}": ("resume", {"deterministic": d}) for d in (True, False)}
    rows |= {f"agree {config}": ("agree", {"config": config}) for config in families}
    rows |= {f"watch {model}": ("watch", {"model": model}) for model in ("gpt2", "vit_small_patch16_224")}
    for config, batch in ((LEAN, BATCH), (ORIGINAL, BATCH), *((config, 128) for config in GPT)):
        peer = ("peer", {"config": config, "batch": batch, "python": python})
        rows |= [step(config, batch), (f"peer {config}", peer)]
    rows |= [step(NYSTROM, 32)]
    rows |= [step(LEAN, BATCH, "auto", **how) for how in ({"unroll": 1}, {"remat": "none"}, {"remat": "block"})]
    rows |= [step(LEAN, BATCH, "xla"), step(ORIGINAL, BATCH, "auto", unroll=1), step(GPT[1], 128, "auto", unroll=1)]
    rows |= {f"probe {config}": ("probe", {"config": config}) for config in (LEAN, ORIGINAL)}
    rows |= {f"pipeline {LEAN}": ("pipeline", {"config": LEAN, "batch": BATCH, "folder": str(out / "images")})}
    if tiny:  # the rest runs the same functions
        return rows
    rows |= [step(config, 128) for config in (*LEANS, *ORIGINALS)]
    return rows | dict(step(config, batch) for batch in (512, 128, 64) for config in (LEAN, ORIGINAL))


class Measurement:
    """A measurement in a process of its own.

    Args:
        name: name of the row.
        function: name of the function in `gpu_rows`.
        arguments: its keyword arguments.
        out: folder of the results; the process writes to its `logs`.
        seconds_left: time that is left; the process does not start if it is too short.
    """

    def __init__(self, name: str, function: str, arguments: dict[str, Any], out: Path, seconds_left: float):
        self.row: dict[str, Any] = {"name": name, "table": function}
        self.log = out / "logs" / f"{name.replace(' ', '_')}.log"
        self.limit = min(MAX_SECONDS, seconds_left)
        self.deadline = time.monotonic() + self.limit
        self.process, self.stopped = None, False
        if seconds_left < MIN_SECONDS:
            return
        environ = {key: value for key, value in os.environ.items() if key != "JAX_COMPILATION_CACHE_DIR"}
        environ["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0]
        if function in (*CHECKS, "peer"):  # they share the GPU's memory, with each other or with PyTorch
            environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
        if function in ("train", "peer"):  # a peer's row finds the program of the step before it compiled
            environ["JAX_COMPILATION_CACHE_DIR"] = str(out / "programs")
        if function == "train":
            shutil.rmtree(out / "programs", ignore_errors=True)
        command = [sys.executable, __file__, "--measure", function, json.dumps(arguments), str(os.getpid())]
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("w") as file:
            self.process = subprocess.Popen(command, stdout=file, stderr=file, env=environ, start_new_session=True)

    def is_running(self) -> bool:
        """Return whether the process runs and may go on; kill it if it is at its limit."""
        if self.process is None or self.process.poll() is not None:
            return False
        if time.monotonic() < self.deadline:
            return True
        os.killpg(self.process.pid, signal.SIGKILL)
        self.stopped = True
        return False

    def read(self) -> dict[str, Any]:
        """Return the row of a process that has ended; a failure is one too."""
        if self.process is None:
            return self.row | {"status": NO_TIME}
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


def split(todo: dict[str, tuple[str, dict[str, Any]]]) -> Iterator[tuple[str, ...]]:
    """Yield the names of measurements that run at the same time: some checks, then single ones."""
    checks = [name for name, (function, _) in todo.items() if function in CHECKS]
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


def format_page(results: dict[str, Any]) -> str:
    """Format all rows as Markdown tables; failed measurements are below their table."""
    lines = [f"# {results['machine']['device']}", "", json.dumps(results["machine"]), ""]
    for name in gpu_rows.FUNCTIONS:
        results_of = [result for result in results["rows"].values() if result["table"] == name]
        shown = [row for result in results_of for row in result.get("rows", ())]
        lines += [f"## {name}", "", timing.format_markdown(shown), ""] if shown else []
        lines += [f"- {r['name']}: {r['status']}. {r.get('note', '')}" for r in results_of if r["status"] != MEASURED]
    return "\n".join(lines)


def study_command(name: str, out: Path) -> list[str]:
    """Return a command of the study."""
    module, *flags = STUDY[name]
    flag = "workdir" if module == "leanformer.train" else "out"
    return [sys.executable, "-m", module, *flags, f"--{flag}={out / 'study' / name}"]


def run_study(out: Path, deadline: float) -> None:
    """Run the study's commands until the deadline; finished runs end at once, and others resume."""
    for name in STUDY:
        if (left := deadline - time.monotonic()) < MIN_SECONDS:
            print(f"No time left for {name} and what follows; the same command resumes.", flush=True)
            return
        process = subprocess.Popen(study_command(name, out), cwd=Path(__file__).parents[2])
        try:
            status = process.wait(left)
        except subprocess.TimeoutExpired:
            process.terminate()
            status = process.wait(GRACE)
        print(f"{name}: status {status}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=45)
    parser.add_argument("--out", type=Path, default=Path("gpu"), help="folder of the results")
    parser.add_argument("--only", default="*", help="name patterns, separated by commas")
    parser.add_argument("--python", default=sys.executable, help="interpreter with torch, timm and transformers")
    parser.add_argument("--tiny", action="store_true", help="tiny models and few steps; runs on a CPU too")
    parser.add_argument("--study", action="store_true", help="then the runs of the study, in the minutes that are left")
    parser.add_argument("--list", action="store_true", help="print the names, with --study the commands, and exit")
    parser.add_argument("--measure", nargs=3, help=argparse.SUPPRESS)
    f = parser.parse_args()
    if f.measure:
        end_with_parent(int(f.measure[2]))
        startup.keep_freed_memory()  # as every command does
        print(RESULT_PREFIX + json.dumps(gpu_rows.FUNCTIONS[f.measure[0]](**json.loads(f.measure[1]))), flush=True)
        return
    out, deadline = f.out.expanduser().resolve(), time.monotonic() + 60 * f.minutes
    todo = measurements(out, f.python, f.tiny)
    todo = {name: value for name, value in todo.items() if any(fnmatch.fnmatch(name, p) for p in f.only.split(","))}
    if f.list:
        print("\n".join(todo))
        print("\n".join(shlex.join(study_command(name, out)) for name in STUDY) if f.study else "")
        return
    (facts,) = finish([Measurement("machine", "machine", {"tiny": f.tiny}, out, MAX_SECONDS)])
    if facts["status"] != MEASURED:
        parser.error(f"The device cannot be used: {facts['note']}")
    result: dict[str, Any] = {"machine": facts["rows"][0], "rows": {}}
    if (path := out / "results.json").is_file():
        result["rows"] = files.read_json(path)["rows"]
    todo = {name: value for name, value in todo.items() if result["rows"].get(name, {}).get("status") != MEASURED}
    for names in split(todo):
        seconds_left = deadline - time.monotonic()
        started = [
            Measurement(name, function, arguments | {"tiny": f.tiny}, out, seconds_left)
            for name, (function, arguments) in ((name, todo[name]) for name in names)
        ]
        for row in finish(started):
            result["rows"][row["name"]] = row
            files.write_json(path, result)
            files.write_text(out / "table.md", format_page(result))
            print(json.dumps(row), flush=True)
    print(f"\n{format_page(result)}\nIn {out}: results.json and table.md")
    if f.study:
        run_study(out, deadline)


if __name__ == "__main__":
    main()
