"""Confusion matrix of an evaluation: accuracy per class, most frequent errors, and a CSV file."""

import csv
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from jaxtyping import Int

from leanformer.errors import WorkdirError
from leanformer.runtime import files


def accuracy(matrix: Int[np.ndarray, "v v"]) -> list[float | None]:
    """Return the accuracy of each of V classes, in [0, 1], from counts V V (labels x predictions).

    A class without examples has None.
    """
    totals = matrix.sum(axis=1)
    counts = zip(matrix.diagonal(), totals, strict=True)
    return [float(correct / total) if total else None for correct, total in counts]


def most_confused(matrix: Int[np.ndarray, "v v"], most: int) -> list[tuple[int, int, int]]:
    """Return up to `most` of the most frequent errors from counts V V (labels x predictions).

    Each is (label, prediction, count) with the indices of the classes, the most frequent first.
    """
    wrong = matrix - np.diag(matrix.diagonal())
    order = np.argsort(-wrong, axis=None, kind="stable")[:most]
    cells = (tuple(map(int, np.unravel_index(place, wrong.shape))) for place in order)
    return [(label, predicted, int(wrong[label, predicted])) for label, predicted in cells if wrong[label, predicted]]


def write_csv(path: Path, matrix: Int[np.ndarray, "v v"], classes: Sequence[str]) -> None:
    """Write counts V V (labels x predictions) as CSV, with the names of the V classes in the first row and column."""
    with (
        files.atomic_write(path) as draft,
        draft.open("w", newline="", encoding="utf-8", errors="backslashreplace") as file,
    ):
        table = csv.writer(file)
        table.writerow(["label \\ predicted", *classes])
        table.writerows([name, *row] for name, row in zip(classes, matrix.tolist(), strict=True))


def read_csv(path: Path) -> tuple[Int[np.ndarray, "v v"], list[str]]:
    """Return the counts V V (labels x predictions) and the names of the V classes from a file of `write_csv`.

    Raises WorkdirError if the file is not a square table of whole numbers.
    """
    try:
        with path.open(newline="", encoding="utf-8") as file:
            head, *rows = [*csv.reader(file)] or [[]]
        matrix = np.array([[int(cell) for cell in row[1:]] for row in rows])
        if matrix.shape != (len(head) - 1,) * 2:
            raise ValueError(f"{len(rows)} rows and {len(head)} columns")
    except (ValueError, csv.Error) as error:  # of numbers, of UTF-8, or of the table
        raise WorkdirError(f"{path} is not a confusion matrix: {error}. Run evaluate again.") from error
    return matrix, head[1:]
