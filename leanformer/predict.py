"""Classification of files: `python -m leanformer.predict --workdir=DIR [--best|--step=N] FILE|FOLDER ...`

      ... [--top=5] [--format=json|csv] [--out=FILE]

Files are images if the run was trained on images, otherwise texts; folders are searched recursively. The output is the
most likely classes with probabilities, as one JSON line per file or as CSV with one row per class. Unreadable files are
reported, the others are classified, and the exit status is 2.
"""

import csv
import io
import itertools
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np

from leanformer import cli
from leanformer.errors import USER_ERROR, ConfigError, CorruptExample, DataError
from leanformer.runtime import files


BATCH = 32
TEXT_SUFFIXES = (".txt",)


def find_files(paths: Sequence[str], suffixes: tuple[str, ...]) -> list[Path]:
    """Return the files in `paths`, and all files with one of the suffixes in folders in `paths`, without hidden files.

    Warns about the other files in folders.

    Raises:
        ConfigError: a path does not exist, or a folder contains no such file.
    """

    from leanformer.data import source

    listed, skipped = [], []
    for path in (Path(path).expanduser() for path in paths):
        if not path.exists():
            raise ConfigError(f"{path} does not exist. Give files, or folders with {' '.join(suffixes)} files.")
        inside = [path]
        if path.is_dir():
            visible = [file for file in sorted(path.rglob("*")) if not _is_hidden(file.relative_to(path))]
            visible = [file for file in visible if not file.is_dir()]
            inside = [file for file in visible if file.suffix.lower() in suffixes]
            skipped += [str(file) for file in sorted({*visible} - {*inside})]
        if not inside:
            raise ConfigError(f"{path} contains no file with one of the suffixes {' '.join(suffixes)}.")
        listed += inside
    if skipped:
        suffix = f"no files with one of the suffixes {' '.join(suffixes)}"
        print(f"WARNING: skipped, because they are {suffix}: {source.quote(skipped)}", file=sys.stderr, flush=True)
    return listed


def _is_hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


def classify_files(model: Any, paths: Sequence[Path], top: int) -> Iterator[dict[str, Any]]:
    """Yield a record per file: {"file": ..., "classes": [...]}, or {"file": ..., "error": ...} if it is unreadable.

    Args:
        model: model that classifies.
        paths: files, images or texts as the model takes.
        top: number of classes per file, the most likely first: {"class": ..., "probability": ...}.
    """
    for group in itertools.batched(paths, BATCH):
        rows: list[Any] = []
        for path in group:
            try:
                rows.append(model.prepare(path.read_bytes()))
            except (CorruptExample, DataError, OSError) as error:
                rows.append(error)
        read = [row for row in rows if isinstance(row, dict)]
        # Batches are padded to one size, because every other size would be compiled again.
        scores = iter(model.scores([*read, *read[:1] * (BATCH - len(read))]) if read else ())
        for path, row in zip(group, rows, strict=True):
            if isinstance(row, dict):
                yield {"file": str(path), "classes": _select_best(next(scores), model.classes, top)}
            else:
                yield {"file": str(path), "error": getattr(row, "strerror", None) or str(row)}


def _select_best(scores: np.ndarray, classes: Sequence[str], top: int) -> list[dict[str, Any]]:
    order = np.argsort(-scores, kind="stable")[:top]
    return [{"class": classes[i], "probability": round(float(scores[i]), 6)} for i in order]


def write(lines: Iterator[dict[str, Any]], form: str, out: io.TextIOBase | IO[str]) -> int:
    """Write the records of `classify_files` as they arrive, and return the number of unreadable files.

    Each unreadable file is reported on stderr. It has a line in JSON, and no row in CSV.

    Args:
        lines: records from `classify_files`.
        form: "json" (one object per line) or "csv" (file, class, probability; one row per class).
        out: stream to write to.
    """
    table = csv.writer(out, lineterminator="\n")
    if form == "csv":
        table.writerow(["file", "class", "probability"])
    failed = 0
    for line in lines:
        if "error" in line:
            failed += 1
            print(f"WARNING: {line['file']} cannot be read: {line['error']}", file=sys.stderr, flush=True)
        if form == "json":
            print(json.dumps(line, ensure_ascii=False), file=out, flush=True)
        else:
            table.writerows([line["file"], *row.values()] for row in line.get("classes", ()))
    return failed


@cli.command(
    cli.Flag("workdir", "Folder of the run.", required=True),
    cli.Flag("step", "Checkpoint step to use; the newest if neither --step nor --best is given.", int),
    cli.Flag("best", "Use the best checkpoint by validation score.", bool, default=False),
    cli.Flag("top", "Number of classes per file.", int, default=5, minimum=1),
    cli.Flag("format", "Output format.", ("json", "csv"), default="json"),
    cli.Flag("out", "File to write to instead of printing."),
    words="files or folders, and flags as --name=value",
)
def main(f: cli.Values) -> int:
    from leanformer.data.images.sources import IMAGE_SUFFIXES
    from leanformer.runtime import phases
    from leanformer.training import inference

    if f.out is not None:
        files.check_output_file(f.out)
    model = inference.load(f.workdir, step=f.step, best=f.best)
    if not model.classes:
        raise ConfigError(f'{f.workdir} is a run with task="{model.config.task}" that has no classes. {model.advice}')
    paths = find_files(f.words, IMAGE_SUFFIXES if model.takes_images else TEXT_SUFFIXES)
    if f.out is not None:
        files.check_output_file(f.out, paths)
    lines = phases.announce_first(classify_files(model, paths, f.top), "Compiling, and classifying the first files")
    if f.out is None:
        failed = write(lines, f.format, sys.stdout)
    else:
        how: dict[str, Any] = {"newline": "", "encoding": "utf-8"}
        with files.atomic_write(Path(f.out).expanduser()) as draft, draft.open("w", **how) as out:
            failed = write(lines, f.format, out)
        print(f"Wrote {f.out}: {len(paths) - failed} of {len(paths)} files, step {model.step} of {f.workdir}.")
    return USER_ERROR if failed else 0


if __name__ == "__main__":
    cli.run(main)
