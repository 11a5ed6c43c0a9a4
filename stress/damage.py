"""Fault injection: full and failing disks, clocks that jump back, damaged files, and two runs in one folder.

    python stress/damage.py [--parts=disk,clock,files,two,read_only] [--calls=12] [--keep=DIR]

disk: the `train` command while its writes, syncs and renames in the workdir fail with ENOSPC, EFBIG or EIO, starting at
some call (`preload.c`; --calls such calls are spread over the run). It must end with status 2 and a message, or finish.
Then the same command without the fault must reach the final state of an undisturbed run, bit for bit.
clock: the wall clock jumps back by an hour during a run. files: one byte flipped, or the second half missing, in every
file of a stopped run: train, evaluate, probe, predict and compare must work, or end with status 2 and a message.
two: a second run in the same folder. read_only: a workdir without write permission (not as root).

A trial is broken if there is a traceback, a signal, another status, a hang or another final state. Exit status 1 if any
trial is broken.
"""

import argparse
import collections
import errno
import importlib
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path


os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"

import forked
import kills


HERE, SECONDS = Path(__file__).parent, 150
PARTS = ("disk", "clock", "files", "two", "read_only")
COMMANDS = ("train", "evaluate", "probe", "predict", "compare")


class Report:
    """Counts of trials by part, and the broken trials."""

    def __init__(self):
        self.counts, self.broken = collections.Counter(), []

    def add(self, part, name, why, text=""):
        """Add one trial; `why` is the reason if it is broken, otherwise None."""
        self.counts[part, "broken" if why else "passed"] += 1
        if why:
            self.broken.append((part, name, why))
            print(f"BROKEN {part} {name}: {why}\n    {text[-800:]!r}", flush=True)


def command_line(workdir, base, steps=kills.STEPS):
    """Return the command line of a small image run."""
    keys = kills.RUN | kills.IMAGE | {"total_steps": steps}
    return [f"--config={kills.ROOT / 'configs' / 'quickstart.py'}", f"--workdir={workdir}"] + [
        f"--config.{key}={value}" for key, value in keys.items()
    ]


def run_command(module, line, base, environ=(), seconds=SECONDS):
    """Run a command in a new process, and return its exit status (None after a hang) and output."""
    environ = os.environ | {"JAX_COMPILATION_CACHE_DIR": f"{base}/cache"} | dict(environ)
    try:
        result = subprocess.run(
            [sys.executable, "-m", f"leanformer.{module}", *line],
            cwd=kills.ROOT,
            env=environ,
            capture_output=True,
            text=True,
            timeout=seconds,
            errors="replace",
        )
    except subprocess.TimeoutExpired as error:
        return None, str(error.stdout)
    return result.returncode, result.stdout + result.stderr


def describe_differences(workdir, expected):
    """Return the names of the differences from an undisturbed run, or None."""
    return ", ".join(kills.list_differences({"": kills.read_run(workdir)}, {"": expected})) or None


def check_disk(report, base, library, calls, expected):
    """Let writes fail, starting at several calls."""
    count, workdir = base / "count", base / "counted"
    environ = {"LD_PRELOAD": str(library), "FAULT_PATH": str(workdir), "FAULT_COUNT": str(count)}
    status, text = run_command("train", command_line(workdir, base), base, environ)
    report.add(
        "disk",
        "without a fault",
        forked.find_failure(status, text, SECONDS, (0,)) or describe_differences(workdir, expected),
        text,
    )
    total = int(count.read_text())
    print(f"disk: {total} calls in an undisturbed run", flush=True)
    rng = random.Random(0)
    for number in range(calls):
        code = (errno.ENOSPC, errno.EFBIG, errno.EIO)[number % 3]
        after = 1 + int((number + rng.random()) * total / calls)
        name, workdir = f"{errno.errorcode[code]} from call {after}", base / f"disk{number}"
        environ = {"LD_PRELOAD": str(library), "FAULT_PATH": str(workdir), "FAULT_AFTER": str(after)}
        status, text = run_command("train", command_line(workdir, base), base, environ | {"FAULT_ERRNO": str(code)})
        report.add("disk", name, forked.find_failure(status, text, SECONDS), text)
        status, text = run_command("train", command_line(workdir, base), base)
        why = forked.find_failure(status, text, SECONDS, (0,)) or describe_differences(workdir, expected)
        report.add("disk", f"{name}, then resumed", why, text)
        shutil.rmtree(workdir, ignore_errors=True)


def check_clock(report, base, library, expected):
    """Let the wall clock jump back by an hour at several times."""
    for after in (2, 5, 8, 11):
        workdir = base / f"clock{after}"
        environ = {"LD_PRELOAD": str(library), "CLOCK_AFTER": str(after), "CLOCK_BACK": "3600"}
        status, text = run_command("train", command_line(workdir, base), base, environ)
        why = forked.find_failure(status, text, SECONDS, (0,)) or describe_differences(workdir, expected)
        report.add("clock", f"back after {after} s", why, text)


def flip_bit(path):
    """Flip one bit in the middle of a file."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)


def truncate_file(path):
    """Cut off the second half of a file."""
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def check_files(report, base):
    """Damage each file of a run that stopped at half its steps, then run every command on it."""
    original, picture = base / "whole", base / "picture.png"
    run_command("train", command_line(original, base, kills.STEPS // 2), base)
    import numpy as np
    from PIL import Image

    Image.fromarray(np.arange(28 * 28, dtype=np.uint8).reshape(28, 28)).save(picture)
    os.environ["JAX_COMPILATION_CACHE_DIR"] = f"{base}/cache"
    mains = {module: importlib.import_module(f"leanformer.{module}").main for module in COMMANDS}
    paths = [
        path.relative_to(original) for path in sorted(original.rglob("*")) if path.is_file() and path.stat().st_size
    ]
    paths_by_type = {}
    for path in paths:  # one file of each type: those of a checkpoint differ in the hash or number of their names
        paths_by_type.setdefault((path.parts[0], path.suffix, path.stem.rstrip("0123456789abcdef")[:12]), path)
    os.chdir(kills.ROOT)
    for path in paths_by_type.values():
        for damage in (flip_bit, truncate_file):
            for module in COMMANDS:
                workdir = base / "damaged"
                shutil.copytree(original, workdir)
                damage(workdir / path)
                line = {"train": command_line(workdir, base), "predict": [f"--workdir={workdir}", str(picture)]}
                line["compare"] = [str(workdir)]
                command = forked.ForkedCommand(mains[module], line.get(module, [f"--workdir={workdir}"]), base / "log")
                status, text = command.wait(SECONDS)
                report.add(
                    "files", f"{path} {damage.__name__}, {module}", forked.find_failure(status, text, SECONDS), text
                )
                shutil.rmtree(workdir)


def check_two_runs(report, base, expected):
    """Start a second run in the folder of a first one."""
    workdir = base / "two"
    first = subprocess.Popen(
        [sys.executable, "-m", "leanformer.train", *command_line(workdir, base)],
        cwd=kills.ROOT,
        env=os.environ | {"JAX_COMPILATION_CACHE_DIR": f"{base}/cache"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    while first.poll() is None and not (workdir / "metrics.jsonl").exists():
        time.sleep(0.02)
    status, text = run_command("train", command_line(workdir, base), base)
    is_running = first.poll() is None
    why = forked.find_failure(status, text, SECONDS, (2,) if is_running else (0, 2))
    report.add("two", "second run", why, text)
    report.add("two", "first run", None if first.wait() == 0 else f"status {first.returncode}")
    report.add("two", "final state", describe_differences(workdir, expected))


def check_read_only(report, base):
    """Train into a folder without write permission."""
    workdir = base / "read_only"
    workdir.mkdir()
    workdir.chmod(0o500)
    if os.access(workdir, os.W_OK):
        print("read_only: skipped, since this user can write everywhere")
        return
    status, text = run_command("train", command_line(workdir / "run", base), base)
    report.add("read_only", "train", forked.find_failure(status, text, SECONDS, (2,)), text)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--calls", type=int, default=12, help="number of disk faults")
    parser.add_argument("--keep", help="folder for the runs; a temporary one if not given")
    options = parser.parse_args()
    report, parts = Report(), options.parts.split(",")
    with kills.open_folder(options.keep) as base, tempfile.TemporaryDirectory() as build:
        library = Path(build) / "preload.so"
        compiler = ["cc", "-O1", "-shared", "-fPIC", "-o", str(library), str(HERE / "preload.c"), "-ldl"]
        subprocess.run(compiler, check=True)
        expected = None
        if {"disk", "clock", "two"} & set(parts):
            status, text = run_command("train", command_line(base / "undisturbed", base), base)
            assert status == 0, text
            expected = kills.read_run(base / "undisturbed")
        if "disk" in parts:
            check_disk(report, base, library, options.calls, expected)
        if "clock" in parts:
            check_clock(report, base, library, expected)
        if "two" in parts:
            check_two_runs(report, base, expected)
        if "read_only" in parts:
            check_read_only(report, base)
        if "files" in parts:
            check_files(report, base)
    for (part, result), number in sorted(report.counts.items()):
        print(f"{part:<10} {result:<7} {number}")
    return int(bool(report.broken))


if __name__ == "__main__":
    sys.exit(main())
