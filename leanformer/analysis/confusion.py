"""Confusion matrix of an evaluation: accuracy per class, most frequent errors, and a CSV file."""

import csv
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from jaxtyping import Int

from leanformer.errors import WorkdirError
from leanformer.runtime import files


def accuracy(matrix: Int[np.ndarray, "v v"]) -> list[float | None]:
    """Return the accuracy per class, in [0, 1], from counts V V (labels x predictions); None without examples."""
    totals = matrix.sum(axis=1)
    counts = zip(matrix.diagonal(), totals, strict=True)
    return [float(correct / total) if total else None for correct, total in counts]


def most_confused(matrix: Int[np.ndarray, "v v"], most: int) -> list[tuple[int, int, int]]:
    """Return up to `most` of the most frequent errors as (label, prediction, count), from counts V V."""
    wrong = matrix - np.diag(matrix.diagonal())
    order = np.argsort(-wrong, axis=None, kind="stable")[:most]
    cells = (tuple(map(int, np.unravel_index(place, wrong.shape))) for place in order)
    return [(label, predicted, int(wrong[label, predicted])) for label, predicted in cells if wrong[label, predicted]]


def write_csv(path: Path, matrix: Int[np.ndarray, "v v"], classes: Sequence[str]) -> None:
    """Write the matrix as CSV: one row per label, one column per prediction, with the names of the classes."""
    with files.atomic_write(path) as draft, draft.open("w", newline="", encoding="utf-8", errors=files.ESCAPED) as file:
        table = csv.writer(file)
        table.writerow(["label \\ predicted", *classes])
        table.writerows([name, *row] for name, row in zip(classes, matrix.tolist(), strict=True))


def read_csv(path: Path) -> tuple[Int[np.ndarray, "v v"], list[str]]:
    """Return the matrix and the classes from a file of `write_csv`. Raises WorkdirError for any other file."""
    with path.open(newline="", encoding="utf-8") as file:
        head, *rows = [*csv.reader(file)] or [[]]
    try:
        matrix = np.array([[int(cell) for cell in row[1:]] for row in rows])
        if matrix.shape != (len(head) - 1,) * 2:
            raise ValueError(f"{len(rows)} rows and {len(head)} columns")
    except ValueError as error:
        raise WorkdirError(f"{path} is not a confusion matrix: {error}. Run evaluate again.") from error
    return matrix, head[1:]
