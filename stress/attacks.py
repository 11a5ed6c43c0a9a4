"""Attacks on commands from outside: terminals, environments, limits, folders, special files and signals.

    python stress/attacks.py [--kinds=streams,environment,...] [--only=TEXT] [--keep=DIR]

Each attack is a shell command. It must end with one of its exit statuses within the time limit, without a traceback;
with status 2 its message must mention the cause, and a run that ends with status 0 must have all of its records. A
kind is a list of ATTACKS; add one for each new attack that found something. Prints a table of runs and failures by
kind. Exit status 1 if any attack failed.
"""

import argparse
import collections
import dataclasses
import json
import os
import shlex
import subprocess
import sys
import time
from pathlib import Path


os.environ["JAX_PLATFORMS"] = "cpu"

import forked
import kills
import numpy as np
from PIL import Image


SECONDS, STEPS = 150, 3
KEYS = kills.RUN | {"total_steps": STEPS, "batch_size": 8, "log_every": 1, "eval.every": 0, "probe.every": 0}
KEYS |= {"eval.examples": 64, "eval.batch_size": 8, "optim.ema": 0.0}


@dataclasses.dataclass(frozen=True)
class Attack:
    """Shell command, in which {words} are replaced (`make_words`).

    Attributes:
        shell: command.
        statuses: exit statuses that are right.
        cause: text that the message of status 2 must contain.
    """

    shell: str
    statuses: tuple[int, ...] = (0,)
    cause: str = ""


def refused(shell: str, cause: str) -> Attack:
    """Return an attack that must be refused with one message."""
    return Attack(shell, (2,), cause)


FOLDER = "--config.data.name=folder:{base}/data --config.data.eval_split=val --config.model.num_classes=2"
STOPS = "{train} --config.total_steps=100000 & sleep 12; kill -%s $!; wait $!"
ATTACKS = {
    "streams": [
        *[Attack(f"{{train}} {where}") for where in (">&-", "2>&-", ">&- 2>&-", "<&- >&- 2>&-", ">/dev/full")],
        *[Attack(f"{{train}} {where}") for where in ("2>/dev/full", "| head -1", "2>&1 | true", ">/dev/full 2>&1")],
        Attack("{train} | sleep 60"),  # a reader that never reads
        Attack("{probe} >/dev/full"),
        Attack("{evaluate} >&-"),
        *[refused(f"{command} >/dev/full", "standard output") for command in ("{predict} {image}", "{keys}", "{cost}")],
        *[refused(f"{command} >&-", "standard output") for command in ("{predict} {image}", "{keys}")],
        Attack("set -o pipefail; {keys} | head -1", (0, 141)),
        Attack("{predict} {image} --out={new}/p.json 2>&-"),
    ],
    "environment": [
        *[refused(f"JAX_ENABLE_X64={value} {{train}}", "JAX_ENABLE_X64") for value in ("1", "maybe")],
        *[refused(f"JAX_PLATFORMS={value} {{train}}", "JAX_PLATFORMS") for value in ("cuda", "bogus", "tpu", "cpu,x")],
        *[refused(f"XLA_FLAGS={value} {{train}}", "XLA_FLAGS") for value in ("--xla_bogus=1", "foo", "' '")],
        refused("JAX_DISABLE_JIT=1 {train}", "JAX_DISABLE_JIT"),
        refused("JAX_NUMPY_DTYPE_PROMOTION=strict {train}", "JAX_NUMPY_DTYPE_PROMOTION"),
        refused("JAX_TRANSFER_GUARD=disallow {train}", "JAX_TRANSFER_GUARD"),
        refused("JAX_RANDOM_SEED_OFFSET=5 {train}", "JAX_RANDOM_SEED_OFFSET"),
        refused("JAX_DEFAULT_MATMUL_PRECISION=x {train}", "JAX_DEFAULT_MATMUL_PRECISION"),
        refused("JAX_DEFAULT_DEVICE=x {train}", "JAX_DEFAULT_DEVICE"),
        refused("JAX_NUM_CPU_DEVICES=0 {train}", "JAX_NUM_CPU_DEVICES"),
        refused("SLURM_NTASKS=x {train}", "SLURM_NTASKS"),
        refused("OMPI_COMM_WORLD_SIZE=2 {train}", "OMPI_COMM_WORLD"),
        refused("PMI_SIZE=x {train}", "PMI_SIZE"),
        *[Attack(f"{value} {{train}}") for value in ("MPLBACKEND=bogus", "PYTHONOPTIMIZE=2", "TMPDIR=/no", "TZ=x")],
        *[Attack(f"{value} {{train}}") for value in ("JAX_DEBUG_NANS=1", "LC_ALL=C", "COLUMNS=10", "PYTHONUTF8=0")],
        *[Attack(f"{value} {{train}}") for value in ("PYTHONWARNINGS=error", "JAX_CHECK_TRACER_LEAKS=1", "HOME=/x")],
        Attack("env -i {train}"),
        Attack("COLUMNS=10 {probe}"),
    ],
    "limits": [
        *[refused(f"ulimit -n {number}; {{train}}", "ulimit -n") for number in (20, 64)],
        refused("ulimit -v 1000000; {train}", "ulimit -v"),
        Attack("ulimit -S -n 64; {train} --config.data.workers=2"),
        Attack("ulimit -s 256; {train}"),
        Attack("ulimit -S -t 8; {train} --config.total_steps=100000", (75,)),
        Attack("ulimit -f 100; {train}", (0, 2)),
    ],
    "folders": [
        *[refused(f"{{train}} --workdir={{new}}/{'x' * number}", "name") for number in (250, 300)],
        refused(f"{{train}} --workdir={{new}}/{'/'.join(['x' * 200] * 20)}", "name"),
        refused("{train} --workdir={base}/$(printf 'caf\\351')", "UTF-8"),
        *[refused(f"{{train}} --workdir={{base}}/{name}", name) for name in ("dangling", "loop", "image.png")],
        *[refused(f"{{train}} --workdir={name}", name) for name in ("gs:/x", "/dev/null", "/proc/x")],
        refused(f"{{predict}} {{image}} --out={{new}}/{'x' * 250}", "name"),
    ],
    "special": [
        Attack(f"{{train}} {FOLDER}"),
        refused(f"{{train}} {FOLDER} --config.data.train_split=listed", "unreadable"),
        *[Attack(f"{{predict}} {{base}}/data/train/ant/{name}.png", (2,), name) for name in ("pipe", "zero", "socket")],
        Attack("{predict} {base}/data"),
    ],
    "signals": [
        *[Attack(STOPS % name, (75,)) for name in ("TERM", "HUP", "USR1", "USR2", "XCPU")],
        Attack("trap '' HUP; {train} & sleep 3; kill -HUP $!; wait $!"),  # as nohup does
        Attack("({train} --config.total_steps=9999 2>&1 & echo $! >{new}.pid; wait $!; echo $? >{new}.status) | true & "
               "sleep 5; kill -TERM $(cat {new}.pid); while ! test -s {new}.status; do sleep 0.2; done; "
               "exit $(cat {new}.status)", (75,)),  # during start-up, without a terminal
    ],
}  # fmt: skip


def make_words(base: Path, new: Path) -> dict[str, str]:
    """Return the replacements of words in an attack: commands, a new folder, and files."""
    python, run = shlex.quote(sys.executable), base / "run"
    keys = " ".join(f"--config.{key}={shlex.quote(str(value))}" for key, value in KEYS.items())
    commands = {"train": f"--config=configs/quickstart.py --workdir={new} {keys}"}
    commands |= dict.fromkeys(("evaluate", "predict"), f"--workdir={run}")
    commands |= {
        "probe": f"--workdir={run} --out={new}",
        "keys": "mesh",
        "cost": f"--config=configs/quickstart.py {keys}",
    }
    words = {name: f"{python} -m leanformer {name} {rest}" for name, rest in commands.items()}
    return words | {"base": str(base), "new": str(new), "image": str(base / "image.png")}


def make_files(base: Path) -> None:
    """Write a finished run, images, special files among them, and links."""
    rng = np.random.default_rng(0)
    for split in ("train", "val"):
        for label in ("ant", "bee"):
            (base / "data" / split / label).mkdir(parents=True)
            for i in range(9):
                pixels = rng.integers(0, 256, (28, 28), dtype=np.uint8)
                Image.fromarray(pixels).save(base / "data" / split / label / f"{i}.png")
    ant = base / "data" / "train" / "ant"
    os.mkfifo(ant / "pipe.png")
    os.mknod(ant / "socket.png", 0o140600)
    (ant / "zero.png").symlink_to("/dev/zero")
    lines = [f"train/ant/{name}.png ant\n" for name in ("pipe", "zero", "socket")] + ["train/bee/1.png bee\n"]
    (base / "data" / "listed.txt").write_text("".join(lines))
    Image.fromarray(rng.integers(0, 256, (28, 28), dtype=np.uint8)).save(base / "image.png")
    (base / "dangling").symlink_to(base / "nowhere")
    (base / "loop").symlink_to("loop")
    done = run(Attack("{train}"), make_words(base, base / "run"), base)
    assert done is None, done


def run(attack: Attack, words: dict[str, str], base: Path) -> str | None:
    """Run an attack, and return the reason if it failed, otherwise None."""
    shell = attack.shell
    for name, value in words.items():
        shell = shell.replace("{" + name + "}", value)
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "OMPI_"))}
    environ |= {"JAX_COMPILATION_CACHE_DIR": f"{base}/cache", "PYTHONPATH": str(kills.ROOT)}
    with (base / "log").open("w+b") as log:
        process = subprocess.Popen(
            ["bash", "-c", shell], cwd=kills.ROOT, env=environ, stdout=log, stderr=log, start_new_session=True
        )
        try:
            status = process.wait(SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)
            status = None
        log.seek(0)
        text = log.read().decode(errors="replace")
    why = forked.find_failure(status, text, SECONDS, attack.statuses)
    if status == 2 == attack.statuses[0] and attack.cause and f"WARNING: {words['base']}" in text:
        why = None  # predict warns of each unreadable file
    if why is None and attack.cause not in text and "2>" not in attack.shell:
        why = f"no mention of {attack.cause}"
    if why is None and status == 0 and "{train}" in attack.shell and (left := find_missing(Path(words["new"]))):
        why = left
    return why and f"{why}\n    {text[-600:]!r}"


def find_missing(workdir: Path) -> str | None:
    """Return the reason why a finished run of STEPS steps is incomplete, or None."""
    path = workdir / "metrics.jsonl"
    records = [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []
    steps = [record["step"] for record in records if record["kind"] == "train"]
    complete = steps == [*range(1, STEPS + 1)] and (workdir / "summary.json").is_file()
    return None if complete else f"records of steps {steps}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", default=",".join(ATTACKS))
    parser.add_argument("--only", default="", help="run only attacks whose command contains this text")
    parser.add_argument("--keep", help="new folder for the runs; a temporary one if not given")
    options = parser.parse_args()
    runs, failures = collections.Counter(), collections.Counter()
    with kills.open_folder(options.keep) as base:
        make_files(base)
        for kind in options.kinds.split(","):
            for attack in (attack for attack in ATTACKS[kind] if options.only in attack.shell):
                new, start = base / f"{kind}{runs[kind]}", time.monotonic()
                runs[kind] += 1
                if why := run(attack, make_words(base, new), base):
                    failures[kind] += 1
                    print(f"FAILED {kind}: {attack.shell[:150]}: {why}", flush=True)
                else:
                    print(f"passed {kind}: {attack.shell[:90]} ({time.monotonic() - start:.0f} s)", flush=True)
    print(f"\n{'kind':<12} {'runs':>5} {'failures':>9}")
    for kind, number in runs.items():
        print(f"{kind:<12} {number:>5} {failures[kind]:>9}")
    return int(bool(failures))


if __name__ == "__main__":
    sys.exit(main())
