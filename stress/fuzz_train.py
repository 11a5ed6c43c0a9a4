"""Fuzz test of the command line: `python -m leanformer.train` for two steps, with random keys and flags of odd values.

    python stress/fuzz_train.py [--draws=5000] [--seed=0] [--jobs=2] [--minutes=N]
    python stress/fuzz_train.py --traced [...]     everything before the first step, ten times as fast
    python stress/fuzz_train.py --only=NUMBER [--seed=0]       repeat one draw, with its whole output

The small config of every architecture and task must train without changes. Draw number N is a function of (seed, N):
one of these configs and one to three keys, half of them with a value of the key's type, half with an edge value; one
draw in ten also has one of EXTRA_WORDS. The command runs in a forked child process, to save imports. A draw is broken
if it prints a traceback, dies of a signal, ends with a status other than 0 or 2, ends with status 0 and a loss that is
not finite, or hangs for --seconds. It is late if it is refused after the first step, unless the run diverged; such a
run has an "abort" record. Exit status 1 if any draw is broken or late.

A child may take 12 GB of memory.
"""

import argparse
import collections
import json
import math
import os
import re
import shutil
import sys
import tempfile
import time
from pathlib import Path

import jax
import numpy as np


ROOT = Path(__file__).parents[1]
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"

import forked

from leanformer import config, train
from leanformer.config import key_docs
from leanformer.training.run import Run


ONE = {"width": 8, "depth": 2, "num_heads": 2, "head_dim": 4, "mlp_dim": 12}
STAGES = {"width": "(8,16)", "depth": "(1,2)", "num_heads": "(2,1)", "head_dim": "(4,8)", "mlp_dim": "(12,20)"}
CLASS = {"class_depth": 1, "class_heads": 2, "class_head_dim": 4, "class_mlp_dim": 12}
INNER = {"inner_width": 4, "inner_heads": 2, "inner_head_dim": 2, "inner_mlp_dim": 8}
IMAGES = {"data.name": "synthetic", "model.num_classes": 5, "model.image_size": 32}
PATCHES = IMAGES | {"model.patch_size": 8}
PIXELS = {
    "data.name": "pixels:bundled:fashion_mnist",
    "model.num_classes": 10,
    "data.max_length": 784,
    "model.max_length": 784,
    "model.vocabulary": 256,
    "data.eval_split": "t10k",
}
TEXT = {"model.max_length": 16, "data.train_split": "test", "eval.examples": 16}
BASES = {  # name: (config file, keys that make it small)
    "vit": ("vit_b", PATCHES, ONE),
    "xcit": ("xcit_m_12x16", PATCHES, ONE | CLASS),
    "tnt": ("tnt_b_8x16", PATCHES, ONE | INNER),
    "volo": ("volo_d3_lean", PATCHES, STAGES | CLASS | {"stem_width": 8}),
    "davit": ("davit_b_lean", IMAGES, STAGES | {"window_size": 3, "channel_head_dim": "(4,8)"}),
    "nystromformer": ("nystromformer_listops", PIXELS, ONE),
    "gpt": ("quickstart_gpt", TEXT, ONE),
    "bert": ("quickstart_bert", TEXT, ONE),
    "points": ("rank_nn_small", {"eval.examples": 16}, {}),
}
RUN = {"batch_size": 8, "eval.batch_size": 8, "probe.examples": 4, "total_epochs": 0.0, "total_steps": 2}
RUN |= {"optim.warmup_epochs": 0.0, "optim.warmup_steps": 0, "eval.every": 0, "probe.every": 0, "data.workers": 0}
RUN |= {"log_every": 1, "eval.examples": 16}
FIXED = ("total_steps", "total_epochs", "hang_seconds", "data.prefetch")  # these only affect how long a draw takes
NUMBERS = ("0", "-1", "1", "2", "3", "7", "64", "97", "65536", "2147483648", "-1099511627776", "1e308")
REALS = ("0.0", "-1.0", "0.25", "1.0", "2.0", "1e-30", "1e30", "nan", "inf", "-inf")
WORDS = ("", "nonsense", "None", "True", "False", "bfloat16", "test", "../..", "é", "\udcff", "a=b", "[1", "{}", "()")
TUPLES = ("()", "(0,)", "(1,)", "(-1,2)", "(2,3)", "(1,1,1)", "('a','b')", "(0.5,0.25)", "(8,16,24)", "(1,")
EXTRA_WORDS = (  # of one draw in ten, beside its keys
    *("--dry_run", "--nodry_run", "--dry_run=maybe", "word", "--", "-", "--unknown=1", "--config.unknown=1"),
    *(
        "--config.=1",
        "--config.model=1",
        "--config.model.=1",
        "--processes=2",
        "--process=0",
        "--coordinator=nowhere",
        "--help",
    ),
    *("--connect_seconds=0", "--workdir=", "--workdir=~nobody/x", "--workdir=/proc/x", "--workdir=/dev/null"),
    *("--workdir=gs:/x", "--config=", "--config=nowhere.py", "--config=/dev/null", "--config=.", "--config", "\udcff"),
    *(f"--workdir={'x' * 300}", "--workdir=/proc/self/fd/\udcff", "--config.seed", "--noconfig.deterministic"),
)
POSSIBLE = {bool: ("True", "False"), int: ("1", "2", "3", "7", "16"), float: ("0.0", "0.25", "1.0", "2.0")}
KINDS = {bool: WORDS, int: NUMBERS, float: NUMBERS + REALS, str: WORDS, tuple: TUPLES, type(None): NUMBERS + REALS}


def load_base(name):
    """Return the keys of a small run that works, its config, and the name of the config file."""
    file, run, model = BASES[name]
    c = config.load(str(ROOT / "configs" / f"{file}.py"))
    keys = RUN | run | {f"model.{key}": value for key, value in model.items()}
    config_keys = dict(key_docs.iterate_keys(c))
    return {key: value for key, value in keys.items() if key in config_keys}, c, file


def draw(seed, number):
    """Return the architecture, the command line and the changed keys of a draw; below 0, of a base without changes."""
    rng = np.random.default_rng((seed, abs(number)))
    name = str(rng.choice(list(BASES))) if number >= 0 else [*BASES][-number - 1]
    small, c, file = load_base(name)
    help_texts = key_docs.help_texts(c.task)
    choices = [(key, value) for key, value in key_docs.iterate_keys(c) if key not in FIXED]
    changes = {}
    for i in rng.choice(len(choices), size=rng.integers(1, 4), replace=False) if number >= 0 else ():
        key, value = choices[i]
        values = [*KINDS.get(type(value), WORDS), *re.findall(r'"(\w+)"', help_texts.get(key, ""))]
        kind_of_value = rng.random()
        if kind_of_value < 0.5:
            values = [*POSSIBLE.get(type(value), ()), *re.findall(r'"(\w+)"', help_texts.get(key, "")), value]
        elif kind_of_value > 0.9:
            values = [*NUMBERS, *REALS, *WORDS, *TUPLES]
        changes[key] = str(values[rng.integers(len(values))])
    words = [f"--config={ROOT / 'configs' / file}.py"]
    words += [f"--config.{key}={value}" for key, value in (small | changes).items()]
    if number >= 0 and rng.random() < 0.1:
        words.append(EXTRA_WORDS[rng.integers(len(EXTRA_WORDS))])
        changes["word"] = words[-1]
    return name, words, changes


def stop_before_compiling():
    """Make `train` end with status 0 once its step is traced: compilation takes nearly all of the time of a draw."""

    def trace(run):
        run.lower_train_step()
        sys.exit(0)

    Run.restore = lambda run: run.state  # compiles too
    Run.complete = False
    Run.compile_train_step = trace


def classify(status, text, folder, seconds):
    """Return the outcome of a draw: "trained", "refused", "diverged", or the reason why it is broken."""
    if why := forked.find_failure(status, text, seconds):
        return f"BROKEN: {why}"
    records = folder / "metrics.jsonl"
    rows = [json.loads(line) for line in records.read_text().splitlines()] if records.is_file() else []
    if status == 2:
        diverged = any(row["kind"] == "abort" for row in rows)
        return "diverged" if diverged else f"LATE: {len(rows)} records" if rows else "refused"
    losses = [row.get("loss") for row in rows if row["kind"] in ("train", "eval") and "loss" in row]
    if any(loss is None or not math.isfinite(loss) for loss in losses):
        return "BROKEN: loss not finite, status 0"
    return "trained"


class Draw:
    """One draw in a forked child process."""

    def __init__(self, seed, number, scratch, seconds):
        self.seconds = seconds
        self.number, (self.name, self.words, self.changes) = number, draw(seed, number)
        self.folder = scratch / f"{number}"
        words = [f"--workdir={self.folder}", *self.words]
        self.command = forked.ForkedCommand(train.main, words, scratch / f"{number}.log")

    def poll(self):
        """Return the outcome after the end of the draw, else None."""
        if (result := self.command.poll(self.seconds)) is None:
            return None
        status, text = result
        self.output_end = text[-1500:]
        outcome = classify(status, text, self.folder, self.seconds)
        if self.number < 0 and outcome == "refused":
            outcome = "BROKEN: the base is refused"
        shutil.rmtree(self.folder, ignore_errors=True)
        self.command.log.unlink(missing_ok=True)
        return outcome


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=5000)
    parser.add_argument("--first", type=int, default=0, help="number of the first draw")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--minutes", type=float, default=math.inf, help="time limit, after which no draw is started")
    parser.add_argument("--seconds", type=float, default=75, help="time limit of a draw; more on a busy machine")
    parser.add_argument("--traced", action="store_true", help="end each draw before its step is compiled")
    parser.add_argument("--only", type=int, help="number of one draw to run again")
    f = parser.parse_args(argv)
    if f.traced:
        stop_before_compiling()
    os.chdir(ROOT)
    numbers = [f.only] if f.only is not None else [*range(-len(BASES), 0), *range(f.first, f.first + f.draws)]
    totals, totals_by_base, broken, start = collections.Counter(), collections.Counter(), [], time.monotonic()
    with tempfile.TemporaryDirectory(prefix="fuzz_train") as scratch:
        jax.config.update(
            "jax_compilation_cache_dir", os.environ.get("JAX_COMPILATION_CACHE_DIR") or f"{scratch}/compiled"
        )
        waiting, running = iter(numbers), []
        while True:
            while len(running) < f.jobs and time.monotonic() - start < 60 * f.minutes:
                number = next(waiting, None)
                if number is None:
                    break
                running.append(Draw(f.seed, number, Path(scratch), f.seconds))
            if not running:
                break
            for current in list(running):
                result = current.poll()
                if result is None:
                    continue
                running.remove(current)
                kind = result.split(":")[0]
                totals[kind] += 1
                totals_by_base[current.name, kind] += 1
                if totals.total() % 100 == 0:
                    print(f"{totals.total()} draws: {dict(totals)}", flush=True)
                if kind in ("BROKEN", "LATE"):
                    broken.append(current.number)
                    print(f"{current.number} {current.name} {current.changes}: {result}")
                    print(f"    {current.output_end[-700:]!r}", flush=True)
                elif f.only is not None:
                    print(current.words, current.output_end, result, sep="\n")
            time.sleep(0.005)
    print(f"{totals.total()} draws in {time.monotonic() - start:.0f} s: {dict(totals)}")
    for name in BASES:
        print(f"  {name:<14}", {kind: n for (base, kind), n in sorted(totals_by_base.items()) if base == name})
    return int(bool(broken))


if __name__ == "__main__":
    sys.exit(main())
