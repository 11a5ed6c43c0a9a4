"""Fuzz test of configs, from `check` to a training step: where each one is refused, and whether any crashes.

    python tests/stress/fuzz_configs.py --draws=1000 [--seed=S]   1 to 4 random keys of a small config
    python tests/stress/fuzz_configs.py --alone [--share=0.1]     every key of every architecture, each edge value
    python tests/stress/fuzz_configs.py --only=S:NUMBER           repeat one draw, with its traceback

Each draw is checked and built, a batch of synthetic images is read and augmented, and its training, evaluation and
probe steps are traced; one in --deep (10; 0 is none) also trains a step, evaluates and probes on synthetic data. Prints
each draw that passes `check` and crashes, then the numbers refused by `check` and refused later, with the rule. Exit
status 1 if any draw crashed.
"""

import argparse
import collections
import functools
import os
import re
import sys
import time
from collections.abc import Iterator
from typing import Any


os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Before jax starts: the programs run once, so compiling them fast matters.
os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true")

import jax
import jax.numpy as jnp
import numpy as np
from ml_collections import ConfigDict

from leanformer import config, tasks
from leanformer.config import key_docs
from leanformer.errors import LeanformerError
from leanformer.training import checks, train_setup


EXAMPLES = 64  # size of the training split
LARGE = 2**22  # total size of parameters and batch above which a draw is not run
SMALL: dict[str, Any] = {"batch_size": 8, "eval.batch_size": 8, "probe.examples": 4, "total_epochs": 3.0}
SMALL |= {"optim.warmup_epochs": 0.0, "optim.warmup_steps": 0, "total_steps": 0, "dtype": "float32"}
IMAGES = {"data.name": "synthetic", "model.num_classes": 5, "model.image_size": 32, "model.patch_size": 8}
STAGES = {"width": (8, 16), "depth": (1, 2), "num_heads": (2, 1), "head_dim": (4, 8), "mlp_dim": (12, 20)}
ONE = {"width": 8, "depth": 2, "num_heads": 2, "head_dim": 4, "mlp_dim": 12}
CLASS = {"class_depth": 1, "class_heads": 2, "class_head_dim": 4, "class_mlp_dim": 12}
INNER = {"inner_width": 4, "inner_heads": 2, "inner_head_dim": 2, "inner_mlp_dim": 8}
WINDOWS = {"window_size": 3, "channel_head_dim": (4, 8)}
TASK = {"vocabulary": 17, "max_length": 32, "landmarks": 4, "convolution": 3}
ARCHITECTURES = {  # name: (config, keys of the data, keys of a small model)
    "vit": ("vit_b", IMAGES, ONE),
    "xcit": ("xcit_m_12x16", IMAGES, ONE | CLASS),
    "tnt": ("tnt_b_8x16", IMAGES, ONE | INNER),
    "volo": ("volo_d3_lean", IMAGES, STAGES | CLASS | {"stem_width": 8}),
    "davit": (
        "davit_b_lean",
        {**IMAGES, "model.patch_size": None},
        STAGES | {"window_size": 3, "channel_head_dim": (4, 8)},
    ),
    "nystromformer": ("nystromformer_listops", {"data.max_length": 32}, ONE | TASK),
}
EDGES = {
    int: (0, -1, -3, 1, 2, 3, 7, 64, 97, 2**31, -(2**40), None, 2.5, "many", (3, 3), True),
    float: (0.0, -1.0, 0.25, 1.0, 2.0, 1e-30, 1e30, float("nan"), float("inf"), None, "high", (0.5,)),
    bool: (True, False, None, 2, "yes"),
    str: ("", "nonsense", None, 3),
    tuple: ((), (0,), (1,), (-1, 2), (2, 3), (1, 1, 1), ("a", "b"), (0.5, 0.25), (8, 16, 24), None, 3),
}


def make_base(architecture: str) -> ConfigDict:
    """Return a small config that works."""
    name, run, model = ARCHITECTURES[architecture]
    c = config.load(name).unlock()
    changes = SMALL | run | {f"model.{key}": value for key, value in model.items()}
    set_keys(c, {key: value for key, value in changes.items() if value is not None})
    return c


def set_keys(c: ConfigDict, changes: dict[str, Any]) -> None:
    """Set keys to values of any type."""
    for key, value in changes.items():
        *sections, last = key.split(".")
        section = functools.reduce(ConfigDict.__getitem__, sections, c)
        with section.ignore_type():
            section[last] = value


def edge_values(c: ConfigDict) -> dict[str, list[Any]]:
    """Return the values to try for each key: edge values of its type, and the quoted words in its help text."""
    words = key_docs.help_texts(c.task)
    result = {}
    for key, value in key_docs.iterate_keys(c):
        kind = type(value) if type(value) in EDGES else None
        values = EDGES[kind] if kind else (*EDGES[int], *EDGES[float], *EDGES[str])
        result[key] = [*values, *re.findall(r'"(\w+)"', words.get(key, ""))]
    return result


def iterate_single_keys() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield every key alone with each of its edge values."""
    for architecture in ARCHITECTURES:
        for key, values in edge_values(make_base(architecture)).items():
            yield from ((architecture, {key: value}) for value in values)


def draw_changes(seed: int, number: int) -> tuple[str, dict[str, Any]]:
    """Return an architecture, and 1 to 4 keys with mostly possible values, determined by seed and number."""
    rng = np.random.default_rng((seed, number))
    architecture = str(rng.choice(list(ARCHITECTURES)))
    values_by_key = edge_values(make_base(architecture))
    keys = rng.choice(list(values_by_key), size=rng.integers(1, 5), replace=False)
    return architecture, {str(key): values_by_key[key][rng.integers(len(values_by_key[key]))] for key in keys}


def try_config(architecture: str, changes: dict[str, Any], *, deep: bool) -> tuple[str, str]:
    """Return the stage that a config reached, and the rule that refused it.

    Raises:
        Exception: any error that is not a LeanformerError.
    """
    c = make_base(architecture)
    set_keys(c, changes)
    try:
        checks.check(c)
    except LeanformerError as error:
        return "refused by check", strip_values(error)
    try:
        run = train_setup.build(c, examples=EXAMPLES, mesh=None)
        if c.data.name == "synthetic" and c.batch_size <= EXAMPLES:
            run.train_batches(tasks.open_data(run.task.data, c)[0])[0]
        key = jax.eval_shape(lambda: jax.random.key(0))
        batch = run.abstract_batch()
        jax.eval_shape(run.train_step, run.state, batch, key)
        jax.eval_shape(
            run.model.eval_step(run.task.objective),
            run.state.weights,
            batch | {"mask": jax.ShapeDtypeStruct((c.batch_size,), bool)},
        )
        numbers = sum(x.size for x in jax.tree.leaves((run.state.params, batch)))
        if deep and numbers <= LARGE:
            _run_steps(run)
            return "ran", ""
    except LeanformerError as error:
        return "refused later", strip_values(error)
    return "traced", ""


def _run_steps(run: train_setup.TrainSetup) -> None:
    """Run a training step, an evaluation and a probe."""
    batch = {name: jnp.zeros(x.shape, x.dtype) for name, x in run.abstract_batch().items()}
    state, _ = jax.jit(run.train_step)(run.initial_state(), batch, jax.random.key(0))
    jax.jit(run.model.eval_step(run.task.objective))(
        state.weights, batch | {"mask": jnp.ones(run.config.batch_size, bool)}
    )
    if run.model.probe_step(run.task.objective, run.config.probe.measures):
        leaves = {name: batch[name] for name in run.task.data.input_specs()}
        jax.block_until_ready(
            jax.jit(run.model.probe_step(run.task.objective, run.config.probe.measures))(state.weights, leaves)
        )


def strip_values(error: Exception) -> str:
    """Return the start of a message without its values, which identifies the rule."""
    return re.sub(r"\s+", " ", re.sub(r"=('[^']*'|\"[^\"]*\"|\([^)]*\)|[^\s:,;]+)", "", str(error)))[:70]


def main(words: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--alone", action="store_true")
    parser.add_argument("--share", type=float, default=1.0, help="random share of the draws of --alone to run")
    parser.add_argument("--deep", type=int, default=10, help="one in this number of draws is also run; 0 is none")
    parser.add_argument(
        "--minutes", type=float, default=float("inf"), help="time limit, after which no draw is started"
    )
    parser.add_argument("--only", help="SEED:NUMBER")
    f = parser.parse_args(words)
    if f.only:
        architecture, changes = draw_changes(*map(int, f.only.split(":")))
        print(architecture, changes, *try_config(architecture, changes, deep=True))
        return 0
    rng, start = np.random.default_rng(f.seed), time.monotonic()
    draws = iterate_single_keys() if f.alone else (draw_changes(f.seed, number) for number in range(f.draws))
    outcomes, rules, broken = collections.Counter(), collections.Counter(), []
    for number, (architecture, changes) in enumerate(draws):
        if f.alone and rng.random() >= f.share:
            continue
        if time.monotonic() - start > 60 * f.minutes:
            break
        try:
            stage, reason = try_config(architecture, changes, deep=f.deep > 0 and number % f.deep == 0)
        except Exception as error:  # any other error is a crash
            stage, reason = "BROKEN", ""
            message = " ".join(str(error).split())[:200]
            broken.append(f"{architecture} {changes} ({number}): {type(error).__name__}: {message}")
            print(broken[-1], flush=True)
        outcomes[stage] += 1
        rules[stage, reason] += 1
    print(f"{outcomes.total()} draws")
    for stage, count in outcomes.most_common():
        print(f"{count:6} {stage}")
        if stage == "refused later":
            print(
                *(f"       {n:6} {reason}" for (reached, reason), n in rules.most_common() if reached == stage),
                sep="\n",
            )
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
