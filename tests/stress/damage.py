"""Disks that fill up or fail, clocks that jump back, damaged files, and two runs in one folder.

    python tests/stress/damage.py [--parts=disk,clock,files,two,read_only] [--calls=12] [--keep=DIR]

disk: the ordinary `train` command while its writes, syncs and renames in the workdir fail with ENOSPC, EFBIG or EIO
from a certain call on (`preload.c`; --calls such calls are spread over the run). It must end with status 2 and a
message, or reach its end. Then the same command without the fault must end where an undisturbed run ends, bit for bit.
clock: the wall clock jumps back by an hour during a run. files: one byte flipped, or the second half missing, in every
file of a stopped run: train, evaluate, probe, predict and compare must work, or end with status 2 and a message.
two: a second run in the same folder. read_only: a workdir without write permission (not as root).

Broken are a traceback, a signal, another status, no answer, and another final state. Exit status 1 if anything is.
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
    """Counts by part, and what was broken."""

    def __init__(self):
        self.counts, self.broken = collections.Counter(), []

    def add(self, part, name, why, text=""):
        """Note one trial; `why` says what is broken, None if nothing is."""
        self.counts[part, "broken" if why else "held"] += 1
        if why:
            self.broken.append((part, name, why))
            print(f"BROKEN {part} {name}: {why}\n    {text[-800:]!r}", flush=True)


def words(workdir, base, steps=kills.STEPS):
    """Return the command line of a small image run."""
    keys = kills.RUN | kills.IMAGE | {"total_steps": steps}
    return [f"--config={kills.ROOT / 'configs' / 'quickstart.py'}", f"--workdir={workdir}"] + [
        f"--config.{key}={value}" for key, value in keys.items()
    ]


def call(module, line, base, environ=(), seconds=SECONDS):
    """Run a command in a process of its own: exit status (None: hung) and output."""
    environ = os.environ | {"JAX_COMPILATION_CACHE_DIR": f"{base}/cache"} | dict(environ)
    try:
        done = subprocess.run(
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
    return done.returncode, done.stdout + done.stderr


def differs(workdir, expected):
    """Return what differs from an undisturbed run, in words, or None."""
    return ", ".join(kills.differences({"": kills.final_of_run(workdir)}, {"": expected})) or None


def disk(report, base, library, calls, expected):
    """Let writes fail from a certain call on."""
    count, workdir = base / "count", base / "counted"
    environ = {"LD_PRELOAD": str(library), "FAULT_PATH": str(workdir), "FAULT_COUNT": str(count)}
    status, text = call("train", words(workdir, base), base, environ)
    report.add(
        "disk", "without a fault", forked.broken(status, text, SECONDS, (0,)) or differs(workdir, expected), text
    )
    total = int(count.read_text())
    print(f"disk: {total} calls in an undisturbed run", flush=True)
    chance = random.Random(0)
    for number in range(calls):
        code = (errno.ENOSPC, errno.EFBIG, errno.EIO)[number % 3]
        after = 1 + int((number + chance.random()) * total / calls)
        name, workdir = f"{errno.errorcode[code]} from call {after}", base / f"disk{number}"
        environ = {"LD_PRELOAD": str(library), "FAULT_PATH": str(workdir), "FAULT_AFTER": str(after)}
        status, text = call("train", words(workdir, base), base, environ | {"FAULT_ERRNO": str(code)})
        report.add("disk", name, forked.broken(status, text, SECONDS), text)
        status, text = call("train", words(workdir, base), base)
        why = forked.broken(status, text, SECONDS, (0,)) or differs(workdir, expected)
        report.add("disk", f"{name}, then resumed", why, text)
        shutil.rmtree(workdir, ignore_errors=True)


def clock(report, base, library, expected):
    """Let the wall clock jump back by an hour at several moments."""
    for after in (2, 5, 8, 11):
        workdir = base / f"clock{after}"
        environ = {"LD_PRELOAD": str(library), "CLOCK_AFTER": str(after), "CLOCK_BACK": "3600"}
        status, text = call("train", words(workdir, base), base, environ)
        why = forked.broken(status, text, SECONDS, (0,)) or differs(workdir, expected)
        report.add("clock", f"back after {after} s", why, text)


def flipped(path):
    """Flip one bit in the middle of a file."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)


def truncated(path):
    """Cut off the second half of a file."""
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def files(report, base):
    """Damage each file of a run that stopped at half its steps, then run every command on it."""
    whole, picture = base / "whole", base / "picture.png"
    call("train", words(whole, base, kills.STEPS // 2), base)
    import numpy as np
    from PIL import Image

    Image.fromarray(np.arange(28 * 28, dtype=np.uint8).reshape(28, 28)).save(picture)
    os.environ["JAX_COMPILATION_CACHE_DIR"] = f"{base}/cache"
    mains = {module: importlib.import_module(f"leanformer.{module}").main for module in COMMANDS}
    paths = [path.relative_to(whole) for path in sorted(whole.rglob("*")) if path.is_file() and path.stat().st_size]
    kinds = {}
    for path in paths:  # one of each kind: of the many files of a checkpoint, one by name without its hash or number
        kinds.setdefault((path.parts[0], path.suffix, path.stem.rstrip("0123456789abcdef")[:12]), path)
    os.chdir(kills.ROOT)
    for path in kinds.values():
        for damage in (flipped, truncated):
            for module in COMMANDS:
                workdir = base / "damaged"
                shutil.copytree(whole, workdir)
                damage(workdir / path)
                line = {"train": words(workdir, base), "predict": [f"--workdir={workdir}", str(picture)]}
                line["compare"] = [str(workdir)]
                command = forked.Forked(mains[module], line.get(module, [f"--workdir={workdir}"]), base / "log")
                status, text = command.wait(SECONDS)
                report.add("files", f"{path} {damage.__name__}, {module}", forked.broken(status, text, SECONDS), text)
                shutil.rmtree(workdir)


def two(report, base, expected):
    """Start a second run in the folder of a first one."""
    workdir = base / "two"
    first = subprocess.Popen(
        [sys.executable, "-m", "leanformer.train", *words(workdir, base)],
        cwd=kills.ROOT,
        env=os.environ | {"JAX_COMPILATION_CACHE_DIR": f"{base}/cache"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    while first.poll() is None and not (workdir / "metrics.jsonl").exists():
        time.sleep(0.02)
    status, text = call("train", words(workdir, base), base)
    alone = first.poll() is None
    why = forked.broken(status, text, SECONDS, (2,) if alone else (0, 2))
    report.add("two", "second run", why, text)
    report.add("two", "first run", None if first.wait() == 0 else f"status {first.returncode}")
    report.add("two", "final state", differs(workdir, expected))


def read_only(report, base):
    """Train into a folder without write permission."""
    workdir = base / "read_only"
    workdir.mkdir()
    workdir.chmod(0o500)
    if os.access(workdir, os.W_OK):
        print("read_only: not tried, since this user may write everywhere")
        return
    status, text = call("train", words(workdir / "run", base), base)
    report.add("read_only", "train", forked.broken(status, text, SECONDS, (2,)), text)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--calls", type=int, default=12, help="faults of the disk")
    parser.add_argument("--keep", help="folder for the runs; a temporary one if not given")
    options = parser.parse_args()
    report, parts = Report(), options.parts.split(",")
    with kills.folder(options.keep) as base, tempfile.TemporaryDirectory() as build:
        library = Path(build) / "preload.so"
        compiler = ["cc", "-O1", "-shared", "-fPIC", "-o", str(library), str(HERE / "preload.c"), "-ldl"]
        subprocess.run(compiler, check=True)
        expected = None
        if {"disk", "clock", "two"} & set(parts):
            status, text = call("train", words(base / "undisturbed", base), base)
            assert status == 0, text
            expected = kills.final_of_run(base / "undisturbed")
        if "disk" in parts:
            disk(report, base, library, options.calls, expected)
        if "clock" in parts:
            clock(report, base, library, expected)
        if "two" in parts:
            two(report, base, expected)
        if "read_only" in parts:
            read_only(report, base)
        if "files" in parts:
            files(report, base)
    for (part, result), number in sorted(report.counts.items()):
        print(f"{part:<10} {result:<7} {number}")
    return int(bool(report.broken))


if __name__ == "__main__":
    sys.exit(main())
