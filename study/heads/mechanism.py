"""Narrow heads and the scale of the attention logits: parts E1 and E7 of PLAN2.md.

    python -m study.heads.mechanism train [--arms=NAME,...] [--together] [--rows=FILE] [--tiny]

Every finished run is a row, and the same command continues. With --together the rates of an arm, then its seeds, are
trained as one program, for a GPU.

An arm is trained at several learning rates with one seed, until the best rate by the tuning chapters has a worse one on
both sides, then with five other seeds at that rate.
"""

import argparse
import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp

from leanformer import config
from leanformer.layers import masks, multihead, positions
from study.heads import language, trainer


ROWS = Path(__file__).parents[1] / "data" / "mechanism.csv"
FIELDS = ("arm", "width", "num_heads", "head_dim", "logit_scale", "start_scale", "rotary", "steps", "lr", "seed")
FIELDS += ("loss", "tuning_loss", "entropy", "params", "date", "device", "curve")
RATES, TUNING_SEED, SEEDS, BEYOND = (2e-3, 4e-3, 8e-3), 100, (0, 1, 2, 3, 4), 2
DEPTH, TOKENS = 4, 128
MICRO_BATCHES = 8  # on a processor: attention to 2 rows at a time stays in its cache


class Arm(NamedTuple):
    """What distinguishes the models that are compared.

    Attributes:
        heads: number of heads.
        logit_scale: factor of q·k; 1 / sqrt(head dimension) if None.
        start_scale: factor of the initial projections to queries and keys.
        rotary: True for rotary instead of learned positions.
        base: base of the rotary angles.
        frequencies: number of rotary frequencies of a head; half of its dimension if None; see `rotate_in_groups`.
        width: width, and total width of the heads.
        steps: length of the run and of its schedule.
        head_dim: dimension of a head's queries and keys; width / heads, as of its values, if None.
        mlp: width of the MLP's hidden layer; 4 · width if None.
        taught: number of dimensions of values from which a head's queries and keys learn; see `teach`.
        until: step until which they do, heads are tied or a pattern is given; to the end if None.
        patterns: number of groups of heads that start with the same queries and keys; see `begin_alike`.
        tied: True if they keep them; see `tie`.
        given: half of the heads attend to the key this many tokens before, from the start; see `give`.
        bonus: what is added to its logit; e⁶ is 3 times the 127 other keys at logit 0.
    """

    heads: int
    logit_scale: float | None = None
    start_scale: float = 1.0
    rotary: bool = False
    base: float = 10_000.0
    frequencies: int | None = None
    width: int = 128
    steps: int = 1000
    head_dim: int | None = None
    mlp: int | None = None
    taught: int | None = None
    until: int | None = None
    patterns: int | None = None
    tied: bool = False
    given: int | None = None
    bonus: float = 6.0


def fast(heads: int, width: int = 128) -> float:
    """Return sqrt(width) / head dimension, with which one head of the full width keeps its usual factor."""
    return math.sqrt(width) * heads / width


ARMS = {  # in the order in which they are trained
    "32": Arm(32),
    "32 fast": Arm(32, fast(32)),
    "1": Arm(1),
    "1 fast": Arm(1, 0.5),  # the same 5.66 times its usual factor: a control
    "4": Arm(4),
    "4 fast": Arm(4, fast(4)),
    "32 start": Arm(32, start_scale=math.sqrt(fast(32) * 2)),  # the logits of "32 fast" at the start, not their growth
    "32 rate": Arm(32, fast(32), start_scale=1 / math.sqrt(fast(32) * 2)),  # their growth, not their start
    "32 half": Arm(32, fast(32) / 2),
    "32 double": Arm(32, fast(32) * 2),
    "16": Arm(16),
    "16 fast": Arm(16, fast(16)),
    "32 rank": Arm(32, 1 / 16, head_dim=32),  # logits that grow no faster than those of d = 4, even if like d
    "4 low rank": Arm(4, head_dim=4),  # the queries and keys of 32 heads, the values of 4
    "32 wide": Arm(32, head_dim=32),  # the queries and keys of 4 heads, the values of 32
    "4 low rank taught by 4": Arm(4, head_dim=4, taught=4),
    "32 taught by 32": Arm(32, taught=32),
    "32 taught at first": Arm(32, taught=32, until=400),
    "4 taught at first": Arm(4, taught=128, until=400),
    "4 low rank taught at first": Arm(4, head_dim=4, taught=128, until=400),
    "32 alike": Arm(32, patterns=4),  # starts as the function that "4 low rank" starts as
    "32 wide alike": Arm(32, head_dim=32, patterns=4),  # as "4"
    "32 tied until 500": Arm(32, patterns=4, tied=True, until=500),  # until then it is "4 low rank"
    "32 tied until 700": Arm(32, patterns=4, tied=True, until=700),
    "32 tied until 300": Arm(32, patterns=4, tied=True, until=300),
    "32 given": Arm(32, given=1),
    "4 given": Arm(4, given=1),
    "4 low rank given": Arm(4, head_dim=4, given=1),
    "32 given itself": Arm(32, given=0),  # the token itself: a sham
    "4 given itself": Arm(4, given=0),
    "32 given until 300": Arm(32, given=1, until=300),
    "4 given until 300": Arm(4, given=1, until=300),
    "32 given weakly": Arm(32, given=1, bonus=3.0),
    "4 given weakly": Arm(4, given=1, bonus=3.0),
    "32 given itself weakly": Arm(32, given=0, bonus=3.0),
    "4 given itself weakly": Arm(4, given=0, bonus=3.0),
    "32 given two back": Arm(32, given=2, bonus=3.0),
    "4 given two back": Arm(4, given=2, bonus=3.0),
    "rotary 32": Arm(32, rotary=True),
    "rotary 32 fast": Arm(32, fast(32), rotary=True),
    "rotary 1": Arm(1, rotary=True),
    "rotary 4": Arm(4, rotary=True),
    "rotary 4 low rank": Arm(4, rotary=True, head_dim=4),
    "rotary 32 wide": Arm(32, rotary=True, head_dim=32),
    "rotary 32 mlp": Arm(32, rotary=True, mlp=1412),  # as many parameters more as "rotary 32 wide"
    "rotary 4 two": Arm(4, rotary=True, frequencies=2),  # as a head of 4 has
    "rotary 32 wide two": Arm(32, rotary=True, head_dim=32, frequencies=2),
    "rotary 32 base 10": Arm(32, rotary=True, base=10.0),
    "rotary 4 base 10": Arm(4, rotary=True, base=10.0),
    "rotary 32 given": Arm(32, rotary=True, given=1),
    "rotary 4 given": Arm(4, rotary=True, given=1),
    "256: 32": Arm(32, width=256),
    "256: 32 fast": Arm(32, fast(32, 256), width=256),
    "256: 4": Arm(4, width=256),
    "256: 4 fast": Arm(4, fast(4, 256), width=256),
    "256: 4 low rank": Arm(4, width=256, head_dim=8),
}
for width, counts in ((64, (1, 4, 16)), (128, (1, 4, 32))):  # E7
    for count in counts:
        ARMS[f"long {width}: {count}"] = Arm(count, rotary=True, width=width, steps=4000)
        if count > 1:  # one head has the usual factor
            ARMS[f"long {width}: {count} fast"] = Arm(count, fast(count, width), rotary=True, width=width, steps=4000)
ARMS["long 128: 4 low rank"] = Arm(4, rotary=True, steps=4000, head_dim=4)
ARMS["long 128: 32 wide"] = Arm(32, rotary=True, steps=4000, head_dim=32)


def get_config(arm: Arm, lr: float, seed: int, *, tiny: bool = False) -> config.ConfigDict:
    """Return the config of a run."""
    c = config.load("quickstart_gpt").unlock()
    c.update(total_steps=arm.steps, batch_size=16, seed=seed, loggers=(), log_every=trainer.WINDOW)
    c.accumulate = MICRO_BATCHES if jax.default_backend() == "cpu" and not tiny else 1
    c.model.update(
        width=arm.width, depth=DEPTH, mlp_dim=arm.mlp or 4 * arm.width, max_length=TOKENS, num_heads=arm.heads
    )
    dim = arm.width // arm.heads
    c.model.update(head_dim=arm.head_dim or dim, value_dim=dim)
    c.model.logit_scale = arm.logit_scale
    if arm.rotary:
        c.model.update(positions="none", rotary=arm.base)
    c.optim.update(lr=lr, warmup_steps=100)
    c.probe.every = 0
    if tiny:
        c.update(total_steps=50, batch_size=2)
        c.model.update(depth=1, mlp_dim=32)
        c.optim.warmup_steps = 5
    return c.lock()


def scale_queries_and_keys(params: Any, factor: float) -> Any:
    """Return parameters whose projections to queries and keys are multiplied by a factor."""

    def scale(path: Any, leaf: Any) -> Any:
        names = jax.tree_util.keystr(path)
        return leaf * factor if ("query" in names or "'key'" in names) and "kernel" in names else leaf

    return jax.tree_util.tree_map_with_path(scale, params)


def begin_alike(params: Any, groups: int) -> Any:
    """Return parameters whose heads, in each of `groups` groups, have the queries and keys of the first of them."""

    def copy(path: Any, leaf: Any) -> Any:
        names = jax.tree_util.keystr(path)
        if not (("query" in names or "'key'" in names) and "kernel" in names):
            return leaf
        size = leaf.shape[-2] // groups  # of (layer, width, head, dimension)
        return jnp.repeat(leaf[..., ::size, :], size, axis=-2)

    return jax.tree_util.tree_map_with_path(copy, params)


def tie(attend: Callable[..., jax.Array], groups: int, q: Any, k: Any, v: Any, **options: Any) -> jax.Array:
    """Attend with the mean queries and keys (B S N H) of each group of heads.

    Heads that began alike then have equal gradients, so they stay alike, and are one head with the values of all.
    """

    def average(x: Any) -> Any:
        b, s, heads, dim = x.shape
        mean = x.reshape(b, s, groups, heads // groups, dim).mean(3)
        return jnp.repeat(mean, heads // groups, axis=2)

    return attend(average(q), average(k), v, **options)


def give(offset: int, bonus: float, q: Any, k: Any, v: Any, *, mask: Any, scale: float | None = None, **_: Any) -> Any:
    """Attend with `bonus` added to the logit of the key `offset` tokens before a query, in half of the heads."""
    logits = masks.logits(q, k, mask, scale)
    helped = jnp.arange(q.shape[2]) < q.shape[2] // 2
    added = bonus * jnp.einsum("n,ts->nts", helped, jnp.eye(q.shape[1], k=-offset))[None]
    return jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(logits + added), v)


def rotate_in_groups(rotate: Callable[..., jax.Array], size: int, x: jax.Array, *args: Any, **options: Any) -> Any:
    """Rotate each group of `size` channels of x (B T N H) as a head of that dimension."""
    b, t, heads, dim = x.shape
    return rotate(x.reshape(b, t, heads * dim // size, size), *args, **options).reshape(x.shape)


def teach(attend: Callable[..., jax.Array], dims: int, q: Any, k: Any, v: Any, **options: Any) -> jax.Array:
    """Attend, with gradients to queries and keys from `dims` dimensions of values; the outputs are those of `attend`.

    From the first dimensions of a head's values (B S N H) if it has more. If it has fewer, from those of a group of
    heads that have `dims` together: as if the pattern of each also weighed the values of the others.
    """
    stopped = functools.partial(attend, *map(jax.lax.stop_gradient, (q, k)), **options)
    b, s, heads, own = v.shape
    if dims <= own:
        return jnp.concatenate([attend(q, k, v[..., :dims], **options), stopped(v[..., dims:])], axis=-1)
    size = dims // own
    group = jnp.repeat(jax.lax.stop_gradient(v).reshape(b, s, heads // size, dims), size, axis=2)
    weighed = attend(q, k, group, **options).reshape(b, -1, heads // size, size, size, own).sum(3)
    weighed = weighed.reshape(b, -1, heads, own)
    return stopped(v) + weighed - jax.lax.stop_gradient(weighed)


def plan(name: str, rows: list[dict[str, Any]], rates: Sequence[float] = RATES) -> list[tuple[float, int]]:
    """Return the next (learning rate, seed) of an arm: tuning until the best rate is bracketed, then the seeds."""
    tried = {row["lr"]: row["tuning_loss"] for row in rows if row["arm"] == name and row["seed"] == TUNING_SEED}
    if missing := [rate for rate in rates if rate not in tried]:
        return [(rate, TUNING_SEED) for rate in missing]
    best = best_rate(name, rows)
    if best == max(tried) and best < rates[-1] * 2**BEYOND:
        return [(best * 2, TUNING_SEED)]
    if best == min(tried) and best > rates[0] / 2**BEYOND:
        return [(best / 2, TUNING_SEED)]
    done = {row["seed"] for row in rows if row["arm"] == name and row["lr"] == best}
    return [(best, seed) for seed in SEEDS if seed not in done]


def best_rate(name: str, rows: list[dict[str, Any]]) -> float:
    """Return the rate with the lowest loss on the tuning chapters; of equal ones the largest."""
    tried = [row for row in rows if row["arm"] == name and row["seed"] == TUNING_SEED]
    return float(min(tried, key=lambda row: (round(row["tuning_loss"], 5), -row["lr"]))["lr"])


def start_of(arm: Arm, params: Any) -> Any:
    """Return the initial parameters of an arm from random ones."""
    params = scale_queries_and_keys(params, arm.start_scale)
    return begin_alike(params, arm.patterns) if arm.patterns else params


@contextlib.contextmanager
def intervention(arm: Arm) -> Iterator[Callable[[int, Any], None]]:
    """Attend as an arm does; the function that is yielded, called after a step, ends this at the arm's `until`."""
    usual = attend = multihead.attend
    if arm.tied:
        attend = functools.partial(tie, usual, arm.patterns)
    elif arm.taught:
        attend = functools.partial(teach, usual, arm.taught)
    elif arm.given is not None:
        attend = functools.partial(give, arm.given, arm.bonus)

    def end(step: int, _: Any) -> None:
        if step == arm.until:
            multihead.attend = usual
            jax.clear_caches()  # so that the training step is traced anew

    rotate = positions.rotate
    if arm.frequencies:
        rotate = functools.partial(rotate_in_groups, rotate, 2 * arm.frequencies)
    with mock.patch.object(multihead, "attend", attend), mock.patch.object(positions, "rotate", rotate):
        yield end


def run(name: str, members: list[tuple[float, int]], path: Path, *, tiny: bool = False) -> None:
    """Train runs of an arm with these (learning rate, seed), and append their rows."""
    arm = ARMS[name]
    c, start = get_config(arm, *members[0], tiny=tiny), functools.partial(start_of, arm)
    with intervention(arm) as end:
        if len(members) == 1:
            results = [trainer.train(c, start=start, observe=lambda setup: end)]
        else:
            results = trainer.train_together(c, members, start=start)
    for (lr, seed), result in zip(members, results, strict=True):
        append(name, c, lr, seed, result, path)


def append(name: str, c: config.ConfigDict, lr: float, seed: int, result: trainer.Result, path: Path) -> None:
    """Append the row of a finished run."""
    arm = ARMS[name]
    scale = arm.logit_scale or 1 / math.sqrt(c.model.head_dim)
    row = {"arm": name, "width": arm.width, "num_heads": arm.heads, "head_dim": c.model.head_dim, "rotary": arm.rotary}
    row |= {"logit_scale": f"{scale:.4f}", "start_scale": f"{arm.start_scale:.4f}", "steps": c.total_steps, "lr": lr}
    row |= {"seed": seed, "loss": f"{result.loss:.5f}", "tuning_loss": f"{result.tuning_loss:.5f}"}
    row |= {"entropy": f"{result.entropy:.4f}", "params": result.params, "date": result.date, "device": result.device}
    row |= {"curve": " ".join(f"{x:.4f}" for x in result.curve)}
    language.append_row(row, path, FIELDS)
    print(f"{name}: rate {lr:g}, seed {seed}: {result.loss:.4f} nats, training {result.curve[-1]:.4f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("train",))
    parser.add_argument("--arms", default=",".join(ARMS))
    parser.add_argument("--rows", type=Path, default=ROWS)
    parser.add_argument("--together", action="store_true")
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    known = [] if options.tiny or options.rows == ROWS else language.read_rows(ROWS)
    for name in options.arms.split(","):
        while todo := plan(name, language.read_rows(options.rows) + known):
            run(name, todo if options.together and not ARMS[name].until else todo[:1], options.rows, tiny=options.tiny)


if __name__ == "__main__":
    main()
