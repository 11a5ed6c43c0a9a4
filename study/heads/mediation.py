"""Mediation test: does conditioning explain the effect of the number of heads on accuracy?

    python -m study.heads.mediation --out=DIR [--seeds=10] [--steps=250] [--rates=1e-3,3e-3,9e-3]
    python -m study.heads.mediation --table=study/data/mediation.csv

2026-11-23, ten seeds: by the rule no effect to mediate. 8 heads instead of 2 change top-1 by 2.0 points (-0.1 to 4.0),
and lower the condition number κ 200-fold; with one rate per condition they gain 3.1 (0.8 to 5.3), not mediated by κ.
The plan had five seeds, which gave no verdict; five were added then.

Condition numbers are measured after training with these heads, so regressing scores on both would be biased. Instead,
interventions change κ with the heads unchanged, and scores are compared with conditions of equal attention entropy: a
small ViT on bundled Fashion-MNIST (17 tokens) whose logits are scaled to the same entropy at initialisation; training
changes both. A seed's learning rate is the one at which the other seeds of its condition score best. Controls: an
orthogonal initialisation, and an MLP with the parameters of the added heads. Runs are stored in DIR and resume.

data/mediation.csv has the runs of 9693c40, which averaged over images where this script takes medians.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from matplotlib.figure import Figure

from leanformer import cli, config
from leanformer.analysis import runs as finished_runs
from leanformer.analysis import statistics
from leanformer.analysis.statistics import Difference, Scores
from leanformer.config.rules import require
from leanformer.errors import ConfigError
from study import common, tables


SHARE = 0.5  # of the effect of heads: minimum effect on κ for an intervention to count, and on the score to be mediated
TOLERANCE = 0.25  # of the effect of heads on κ: largest effect of the control, which should have none
WORDS = ("withdrawn", "nothing to carry", "not moved by heads", "untestable", "carries", "does not carry", "undecided")
RULE = f"""Heads: many minus few, no lever. A lever lowers κ if log10 κ falls by at least {SHARE:g} of what heads lower
it by, against its arm of equal entropy, few heads, and the 95 % interval excludes 0. Verdict, the first that applies:
withdrawn, if the control (orthogonal start, few heads) changes the score (95 % interval excludes 0), or moves log10 κ
by over {TOLERANCE:g} of what heads do; nothing to carry, if the interval of heads' effect on the score is not above 0;
not moved by heads, if that on log10 κ is not below 0; untestable, if no lever lowers κ at equal entropy; carries, if
the mean gain of the levers that do, minus {SHARE:g} of heads' gain, has an interval above 0; does not carry, if it is
below 0; undecided otherwise."""  # verbatim, as specified before the runs
ENTROPY_TOLERANCE = 0.02  # relative entropy at initialisation: conditions that differ by more are not compared
KAPPA, ENTROPY = "attention_output.log10_condition", "relative_attention_entropy"
MEASURES = ("attention_output", ENTROPY, "self_weight", "largest_logit")
RECORDED, WHEN = (KAPPA, *MEASURES[1:]), ("before", "after")  # training
HEADS = {"few": 2, "many": 8}
SHAPE = {"width": 32, "depth": 2, "head_dim": 16, "mlp_dim": 64}
INTERVENTIONS: dict[str, dict[str, Any]] = {
    "base": {},
    "qk_norm": {"qk_norm": "rmsnorm"},
    "lambda": {"spectral": 1.0},
    "svd": {"qkv_init": "spectral"},
    "sigma": {"sigma_reparam": True},
    "graying": {"graying": 0.5, "graying_by": "svd"},
    "orthogonal": {"qkv_init": "orthogonal"},
}
MATCHED = {name: f"as {name}" for name in ("qk_norm", "lambda", "svd")}  # names of conditions of equal entropy
TESTED = MATCHED | {"sigma": "base", "graying": "base"}
Key = tuple[str, str]  # intervention, and "few" or "many" heads
MLP: Key = ("mlp", "few")  # with the parameters of many heads
Records = Mapping[str, Mapping[str, Any]]  # "lever, heads": {"runs": [{seed, rate, top1, before, after}, ...], ...}
Choice = Callable[[Iterable[Mapping[str, Any]]], list[Mapping[str, Any]]]  # one run per seed


class Condition(NamedTuple):
    """Scores of a condition, and log10 of the condition number of the attention output, by seed."""

    score: Scores
    kappa: Scores


class Verdict(NamedTuple):
    """Verdict: one of WORDS, a sentence, and the differences it is based on."""

    word: str
    sentence: str
    effects: Mapping[str, Difference]


def verdict(conditions: Mapping[Key, Condition], matched: Mapping[str, str]) -> Verdict:
    """Judge conditions by RULE.

    Args:
        matched: interventions whose effect is tested, each with its condition of equal entropy.

    Raises:
        ConfigError: conditions with different numbers of seeds, or fewer than three.
    """
    counts = {len(values) for condition in conditions.values() for values in condition}
    if len(counts) != 1 or min(counts) < 3:
        raise ConfigError(f"Conditions have {sorted(counts)} seeds: they need the same number, at least three.")
    few, many = conditions["base", "few"], conditions["base", "many"]
    pairs = {"heads": (many, few), "control": (conditions["orthogonal", "few"], few)}
    interventions = {name: (conditions[name, "few"], conditions[other, "few"]) for name, other in matched.items()}
    for name, (lever, plain) in interventions.items():
        pairs |= {f"{name} at equal entropy": (lever, plain), f"{name} beside base": (lever, few)}
    effects: dict[str, Difference] = {}
    for name, (a, b) in pairs.items():
        effects[f"{name}, score"] = statistics.paired(a.score, b.score)
        effects[f"{name}, log10 κ"] = statistics.paired(a.kappa, b.kappa)
    word, why = _decide(effects, interventions, many.score - few.score)
    return Verdict(word, f"{word[0].upper()}{word[1:]}: {why}", effects)


def _decide(
    effects: dict[str, Difference], interventions: Mapping[str, tuple[Condition, Condition]], heads: Scores
) -> tuple[str, str]:
    """Return the word and the reason; add the decisive difference to `effects`."""
    gain, move, control = effects["heads, score"], effects["heads, log10 κ"], effects["control, log10 κ"]
    changed = effects["control, score"]
    if not changed.interval().contains(0.0) or abs(control.value) > TOLERANCE * abs(move.value):
        return ("withdrawn", f"the negative control changes the score by {show(changed)}, log10 κ by {show(control)}.")
    if not gain.interval().low > 0:
        return "nothing to carry", f"more heads change the score by {show(gain)}."
    if not move.interval().high < 0:
        return ("not moved by heads", f"more heads change log10 κ by {show(move)}, and the score by {show(gain)}.")
    at_equal = {name: effects[f"{name} at equal entropy, log10 κ"] for name in interventions}
    lowering = [name for name, d in at_equal.items() if d.value <= SHARE * move.value and d.interval().high < 0]
    if not lowering:
        lowered = [
            name for name in interventions if effects[f"{name} beside base, log10 κ"].value <= SHARE * move.value
        ]
        scores = "; ".join(f"{name}: {show(effects[f'{name} beside base, score'])}" for name in lowered)
        return "untestable", (
            f"heads move log10 κ by {show(move)} and the score by {show(gain)}, and no intervention lowers κ by "
            f"{SHARE:g} of that at equal entropy. Scores of those that do at any entropy: {scores or 'none does'}."
        )
    gains = np.mean([interventions[name][0].score - interventions[name][1].score for name in lowering], axis=0)
    rest = effects["levers' gain beyond that share of heads'"] = statistics.paired(gains, SHARE * heads)
    word = "carries" if rest.interval().low > 0 else "does not carry" if rest.interval().high < 0 else "undecided"
    return word, (
        f"at equal entropy {', '.join(lowering)} lower κ as heads do, and the score changes by "
        f"{show(statistics.paired(gains, np.zeros_like(gains)))}, where heads change it by {show(gain)}; less "
        f"{SHARE:g} of the heads' it is {show(rest)}."
    )


def gains_by_rate(records: Records) -> dict[str, Difference]:
    """Return what many heads gain over few, in points, at each learning rate, and in the mean over them. Not part of
    the rule: chosen after the runs."""
    many, few = (
        {
            rate: np.array([100 * run["top1"] for run in group])
            for rate, group in _by_rate(records[name]["runs"]).items()
        }
        for name in ("base, many", "base, few")
    )
    result = {f"{rate:g}": statistics.paired(many[rate], few[rate]) for rate in many}
    return result | {"mean": statistics.paired(*(np.mean([*group.values()], axis=0) for group in (many, few)))}


def show(difference: Difference) -> str:
    """Format a difference with its 95 % interval."""
    interval = difference.interval()
    return f"{difference.value:+.3g} ({interval.low:+.3g} to {interval.high:+.3g})"


def select_by_other_seeds(runs: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return for each seed the run at the learning rate at which the other seeds score best on average. If two rates
    are equally good, a seed gets the one at which it is worse itself: the mean of a condition is biased downwards."""
    table: dict[int, dict[float, Any]] = {}
    for run in runs:
        table.setdefault(run["seed"], {})[run["rate"]] = run
    result = []
    for seed, by_rate in sorted(table.items()):
        others = [row for other, row in table.items() if other != seed]
        result.append(by_rate[max(by_rate, key=lambda rate: np.mean([row[rate]["top1"] for row in others]))])
    return result


def select_at_one_rate(runs: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the runs at the learning rate with the best mean over all seeds, which is biased slightly upwards."""
    return max(_by_rate(runs).values(), key=lambda group: np.mean([run["top1"] for run in group]))


def _by_rate(runs: Iterable[Mapping[str, Any]]) -> dict[float, list[Mapping[str, Any]]]:
    rates: dict[float, list[Mapping[str, Any]]] = {}
    for run in sorted(runs, key=lambda run: run["seed"]):
        rates.setdefault(run["rate"], []).append(run)
    return rates


def make_condition(record: Mapping[str, Any], choose: Choice = select_by_other_seeds) -> Condition:
    """Return a condition's top-1 in points, and κ after training, each seed at its learning rate."""
    runs = choose(record["runs"])
    return Condition(np.array([100 * run["top1"] for run in runs]), np.array([run["after"][KAPPA] for run in runs]))


def select_equal_entropy(records: Records, tested: Mapping[str, str]) -> dict[str, str]:
    """Return the interventions whose entropy at initialisation, few heads, is near their condition's."""

    def entropy(name: str) -> float:
        return float(np.mean([run["before"][ENTROPY] for run in records[f"{name}, few"]["runs"]]))

    return {name: other for name, other in tested.items() if abs(entropy(name) - entropy(other)) <= ENTROPY_TOLERANCE}


def judge(records: Records, tested: Mapping[str, str], choose: Choice = select_by_other_seeds) -> Verdict:
    """Judge records by RULE; add the effects of the MLP, and of the number of heads under each intervention."""
    conditions: dict[Any, Condition] = {
        tuple(name.split(", ")): make_condition(record, choose) for name, record in records.items()
    }
    result = verdict(conditions, select_equal_entropy(records, tested))
    few, many = conditions["base", "few"].score, conditions["base", "many"].score
    effects = dict(result.effects) | {
        "MLP of equal parameters, score": statistics.paired(conditions[MLP].score, few),
        "heads beyond that MLP, score": statistics.paired(many, conditions[MLP].score),
    }
    for lever in (lever for lever, heads in conditions if heads == "many"):
        pair = (conditions[lever, heads].score for heads in ("many", "few"))
        effects[f"heads under {lever}, score"] = statistics.paired(*pair)
    return result._replace(effects=effects)


def table(records: Records, result: Verdict) -> str:
    """Format conditions, differences, the verdict and its rule as Markdown."""
    lines = ["| condition, heads | parameters | rates | top-1, % | κ | entropy / ln N | self-weight | largest logit |"]
    lines.append("|---" * 8 + "|")
    for name, record in records.items():
        runs, score = select_by_other_seeds(record["runs"]), make_condition(record).score
        half = statistics.mean_interval(score).high - score.mean()
        cells = [name, f"{record['parameters']:,}", ", ".join(sorted({f"{run['rate']:g}" for run in runs}))]
        cells.append(f"{score.mean():.2f} ± {half:.2f}")
        for key in (KAPPA, *MEASURES[1:]):
            pair = [np.mean([run[when][key] for run in runs]) for when in ("before", "after")]
            cells.append(" → ".join(f"{10**x if key == KAPPA else x:.3g}" for x in pair))
        lines.append(f"| {' | '.join(cells)} |")
    lines += ["", "| difference | mean and 95 % interval |", "|---|---|"]
    lines += [f"| {name} | {show(d)} |" for name, d in result.effects.items()]
    return "\n".join([*lines, "", f"**{result.sentence}**", "", f"Rule. {RULE}"])


def chart(records: Records, result: Verdict) -> Figure:
    """Plot top-1 against κ after training, with 95 % intervals."""
    figure = Figure(figsize=(7.5, 4.6), dpi=110, layout="constrained")
    axes = figure.subplots()
    for name, record in records.items():
        (lever, many), condition = name.split(", "), make_condition(record)
        kappa = 10 ** condition.kappa.mean()
        half = statistics.mean_interval(condition.score).high - condition.score.mean()
        color, marker = {"few": "#b5541c", "many": "#1f5fa8"}[many], "s" if lever.startswith("as ") else "o"
        axes.errorbar(kappa, condition.score.mean(), half, fmt=marker, color=color, capsize=2, markersize=5, lw=1)
        place = {"textcoords": "offset points", "xytext": (5, 3), "fontsize": 7, "color": color}
        axes.annotate(lever, (kappa, condition.score.mean()), **place)
    axes.set(xscale="log", xlabel="condition number of the attention output after training", ylabel="top-1, %")
    axes.set_title(
        f"{result.word}; {HEADS['few']} heads orange, {HEADS['many']} blue; squares: equal entropy", fontsize=9
    )
    return figure


def get_config(arguments: str = "") -> config.ConfigDict:
    """Return the config of a condition; `scale` multiplies the logits unless 0."""
    a = config.arguments(arguments, lever="base", heads="few", scale=0.0)
    c = config.load("quickstart").unlock()
    c.update(batch_size=32, total_epochs=0.0, total_steps=250, loggers=())
    c.model.update(SHAPE | {"num_heads": HEADS[a["heads"]]} | INTERVENTIONS.get(a["lever"], {}))
    if a["lever"] == MLP[0]:
        added = (HEADS["many"] - HEADS["few"]) * SHAPE["head_dim"] * (4 * SHAPE["width"] + 3)
        c.model.mlp_dim += round(added / (2 * SHAPE["width"] + 1))
    if a["scale"]:
        c.model.logit_scale = a["scale"] / math.sqrt(SHAPE["head_dim"])
    c.optim.update(warmup_epochs=0.0, warmup_steps=30)
    c.probe.update(examples=64, measures=MEASURES, every=common.NEVER)
    c.eval.update(every=0, batch_size=500)
    return c.lock()


def entropy_at_start(arguments: str, seeds: int) -> float:
    """Return the mean over layers and seeds of the relative attention entropy before training."""
    result = common.measure_at_start(get_config(arguments), [ENTROPY], seeds)
    return float(np.mean([layer["median"] for seed in result for layer in seed[ENTROPY]]))


def matching_scale(lever: str, seeds: int) -> float:
    """Return the scale of the base condition's logits at which its entropy equals `lever`'s, by bisection."""
    target, low, high = entropy_at_start(f"lever={lever}", seeds), 1e-2, 1e4
    for _ in range(14):
        middle = math.sqrt(low * high)
        above = entropy_at_start(f"scale={middle}", seeds) > target
        low, high = (middle, high) if above else (low, middle)
    return math.sqrt(low * high)


def read(folder: Path) -> dict[str, dict[str, Any]]:
    """Return the records of finished runs, in the form that `judge` requires."""
    records: dict[str, dict[str, Any]] = {}
    for run in finished_runs.read([str(folder)], "top1").runs:
        name = common.parse_run_name(run.workdir)
        probes = [record for record in run.records if record["kind"] == "probe"]
        before, after = ({n: float(np.mean(p[n]["median"])) for n in MEASURES[1:]} for p in (probes[0], probes[-1]))
        for values, probe in ((before, probes[0]), (after, probes[-1])):
            values[KAPPA] = float(np.mean(np.log10(probe[MEASURES[0]]["median"])))
        lever = ("as " if "scale" in name else "") + name["lever"]
        record = records.setdefault(f"{lever}, {name['heads']}", {"parameters": run.summary["params"], "runs": []})
        about = {"seed": run.seed, "rate": float(name["lr"]), "top1": run.value}
        record["runs"].append(about | {"before": before, "after": after})
    return records


def read_table(path: Path) -> dict[str, dict[str, Any]]:
    """Return the records of a mediation.csv."""
    records: dict[str, dict[str, Any]] = {}
    for row in tables.read(path):
        record = records.setdefault(row["condition"], {"parameters": int(row["parameters"]), "runs": []})
        run: dict[str, Any] = {"seed": int(row["seed"]), "rate": float(row["rate"]), "top1": float(row["top1"])}
        record["runs"].append(run | {w: {key: float(row[f"{w}.{key}"]) for key in RECORDED} for w in WHEN})
    return records


def write_table(path: Path, records: Records) -> None:
    """Write one row per run."""
    rows = []
    for name, record in records.items():
        for run in record["runs"]:
            row = {
                "condition": name,
                "parameters": record["parameters"],
                **{k: run[k] for k in ("seed", "rate", "top1")},
            }
            rows.append(row | {f"{when}.{key}": f"{run[when][key]:.6g}" for when in WHEN for key in RECORDED})
    tables.write(path, rows)


def report(records: Records) -> Verdict:
    """Print the table, the verdict, and what was looked at after the runs. Return the verdict."""
    result, other = judge(records, TESTED), judge(records, TESTED, select_at_one_rate).sentence
    print(f"{table(records, result)}\n\nWith one rate for all seeds of a condition: {other}\n")
    print("Gain of many heads at each learning rate, and in the mean over them (chosen after the runs)")
    print(*(f"{rate:<8}{show(gain)}" for rate, gain in gains_by_rate(records).items()), sep="\n")
    return result


@cli.command(
    cli.Flag("out", "Folder for the runs and the results."),
    cli.Flag("table", "mediation.csv of finished runs to report, instead of training."),
    cli.Flag("seeds", "Seeds of each condition and rate.", int, default=10),
    cli.Flag("steps", "Training steps.", int, default=250),
    cli.Flag("rates", "Learning rates.", list, default=["1e-3", "3e-3", "9e-3"]),
)
def main(f: cli.Values) -> None:
    require(bool(f.out) != bool(f.table), "Pass either --out=DIR or --table=FILE.")
    if f.table:
        report(read_table(Path(f.table)))
        return
    out = Path(f.out).expanduser()
    keys = [*((lever, heads) for heads in HEADS for lever in INTERVENTIONS), MLP]
    cases = [f"lever={lever},heads={heads}" for lever, heads in keys]
    cases += [f"lever={name},heads=few,scale={matching_scale(name, f.seeds)}" for name in MATCHED]
    words = [f"--config={','.join(f'{Path(__file__)}:{arguments}' for arguments in cases)}", f"--seeds={f.seeds}"]
    words += [f"--over=optim.lr={','.join(f.rates)}", f"--set=total_steps={f.steps}"]
    common.sweep(out / "runs", *words)
    records = read(out / "runs")
    write_table(out / "mediation.csv", records)
    chart(records, report(records)).savefig(out / "mediation.png")


if __name__ == "__main__":
    cli.run(main)
