"""GLUE's eight tasks (Wang et al. 2019, Table 1; WNLI is left out, as it is everywhere) in their published files.

A folder holds the download, a folder a task, such as SST-2/train.tsv; or the files of one task. CoLA is also read as
its authors publish it, in_domain_train.tsv and two more, of which the two `dev` files together are GLUE's dev; and
SST-2 as sentences alone, sst2_train.tsv, a sentence, a tab, a label, without a header.
"""

import dataclasses
from collections.abc import Mapping
from pathlib import Path

from leanformer.data.sentences.tables import Columns
from leanformer.errors import DataError


Layout = tuple[tuple[Path, ...], Columns]  # files that are one split, and where they have what


@dataclasses.dataclass(frozen=True)
class Published:
    """One task.

    Attributes:
        folder: of the download.
        columns: of its files.
        classes: their names by the word that stands for them, in the order of the model's outputs; None where the
            label is a number from 0 to `highest`.
        splits: that have labels.
        loose: other files that are published: by split, their names; and their columns.
        torn: share of a file's lines that may be short of columns, or have too many: some of QQP's are so as published,
            and loaders elsewhere leave them out as well.
    """

    folder: str
    columns: Columns
    classes: Mapping[str, str] | None
    splits: tuple[str, ...] = ("train", "dev")
    highest: float = 5.0
    loose: tuple[Mapping[str, tuple[str, ...]], Columns] | None = None
    torn: float = 0.0

    def find(self, root: Path, split: str) -> Layout:
        """The files of a split. Raises DataError where there are none."""
        tried = [(root / self.folder / f"{split}.tsv",), (root / f"{split}.tsv",)]
        for files in tried:
            if files[0].is_file():
                return files, self.columns
        names, columns = self.loose or ({}, self.columns)
        for files in ([root / f"{prefix}{name}" for name in names.get(split, ())] for prefix in ("", "cola_")):
            if files and all(file.is_file() for file in files):
                return tuple(files), columns
        known = ", ".join(sorted(file.name for file in root.glob("*.tsv"))[:8]) or "no .tsv"
        looked = ", ".join([*(str(files[0]) for files in tried), *names.get(split, ())])
        raise DataError(
            f'The split "{split}" of {self.folder} is not there: looked for {looked}. Found in {root}: {known}. Set '
            f"--config.data.dir to the folder of GLUE's download; it has the splits {', '.join(self.splits)}."
        )


def _of(*names: str) -> dict[str, str]:
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
    "cola": Published("CoLA", COLA, _of("unacceptable", "acceptable"), loose=(RAW_COLA, COLA)),
    "sst2": Published(
        "SST-2", Columns("sentence", "label"), _of("negative", "positive"), loose=(SENTENCES, Columns(0, 1, number=2))
    ),
    "mrpc": Published("MRPC", Columns("#1 String", "Quality", "#2 String"), _of("not_equivalent", "equivalent")),
    "qqp": Published(
        "QQP", Columns("question1", "is_duplicate", "question2"), _of("not_duplicate", "duplicate"), torn=1e-3
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
