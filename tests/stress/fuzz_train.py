"""Fuzz of the public command line: `python -m leanformer.train` for two steps, with random keys set to odd values.

    python tests/stress/fuzz_train.py [--draws=5000] [--seed=0] [--jobs=2] [--minutes=N]
    python tests/stress/fuzz_train.py --only=NUMBER [--seed=0]       one draw again, with its whole output

Draw number N is a function of (seed, N): a small config of one architecture or task and one to three keys, half of
them with a value of the key's type, half with an edge value. The command runs in a forked child, which saves the
imports. A draw is broken if it prints a traceback, dies of a signal, ends with another status than 0 or 2, ends with
status 0 and a loss that is not finite, or gives no answer in 75 s. Exit status 1 if any is.

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


ROOT = Path(__file__).parents[2]
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"

import forked

from leanformer import config, train
from leanformer.config import key_docs


SECONDS = 75
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
FIXED = ("total_steps", "total_epochs", "hang_seconds", "data.prefetch")  # how long a draw takes, nothing else
NUMBERS = ("0", "-1", "1", "2", "3", "7", "64", "97", "65536", "2147483648", "-1099511627776", "1e308")
REALS = ("0.0", "-1.0", "0.25", "1.0", "2.0", "1e-30", "1e30", "nan", "inf", "-inf")
WORDS = ("", "nonsense", "None", "True", "False", "bfloat16", "test", "../..", "é", "\udcff", "a=b", "[1", "{}", "()")
TUPLES = ("()", "(0,)", "(1,)", "(-1,2)", "(2,3)", "(1,1,1)", "('a','b')", "(0.5,0.25)", "(8,16,24)", "(1,")
POSSIBLE = {bool: ("True", "False"), int: ("1", "2", "3", "7", "16"), float: ("0.0", "0.25", "1.0", "2.0")}
KINDS = {bool: WORDS, int: NUMBERS, float: NUMBERS + REALS, str: WORDS, tuple: TUPLES, type(None): NUMBERS + REALS}


def base(name):
    """Return the words of a small run that works, and its config."""
    file, run, model = BASES[name]
    c = config.load(str(ROOT / "configs" / f"{file}.py"))
    keys = RUN | run | {f"model.{key}": value for key, value in model.items()}
    known = dict(key_docs.iterate_keys(c))
    return {key: value for key, value in keys.items() if key in known}, c, file


def draw(seed, number):
    """Return the architecture, the command line and the changed keys of a draw."""
    chance = np.random.default_rng((seed, number))
    name = str(chance.choice(list(BASES)))
    small, c, file = base(name)
    meanings = key_docs.help_texts(c.task)
    choices = [(key, value) for key, value in key_docs.iterate_keys(c) if key not in FIXED]
    changes = {}
    for i in chance.choice(len(choices), size=chance.integers(1, 4), replace=False):
        key, value = choices[i]
        values = [*KINDS.get(type(value), WORDS), *re.findall(r'"(\w+)"', meanings.get(key, ""))]
        how = chance.random()
        if how < 0.5:
            values = [*POSSIBLE.get(type(value), ()), *re.findall(r'"(\w+)"', meanings.get(key, "")), value]
        elif how > 0.9:
            values = [*NUMBERS, *REALS, *WORDS, *TUPLES]
        changes[key] = str(values[chance.integers(len(values))])
    words = [f"--config={ROOT / 'configs' / file}.py"]
    words += [f"--config.{key}={value}" for key, value in (small | changes).items()]
    return name, words, changes


def verdict(status, text, folder):
    """Return what a draw came to: "trained", "refused", or the reason why it is broken."""
    if why := forked.broken(status, text, SECONDS):
        return f"BROKEN: {why}"
    if status == 2:
        return "refused"
    records = folder / "metrics.jsonl"
    rows = [json.loads(line) for line in records.read_text().splitlines()] if records.is_file() else []
    losses = [row.get("loss") for row in rows if row["kind"] in ("train", "eval") and "loss" in row]
    if any(loss is None or not math.isfinite(loss) for loss in losses):
        return "BROKEN: loss not finite, status 0"
    return "trained"


class Draw:
    """One draw in a forked child."""

    def __init__(self, seed, number, scratch):
        self.number, (self.name, self.words, self.changes) = number, draw(seed, number)
        self.folder = scratch / f"{number}"
        words = [f"--workdir={self.folder}", *self.words]
        self.command = forked.Forked(train.main, words, scratch / f"{number}.log")

    def poll(self):
        """Return the verdict once there is one, else None."""
        if (result := self.command.poll(SECONDS)) is None:
            return None
        status, text = result
        self.end = text[-1500:]
        answer = verdict(status, text, self.folder)
        shutil.rmtree(self.folder, ignore_errors=True)
        self.command.log.unlink(missing_ok=True)
        return answer


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=5000)
    parser.add_argument("--first", type=int, default=0, help="number of the first draw")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--minutes", type=float, default=math.inf, help="stop after so many, wherever it is")
    parser.add_argument("--only", type=int, help="number of one draw to run again")
    f = parser.parse_args(argv)
    os.chdir(ROOT)
    numbers = [f.only] if f.only is not None else range(f.first, f.first + f.draws)
    totals, by_base, broken, began = collections.Counter(), collections.Counter(), [], time.monotonic()
    with tempfile.TemporaryDirectory(prefix="fuzz_train") as scratch:
        jax.config.update(
            "jax_compilation_cache_dir", os.environ.get("JAX_COMPILATION_CACHE_DIR") or f"{scratch}/compiled"
        )
        waiting, running = iter(numbers), []
        while True:
            while len(running) < f.jobs and time.monotonic() - began < 60 * f.minutes:
                number = next(waiting, None)
                if number is None:
                    break
                running.append(Draw(f.seed, number, Path(scratch)))
            if not running:
                break
            for one in list(running):
                result = one.poll()
                if result is None:
                    continue
                running.remove(one)
                kind = result.split(":")[0]
                totals[kind] += 1
                by_base[one.name, kind] += 1
                if kind == "BROKEN":
                    broken.append(one.number)
                    print(f"{one.number} {one.name} {one.changes}: {result}\n    {one.end[-700:]!r}", flush=True)
                elif f.only is not None:
                    print(one.words, one.end, result, sep="\n")
            time.sleep(0.005)
    print(f"{totals.total()} draws in {time.monotonic() - began:.0f} s: {dict(totals)}")
    for name in BASES:
        print(f"  {name:<14}", {kind: n for (b, kind), n in sorted(by_base.items()) if b == name})
    return int(bool(broken))


if __name__ == "__main__":
    sys.exit(main())
