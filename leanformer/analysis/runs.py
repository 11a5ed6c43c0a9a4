"""Finished runs read from their folders, and checks that they can be compared."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from leanformer.analysis.design import Dimensions, model_dimensions
from leanformer.config import is_run_only, iterate_keys
from leanformer.costs.count import format_count
from leanformer.errors import ConfigError
from leanformer.runtime import files
from leanformer.tasks import Score
from leanformer.training import run_files


SEED = "seed"
IGNORED_KEYS = (SEED, "data.dir")  # like keys that change no result, these do not define a configuration
# Keys that must be equal for a metric to be comparable: task and evaluation data.
MUST_MATCH_KEYS = (
    *("task", "data.name", "data.eval_split", "eval.examples", "data.documents", "data.separator", "mask_share"),
    *("data.points", "data.dim", "data.num_items", "data.bias", "data.examples"),
    *("data.recipe.contour", "data.recipe.seed"),  # Pathfinder's images, and its splits
)
CORRELATIONS = ("matthews", "pearson", "spearman")  # scores from -1 to 1
BY_TOKENS = ("language", "masked")  # tasks whose metrics are means over tokens, except bits/byte


@dataclasses.dataclass(frozen=True)
class Run:
    """Finished run."""

    workdir: Path
    seed: int
    keys: Mapping[str, Any]  # flat config, {"model.depth": 3, ...}, without IGNORED_KEYS and keys that change no result
    changed: Sequence[str]  # of these keys, those that were changed after the first step
    made_by: str  # commit and devices, for messages
    summary: Mapping[str, Any]  # summary.json
    records: Sequence[Mapping[str, Any]]  # lines of metrics.jsonl
    value: float  # final value of the compared metric


@dataclasses.dataclass(frozen=True)
class ComparableRuns:
    """Finished runs of one task and data set that can be compared."""

    runs: list[Run]  # at least one
    score: Score  # compared metric
    left_out: dict[Path, str]  # reason for each run that is not counted: unfinished, or without a finite value


def find_workdirs(paths: Sequence[str]) -> dict[Path, bool]:
    """Return the absolute folders of runs, each with True if it was given itself, False if its sweep was."""
    result: dict[Path, bool] = {}
    for path in (Path(text).expanduser() for text in paths):
        is_run = (path / "config.json").is_file()
        inside = [path] if is_run else sorted(file.parent for file in path.glob("*/config.json"))
        if not inside:
            raise ConfigError(f"{path} does not exist, or is neither a run, a folder with a config.json, nor a sweep.")
        result |= {workdir.resolve(): is_run for workdir in inside}
    return result


def read(paths: Sequence[str], metric: str | None = None) -> ComparableRuns:
    """Return the finished runs in these folders.

    Unfinished runs of a sweep, and runs without a finite value of the metric, are left out.

    Args:
        paths: folders of runs or of sweeps.
        metric: NAME of a metric in the final evaluation records, or NAME:higher or NAME:lower if the runs do not record
            which is better; by default the score of the runs.

    Raises:
        ConfigError: a folder does not exist or holds no run; a run named on its own is unfinished; no run is finished,
            or none has a finite value; the final record of a run lacks the metric, or nothing tells which direction is
            better; the runs have different scores and no metric is given; their task or evaluation data differ, or the
            tokenizer or loss if the metric depends on it; two folders have the same config and seed.
    """
    summaries, left_out = {}, {}
    for workdir, alone in find_workdirs(paths).items():
        if (workdir / "summary.json").is_file():
            summaries[workdir] = files.read_json(workdir / "summary.json")
        elif alone:
            raise ConfigError(f"{workdir} is not finished: no summary.json. Run its training command again to resume.")
        else:
            left_out[workdir] = "not finished, or failed"
    if not summaries:
        raise ConfigError(f"Finished: 0 of {format_count(len(left_out), 'run')}. Run the same sweep again to resume.")
    score = _select_score(summaries, metric)
    result = []
    for workdir, summary in summaries.items():
        if score.name not in summary["final"]:
            names = ", ".join(name for name in summary["final"] if name not in ("step", "kind"))
            raise ConfigError(f"--metric={score.name}: the final record of {workdir} does not have it, only {names}.")
        value = summary["final"][score.name]
        if isinstance(value, int | float) and math.isfinite(value):
            result.append(_read_run(workdir, summary, float(value)))
        else:
            left_out[workdir] = f"{score.name} is not finite"
    if not result:
        raise ConfigError(f"--metric={score.name}: it is not finite in any run. There is nothing to compare.")
    _check_comparable(result, score)
    return ComparableRuns(result, score, left_out)


def _select_score(summaries: Mapping[Path, Mapping[str, Any]], metric: str | None) -> Score:
    """Return the requested metric, or the common score of all runs."""
    names = {Score.read(summary["score"]): workdir for workdir, summary in summaries.items()}
    if metric is None:
        if len(names) > 1:
            listed = "; ".join(f"{score.name} of {workdir.name}" for score, workdir in names.items())
            raise ConfigError(f"The runs have different scores: {listed}. Choose one that all have: --metric=NAME.")
        return next(iter(names))
    name, _, direction = metric.partition(":")
    directions = {score.name: score.higher for score in names} | {"loss": False, "ema_loss": False}
    if direction not in ("", "higher", "lower") or (not direction and name not in directions):
        raise ConfigError(
            f"--metric={metric}: the runs do not record which is better. Use --metric={name}:higher or {name}:lower."
        )
    return Score(name, direction == "higher" if direction else directions[name])


def _read_run(workdir: Path, summary: Mapping[str, Any], value: float) -> Run:
    config, header = run_files.load_config(workdir), files.read_json(workdir / "config.json")
    keys = {name: item for name, item in iterate_keys(config) if not (name in IGNORED_KEYS or is_run_only(name))}
    devices = ", ".join(" ".join(dict.fromkeys(name.split())) for name in header.get("devices") or ["unknown devices"])
    changed = [key for key in header.get("changed", ()) if key in keys]
    records = run_files.read_records(workdir)
    return Run(workdir, config.seed, keys, changed, f"commit {header.get('git')}, {devices}", summary, records, value)


def _check_comparable(runs: Sequence[Run], score: Score) -> None:
    """Raise ConfigError if the runs differ in task or evaluation data, or if two folders hold the same run."""
    first, required = runs[0], MUST_MATCH_KEYS
    task = first.keys.get("task")
    if task in BY_TOKENS and not score.name.endswith("bits_per_byte"):
        required += ("data.tokenizer",)
    if task in BY_TOKENS and first.keys["eval.examples"]:  # rows of tokens
        required += ("model.max_length", "model.packed", "data.tokenizer")
    if score.name.endswith("loss"):
        required += ("loss",)
    for key in required:
        for run in runs:
            value, other = (_comparable_value(x, key) for x in (first, run))
            if value != other:
                by_bytes = key == "data.tokenizer" and task == "language"
                fix = ", or use a metric that does not depend on the tokenizer: --metric=bits_per_byte:lower" * by_bytes
                raise ConfigError(
                    f"{key} is {value!r} in {first.workdir.name} and {other!r} in {run.workdir.name}: their metrics "
                    f"are not comparable. Compare these runs separately{fix}."
                )
    folders: dict[Any, Path] = {}
    for run in runs:
        same = folders.setdefault((run.seed, repr(sorted(run.keys.items()))), run.workdir)
        if same != run.workdir:
            raise ConfigError(f"{same} and {run.workdir} have the same config and seed. Leave one out.")


def _comparable_value(run: Run, key: str) -> Any:
    """Return the value of a key; for a trained tokenizer, with the split on which it was trained."""
    value = run.keys.get(key)
    if key == "data.tokenizer" and str(value).startswith(("bpe:", "wordpiece:")):
        value = f"{value} of {run.keys.get('data.train_split', '').partition('[')[0]}"
    return value


def differing_keys(runs: Sequence[Run]) -> list[str]:
    """Return the keys whose values differ between runs, in the order of the configs; a missing key counts as None."""
    keys = dict.fromkeys(key for run in runs for key in run.keys)
    return [key for key in keys if len({repr(run.keys.get(key)) for run in runs}) > 1]


def error_limit(score: Score) -> float:
    """Return the largest value of `to_errors`: 2 for a correlation, 1 for a fraction, infinite if lower is better."""
    if not score.higher:
        return math.inf
    return 2.0 if score.name.removeprefix("ema_") in CORRELATIONS else 1.0


def to_errors(values: Sequence[float], score: Score) -> list[float]:
    """Return scores as errors, lower is better: 1 - score if higher is better, else unchanged."""
    if score.higher and max(values) > 1:
        raise ConfigError(f"--metric={score.name}: {max(values):g} is above 1. Choose a fraction, or --metric=loss.")
    return [1 - value if score.higher else value for value in values]


def run_dimensions(run: Run) -> Dimensions:
    """Return the sizes of a run's architecture, as `model_dimensions`."""
    model = {key.removeprefix("model."): value for key, value in run.keys.items() if key.startswith("model.")}
    return model_dimensions(model, run.summary["params"], run.summary.get("forward_flops"))
