"""How well shapes are ranked before they are trained: every predictor against transformers that were.

    python benchmarks/planner.py [--evidence=DIR] [--runs=SWEEP ...] [--out=FILE.json]

Of each table of trained models (benchmarks/evidence, and --runs, finished sweeps of one's own), for each predictor:
Kendall's τ on pairs within 10 % of one another in parameters, which is what a planner must order, with a 90 % interval
by bootstrap over models; Spearman's ρ over all, which size alone makes high; regret, how much worse than the best is
the shape recommended among those within 10 % under each model's parameters, in percent of the error, in the mean. The
surface predicts shapes that it was not fitted to (five folds); also its error and that of a power law in parameters on
the largest fifth when fitted to the rest, and how often its 90 % interval held a run that it had not seen.
"""

import argparse
import csv
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from scipy import stats

from leanformer.studies import comparison, runs, surface
from leanformer.studies.predictors import AXES, PREDICTORS, Dimensions


EVIDENCE = Path(__file__).parent / "evidence"
NEAR = math.log(1.1)
FOLDS, DRAWS = 5, 200
Models = tuple[list[Dimensions], list[list[float]]]  # shapes, and the errors of their runs


def language(path: Path) -> dict[str, Models]:
    """Perplexities by table. Heads share the width; the count is of the decoder, without embeddings."""
    tables: dict[str, Models] = {}
    for row in _rows(path):
        if not row["set"].startswith("random"):
            continue  # found shapes are no sample
        width, heads, mlp = int(row["width"]), _numbers(row["heads"]), _numbers(row["mlp"])
        shape = Dimensions(width, heads, tuple(width // n for n in heads), mlp, int(row["block_params"]))
        shapes, errors = tables.setdefault(row["set"].removeprefix("random_"), ([], []))
        shapes.append(shape)
        errors.append([float(row["perplexity"])])
    return tables


def bert(path: Path) -> dict[str, Models]:
    """GLUE's distance from 100. Layers without softmax attention are left in as if they had it: their mixer has heads.
    The count is of products in blocks, an MLP as often as a layer repeats it."""
    shapes, errors = [], []
    for row in _rows(path):
        width, heads = int(row["width"]), _numbers(row["heads"])
        mlp = tuple(f * times for f, times in zip(_numbers(row["mlp"]), _numbers(row["mlps"]), strict=True))
        params = sum(4 * width**2 + 2 * width * f for f in mlp)
        shapes.append(Dimensions(width, heads, tuple(width // n for n in heads), mlp, params))
        errors.append([100 - float(row["glue"])])
    return {"BERT GLUE": (shapes, errors)}


def quickstart(path: Path) -> dict[str, Models]:
    """Our own small ViTs, which benchmarks/surface.py trains: error by top-1, the runs of a shape together."""
    errors: dict[tuple[int, ...], list[float]] = {}
    for row in _rows(path):
        shape = tuple(int(row[name]) for name in (*AXES, "params", "forward_flops"))
        errors.setdefault(shape, []).append(1 - float(row["top1"]))
    shapes = [
        Dimensions(width, (heads,) * depth, (head_dim,) * depth, (mlp,) * depth, params, flops)
        for depth, width, heads, head_dim, mlp, params, flops in errors
    ]
    return {"ViT quickstart": (shapes, [*errors.values()])}


def committed(folder: Path) -> dict[str, Models]:
    """All tables of a folder. That of our own ViTs may be missing, which is said: it takes hours to make."""
    tables, ours = language(folder / "language_models.csv") | bert(folder / "bert.csv"), folder / "quickstart.csv"
    if ours.is_file():
        return tables | quickstart(ours)
    print(f"No {ours}, which is the surface.csv of benchmarks/surface.py: left out.", file=sys.stderr)
    return tables


def own(paths: Sequence[str]) -> dict[str, Models]:
    """Shapes of finished sweeps, by the score of their runs."""
    if not paths:
        return {}
    found = runs.read(paths)
    shapes = comparison.group(found.runs)
    errors = [runs.errors([run.value for run in shape.runs], found.score) for shape in shapes]
    return {"own runs": ([runs.dimensions(shape.runs[0]) for shape in shapes], errors)}


def _rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return [*csv.DictReader(file)]


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split()))


def tau(predicted: np.ndarray, errors: np.ndarray, params: np.ndarray) -> tuple[float, float, float]:
    """Kendall's τ-a over pairs near in parameters, a pair that is predicted to be equal counting as 0; and its 90 %
    interval by bootstrap over models, where a pair of a model with itself says nothing."""
    first, second = np.triu_indices(len(errors), 1)
    near = np.abs(np.log(params[first] / params[second])) < NEAR
    first, second = first[near], second[near]
    right = np.sign(predicted[first] - predicted[second]) * np.sign(errors[second] - errors[first])
    if not len(right):
        return math.nan, math.nan, math.nan
    rng, drawn = np.random.default_rng(0), []
    for _ in range(DRAWS):
        times = np.bincount(rng.integers(len(errors), size=len(errors)), minlength=len(errors))
        weight = times[first] * times[second]
        drawn.append((weight * right).sum() / max(1, weight.sum()))
    return float(right.mean()), *map(float, np.quantile(drawn, (0.05, 0.95)))


def regret(predicted: np.ndarray, errors: np.ndarray, params: np.ndarray) -> float:
    """Percent of the error lost, in the mean over budgets, by taking the shape that is predicted to be best."""
    lost = []
    for budget in params:
        inside = np.flatnonzero((params <= budget) & (params > budget / 1.1))
        if len(inside) > 1:
            chosen = inside[np.argmax(predicted[inside])]
            lost.append(errors[chosen] / errors[inside].min() - 1)
    return 100 * float(np.mean(lost)) if lost else math.nan


def folds(shapes: list[Dimensions], errors: list[list[float]]) -> tuple[np.ndarray, float]:
    """What the surface predicts of shapes held out, as minus ln error, and how often its interval holds a run."""
    order = np.random.default_rng(0).permutation(len(shapes))
    predicted, held, seen = np.empty(len(shapes)), 0, 0
    for fold in np.array_split(order, FOLDS):
        rest = np.setdiff1d(order, fold)
        fitted = surface.fit([shapes[i] for i in rest], [errors[i] for i in rest])
        out = [shapes[i] for i in fold]
        predicted[fold] = -np.log(fitted.error(out))
        for i, low, high in zip(fold, *fitted.interval(out), strict=True):
            held += sum(low <= error <= high for error in errors[i])
            seen += len(errors[i])
    return predicted, held / seen


def largest(shapes: list[Dimensions], errors: list[list[float]]) -> tuple[float, float]:
    """Mean error in percent on the largest fifth, fitted to the rest: of the surface, and of a power law in size."""
    order = np.argsort([shape.params for shape in shapes], kind="stable")
    known, new = np.split(order, [4 * len(order) // 5])
    truth = np.array([np.mean(errors[i]) for i in new])
    fitted = surface.fit([shapes[i] for i in known], [errors[i] for i in known]).error([shapes[i] for i in new])
    logs = [np.log([shapes[i].params for i in part]) for part in (known, new)]
    law = np.polynomial.Polynomial.fit(logs[0], np.log([np.mean(errors[i]) for i in known]), 1)
    return tuple(100 * float(np.abs(found / truth - 1).mean()) for found in (fitted, np.exp(law(logs[1]))))


def scored(shapes: list[Dimensions], errors: list[list[float]]) -> dict[str, dict]:
    """Every predictor's figures on one table."""
    params = np.array([float(shape.params) for shape in shapes])
    truth = np.array([np.mean(each) for each in errors])
    guesses = {name: [p.of(shape) for shape in shapes] for name, p in PREDICTORS.items()}
    guesses = {name: np.array(found) for name, found in guesses.items() if None not in found}
    guesses["surface"], held = folds(shapes, errors)
    figures = {
        name: {
            "tau": tau(guess, truth, params),
            "spearman": float(stats.spearmanr(guess, -truth).statistic),
            "regret": regret(guess, truth, params),
        }
        for name, guess in guesses.items()
    }
    ours, law = largest(shapes, errors)
    figures["surface"] |= {"held": held, "largest": ours, "largest_by_params": law}
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--evidence", type=Path, default=EVIDENCE)
    parser.add_argument("--runs", nargs="*", default=[])
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    tables = committed(options.evidence) | own(options.runs)
    found = {}
    print("table                   models  predictor     tau within 10 %           Spearman  regret %")
    for name, (shapes, errors) in tables.items():
        found[name] = scored(shapes, errors)
        for predictor, f in found[name].items():
            middle = "{:+.2f} [{:+.2f}, {:+.2f}]".format(*f["tau"])
            print(
                f"{name:<24}{len(shapes):>6}  {predictor:<12}  {middle:<24}  {f['spearman']:+.3f}    {f['regret']:.2f}"
            )
        f = found[name]["surface"]
        print(
            f"{'':<32}surface: {f['held']:.0%} of held-out runs inside its 90 % interval; largest fifth off by ", end=""
        )
        print(f"{f['largest']:.2f} %, a power law in parameters by {f['largest_by_params']:.2f} %")
    if options.out:
        options.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
