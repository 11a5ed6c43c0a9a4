"""Classification of files: `python -m leanformer.predict --workdir=DIR [--best|--step=N] FILE|FOLDER ...`

      ... [--top=5] [--format=json|csv] [--out=FILE]

Files are images if the run was trained on images, otherwise texts; folders are searched recursively. The output is the
most likely classes with probabilities, as one JSON line per file or as CSV with one row per class. Unreadable files are
reported, the others are classified, and the exit status is 2.
"""

import csv
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from leanformer import cli
from leanformer.errors import USER_ERROR, ConfigError, DataError
from leanformer.runtime import files


TEXT_SUFFIXES = (".txt",)


def find_files(paths: Sequence[str], suffixes: tuple[str, ...]) -> list[Path]:
    """Return the files in `paths`, and the files with one of the suffixes in folders in `paths`, but no hidden ones."""
    found = []
    for path in (Path(path).expanduser() for path in paths):
        inside = [file for file in sorted(path.rglob("[!.]*")) if file.suffix.lower() in suffixes]
        if not inside and not path.is_file():
            raise ConfigError(f"{path} does not exist, or contains no file with {' '.join(suffixes)}.")
        found += inside or [path]
    return found


def classify_files(model: Any, paths: Sequence[Path], top: int) -> Iterator[dict[str, Any]]:
    """Yield {"file": ..., "classes": [...]} per file, or {"file": ..., "error": ...} if it is unreadable.

    The `top` classes are {"class": ..., "probability": ...}, the most likely first.
    """
    errors: dict[Path, str] = {}

    def read() -> Iterator[Any]:
        for path in paths:
            try:
                yield model.prepare(path)
            except DataError as error:
                print(f"WARNING: {path} cannot be read: {error}", file=sys.stderr, flush=True)
                errors[path] = str(error)

    scores = iter(model.scores(read()))
    for path in paths:
        if path in errors:
            yield {"file": str(path), "error": errors[path]}
            continue
        probabilities = next(scores)
        best = np.argsort(-probabilities, kind="stable")[:top]
        classes = [{"class": model.classes[i], "probability": round(float(probabilities[i]), 6)} for i in best]
        yield {"file": str(path), "classes": classes}


def write(records: Sequence[dict[str, Any]], form: str, out: Any) -> None:
    """Write the records as "json" lines, or as "csv" with one row per class, to a stream."""
    if form == "json":
        out.writelines(json.dumps(record, ensure_ascii=False) + "\n" for record in records)
        return
    table = csv.writer(out, lineterminator="\n")
    table.writerow(["file", "class", "probability"])
    table.writerows([record["file"], *row.values()] for record in records for row in record.get("classes", ()))


@cli.command(
    cli.Flag("workdir", "Folder of the run.", required=True),
    cli.Flag("step", "Checkpoint step to use; the newest if neither --step nor --best is given.", int),
    cli.Flag("best", "Use the best checkpoint by validation score.", bool, default=False),
    cli.Flag("top", "Number of classes per file.", int, default=5, minimum=1),
    cli.Flag("format", "Output format.", ("json", "csv"), default="json"),
    cli.Flag("out", "File to write to instead of printing."),
    words="files or folders, and flags as --name=value",
)
def main(flags: cli.Values) -> int:
    from leanformer.data.images.sources import IMAGE_SUFFIXES
    from leanformer.training import inference

    model = inference.load(flags.workdir, step=flags.step, best=flags.best)
    model.check_classes()
    paths = find_files(flags.words, IMAGE_SUFFIXES if model.takes_images else TEXT_SUFFIXES)
    if flags.out is not None:
        files.check_output_file(flags.out, paths)
    records = [*classify_files(model, paths, flags.top)]
    if flags.out is None:
        write(records, flags.format, sys.stdout)
    else:
        with Path(flags.out).expanduser().open("w", newline="", encoding="utf-8") as out:
            write(records, flags.format, out)
        print(f"Wrote {flags.out}: {len(paths)} files, step {model.step} of {flags.workdir}.")
    return USER_ERROR if any("error" in record for record in records) else 0


if __name__ == "__main__":
    cli.run(main)
