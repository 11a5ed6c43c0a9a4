"""Kills of runs at random times: the same command must reach the final state of an undisturbed run, bit for bit.

    python tools/kills.py [--kills=20] [--kinds=kill,save,...] [--jobs=image,...] [--seed=0] [--keep=DIR]

Kinds: `kill`, SIGKILL, a quarter of them during the first seconds; `term`, SIGTERM, after which the run must save and
end with status 75; `start`, SIGTERM during the first seconds; `save`, SIGKILL while a checkpoint is written;
`evaluation`, SIGKILL during an evaluation. With two processes, images only: `peer`, SIGKILL of one process, after which
the other must end with an error within 60 s; `frozen`, the same with SIGSTOP, like a lost host; `term2`, SIGTERM of
one process, after which both must end with status 75.

Jobs: image, gpt, bert, sentences, lra, points (`train`); sweep (`sweep` of four runs); prepare (`prepare build`). A
job is killed up to four times. Then the same command finishes it. These must equal an undisturbed job: every final
state bit for bit, the records of all steps and evaluations, each once and in order, and the best checkpoint; for
`prepare`, every file. No child process may be left. Runs are tiny, on the CPU, with all random augmentation enabled.
Exit status 1 if anything differs.
"""

import argparse
import contextlib
import os
import random
import shutil
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
from ml_collections import ConfigDict

from leanformer import config as configs
from leanformer.config import iterate_keys
from leanformer.data import sequences
from leanformer.runtime import mesh
from leanformer.training import run_files, train_setup
from leanformer.training.checkpoint import Checkpoints


ROOT = Path(__file__).parents[1]
STEPS, EVAL, SAVE = 40, 10, 4
RUN = {
    **{"total_epochs": 0.0, "total_steps": STEPS, "log_every": 2, "hang_seconds": 120, "data.workers": 0},
    **{"eval.every": EVAL, "eval.examples": 96, "eval.batch_size": 48, "checkpoint.every": SAVE},
    **{"probe.every": 20, "probe.examples": 4, "optim.ema": 0.9, "optim.warmup_steps": 2, "optim.warmup_epochs": 0.0},
    **{"model.width": 24, "model.num_heads": 4, "model.head_dim": 8, "model.mlp_dim": 32},
}
IMAGE = {"batch_size": 32, "accumulate": 2, "model.drop_path": 0.2, "augment.mixup": 0.8, "augment.cutmix": 1.0}
IMAGE |= {"augment.erase": 0.25, "augment.rand_magnitude": 9.0}
TEXT = {"batch_size": 8, "model.dropout": 0.1, "model.max_length": 16, "optim.ema": None}
TEXT |= {"eval.batch_size": 8, "data.dir": "{base}/texts", "data.max_length": 16}
SHORT = {"data.max_length": 39, "model.max_length": 40, "data.recipe.train": 2000, "data.recipe.test": 96}
SHORT |= {"data.recipe.val": 96, "data.recipe.min_length": 10, "data.recipe.max_length": 40}
LISTOPS = SHORT | {"data.name": "listops:{base}/listops", "model.dropout": 0.1, "batch_size": 16}
SENTENCES = {"data.dir": "{base}", "data.name": "tsv:{base}/reviews", "data.tokenizer": "wordpiece:70", "batch_size": 8}
JOBS = {  # name: (command, its flags, config, keys of the config)
    "image": ("train", [], "quickstart", RUN | IMAGE),
    "gpt": ("train", [], "quickstart_gpt", RUN | TEXT),
    "bert": ("train", [], "quickstart_bert", RUN | TEXT),
    "sentences": ("train", [], "glue", RUN | TEXT | SENTENCES | {"model.depth": 2, "model.vocabulary": 71}),
    "lra": ("train", [], "nystromformer_listops_short:landmarks=8", RUN | LISTOPS | {"optim.ema": None}),
    "points": ("train", [], "rank_nn_small", RUN | {"batch_size": 16, "model.width": None}),
    "sweep": ("sweep", ["--seeds=2", "--over=optim.lr=1e-3,3e-3", "--parallel=2"], "quickstart", RUN | IMAGE),
    "prepare": ("prepare", ["build"], "nystromformer_listops_short", SHORT | {"data.recipe.train": 60_000}),
}
KINDS = ("kill", "term", "start", "save", "evaluation", "peer", "frozen", "term2")
STOPS = ("term", "term2", "start")  # kinds that send SIGTERM
TWO_PROCESSES = ("peer", "frozen", "term2")  # kinds that need two processes
TRAINING = ("save", "evaluation", *TWO_PROCESSES)  # kinds that need the records of a single run
CHAIN = 4  # most kills of one job
STARTING, START = 0.25, 8.0  # share of kills during start-up, and the seconds that start-up takes
PYTHON = 0.5  # seconds until Python has started; no signal handler can exist before
ENDS_WITHIN = 60  # time limit in seconds for the end of the other process
AGAIN = os.EX_TEMPFAIL


class Run:
    """One attempt at a job: its command, in one process or two."""

    def __init__(self, job: str, workdir: Path, processes: int, base: Path):
        command, words, config, keys = JOBS[job]
        self.training, self.has_records = command == "train", command != "prepare"
        name, colon, argument = config.partition(":")
        words = [sys.executable, "-m", f"leanformer.{command}", *words, f"--config=configs/{name}.py{colon}{argument}"]
        config_keys = dict(iterate_keys(load(config)))
        keys = {key: value for key, value in keys.items() if key in config_keys and value is not None}
        if command == "prepare":
            keys["data.name"] = f"listops:{workdir}/listops"
        else:
            words.append(f"--workdir={workdir}")
        prefix = "--set=" if command == "sweep" else "--config."
        words += [f"{prefix}{key}={value}".replace("{base}", str(base)) for key, value in keys.items()]
        plain = {key: value for key, value in os.environ.items() if key != "XLA_FLAGS"}
        xla_flags = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
        cache = base / "cache"
        environ = plain | {"XLA_FLAGS": xla_flags, "JAX_COMPILATION_CACHE_DIR": str(cache), "TF_CPP_MIN_LOG_LEVEL": "2"}
        environ |= {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
        port = _free_port()
        multihost_flags = [f"--coordinator=localhost:{port}", f"--processes={processes}"] if processes > 1 else []
        self.workdir = workdir
        self.logs = [workdir.with_name(f"{workdir.name}.{i}.log") for i in range(processes)]
        self.processes = []
        for i, log in enumerate(self.logs):
            with log.open("w") as out:
                call = [*words, *multihost_flags, f"--process={i}"] if multihost_flags else words
                self.processes.append(
                    subprocess.Popen(call, cwd=ROOT, env=environ, stdout=out, stderr=out, start_new_session=True)
                )

    def records(self) -> list[dict]:
        """Return the records of the run, or of the run of a sweep with most records."""
        folders = [self.workdir] if self.training else sorted(self.workdir.glob("*/"))
        rows = [run_files.read_records(folder) for folder in folders]
        return max(rows, key=len, default=[])

    def is_running(self) -> bool:
        return all(process.poll() is None for process in self.processes)

    def wait(self, seconds: float = 600, all_but: subprocess.Popen | None = None) -> list[int]:
        """Return exit statuses.

        Raises:
            TimeoutExpired: a process did not end; all are killed.
        """
        deadline, awaited = time.monotonic() + seconds, [p for p in self.processes if p is not all_but]
        try:
            return [process.wait(max(0.1, deadline - time.monotonic())) for process in awaited]
        finally:
            for process in self.processes:
                process.kill()

    def children(self) -> list[str]:
        """Return, and kill, the child processes that still run ten seconds after this attempt."""
        for _ in range(100):
            sessions = ",".join(str(process.pid) for process in self.processes)
            remaining = subprocess.run(
                ["ps", "-o", "pid=,args=", "--sid", sessions], capture_output=True, text=True
            ).stdout
            if not remaining.strip():
                return []
            time.sleep(0.1)
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        return remaining.splitlines()

    def read_logs(self) -> str:
        return "\n".join(f"--- {log.name}\n{log.read_text()[-3000:]}" for log in self.logs)


def load(config: str) -> ConfigDict:
    name, colon, argument = config.partition(":")
    return configs.load(f"{ROOT / 'configs' / name}.py{colon}{argument}")


def write_data(base: Path) -> None:
    """Write generated data for jobs that need it: labelled sentences and ListOps."""
    rng, folder = random.Random(0), base / "reviews"
    folder.mkdir(exist_ok=True)
    words = {"good": ["fine", "bright", "warm", "clever"], "bad": ["dull", "cold", "long", "flat"]}
    for split, number in (("train", 400), ("dev", 96)):
        rows = ["sentence\tlabel"]
        for _ in range(number):
            label = rng.choice(sorted(words))
            rows.append(" ".join(rng.choices([*words[label], "a", "the", "film", "story"], k=8)) + f"\t{label}")
        (folder / f"{split}.tsv").write_text("\n".join(rows) + "\n")
    c = load(JOBS["lra"][2]).unlock()
    c.update_from_flattened_dict(SHORT)
    sequences.build_sequences(f"listops:{base / 'listops'}", None, c.data.recipe.to_dict())


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("localhost", 0))
        return s.getsockname()[1]


def _wait_until(run: Run, condition: object, pause: float = 0.002) -> bool:
    """Wait for `condition(run)`. Return False if the run ended first."""
    while run.is_running():
        if condition(run):
            return True
        time.sleep(pause)
    return False


def _last_step(run: Run) -> int:
    return max((record["step"] for record in run.records()), default=0)


def _is_saving(run: Run) -> bool:
    return any((run.workdir / "checkpoints").glob("*.orbax-checkpoint-tmp*"))


def _is_evaluating(run: Run) -> bool:
    records = run.records()
    last = records[-1] if records else {"step": -1, "kind": ""}
    return last["kind"] == "train" and last["step"] % EVAL == 0


def wait_for_time(kind: str, run: Run, rng: random.Random) -> bool:
    """Wait for a random time that fits the kind. Return False if the run ended first."""
    if kind == "start" or not run.has_records or (kind == "kill" and rng.random() < STARTING):
        # While it imports, reads the checkpoint, compiles or runs its first steps.
        time.sleep(rng.uniform(PYTHON, START))
        return run.is_running()
    _wait_until(run, lambda r: any(r.workdir.rglob("config.json")), 0.02)
    target = min(_last_step(run) + rng.randint(1, STEPS // CHAIN), STEPS - 1)
    if not _wait_until(run, lambda r: _last_step(r) >= target):
        return False
    if kind == "save":
        result = _wait_until(run, _is_saving, 0.0005)
        time.sleep(rng.uniform(0, 0.05))
        return result
    if kind == "evaluation":
        result = _wait_until(run, _is_evaluating)
        time.sleep(rng.uniform(0, 0.2))
        return result
    time.sleep(rng.uniform(0, 0.1))
    return True


def is_hit(kind: str, run: Run) -> bool:
    """Return whether a kill happened during the intended activity."""
    if kind == "evaluation":
        return _is_evaluating(run)
    unlisted = any(not (path / "files.json").is_file() for path in (run.workdir / "checkpoints").glob("[0-9]*"))
    return kind != "save" or unlisted


def kill_run(kind: str, run: Run, rng: random.Random) -> tuple[bool, float]:
    """Kill a run at a time that fits the kind. Return whether it was hit as intended, and the seconds until its end.

    Raises:
        AssertionError: it did not end as expected.
    """
    if not wait_for_time(kind, run, rng):
        assert run.wait() == [0] * len(run.processes), run.read_logs()
        return False, 0.0
    victim = rng.choice(run.processes)
    start = time.monotonic()
    signals = dict.fromkeys(STOPS, signal.SIGTERM) | {"frozen": signal.SIGSTOP}
    victim.send_signal(signals.get(kind, signal.SIGKILL))
    try:
        if kind == "frozen":
            run.wait(ENDS_WITHIN, all_but=victim)
        statuses = run.wait(ENDS_WITHIN)
    except subprocess.TimeoutExpired as error:
        raise AssertionError(f"not ended {ENDS_WITHIN} s after the {kind}\n{run.read_logs()}") from error
    took = time.monotonic() - start
    assert not (remaining := run.children()), f"left: {remaining}\n{run.read_logs()}"
    if kind in STOPS and run.has_records:
        ended = {AGAIN}, {0}, {-signal.SIGTERM}  # saved; after the last step; before the first
        assert set(statuses) in ended, f"{statuses}\n{run.read_logs()}"
        return set(statuses) != {0}, took
    others = [s for s, process in zip(statuses, run.processes, strict=True) if process is not victim]
    assert all(status not in (0, AGAIN) for status in others), f"{statuses}\n{run.read_logs()}"
    return is_hit(kind, run), took


def read_final(job: str, workdir: Path) -> dict[str, tuple]:
    """Return the final state of a job by run; for prepared data, the content of every file."""
    if JOBS[job][0] == "train":
        return {"": read_run(workdir)}
    if JOBS[job][0] == "sweep":
        return {path.parent.name: read_run(path.parent) for path in sorted(workdir.glob("*/config.json"))}
    files = {path.relative_to(workdir): path.read_bytes() for path in workdir.rglob("*") if path.is_file()}
    return {"": (files, [], None)}


def read_run(workdir: Path) -> tuple[object, list[dict], int | None]:
    """Return the state, the records without timing, and the best checkpoint."""
    c = run_files.load_config(workdir)
    device_mesh = mesh.make_mesh(devices=jax.devices()[:1])  # as each job has, also within tests on several devices
    abstract = train_setup.set_up_training(c, examples=10_000, mesh=device_mesh).state
    with Checkpoints(workdir / "checkpoints") as saved:
        state = saved.restore(abstract).state
        best = saved.best()
    records = run_files.read_records(workdir)
    return state, [{k: v for k, v in r.items() if k not in run_files.TIMING} for r in records], best


def list_differences(result: dict[str, tuple], expected: dict[str, tuple]) -> list[str]:
    """Return the names of the differences between two jobs."""
    if result.keys() != expected.keys():
        return ["runs"]
    words = []
    for name, (state, records, best) in result.items():
        same = jax.tree.map(_equal, state, expected[name][0])
        words += [] if all(jax.tree.leaves(same)) else [f"{name} final state"]
        words += [] if records == expected[name][1] else [f"{name} records"]
        words += [] if best == expected[name][2] else [f"{name} best checkpoint"]
    return words


def _equal(a: object, b: object) -> bool:
    return a == b if isinstance(a, bytes) else np.array_equal(np.asarray(a), np.asarray(b))


@contextlib.contextmanager
def open_folder(keep: str | None) -> Iterator[Path]:
    if keep:
        Path(keep).mkdir(parents=True, exist_ok=True)
        yield Path(keep)
    else:
        with tempfile.TemporaryDirectory(prefix="faults") as temporary:
            yield Path(temporary)


def run_undisturbed(job: str, base: Path, processes: int) -> dict[str, tuple]:
    run = Run(job, base / f"{job}_undisturbed{processes}", processes, base)
    statuses = run.wait()
    assert statuses == [0] * processes, run.read_logs()
    return read_final(job, run.workdir)


def measure_row(job: str, kind: str, kills: int, expected: dict[str, tuple], base: Path, rng: random.Random) -> dict:
    """Kill a job `kills` times in total, over as many jobs as needed, and compare the final state of each."""
    hits, misses, slowest, errors, runs = 0, 0, 0.0, [], 0
    processes = 2 if kind in TWO_PROCESSES else 1
    while hits < kills and not errors:
        workdir, runs = base / f"{job}_{kind}{runs}", runs + 1
        for _ in range(min(CHAIN, kills - hits)):
            hit, took = kill_run(kind, Run(job, workdir, processes, base), rng)
            hits, misses, slowest = hits + hit, misses + (not hit), max(slowest, took)
            if any((workdir / name).is_file() for name in ("summary.json", "sweep.json")):
                break
        last = Run(job, workdir, processes, base)
        statuses = last.wait()
        assert statuses == [0] * processes, last.read_logs()
        errors += list_differences(read_final(job, workdir), expected)
        shutil.rmtree(workdir)
    return {"kills": hits, "missed": misses, "jobs": runs, "slowest end s": round(slowest, 1)} | {
        "same": "yes" if not errors else f"NO: {', '.join(sorted(set(errors)))}"
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20, help="number of kills per job and kind")
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--jobs", default=",".join(JOBS))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", help="folder for the runs; a temporary one if not given")
    options = parser.parse_args()
    kinds, jobs = options.kinds.split(","), options.jobs.split(",")
    table = {}
    with open_folder(options.keep) as base:
        write_data(base)
        for job in jobs:
            trains, expected = JOBS[job][0] == "train", {}
            for kind in kinds:
                if (kind in TRAINING and not trains) or (kind in TWO_PROCESSES and job != "image"):
                    continue
                start, n = time.monotonic(), 2 if kind in TWO_PROCESSES else 1
                if n not in expected:
                    expected[n] = run_undisturbed(job, base, n)
                rng = random.Random(f"{options.seed} {job} {kind}")
                try:
                    values = measure_row(job, kind, options.kills, expected[n], base, rng)
                except AssertionError as error:
                    values = {"same": "NO: see above"}
                    print(error)
                table[job, kind] = values
                print(f"{job} {kind}: {values}, {time.monotonic() - start:.0f} s", flush=True)
    head = ["kills", "missed", "jobs", "slowest end s", "same"]
    print("\n| job | kind | " + " | ".join(head) + " |\n" + "|---" * (len(head) + 2) + "|")
    for (job, kind), values in table.items():
        print(f"| {job} | {kind} | " + " | ".join(str(values.get(name, "")) for name in head) + " |")
    return int(any(values["same"] != "yes" for values in table.values()))


if __name__ == "__main__":
    sys.exit(main())
