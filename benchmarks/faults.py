"""Kills runs at random moments and checks that the same command ends where an undisturbed run ends, bit for bit.

python benchmarks/faults.py [--kills=20] [--kinds=…] [--seed=0] [--keep=DIR]

Kinds: `kill` -9 of a run in one process, a quarter of them while it starts; `peer`: -9 of one process of two, where the
other must end by itself, with an error, inside 60 s; `frozen`: the same with SIGSTOP, as a lost host looks; `term`:
SIGTERM of a run in one process, which must save and exit with 75; `term2`: SIGTERM of one process of two; `save`: -9
while a checkpoint is being written; `evaluation`: -9 during one. A run is killed up to four times. Then the same
command brings it to its end, and what it leaves is compared with what an undisturbed run of as many processes left: the
final state bit for bit, the record of every step and evaluation once and in order, and the best checkpoint. Exit status
1 if anything differs. Runs are tiny, on the CPU, and everything random is on.
"""

import argparse
import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path


os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import numpy as np

from leanformer.runtime import mesh
from leanformer.training import experiment, report
from leanformer.training.checkpoint import Checkpoints


ROOT = Path(__file__).parents[1]
STEPS, EVAL, SAVE = 40, 10, 4
CONFIG = {
    **{"total_epochs": 0.0, "total_steps": STEPS, "batch_size": 32, "accumulate": 2, "log_every": 2},
    **{"model.width": 24, "model.num_heads": 4, "model.head_dim": 8, "model.mlp_dim": 32, "model.drop_path": 0.2},
    **{"augment.mixup": 0.8, "augment.cutmix": 1.0, "augment.erase": 0.25, "augment.rand_magnitude": 9.0},
    **{"optim.ema": 0.9, "optim.warmup_epochs": 0.01, "probe.every": 20, "probe.examples": 4},
    **{"eval.every": EVAL, "eval.batch_size": 48, "checkpoint.every": SAVE, "hang_seconds": 120},
}
KINDS = ("kill", "peer", "frozen", "term", "term2", "save", "evaluation")
TWO = ("peer", "frozen", "term2")  # in two processes
CHAIN = 4  # kills of one run
STARTING, START = 0.25, 8.0  # share of kills that come at any time of the first so many seconds
ENDS_WITHIN = 60  # seconds that the other of two processes has to end
AGAIN = os.EX_TEMPFAIL


class Run:
    """One attempt: the ordinary command, in one process or two."""

    def __init__(self, workdir: Path, processes: int, cache: Path):
        words = [sys.executable, "-m", "leanformer.train", "--config=configs/quickstart.py", f"--workdir={workdir}"]
        words += [f"--config.{key}={value}" for key, value in CONFIG.items()]
        plain = {key: value for key, value in os.environ.items() if key != "XLA_FLAGS"}
        quick = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
        environ = plain | {"XLA_FLAGS": quick, "JAX_COMPILATION_CACHE_DIR": str(cache), "TF_CPP_MIN_LOG_LEVEL": "2"}
        environ |= {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
        port = _free_port()
        meet = [f"--coordinator=localhost:{port}", f"--processes={processes}"] if processes > 1 else []
        self.workdir = workdir
        self.logs = [workdir.with_name(f"{workdir.name}.{i}.log") for i in range(processes)]
        self.processes = []
        for i, log in enumerate(self.logs):
            with log.open("w") as out:
                own = [*words, *meet, f"--process={i}"] if meet else words
                self.processes.append(subprocess.Popen(own, cwd=ROOT, env=environ, stdout=out, stderr=out))

    def records(self) -> list[dict]:
        return report.read_records(self.workdir / "metrics.jsonl")

    def going(self) -> bool:
        return all(process.poll() is None for process in self.processes)

    def wait(self, seconds: float = 600, all_but: subprocess.Popen | None = None) -> list[int]:
        """Exit statuses. Raises TimeoutExpired where a process does not end, and leaves none running."""
        deadline, awaited = time.monotonic() + seconds, [p for p in self.processes if p is not all_but]
        try:
            return [process.wait(max(0.1, deadline - time.monotonic())) for process in awaited]
        finally:
            for process in self.processes:
                process.kill()

    def said(self) -> str:
        return "\n".join(f"--- {log.name}\n{log.read_text()[-3000:]}" for log in self.logs)


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("localhost", 0))
        return s.getsockname()[1]


def _until(run: Run, condition: object, pause: float = 0.002) -> bool:
    """Waits for `condition(run)`; False if the run ended first."""
    while run.going():
        if condition(run):
            return True
        time.sleep(pause)
    return False


def _last(run: Run) -> int:
    return max((record["step"] for record in run.records()), default=0)


def _saving(run: Run) -> bool:
    return any((run.workdir / "checkpoints").glob("*.orbax-checkpoint-tmp*"))


def _evaluating(run: Run) -> bool:
    records = run.records()
    last = records[-1] if records else {"step": -1, "kind": ""}
    return last["kind"] == "train" and last["step"] % EVAL == 0


def moment(kind: str, run: Run, chance: random.Random) -> bool:
    """Waits for a random moment of the kind; False if the run ended first."""
    if kind == "kill" and chance.random() < STARTING:
        time.sleep(chance.uniform(0, START))  # while it reads the checkpoint, compiles, or takes its first steps
        return run.going()
    _until(run, lambda r: (r.workdir / "attempts.jsonl").is_file(), 0.02)
    target = min(_last(run) + chance.randint(1, STEPS // CHAIN), STEPS - 1)
    if not _until(run, lambda r: _last(r) >= target):
        return False
    if kind == "save":
        found = _until(run, _saving, 0.0005)
        time.sleep(chance.uniform(0, 0.05))
        return found
    if kind == "evaluation":
        found = _until(run, _evaluating)
        time.sleep(chance.uniform(0, 0.2))
        return found
    time.sleep(chance.uniform(0, 0.1))
    return True


def struck(kind: str, run: Run) -> bool:
    """Whether a kill hit what it was meant to hit."""
    if kind == "evaluation":
        return _evaluating(run)
    unlisted = any(not (path / "files.json").is_file() for path in (run.workdir / "checkpoints").glob("[0-9]*"))
    return kind != "save" or unlisted


def kill(kind: str, run: Run, chance: random.Random) -> tuple[bool, float]:
    """Kills a run at its moment. Returns whether it was hit as meant, and how long it took to end.

    Raises:
        AssertionError: it did not end as it should.
    """
    if not moment(kind, run, chance):
        assert run.wait() == [0] * len(run.processes), run.said()
        return False, 0.0
    victim = chance.choice(run.processes)
    since = time.monotonic()
    signals = {"term": signal.SIGTERM, "term2": signal.SIGTERM, "frozen": signal.SIGSTOP}
    victim.send_signal(signals.get(kind, signal.SIGKILL))
    try:
        if kind == "frozen":
            run.wait(ENDS_WITHIN, all_but=victim)
        statuses = run.wait(ENDS_WITHIN)
    except subprocess.TimeoutExpired as error:
        raise AssertionError(f"not ended {ENDS_WITHIN} s after the {kind}\n{run.said()}") from error
    took = time.monotonic() - since
    if kind.startswith("term"):
        assert set(statuses) in ({AGAIN}, {0}), f"{statuses}\n{run.said()}"  # 0: it was past its last step
        return set(statuses) == {AGAIN}, took
    others = [s for s, process in zip(statuses, run.processes, strict=True) if process is not victim]
    assert all(status not in (0, AGAIN) for status in others), f"{statuses}\n{run.said()}"
    return struck(kind, run), took


def final(workdir: Path) -> tuple[object, list[dict], int | None]:
    """What a run leaves: state, records without what the clock measured, best checkpoint."""
    c = report.read_config(workdir)
    one = mesh.make_mesh()
    like = experiment.build(c, examples=10_000, mesh=one).like
    with Checkpoints(workdir / "checkpoints") as saved:
        state, _ = saved.restore(like)
        best = saved.best()
    records = report.read_records(workdir / "metrics.jsonl")
    return state, [{k: v for k, v in r.items() if k not in report.TIMING} for r in records], best


def differences(found: tuple, wanted: tuple) -> list[str]:
    """In words; empty where two runs left the same."""
    same = jax.tree.map(lambda a, b: np.array_equal(np.asarray(a), np.asarray(b)), found[0], wanted[0])
    words = [] if all(jax.tree.leaves(same)) else ["final state"]
    return words + [what for i, what in ((1, "records"), (2, "best checkpoint")) if found[i] != wanted[i]]


@contextlib.contextmanager
def folder(keep: str | None) -> Iterator[Path]:
    if keep:
        Path(keep).mkdir(parents=True, exist_ok=True)
        yield Path(keep)
    else:
        with tempfile.TemporaryDirectory(prefix="faults") as made:
            yield Path(made)


def undisturbed(base: Path, processes: int) -> tuple:
    run = Run(base / f"undisturbed{processes}", processes, base / "cache")
    statuses = run.wait()
    assert statuses == [0] * processes, run.said()
    return final(run.workdir)


def row(kind: str, kills: int, wanted: tuple, base: Path, chance: random.Random) -> dict:
    """Kills `kills` times in as many runs as it takes, and compares what each leaves."""
    hits, misses, slowest, bad, seconds, runs = 0, 0, 0.0, [], [], 0
    processes = 2 if kind in TWO else 1
    while hits < kills and not bad:
        workdir, runs = base / f"{kind}{runs}", runs + 1
        for _ in range(min(CHAIN, kills - hits)):
            hit, took = kill(kind, Run(workdir, processes, base / "cache"), chance)
            hits, misses, slowest = hits + hit, misses + (not hit), max(slowest, took)
            if (workdir / "summary.json").is_file():
                break
        last = Run(workdir, processes, base / "cache")
        statuses = last.wait()
        assert statuses == [0] * processes, last.said()
        bad += differences(final(workdir), wanted)
        seconds.append(json.loads((workdir / "summary.json").read_text())["seconds"]["lost to restarts"])
    return {"kills": hits, "beside": misses, "runs": runs, "slowest end s": round(slowest, 1)} | {
        "lost s a run": round(sum(seconds) / len(seconds), 1),
        "same": "yes" if not bad else f"NO: {', '.join(sorted(set(bad)))}",
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20, help="of each kind")
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", help="folder for the runs; a temporary one if not given")
    options = parser.parse_args()
    kinds = options.kinds.split(",")
    with folder(options.keep) as base:
        wanted = {n: undisturbed(base, n) for n in ({2 if k in TWO else 1 for k in kinds})}
        table = {}
        for kind in kinds:
            began = time.monotonic()
            n = 2 if kind in TWO else 1
            table[kind] = row(kind, options.kills, wanted[n], base, random.Random(f"{options.seed} {kind}"))
            print(f"{kind}: {table[kind]}, {time.monotonic() - began:.0f} s", flush=True)
    print("\n| fault | " + " | ".join(next(iter(table.values()))) + " |")
    print("|---" * (len(next(iter(table.values()))) + 1) + "|")
    for kind, values in table.items():
        print(f"| {kind} | " + " | ".join(map(str, values.values())) + " |")
    return int(any(values["same"] != "yes" for values in table.values()))


if __name__ == "__main__":
    sys.exit(main())
