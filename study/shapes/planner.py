"""Evaluation of predictors that rank architectures, on published tables of trained models.

    python -m study.shapes.planner [--runs=SWEEP ...]

2026-11-22. Kendall's τ within 10 % of parameters on six public tables: parameters .03 to .63, spectral capacity .04 to
.52 (worse than parameters on three), a fitted response surface .16 to .61 (worse on one). None wins everywhere.

For each table of trained models (study/data, and finished sweeps of --runs) and each predictor:

- tau: Kendall's τ over pairs within 10 % of one another in parameters, with a 90 % interval by bootstrap over models.
- Spearman: rank correlation over all models, which size alone makes high.
- regret: mean excess error, in percent, of the shape that is recommended among those up to 10 % smaller than a model.

The response surface predicts held-out shapes, in five folds. Also printed: the share of held-out runs in its 90 %
prediction interval; and, for the largest fifth of models if the surface is fitted to the rest, that share, its mean
error, and the mean error of a power law in parameters.
"""

import argparse
import math
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from scipy import stats

from leanformer.analysis import comparison, runs, surface
from leanformer.analysis.design import AXES, Dimensions
from leanformer.analysis.surface import Scale
from study.shapes.predictors import PREDICTORS
from study.tables import EVIDENCE
from study.tables import read as read_rows


NEAR = math.log(1.1)
FOLDS, DRAWS = 5, 200


class Models(NamedTuple):
    """Trained shapes, the errors of the runs of each shape, and the scale on which the response surface is fitted."""

    shapes: list[Dimensions]
    errors: list[list[float]]
    scale: Scale = Scale()


def read_language(path: Path) -> dict[str, Models]:
    """Read perplexities by table. Heads split the width; parameters are the decoder's, without embeddings."""
    tables: dict[str, Models] = {}
    for row in read_rows(path):
        if not row["set"].startswith("random"):
            continue  # shapes found by a search are not a random sample
        width, heads, mlp = int(row["width"]), _numbers(row["heads"]), _numbers(row["mlp"])
        shape = Dimensions(width, heads, tuple(width // n for n in heads), mlp, int(row["block_params"]))
        shapes, errors, _ = tables.setdefault(row["set"].removeprefix("random_"), Models([], []))
        shapes.append(shape)
        errors.append([float(row["perplexity"])])
    return tables


def read_bert(path: Path) -> dict[str, Models]:
    """Read GLUE scores as error rates. Layers without softmax attention count as attention, since their mixers have
    heads. Parameters are in matrices of blocks; an MLP counts as often as a layer repeats it."""
    shapes, errors = [], []
    for row in read_rows(path):
        width, heads = int(row["width"]), _numbers(row["heads"])
        mlp = tuple(f * times for f, times in zip(_numbers(row["mlp"]), _numbers(row["mlps"]), strict=True))
        params = sum(4 * width**2 + 2 * width * f for f in mlp)
        shapes.append(Dimensions(width, heads, tuple(width // n for n in heads), mlp, params))
        errors.append([1 - float(row["glue"]) / 100])
    return {"BERT GLUE": Models(shapes, errors, Scale(1.0))}


def read_quickstart(path: Path) -> dict[str, Models]:
    """Read the small ViTs of study/shapes/surface.py: top-1 error rates, grouped by shape."""
    errors: dict[tuple[int, ...], list[float]] = {}
    for row in read_rows(path):
        shape = tuple(int(row[name]) for name in (*AXES, "params", "forward_flops"))
        errors.setdefault(shape, []).append(1 - float(row["top1"]))
    shapes = [
        Dimensions(width, (heads,) * depth, (head_dim,) * depth, (mlp,) * depth, params, flops)
        for depth, width, heads, head_dim, mlp, params, flops in errors
    ]
    return {"ViT quickstart": Models(shapes, [*errors.values()], Scale(1.0))}


def read_runs(paths: Sequence[str]) -> dict[str, Models]:
    """Read finished sweeps, by the score of their runs."""
    if not paths:
        return {}
    data = runs.read(paths)
    groups = comparison.group(data.runs)
    errors = [runs.to_errors([run.value for run in group.runs], data.score) for group in groups]
    shapes = [runs.run_dimensions(group.runs[0]) for group in groups]
    return {"runs of --runs": Models(shapes, errors, Scale(runs.error_limit(data.score)))}


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split()))


def tau(predicted: np.ndarray, errors: np.ndarray, params: np.ndarray) -> tuple[float, float, float]:
    """Return Kendall's τ-a over pairs near in parameters, with its 90 % interval by bootstrap over models.

    A pair that is predicted to be equal counts as 0; pairs of a model with itself are excluded.
    """
    first, second = np.triu_indices(len(errors), 1)
    near = np.abs(np.log(params[first] / params[second])) < NEAR
    first, second = first[near], second[near]
    right = np.sign(predicted[first] - predicted[second]) * np.sign(errors[second] - errors[first])
    if not len(right):
        return math.nan, math.nan, math.nan
    rng, samples = np.random.default_rng(0), []
    for _ in range(DRAWS):
        times = np.bincount(rng.integers(len(errors), size=len(errors)), minlength=len(errors))
        weight = times[first] * times[second]
        samples.append((weight * right).sum() / max(1, weight.sum()))
    return float(right.mean()), *map(float, np.quantile(samples, (0.05, 0.95)))


def regret(predicted: np.ndarray, errors: np.ndarray, params: np.ndarray) -> float:
    """Return the mean excess error, in percent, of the shape predicted to be best under each model's parameters."""
    excess = []
    for budget in params:
        inside = np.flatnonzero((params <= budget) & (params > budget / 1.1))
        if len(inside) > 1:
            chosen = inside[np.argmax(predicted[inside])]
            excess.append(errors[chosen] / errors[inside].min() - 1)
    return 100 * float(np.mean(excess)) if excess else math.nan


def check_coverage(fit: surface.Surface, shapes: list[Dimensions], errors: list[list[float]]) -> list[bool]:
    """Return for each run whether its error lies in the prediction interval."""
    ends = zip(errors, *fit.interval(shapes), strict=True)
    return [bool(low <= error <= high) for runs_of_shape, low, high in ends for error in runs_of_shape]


def cross_validate(models: Models) -> tuple[np.ndarray, float]:
    """Return predictions for held-out shapes, as minus the expected error, and the share of runs in their interval."""
    shapes, errors, scale = models
    order = np.random.default_rng(0).permutation(len(shapes))
    predicted, inside = np.empty(len(shapes)), []
    for fold in np.array_split(order, FOLDS):
        rest = np.setdiff1d(order, fold)
        fit = surface.fit([shapes[i] for i in rest], [errors[i] for i in rest], scale)
        out = [shapes[i] for i in fold]
        predicted[fold] = -fit.expected_error(out)
        inside += check_coverage(fit, out, [errors[i] for i in fold])
    return predicted, float(np.mean(inside))


def extrapolate(models: Models) -> tuple[float, float, float]:
    """Fit to all but the largest fifth of models, and predict the largest fifth.

    Returns:
        Mean error in percent of the response surface and of a power law in parameters; the share of runs in the
        surface's prediction intervals.
    """
    shapes, errors, scale = models
    order = np.argsort([shape.params for shape in shapes], kind="stable")
    train, test = np.split(order, [4 * len(order) // 5])
    truth = np.array([np.mean(errors[i]) for i in test])
    fit = surface.fit([shapes[i] for i in train], [errors[i] for i in train], scale)
    out = [shapes[i] for i in test]
    inside = check_coverage(fit, out, [errors[i] for i in test])
    logs = [np.log([shapes[i].params for i in part]) for part in (train, test)]
    law = np.polynomial.Polynomial.fit(logs[0], np.log([np.mean(errors[i]) for i in train]), 1)
    both = (fit.expected_error(out), np.exp(law(logs[1])))
    return *(100 * float(np.abs(values / truth - 1).mean()) for values in both), float(np.mean(inside))


def score_predictors(models: Models) -> dict[str, dict]:
    """Return the metrics of every predictor on one table."""
    shapes, errors, _ = models
    params = np.array([float(shape.params) for shape in shapes])
    truth = np.array([np.mean(values) for values in errors])
    predictions = {name: [predict(shape) for shape in shapes] for name, predict in PREDICTORS.items()}
    predictions = {name: np.array(values) for name, values in predictions.items() if None not in values}
    predictions["surface"], share = cross_validate(models)
    metrics = {
        name: {
            "tau": tau(prediction, truth, params),
            "spearman": float(stats.spearmanr(prediction, -truth).statistic),
            "regret": regret(prediction, truth, params),
        }
        for name, prediction in predictions.items()
    }
    ours, law, beyond = extrapolate(models)
    metrics["surface"] |= {"covered": share, "largest": ours, "largest_by_params": law, "largest_covered": beyond}
    return metrics


def read_published() -> dict[str, Models]:
    """Return the tables of published models in study/data."""
    return read_language(EVIDENCE / "language_models.csv") | read_bert(EVIDENCE / "bert.csv")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", nargs="*", default=[])
    options = parser.parse_args()
    tables = read_published() | read_quickstart(EVIDENCE / "quickstart.csv")
    print("table                   models  predictor     tau within 10 %           Spearman  regret %")
    for name, models in (tables | read_runs(options.runs)).items():
        metrics = score_predictors(models)
        for predictor, f in metrics.items():
            middle = "{:+.2f} [{:+.2f}, {:+.2f}]".format(*f["tau"])
            row = f"{name:<24}{len(models.shapes):>6}  {predictor:<12}  {middle:<24}  {f['spearman']:+.3f}    "
            print(f"{row}{f['regret']:.2f}")
        f, law = metrics["surface"], metrics["surface"]["largest_by_params"]
        print(
            f"{'':<24}surface: {f['covered']:.0%} of held-out runs in the interval. Largest fifth, fitted to the rest:"
        )
        print(f"{'':<24}{f['largest_covered']:.0%}, mean error {f['largest']:.2f} %, of a power law {law:.2f} %")


if __name__ == "__main__":
    main()
