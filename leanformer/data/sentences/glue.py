"""GLUE's eight tasks (Wang et al. 2019, Table 1, without WNLI, as is common) in their published files.

A folder has the whole download, with one folder per task, such as SST-2/train.tsv, or only the files of one task. Two
other formats are supported. CoLA as published by its authors: in_domain_train.tsv and two `dev` files, which together
are GLUE's dev. SST-2 as sst2_train.tsv etc. without a header: a sentence, a tab, a label.
"""

import dataclasses
from collections.abc import Mapping
from pathlib import Path

from leanformer.data.sentences.tables import Columns
from leanformer.errors import DataError


Layout = tuple[tuple[Path, ...], Columns]  # files of one split, and their columns


@dataclasses.dataclass(frozen=True)
class Published:
    """Names, columns and classes of the published files of one GLUE task; `find` looks for the files.

    Attributes:
        folder: name of the task's folder in the download.
        columns: `Columns` of the files.
        classes: {label in the files: class name}, in the order of the model's outputs; None if labels are numbers.
        splits: names of the splits that have labels, such as "train"; only error messages use them.
        highest: largest label if labels are numbers; the smallest is 0.
        loose: another published form of the task, a pair ({split: names of its files}, their `Columns`); None if there
            is none.
        torn: largest fraction of lines with too few or too many columns that is skipped; see `tables.read`.
    """

    folder: str
    columns: Columns
    classes: Mapping[str, str] | None
    splits: tuple[str, ...] = ("train", "dev")
    highest: float = 5.0
    loose: tuple[Mapping[str, tuple[str, ...]], Columns] | None = None
    torn: float = 0.0  # above 0 for QQP, some of whose lines are damaged: other loaders skip them as well

    def find(self, root: Path, split: str) -> Layout:
        """Return the pair (paths of the files of a split, their columns).

        Args:
            root: folder with the whole download, or only the files of this task.
            split: name of the split, such as "train".

        Raises:
            DataError: there are no such files.
        """
        tried = [(root / self.folder / f"{split}.tsv",), (root / f"{split}.tsv",)]
        for files in tried:
            if files[0].is_file():
                return files, self.columns
        names, columns = self.loose or ({}, self.columns)
        for files in ([root / f"{prefix}{name}" for name in names.get(split, ())] for prefix in ("", "cola_")):
            if files and all(file.is_file() for file in files):
                return tuple(files), columns
        looked = ", ".join([*(str(files[0]) for files in tried), *names.get(split, ())])
        raise DataError(
            f'The split "{split}" of {self.folder} was not found: looked for {looked}. Set --config.data.dir to the '
            f"folder of GLUE's download; it has the splits {', '.join(self.splits)}."
        )


def _by_number(*names: str) -> dict[str, str]:
    return {str(number): name for number, name in enumerate(names)}


NLI = {name: name for name in ("entailment", "not_entailment")}
COLA = Columns(3, 1, number=4)  # source, label, the author's mark, sentence
RAW_COLA = {
    "train": ("in_domain_train.tsv",),
    "dev": ("in_domain_dev.tsv", "out_of_domain_dev.tsv"),
    "in_domain_dev": ("in_domain_dev.tsv",),
    "out_of_domain_dev": ("out_of_domain_dev.tsv",),
}
SENTENCES = {split: (f"sst2_{split}.tsv",) for split in ("train", "dev", "test")}

TASKS = {
    "cola": Published("CoLA", COLA, _by_number("unacceptable", "acceptable"), loose=(RAW_COLA, COLA)),
    "sst2": Published(
        "SST-2",
        Columns("sentence", "label"),
        _by_number("negative", "positive"),
        loose=(SENTENCES, Columns(0, 1, number=2)),
    ),
    "mrpc": Published("MRPC", Columns("#1 String", "Quality", "#2 String"), _by_number("not_equivalent", "equivalent")),
    "qqp": Published(
        "QQP", Columns("question1", "is_duplicate", "question2"), _by_number("not_duplicate", "duplicate"), torn=1e-3
    ),
    "stsb": Published("STS-B", Columns("sentence1", "score", "sentence2"), None),
    "mnli": Published(
        "MNLI",
        Columns("sentence1", "gold_label", "sentence2"),
        {name: name for name in ("entailment", "neutral", "contradiction")},
        ("train", "dev_matched", "dev_mismatched"),
    ),
    "qnli": Published("QNLI", Columns("question", "label", "sentence"), NLI),
    "rte": Published("RTE", Columns("sentence1", "label", "sentence2"), NLI),
}
