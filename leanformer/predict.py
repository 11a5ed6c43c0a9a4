"""What a trained model takes files for: `python -m leanformer.predict --workdir=DIR [--best|--step=N] FILE|FOLDER ...`

      ... [--top=5] [--format=json|csv] [--out=FILE]

Files are images for a run that was trained on images, else texts; folders are searched for them. Each gives the
likeliest classes by name, with probabilities: a line of JSON each, or CSV with a line a class. A file that cannot be
read is named, and the command then ends with 2; the others are done all the same.
"""

import csv
import io
import itertools
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from leanformer import cli
from leanformer.data.images.folder import IMAGE_SUFFIXES
from leanformer.errors import USER_ERROR, ConfigError, CorruptExample, DataError
from leanformer.runtime import files
from leanformer.training import inference
from leanformer.training.inference import Trained


BATCH = 32
TEXT_SUFFIXES = (".txt",)


def found(paths: Sequence[str], suffixes: tuple[str, ...]) -> list[Path]:
    """The files among `paths`, and those with one of the suffixes in folders among them, hidden ones left out.

    Raises:
        ConfigError: a path is not there, or a folder has none.
    """
    listed = []
    for path in (Path(path).expanduser() for path in paths):
        if not path.exists():
            raise ConfigError(f"{path} is not there. Give files, or folders that hold {' '.join(suffixes)}.")
        inside = [path]
        if path.is_dir():
            inside = sorted(file for file in path.rglob("*") if file.suffix.lower() in suffixes)
            inside = [file for file in inside if not any(p.startswith(".") for p in file.relative_to(path).parts)]
        if not inside:
            raise ConfigError(f"{path} holds no file with one of {' '.join(suffixes)}.")
        listed += inside
    return listed


def answers(model: Trained, paths: Sequence[Path], top: int) -> Iterator[dict[str, Any]]:
    """For each file the likeliest classes, or the `error` that kept it from being read."""
    for some in itertools.batched(paths, BATCH):
        rows: list[Any] = []
        for path in some:
            try:
                rows.append(model.prepare(path.read_bytes()))
            except (CorruptExample, DataError, OSError) as error:
                rows.append(error)
        read = [row for row in rows if isinstance(row, dict)]
        # Always of one size, since each other one would be compiled anew.
        scores = iter(model.scores([*read, *read[:1] * (BATCH - len(read))]) if read else ())
        for path, row in zip(some, rows, strict=True):
            if isinstance(row, dict):
                yield {"file": str(path), "classes": _best(next(scores), model.classes, top)}
            else:
                yield {"file": str(path), "error": str(row)}


def _best(scores: np.ndarray, classes: Sequence[str], top: int) -> list[dict[str, Any]]:
    order = np.argsort(-scores, kind="stable")[:top]
    return [{"class": classes[i], "probability": round(float(scores[i]), 6)} for i in order]


def write(lines: Iterator[dict[str, Any]], form: str, out: io.TextIOBase) -> int:
    """Writes answers as they come; returns how many files could not be read."""
    table = csv.writer(out, lineterminator="\n")
    if form == "csv":
        table.writerow(["file", "class", "probability"])
    failed = 0
    for line in lines:
        if "error" in line:
            failed += 1
            print(f"Cannot be read: {line['file']}: {line['error']}", file=sys.stderr, flush=True)
        if form == "json":
            print(json.dumps(line, ensure_ascii=False), file=out, flush=True)
        else:
            table.writerows([line["file"], *each.values()] for each in line.get("classes", ()))
    return failed


@cli.command(
    cli.Flag("workdir", "Folder of the run.", required=True),
    cli.Flag("step", "Checkpoint to take; the newest if neither this nor --best is given.", int),
    cli.Flag("best", "Take the best checkpoint by evaluation during training.", bool, default=False),
    cli.Flag("top", "How many classes to name.", int, default=5),
    cli.Flag("format", "How to print them.", ("json", "csv"), default="json"),
    cli.Flag("out", "File to write to instead of printing."),
    words="files or folders, and flags as --name=value",
)
def main(f: cli.Values) -> int:
    if f.top < 1:
        raise ConfigError(f"--top={f.top} must be at least 1.")
    if f.out is not None:
        files.check_writable(Path(f.out).expanduser().parent)
    model = inference.load(f.workdir, step=f.step, best=f.best)
    if not model.classes:
        raise ConfigError(
            f'{f.workdir} is a run of task="{model.config.task}", which has no classes to choose from. A language '
            "model goes on with texts: python -m leanformer.generate."
        )
    paths = found(f.words, IMAGE_SUFFIXES if model.takes_images else TEXT_SUFFIXES)
    lines = answers(model, paths, f.top)
    if f.out is None:
        failed = write(lines, f.format, sys.stdout)
    else:
        how = {"newline": "", "encoding": "utf-8", "errors": files.ESCAPED}
        with files.asked(f.out) as draft, draft.open("w", **how) as out:
            failed = write(lines, f.format, out)
        print(f"Wrote {f.out}: {len(paths) - failed} of {len(paths)} files, step {model.step} of {f.workdir}.")
    return USER_ERROR if failed else 0


if __name__ == "__main__":
    cli.run(main)
