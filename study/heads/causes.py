"""Is conditioning a cause of accuracy? Interventions, their dose and their response: part 3 of PLAN.md.

    python -m study.heads.causes [--out=DIR]

With --out, trains the small ViT of `study.heads.mediation` under every condition, at three learning rates with ten
seeds that no other study used. The same command resumes; every run is a row
of study/data/study_causes.csv. Without --out, prints what the rows say.
"""

import contextlib
import datetime
import io
import math
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from leanformer import cli, config, train
from leanformer.analysis import statistics
from leanformer.runtime import files
from leanformer.training import run_files
from study import common
from study.heads import language, mediation
from study.tables import Estimate


ROWS = language.ROWS.with_name("study_causes.csv")
FIELDS = ("block", "params", "lr", "seed", "top1", "loss", "log10_condition", "bounds", "entropy", "date", "device")
PROBED = 64  # images on which conditioning is measured
RATES, SEEDS = (1e-3, 3e-3, 9e-3), tuple(range(100, 110))
BASE = "2 heads"
HEADS = {"4 heads": {"num_heads": 4}, "8 heads": {"num_heads": 8}}
INTERVENTIONS: dict[str, dict[str, Any]] = {
    **{f"graying {power:g}": {"graying": power, "graying_by": "svd"} for power in (0.75, 0.5, 0.25)},
    "sigma, attention": {"sigma_reparam": True},
    "sigma, all layers": {"sigma_reparam": True, "mlp_sigma_reparam": True},
    "QK-norm": {"qk_norm": "rmsnorm"},
    **{f"spectral {weight:g}": {"spectral": weight} for weight in (0.5, 1.0, 2.0)},
    "orthogonal Q and K": {"qkv_init": "orthogonal", "levers_on": "qk"},
}
HARMFUL = ("graying 0.75", "graying 0.5", "graying 0.25", "spectral 2")  # lose accuracy; chosen after the runs
CONDITIONS = {BASE: {}} | HEADS | INTERVENTIONS  # keys of the section model


class Effect(NamedTuple):
    """Change from the base, paired by seed, of means over the learning rates."""

    dose: statistics.Difference  # of log10 κ of the attention output after training
    response: statistics.Difference  # of top-1, in points
    by_seed: np.ndarray  # the response of each seed


class Slopes(NamedTuple):
    """Points of top-1 per unit of log10 κ: least squares through the base, and the rule's difference, by seed."""

    heads: statistics.Difference
    interventions: statistics.Difference
    beyond: statistics.Difference  # slope of interventions minus half the slope of heads


def get_config(condition: str, lr: float, seed: int) -> config.ConfigDict:
    """Return the config of a run."""
    c = mediation.get_config("lever=base,heads=few").unlock()
    c.model.update(CONDITIONS[condition])
    c.update(seed=seed)
    c.probe.examples = PROBED
    c.optim.lr = lr
    return c.lock()


def run(condition: str, out: Path) -> list[dict[str, Any]]:
    """Train the runs of a condition that have not finished, and return the rows of all of them."""
    runs = {(lr, seed): out / f"{condition}-lr={lr:g}-seed={seed}" for lr in RATES for seed in SEEDS}
    configs = ((folder, get_config(condition, *about)) for about, folder in runs.items())
    if members := [(folder, c) for folder, c in configs if not common.is_finished(c, folder)]:
        for folder, c in members:
            config.check(c)
            with contextlib.redirect_stdout(io.StringIO()):
                status = train.train(c, folder)
            if status:
                sys.exit(status)
    return [make_row(condition, *about, folder) for about, folder in runs.items()]


def make_row(condition: str, lr: float, seed: int, workdir: Path) -> dict[str, Any]:
    """Return the row of a finished run: log10 κ of the median image, averaged over layers."""
    summary = files.read_json(workdir / "summary.json")
    probe = run_files.read_records(workdir, "probe")[-1]
    output, entropy = probe["attention_output"], probe["relative_attention_entropy"]
    return {
        **{"block": condition, "params": summary["params"], "lr": lr, "seed": seed},
        **{"top1": f"{summary['final']['top1']:.5f}", "loss": f"{summary['final']['loss']:.5f}"},
        "log10_condition": f"{np.mean(np.log10(output['median'])):.4f}",
        "bounds": f"{np.mean(output['singular']) / PROBED:.4f}",
        "entropy": f"{np.mean(entropy['median']):.4f}",
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%MZ"),
        "device": jax.devices()[0].device_kind,
    }


def average(rows: Sequence[Mapping[str, Any]], condition: str, key: str, rates: Sequence[float] = RATES) -> np.ndarray:
    """Return the mean over the learning rates for each seed; empty unless every rate has every seed."""
    values = {(row["lr"], row["seed"]): row[key] for row in rows if row["block"] == condition}
    if not {(lr, seed) for lr in rates for seed in SEEDS} <= set(values):
        return np.empty(0)
    return np.array([[values[lr, seed] for seed in SEEDS] for lr in rates]).mean(0)


def compare(rows: Sequence[Mapping[str, Any]], rates: Sequence[float] = RATES) -> dict[str, Effect]:
    """Return the effects of the conditions that have all runs at the learning rates."""
    result = {}
    kappa, top1 = (average(rows, BASE, key, rates) for key in ("log10_condition", "top1"))
    for name in list(CONDITIONS)[1:]:
        dose, response = (average(rows, name, key, rates) for key in ("log10_condition", "top1"))
        if kappa.size and dose.size:
            gain = 100 * (response - top1)
            result[name] = Effect(statistics.paired(dose, kappa), statistics.paired(100 * response, 100 * top1), gain)
    return result


def fit_slope(effects: Mapping[str, Effect], names: Iterable[str]) -> np.ndarray:
    """Return the slope of response on dose of each seed, by least squares through the base.

    A dose is the mean over seeds, so that its scatter does not flatten the slope.
    """
    chosen = [effects[name] for name in names]
    dose = np.array([effect.dose.value for effect in chosen])
    return dose @ np.array([effect.by_seed for effect in chosen]) / (dose @ dose)


def find_slopes(effects: Mapping[str, Effect]) -> Slopes | None:
    """Return the slopes of heads and interventions; None unless every condition was run."""
    if set(effects) != set(HEADS) | set(INTERVENTIONS):
        return None
    heads, interventions = fit_slope(effects, HEADS), fit_slope(effects, INTERVENTIONS)
    pairs = (heads, np.zeros_like(heads)), (interventions, np.zeros_like(heads)), (interventions, heads / 2)
    return Slopes(*(statistics.paired(*pair) for pair in pairs))


def exclude(*names: str) -> list[str]:
    """Return the other interventions, in their order."""
    return [name for name in INTERVENTIONS if name not in names]


def without_each(effects: Mapping[str, Effect]) -> dict[str, float]:
    """Return the slope of interventions without each of them in turn. Not part of the rule: chosen after the runs."""
    return {name: fit_slope(effects, exclude(name)).mean() for name in INTERVENTIONS}


def decide(slopes: Slopes | None) -> str:
    """Return the verdict on conditioning as a cause, by the rule and its dated lines in PLAN.md."""
    if slopes is None:
        return "not run"
    if slopes.heads.interval().contains(0.0):
        return "undecided"  # heads have no effect that conditioning could explain
    sign = math.copysign(1.0, slopes.heads.value)
    beyond, own = slopes.beyond.interval(), slopes.interventions.interval()
    if max(sign * beyond.low, sign * beyond.high) < 0:
        return "refuted"
    near = 0.5 <= slopes.interventions.value / slopes.heads.value <= 2
    return "holds" if near and not own.contains(0.0) else "undecided"


def report(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield the lines of the report."""
    effects = compare(rows)
    for name in CONDITIONS:
        chosen = [row for row in rows if row["block"] == name]
        if not average(rows, name, "top1").size:
            yield f"{name}: {len(chosen)} of {len(RATES) * len(SEEDS)} runs"
            continue
        top1, kappa = (average(rows, name, key).mean() for key in ("top1", "log10_condition"))
        line = f"{name:<20}top-1 {100 * top1:.2f} %, log10 κ {kappa:.2f} ({np.mean([r['bounds'] for r in chosen]):.0%} "
        if name in effects:
            effect = effects[name]
            line += f"bounds); change of top-1 {Estimate.of(effect.response):+.2f} points, "
            yield f"{line}of log10 κ {Estimate.of(effect.dose):+.2f}"
        else:
            yield f"{line}bounds)"
    slopes = find_slopes(effects)
    if slopes is not None:
        yield f"Points per unit of log10 κ: heads {Estimate.of(slopes.heads):+.2f}"
        yield f"  interventions {Estimate.of(slopes.interventions):+.2f}"
        yield f"  interventions minus half of heads {Estimate.of(slopes.beyond):+.2f}"
        rest = fit_slope(effects, exclude(*HARMFUL)).mean()
        yield f"  interventions without those that lose accuracy (chosen after the runs) {rest:+.2f}"
        least, most = (choose(without_each(effects).items(), key=lambda item: item[1]) for choose in (min, max))
        yield f"  interventions without {least[0]} {least[1]:+.2f}, without {most[0]} {most[1]:+.2f}"
    yield f"Conditioning is the cause of what heads gain: {decide(slopes)}"


@cli.command(cli.Flag("out", "Folder for the runs; without it the rows are reported."))
def main(f: cli.Values) -> None:
    if f.out:
        for condition in CONDITIONS:
            done = {(row["lr"], row["seed"]) for row in language.read_rows(ROWS) if row["block"] == condition}
            if len(done) == len(RATES) * len(SEEDS):
                continue
            for row in run(condition, Path(f.out).expanduser()):
                if (row["lr"], row["seed"]) not in done:
                    language.append_row(row, ROWS, FIELDS)
            print(condition, flush=True)
    print(*report(language.read_rows(ROWS)), sep="\n")


if __name__ == "__main__":
    cli.run(main)
