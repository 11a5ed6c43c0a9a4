"""Which class was taken for which: the matrix of an evaluation as figures and as a table."""

import csv
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from jaxtyping import Int

from leanformer.errors import WorkdirError
from leanformer.runtime import files


def accuracy(matrix: Int[np.ndarray, "v v"]) -> list[float | None]:
    """The share that is right of each label's examples, in [0, 1]; None for a label without any."""
    totals = matrix.sum(axis=1)
    return [float(right / total) if total else None for right, total in zip(matrix.diagonal(), totals, strict=True)]


def mistakes(matrix: Int[np.ndarray, "v v"], most: int) -> list[tuple[int, int, int]]:
    """The most frequent ones, as label, what it was taken for, and how often."""
    wrong = matrix - np.diag(matrix.diagonal())
    order = np.argsort(-wrong, axis=None, kind="stable")[:most]
    found = (tuple(map(int, np.unravel_index(place, wrong.shape))) for place in order)
    return [(label, taken, int(wrong[label, taken])) for label, taken in found if wrong[label, taken]]


def write_csv(path: Path, matrix: Int[np.ndarray, "v v"], classes: Sequence[str]) -> None:
    """A row a label, a column what was taken for it, both by name."""
    with files.whole(path) as draft, draft.open("w", newline="", encoding="utf-8", errors=files.ESCAPED) as file:
        table = csv.writer(file)
        table.writerow(["label \\ taken for", *classes])
        table.writerows([name, *row] for name, row in zip(classes, matrix.tolist(), strict=True))


def read_csv(path: Path) -> tuple[Int[np.ndarray, "v v"], list[str]]:
    """The matrix and the classes of a table that `write_csv` wrote. Raises WorkdirError for another."""
    with path.open(newline="", encoding="utf-8") as file:
        head, *rows = [*csv.reader(file)] or [[]]
    try:
        matrix = np.array([[int(cell) for cell in row[1:]] for row in rows])
        if matrix.shape != (len(head) - 1,) * 2:
            raise ValueError(f"{len(rows)} rows and {len(head)} columns")
    except ValueError as error:
        raise WorkdirError(f"{path} is no confusion matrix: {error}. Run evaluate again.") from error
    return matrix, head[1:]
