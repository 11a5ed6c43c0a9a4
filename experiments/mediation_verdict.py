"""Does conditioning carry the effect of heads on a score? What arms of an experiment say, by a rule stated beforehand.

Condition numbers are measured after heads and levers have done their work, so that regressing scores on them and on
heads together would be biased. Here levers move the condition number instead, with heads as they are, against arms of
equal attention entropy, and what the score does is held against what heads do. All figures are paired by seed.
"""

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from leanformer.analysis import statistics
from leanformer.analysis.statistics import Difference, Scores
from leanformer.errors import ConfigError


SHARE = 0.5  # of what heads do, that a lever must do to count, and the score to follow
TOLERATED = 0.25  # of heads' move of the condition number, in a control that is said not to move it
WORDS = ("withdrawn", "nothing to carry", "not moved by heads", "untestable", "carries", "does not carry", "undecided")
RULE = f"""Heads: many minus few, no lever. A lever lowers κ if log10 κ falls by at least {SHARE:g} of what heads lower
it by, against its arm of equal entropy, few heads, and the 95 % interval excludes 0. Verdict, the first that applies:
withdrawn, if the control (orthogonal start, few heads) changes the score (95 % interval excludes 0), or moves log10 κ
by over {TOLERATED:g} of what heads do; nothing to carry, if the interval of heads' effect on the score is not above 0;
not moved by heads, if that on log10 κ is not below 0; untestable, if no lever lowers κ at equal entropy; carries, if
the mean gain of the levers that do, minus {SHARE:g} of heads' gain, has an interval above 0; does not carry, if it is
below 0; undecided otherwise."""


ALIKE = 0.02  # of relative entropy at initialisation, by which an arm and its plain one may differ to be tested
KAPPA, ENTROPY = "attention_output.log10_condition", "relative_attention_entropy"  # of the records
Key = tuple[str, str]  # an arm: its lever, and "few" or "many" heads
MLP: Key = ("mlp", "few")  # with the parameters of many heads


@dataclasses.dataclass(frozen=True)
class Arm:
    """A score, more is better, and log10 of the attention output's condition number, of the same seeds in order."""

    score: Scores
    kappa: Scores


@dataclasses.dataclass(frozen=True)
class Verdict:
    """One of WORDS, the sentence that follows, and the differences that it rests on, by name."""

    word: str
    sentence: str
    effects: Mapping[str, Difference]


Arms = Mapping[Key, Arm]
Choice = Callable[[Iterable[Mapping[str, Any]]], list[Mapping[str, Any]]]  # of the runs of an arm one a seed
Records = Mapping[str, Mapping[str, Any]]  # "lever, heads": {"runs": [{seed, rate, top1, before, after}, ...], ...}


def verdict(arms: Arms, matched: Mapping[str, str], *, base: str = "base", control: str = "orthogonal") -> Verdict:
    """By RULE.

    Args:
        matched: levers whose effect is tested, each with its arm of equal entropy and no lever.

    Raises:
        ConfigError: arms of different numbers of seeds, or of fewer than three.
    """
    counts = {len(values) for arm in arms.values() for values in (arm.score, arm.kappa)}
    if len(counts) != 1 or min(counts) < 3:
        raise ConfigError(f"Arms have {sorted(counts)} seeds: all want the same, three at least.")
    few, many = arms[base, "few"], arms[base, "many"]
    levers = {name: (arms[name, "few"], arms[other, "few"]) for name, other in matched.items()}
    found = {
        "heads, score": _minus(many.score, few.score),
        "heads, log10 κ": _minus(many.kappa, few.kappa),
        "control, score": _minus(arms[control, "few"].score, few.score),
        "control, log10 κ": _minus(arms[control, "few"].kappa, few.kappa),
    }
    for name, (lever, plain) in levers.items():
        found[f"{name} at equal entropy, score"] = _minus(lever.score, plain.score)
        found[f"{name} at equal entropy, log10 κ"] = _minus(lever.kappa, plain.kappa)
        found[f"{name} beside base, score"] = _minus(lever.score, few.score)
        found[f"{name} beside base, log10 κ"] = _minus(lever.kappa, few.kappa)
    word, why = _decide(found, levers, many.score - few.score)
    return Verdict(word, f"{word[0].upper()}{word[1:]}: {why}", found)


def chosen(runs: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Of each seed the run at the rate at which the other seeds score best on average. Where two rates are as good, a
    seed gets the one at which it is the worse itself: the mean of an arm comes out too low."""
    table = _by_seed(runs)
    found = []
    for seed, own in sorted(table.items()):
        others = [row for other, row in table.items() if other != seed]
        best = max(own, key=lambda rate: np.mean([row[rate]["top1"] for row in others]))
        found.append(own[best])
    return found


def at_one_rate(runs: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The runs at the rate with the best mean over all seeds, which comes out a little too high."""
    table = _by_seed(runs)
    best = max(next(iter(table.values())), key=lambda rate: np.mean([row[rate]["top1"] for row in table.values()]))
    return [table[seed][best] for seed in sorted(table)]


def _by_seed(runs: Iterable[Mapping[str, Any]]) -> dict[int, dict[float, Any]]:
    """{seed: {rate: run}}"""
    table: dict[int, dict[float, Any]] = {}
    for run in runs:
        table.setdefault(run["seed"], {})[run["rate"]] = run
    return table


def arm(record: Mapping[str, Any], choose: Choice = chosen) -> Arm:
    """In points of top-1, κ that of the attention output after training, each seed at its rate."""
    runs = choose(record["runs"])
    return Arm(np.array([100 * run["top1"] for run in runs]), np.array([run["after"][KAPPA] for run in runs]))


def alike(records: Records, tested: Mapping[str, str]) -> dict[str, str]:
    """Of levers, each with its arm of no lever, those whose entropies at initialisation, few heads, are near."""

    def entropy(name: str) -> float:
        return float(np.mean([run["before"][ENTROPY] for run in records[f"{name}, few"]["runs"]]))

    return {name: other for name, other in tested.items() if abs(entropy(name) - entropy(other)) <= ALIKE}


def judge(records: Records, tested: Mapping[str, str], choose: Choice = chosen) -> Verdict:
    """By RULE, of the levers in `tested` that are `alike`; with what an MLP of the parameters of many heads does, and
    what is left of heads' effect under each lever that was crossed with them."""
    known: dict[Key, Arm] = {}
    for name, record in records.items():
        lever, heads = name.split(", ")
        known[lever, heads] = arm(record, choose)
    found = verdict(known, alike(records, tested))
    few, many = known["base", "few"], known["base", "many"]
    effects = dict(found.effects) | {
        "MLP of equal parameters, score": _minus(known[MLP].score, few.score),
        "heads beyond that MLP, score": _minus(many.score, known[MLP].score),
    }
    for lever, heads in known:
        if heads == "many":
            effects[f"heads under {lever}, score"] = _minus(known[lever, "many"].score, known[lever, "few"].score)
    return dataclasses.replace(found, effects=effects)


def _decide(found: dict[str, Difference], levers: Mapping[str, tuple[Arm, Arm]], heads: Any) -> tuple[str, str]:
    """The word and the reason; adds the difference that decides, where one does."""
    gain, move, control = found["heads, score"], found["heads, log10 κ"], found["control, log10 κ"]
    if _apart(found["control, score"]) or abs(control.value) > TOLERATED * abs(move.value):
        said = f"score {shown(found['control, score'])}, log10 κ {shown(control)}"
        return "withdrawn", f"the negative control does not behave as one: {said}. Nothing else here can be believed."
    if not gain.interval().low > 0:
        return "nothing to carry", f"more heads change the score by {shown(gain)}."
    if not move.interval().high < 0:
        return "not moved by heads", f"more heads change log10 κ by {shown(move)}, and the score by {shown(gain)}."
    lowering = []
    for name in levers:
        own = found[f"{name} at equal entropy, log10 κ"]
        if own.value <= SHARE * move.value and own.interval().high < 0:
            lowering.append(name)
    if not lowering:
        return "untestable", (
            f"heads move log10 κ by {shown(move)} and the score by {shown(gain)}, and no lever lowers κ by "
            f"{SHARE:g} of that at equal entropy. {_beside(found, levers, move)}"
        )
    gains = np.mean([levers[name][0].score - levers[name][1].score for name in lowering], axis=0)
    rest = found["levers' gain beyond that share of heads'"] = _minus(gains, SHARE * heads)
    word = "carries" if rest.interval().low > 0 else "does not carry" if rest.interval().high < 0 else "undecided"
    mean = statistics.paired(gains, np.zeros_like(gains))
    return word, (
        f"at equal entropy {', '.join(lowering)} lower κ as heads do, and the score changes by {shown(mean)}, where "
        f"heads change it by {shown(gain)}; less {SHARE:g} of the heads' it is {shown(rest)}."
    )


def _beside(found: Mapping[str, Difference], levers: Mapping[str, Any], move: Difference) -> str:
    """What is left to say where no lever can be tested: scores where κ fell, entropy and all."""
    fell = [n for n in levers if found[f"{n} beside base, log10 κ"].value <= SHARE * move.value]
    if not fell:
        return "Nor does one when entropy is free."
    said = "; ".join(f"{n}: {shown(found[f'{n} beside base, score'])}" for n in fell)
    return f"With entropy free κ falls so far under these, and the score changes by: {said}."


def _minus(a: Scores, b: Scores) -> Difference:
    return statistics.paired(a, b)


def _apart(difference: Difference) -> bool:
    return not difference.interval().holds(0.0)


def shown(difference: Difference) -> str:
    """A difference with its 95 % interval."""
    interval = difference.interval()
    return f"{difference.value:+.3g} ({interval.low:+.3g} to {interval.high:+.3g})"
