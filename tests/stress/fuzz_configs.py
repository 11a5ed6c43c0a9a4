"""Configs drawn at random, from `check` to a training step: what is refused, where, and whether anything just breaks.

    python tests/stress/fuzz_configs.py --draws=1000 [--seed=S]   1 to 4 random keys of a small config
    python tests/stress/fuzz_configs.py --alone [--share=0.1]     every key of every architecture, each edge value
    python tests/stress/fuzz_configs.py --only=S:NUMBER           one draw again, with its traceback

Each draw is checked, built, a batch of made-up images is read and augmented, and its training, evaluation and probe
steps are traced; one in --deep (10; 0 is none) also trains a step, evaluates and probes on made-up data. Prints what
passed `check` and broke, as it comes, and how many were refused by `check`, how many only later and by which rule: none
may break, and the exit status is 1 if any did.
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


EXAMPLES = 64  # of the training split that the runs are built for
LARGE = 2**22  # numbers in parameters and batch above which a draw is not run
SMALL: dict[str, Any] = {"batch_size": 8, "eval.batch_size": 8, "probe.examples": 4, "total_epochs": 3.0}
SMALL |= {"optim.warmup_epochs": 0.0, "optim.warmup_steps": 0, "total_steps": 0, "dtype": "float32"}
IMAGES = {"data.name": "synthetic", "model.num_classes": 5, "model.image_size": 32, "model.patch_size": 8}
STAGES = {"width": (8, 16), "depth": (1, 2), "num_heads": (2, 1), "head_dim": (4, 8), "mlp_dim": (12, 20)}
ONE = {"width": 8, "depth": 2, "num_heads": 2, "head_dim": 4, "mlp_dim": 12}
CLASS = {"class_depth": 1, "class_heads": 2, "class_head_dim": 4, "class_mlp_dim": 12}
INNER = {"inner_width": 4, "inner_heads": 2, "inner_head_dim": 2, "inner_mlp_dim": 8}
WINDOWS = {"window_size": 3, "channel_head_dim": (4, 8)}
TASK = {"vocabulary": 17, "max_length": 32, "landmarks": 4, "convolution": 3}
FAMILIES = {  # a config of each, and what makes it small
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


def base(family: str) -> ConfigDict:
    """A small config that works."""
    name, run, model = FAMILIES[family]
    c = config.load(name).unlock()
    changes = SMALL | run | {f"model.{key}": value for key, value in model.items()}
    change(c, {key: value for key, value in changes.items() if value is not None})
    return c


def change(c: ConfigDict, changes: dict[str, Any]) -> None:
    """Sets keys, whatever the type of their values."""
    for key, value in changes.items():
        *sections, last = key.split(".")
        section = functools.reduce(ConfigDict.__getitem__, sections, c)
        with section.ignore_type():
            section[last] = value


def edges(c: ConfigDict) -> dict[str, list[Any]]:
    """What to set each key to: edge values of its kind, its opposite, and the words that its meaning has in quotes."""
    words = key_docs.help_texts(c.task)
    result = {}
    for key, value in key_docs.iterate_keys(c):
        kind = type(value) if type(value) in EDGES else None
        several = EDGES[kind] if kind else (*EDGES[int], *EDGES[float], *EDGES[str])
        result[key] = [*several, *re.findall(r'"(\w+)"', words.get(key, ""))]
    return result


def alone() -> Iterator[tuple[str, dict[str, Any]]]:
    """Every key by itself."""
    for family in FAMILIES:
        for key, values in edges(base(family)).items():
            yield from ((family, {key: value}) for value in values)


def drawn(seed: int, number: int) -> tuple[str, dict[str, Any]]:
    """A function of seed and number: a family, and 1 to 4 keys with values that are mostly possible."""
    chance = np.random.default_rng((seed, number))
    family = str(chance.choice(list(FAMILIES)))
    known = edges(base(family))
    keys = chance.choice(list(known), size=chance.integers(1, 5), replace=False)
    return family, {str(key): known[key][chance.integers(len(known[key]))] for key in keys}


def follow(family: str, changes: dict[str, Any], *, deep: bool) -> tuple[str, str]:
    """How far a config came, and the rule or the error that stopped it.

    Raises whatever is no LeanformerError.
    """
    c = base(family)
    change(c, changes)
    try:
        checks.check(c)
    except LeanformerError as error:
        return "refused by check", rule(error)
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
            _run(run)
            return "ran", ""
    except LeanformerError as error:
        return "refused later", rule(error)
    return "traced", ""


def _run(run: train_setup.TrainSetup) -> None:
    """A step, an evaluation and a probe."""
    made = {name: jnp.zeros(x.shape, x.dtype) for name, x in run.abstract_batch().items()}
    state, _ = jax.jit(run.train_step)(run.initial_state(), made, jax.random.key(0))
    jax.jit(run.model.eval_step(run.task.objective))(
        state.weights, made | {"mask": jnp.ones(run.config.batch_size, bool)}
    )
    if run.model.probe_step(run.task.objective, run.config.probe.measures):
        leaves = {name: made[name] for name in run.task.data.input_specs()}
        jax.block_until_ready(
            jax.jit(run.model.probe_step(run.task.objective, run.config.probe.measures))(state.weights, leaves)
        )


def rule(error: Exception) -> str:
    """A message without its values."""
    return re.sub(r"\s+", " ", re.sub(r"=('[^']*'|\"[^\"]*\"|\([^)]*\)|[^\s:,;]+)", "", str(error)))[:70]


def main(words: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--alone", action="store_true")
    parser.add_argument("--share", type=float, default=1.0, help="of the draws of --alone, by chance")
    parser.add_argument("--deep", type=int, default=10, help="one draw in so many also runs; 0 is none")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="to stop after, wherever it is")
    parser.add_argument("--only", help="SEED:NUMBER")
    f = parser.parse_args(words)
    if f.only:
        family, changes = drawn(*map(int, f.only.split(":")))
        print(family, changes, *follow(family, changes, deep=True))
        return 0
    chance, began = np.random.default_rng(f.seed), time.monotonic()
    draws = alone() if f.alone else (drawn(f.seed, number) for number in range(f.draws))
    came, rules, broken = collections.Counter(), collections.Counter(), []
    for number, (family, changes) in enumerate(draws):
        if f.alone and chance.random() >= f.share:
            continue
        if time.monotonic() - began > 60 * f.minutes:
            break
        try:
            where, why = follow(family, changes, deep=f.deep > 0 and number % f.deep == 0)
        except Exception as error:  # whatever it is, it is what is looked for
            where, why = "BROKEN", ""
            words = " ".join(str(error).split())[:200]
            broken.append(f"{family} {changes} ({number}): {type(error).__name__}: {words}")
            print(broken[-1], flush=True)
        came[where] += 1
        rules[where, why] += 1
    print(f"{came.total()} draws")
    for where, times in came.most_common():
        print(f"{times:6} {where}")
        if where == "refused later":
            print(*(f"       {n:6} {why}" for (at, why), n in rules.most_common() if at == where), sep="\n")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
