"""Finished runs read back from their folders, of any task, and what keeps them from being compared."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from leanformer.analysis.dimensions import Dimensions, of_model
from leanformer.config import key_docs
from leanformer.errors import ConfigError, WorkdirError
from leanformer.runtime import files
from leanformer.tasks import artifacts, scores
from leanformer.tasks.scores import Score
from leanformer.training import report


SEED = "seed"
ASIDE = (SEED, "data.dir")  # runs that differ in them, and in silent keys, alone are of one shape
# Or a metric is not the same thing: what is evaluated on, and what is asked of it.
ALIKE = (
    *("task", "data.name", "data.eval_split", "eval.examples", "data.documents", "data.separator", "mask_share"),
    *("data.points", "data.dim", "data.items", "data.bias", "data.examples"),
)
CORRELATIONS = ("matthews", "pearson", "spearman")  # scores from -1 to 1
BY_TOKENS = ("language", "masked")  # tasks whose metrics, but for bits a byte, are means over tokens


@dataclasses.dataclass(frozen=True)
class Run:
    """One finished run.

    Attributes:
        keys: of its config, flat: {"model.depth": 3, ...}, without silent ones and those of ASIDE.
        made_by: the commit and the devices that it says it was made with.
        records: of metrics.jsonl.
        value: of the metric that is compared.
    """

    workdir: Path
    seed: int
    keys: Mapping[str, Any]
    made_by: str
    summary: Mapping[str, Any]
    records: Sequence[Mapping[str, Any]]
    value: float

    @property
    def together(self) -> int:
        """Runs that its program trained, itself among them: seconds and memory are of all."""
        return self.summary.get("together", 1)

    def cost(self, name: str) -> Any:
        """A figure of the summary; None of a run from before it was written down."""
        return self.summary.get(name)


@dataclasses.dataclass(frozen=True)
class Found:
    """Runs that can be compared, by one metric; and those of a sweep that cannot, with the reason."""

    runs: list[Run]
    score: Score
    left_out: dict[Path, str]


def workdirs(paths: Sequence[str]) -> list[tuple[Path, bool]]:
    """Folders of runs, and whether each was named itself: a folder that is no run stands for the runs in it.

    Raises:
        ConfigError: nothing is there, neither a run nor runs, or one of them twice.
    """
    found: dict[Path, bool] = {}
    for text in paths:
        path = Path(text).expanduser()
        if not path.is_dir():
            raise ConfigError(f"{text}: there is no such folder. Give folders of runs or of sweeps.")
        one = (path / "config.json").is_file()
        inside = [path] if one else sorted(child for child in path.iterdir() if (child / "config.json").is_file())
        if not inside:
            raise ConfigError(f"{text} is neither a run nor a sweep: no config.json in it, nor in a folder of it.")
        for workdir in inside:
            if workdir.resolve() in found:
                raise ConfigError(
                    f"{workdir} was given twice: a run counts once. Name each run or its sweep, not both."
                )
            found[workdir.resolve()] = one
    return [*found.items()]


def read(paths: Sequence[str], metric: str | None = None) -> Found:
    """The runs of these folders. A run of a sweep that has not ended, or has no figure, is left out, with the reason.

    Args:
        metric: NAME, or NAME:higher or NAME:lower where a run does not say which is better; the score of the runs if
            not given.

    Raises:
        ConfigError: as `workdirs`; a run named by itself that has not ended; none that has; different tasks, data or
            scores; a metric that is unknown; two folders with one config and one seed.
        WorkdirError: a file of a run is broken.
    """
    whole, left_out = {}, {}
    for workdir, alone in workdirs(paths):
        if (workdir / "summary.json").is_file():
            whole[workdir] = _summary(workdir)
        elif alone:
            raise ConfigError(f"{workdir} has not ended: no summary.json. Run its training command again to go on.")
        else:
            left_out[workdir] = "has not ended, or failed"
    if not whole:
        raise ConfigError(f"None of {len(left_out)} runs has ended. Run the same sweep again to go on.")
    score = _score(whole, metric)
    runs = []
    for workdir, summary in whole.items():
        value = summary["final"].get(score.name)
        if isinstance(value, int | float) and math.isfinite(value):
            runs.append(_run(workdir, summary, float(value)))
        elif score.name in summary["final"]:
            left_out[workdir] = f"its {score.name} is not finite"
        else:
            known = ", ".join(name for name in summary["final"] if name not in ("step", "kind"))
            raise ConfigError(f"--metric={score.name}: {workdir} has none at its end. It has {known}.")
    if not runs:
        raise ConfigError(f"No {score.name} of any run is finite: nothing to compare.")
    _check_alike(runs, score)
    return Found(runs, score, left_out)


def _summary(workdir: Path) -> dict[str, Any]:
    path = workdir / "summary.json"
    summary = files.read_json(path)
    if not isinstance(summary, dict) or not isinstance(summary.get("final"), dict) or "params" not in summary:
        raise WorkdirError(f"{path} is no summary of a run: final and params are not in it. Put back a copy.")
    return summary


def _score(whole: Mapping[Path, Mapping[str, Any]], metric: str | None) -> Score:
    """What is compared: the metric asked for, or the one score of all runs."""
    scored = {workdir: scores.read(summary.get("score", {"top1": None}))[0] for workdir, summary in whole.items()}
    names = {score: workdir for workdir, score in scored.items()}
    if metric is None:
        if len(names) > 1:
            said = "; ".join(f"{score.name} of {workdir.name}" for score, workdir in names.items())
            raise ConfigError(f"The runs have different scores: {said}. Choose one that all have: --metric=NAME.")
        return next(iter(names))
    name, _, direction = metric.partition(":")
    known = {score.name: score.higher for score in names} | {"loss": False, "ema_loss": False}
    if direction not in ("", "higher", "lower") or (not direction and name not in known):
        raise ConfigError(f"--metric={metric}: say which is better, as --metric={name}:higher or {name}:lower.")
    return Score(name, direction == "higher" if direction else known[name])


def _run(workdir: Path, summary: Mapping[str, Any], value: float) -> Run:
    c = artifacts.load_config(workdir)
    artifacts.load_classes(workdir)  # refuses one that is broken
    told = files.read_json(workdir / "config.json")
    records = report.read_records(workdir / "metrics.jsonl")
    if not records:
        raise WorkdirError(f"{workdir / 'metrics.jsonl'} is missing or empty, and the run has ended. Put back a copy.")
    keys = {name: item for name, item in key_docs.flat(c) if not (name in ASIDE or key_docs.silent(name, c))}
    made_by = f"commit {told.get('git') or 'unknown'}, {', '.join(told.get('devices') or ['unknown devices'])}"
    return Run(workdir, c.seed, keys, made_by, summary, records, value)


def _check_alike(runs: Sequence[Run], score: Score) -> None:
    """Raises ConfigError for runs that answer different questions, or one run in two folders."""
    first, alike = runs[0], ALIKE
    task = first.keys.get("task")
    if task in BY_TOKENS and not score.name.endswith("bits_per_byte"):
        alike += ("data.tokenizer",)
    if score.name.endswith("loss"):
        alike += ("loss",)
    for key in alike:
        for run in runs:
            found, other = (_asked(each, key) for each in (first, run))
            if found != other:
                able = key == "data.tokenizer" and task == "language"
                way = ", or by what no tokenizer changes: --metric=bits_per_byte:lower" * able
                raise ConfigError(
                    f"{key} is {found!r} in {first.workdir.name} and {other!r} in {run.workdir.name}: their figures "
                    f"are not of one question. Compare them apart{way}."
                )
    known: dict[Any, Path] = {}
    for run in runs:
        same = known.setdefault((run.seed, repr(sorted(run.keys.items()))), run.workdir)
        if same != run.workdir:
            raise ConfigError(
                f"{same} and {run.workdir} are of one config and one seed: a copy is no repetition. Leave one out."
            )


def _asked(run: Run, key: str) -> Any:
    """A key's value; of a tokenizer that was trained, with the files that it was trained on."""
    value = run.keys.get(key)
    if key == "data.tokenizer" and str(value).startswith(("bpe:", "wordpiece:")):
        value += f" of {run.keys.get('data.train_split', '').partition('[')[0]}"
    return value


def differing(runs: Sequence[Run]) -> list[str]:
    """Keys that are not the same in all runs, as the configs list them."""
    keys = dict.fromkeys(key for run in runs for key in run.keys)
    return [key for key in keys if len({repr(run.keys.get(key)) for run in runs}) > 1]


def error_limit(score: Score) -> float:
    """Return the largest error that a score can have: 1 for a share, 2 for a correlation, infinity for a loss."""
    if not score.higher:
        return math.inf
    return 2.0 if score.name.removeprefix("ema_") in CORRELATIONS else 1.0


def errors(values: Sequence[float], score: Score) -> list[float]:
    """Return scores as errors, which fall: 1 - score for a share. Raises ConfigError for a share above 1."""
    if score.higher and max(values) > 1:
        raise ConfigError(
            f"{score.name} rises and is no share of 1: choose one that falls, --metric=loss for instance."
        )
    return [1 - value if score.higher else value for value in values]


def dimensions(run: Run) -> Dimensions:
    """The shape of a run. Raises ConfigError where a size is not one for all layers."""
    model = {key.removeprefix("model."): value for key, value in run.keys.items() if key.startswith("model.")}
    return of_model(model, run.summary["params"], run.cost("forward_flops"))
