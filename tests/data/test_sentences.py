"""Labelled sentences: GLUE's published files, other tables, and token rows."""

import itertools

import numpy as np
import pytest
import tokenizers
from messages import mentions, refuses
from tokenizers import models, normalizers, pre_tokenizers

from leanformer.config.texts import GLUE
from leanformer.data.sentences import KINDS, TASKS, join_pair, open_table, truncated_lengths
from leanformer.data.text import tokenizer as readers
from leanformer.errors import DataError


WORDS = "the bear saw a bird and sang of it all day long not no good bad".split()  # noqa: SIM905
HEADERS = {  # header lines of the published download; None: no header line
    "cola": None,
    "sst2": "sentence label",
    "mrpc": "Quality|#1 ID|#2 ID|#1 String|#2 String",
    "qqp": "id qid1 qid2 question1 question2 is_duplicate",
    "stsb": "index genre filename year old_index source1 source2 sentence1 sentence2 score",  # data
    "mnli": "index promptID pairID genre sentence1_binary_parse sentence2_binary_parse sentence1_parse sentence2_parse "
    "sentence1 sentence2 label1 gold_label",
    "qnli": "index question sentence label",  # data
    "rte": "index sentence1 sentence2 label",
}
FOLDERS = ("CoLA", "SST-2", "MRPC", "QQP", "STS-B", "MNLI", "QNLI", "RTE")


def split_header(header):
    return header.split("|" if "|" in header else None)


def write_table(file, header, rows):
    file.parent.mkdir(parents=True, exist_ok=True)
    lines = [*([header] if header else []), *rows]
    file.write_bytes(b"\n".join("\t".join(map(str, line)).encode() for line in lines) + b"\n")


def make_row(task, first, second, label):
    """Return the cells of one line of the published file; columns that must not be read hold a filler."""
    if task == "cola":
        return ["gj04", label, "*", first]
    names, columns = split_header(HEADERS[task]), TASKS[task].columns
    cells = {columns.sentence: first, columns.sentence2: second, columns.label: label}
    return [cells.get(name, "xxx") for name in names]


def list_labels(task):
    classes = TASKS[task].classes
    return list(classes) if classes else ["0.0", "1.25", "3.600", "5"]


@pytest.fixture
def download(tmp_path):
    """Write GLUE's folder with 37 rows in every split of every task, and return it."""
    draw, folder = np.random.default_rng(7), tmp_path / "glue"

    def text():
        return " ".join(draw.choice(WORDS, size=draw.integers(3, 9)))

    for task, name in zip(HEADERS, FOLDERS, strict=True):
        splits = ("train", "dev_matched", "dev_mismatched") if task == "mnli" else ("train", "dev")
        for split in splits:
            rows = [make_row(task, text(), text(), draw.choice(list_labels(task))) for _ in range(37)]
            header = HEADERS[task] and split_header(HEADERS[task])
            write_table(folder / name / f"{split}.tsv", header, rows)
    return folder


@pytest.fixture
def wordpiece(tmp_path):
    """Write a tokenizer.json like BERT's with few words, and return its path."""
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    vocabulary = {token: i for i, token in enumerate([*special, *WORDS, "##s", "##ing"])}
    tokenizer = tokenizers.Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer, tokenizer.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    tokenizer.add_special_tokens(special)
    file = tmp_path / "words" / "tokenizer.json"
    file.parent.mkdir()
    file.write_text(tokenizer.to_str())
    return file


def test_malformed_qqp_lines_are_skipped_with_a_warning(download):
    """The published files have some: at most one in a thousand is accepted, and in other tasks none."""
    file, good = download / "QQP" / "train.tsv", make_row("qqp", "who sang?", "what bear?", 1)
    lines = [split_header(HEADERS["qqp"])] + [good] * 1999
    lines[7], lines[900] = good[:4], [*good, "bear"]
    write_table(file, None, lines)
    with pytest.warns(UserWarning) as warned:
        rows, _ = open_table("qqp", "train", dir=str(download))
    assert mentions(str(warned[0].message), file, 2, 2000, 8)
    assert len(rows) == 1997 and {7, 8, 901, 902} & {result.line for result in rows} == {7, 902}
    lines[3] = good[:4]
    write_table(file, None, lines)
    with refuses(file, 3, "2,000", error=DataError):
        open_table("qqp", "train", dir=str(download))
    file, good = download / "RTE" / "train.tsv", make_row("rte", "a bear", "a bird", "entailment")
    write_table(file, None, [split_header(HEADERS["rte"]), *[good] * 1999, ["1"]])
    with refuses(f"{file}, line 2001", "1 columns", 4, error=DataError):
        open_table("rte", "train", dir=str(download))


@pytest.mark.parametrize("task", GLUE)
def test_published_files_are_read(task, download):
    spec, expected = TASKS[task], GLUE[task]
    assert task in KINDS
    assert (len(spec.classes) if spec.classes else 1) == expected.outputs
    file = download / spec.folder / f"{expected.dev}.tsv"
    published = [line.split("\t") for line in file.read_text().splitlines()][HEADERS[task] is not None :]
    rows, classes = open_table(task, expected.dev, dir=str(download), numbers=expected.outputs == 1)
    assert len(rows) == 37 and rows[0].line == (1 if task == "cola" else 2)
    for result, cells in zip(rows, published, strict=True):
        assert cells == make_row(task, *result.texts, *[None] * (2 - len(result.texts)), cells[find_label_column(task)])
        label = cells[find_label_column(task)]
        assert result.label == (list_labels(task).index(label) if classes else float(label))
    assert len(rows[0].texts) == (1 if task in ("cola", "sst2") else 2)
    same, _ = open_table(task, expected.dev, dir=str(download / spec.folder), numbers=expected.outputs == 1)
    assert [result.texts for result in same] == [result.texts for result in rows]


def find_label_column(task):
    return 1 if task == "cola" else split_header(HEADERS[task]).index(TASKS[task].columns.label)


GOOD = b"sentence\tlabel\nit is good\t1\nit is bad\t0\n"


@pytest.mark.parametrize(
    ("content", "parts"),
    [
        (GOOD + b"short\n", ("line 4", "1 columns", 2)),
        (GOOD + b"a\t2\n", ("line 4", "'2'", 0, 1)),
        (b"sentence\tlabel\tlabel\na\t0\t1\n", ("line 1", "label")),
        (GOOD + b"caf\xe9\t1\n", ("line 4", "utf-8", "0xe9")),
    ],
)
def test_malformed_file_is_refused(content, parts, tmp_path):
    (tmp_path / "dev.tsv").write_bytes(content)
    with refuses(tmp_path / "dev.tsv", *parts, error=DataError):
        open_table("sst2", "dev", dir=str(tmp_path))


def test_invalid_splits_labels_and_tasks_are_refused(tmp_path, download):
    for word in ("5.5", "nan", "good"):
        write_table(tmp_path / "dev.tsv", split_header(HEADERS["stsb"]), [make_row("stsb", "a", "b", word)])
        with refuses("line 2", word, error=DataError):
            open_table("stsb", "dev", dir=str(tmp_path), numbers=True)
    with refuses('data.name="stsb"', "model.num_classes=1", error=DataError):
        open_table("stsb", "dev", dir=str(download))
    with refuses('data.name="rte"', "model.num_classes", error=DataError):
        open_table("rte", "dev", dir=str(download), numbers=True)
    with refuses("RTE", download / "RTE" / "test.tsv", error=DataError):
        open_table("rte", "test", dir=str(download))
    with refuses("glue", *GLUE):
        open_table("glue", "dev")
    with refuses(tmp_path / "x.tsv", "dev.tsv", error=DataError):
        open_table(f"tsv:{tmp_path}", "x")


def test_other_tables_are_read(tmp_path):
    write_table(
        tmp_path / "train.tsv", ["label", "id", "sentence"], [["no", 1, "a"], ["yes", 2, "b"], ["maybe", 3, "c"]]
    )
    write_table(tmp_path / "dev.tsv", ["sentence", "sentence2", "label"], [["a", "b", "yes"]])
    rows, classes = open_table(f"tsv:{tmp_path}", "train")
    assert classes == ("maybe", "no", "yes") and [result.label for result in rows] == [1, 2, 0]
    (pair,), _ = open_table(f"tsv:{tmp_path}", "dev", classes=classes)
    assert pair.texts == ("a", "b") and pair.label == 2
    with refuses("line 2", "'yes'", "no, never", error=DataError):
        open_table(f"tsv:{tmp_path}", "dev", classes=("no", "never"))
    write_table(tmp_path / "dev.tsv", ["sentence", "label"], [["a", "-7.5"], ["b", "2e3"]])
    assert [result.label for result in open_table(f"tsv:{tmp_path}", "dev", numbers=True)[0]] == [-7.5, 2000]
    write_table(tmp_path / "dev.tsv", ["sentence", "label"], [["a", "-1"], ["b", "0"], ["c", "1"]])  # of a sentiment
    rows, classes = open_table(f"tsv:{tmp_path}", "dev")
    assert classes == ("-1", "0", "1") and [result.label for result in rows] == [0, 1, 2]
    (tmp_path / "classes.txt").write_text("yes\nno\nmaybe\n")
    assert open_table(f"tsv:{tmp_path}", "train")[1] == ("yes", "no", "maybe")


def test_longer_sentence_is_truncated_first():
    for length, first, second in itertools.product(range(8), range(7), range(7)):
        a, b = first, second
        while a + b > length:  # one token at a time
            a, b = (a - 1, b) if a > b else (a, b - 1)
        assert truncated_lengths(first, second, length) == (a, b)


def test_rows_equal_the_tokenizers_library(wordpiece):
    """Compare with the template, types, longest-first truncation and padding of the tokenizers library."""
    text, reader = wordpiece.read_text(), readers.read(wordpiece)
    library = tokenizers.Tokenizer.from_str(text)
    special = tuple(library.token_to_id(token) for token in ("[CLS]", "[SEP]", "[PAD]"))
    assert special[0] != special[1] != special[2] == 0
    library.post_processor = tokenizers.processors.BertProcessing(("[SEP]", special[1]), ("[CLS]", special[0]))
    draw = np.random.default_rng(3)
    library.enable_padding(length=17, pad_id=special[2])
    library.enable_truncation(17, strategy="longest_first")
    for pair in (False, True):
        for _ in range(60):
            texts = [" ".join(draw.choice(WORDS, size=draw.integers(1, 25))) for _ in range(1 + pair)]
            example = dict(zip(("tokens", "tokens2"), reader.encode(texts), strict=False))
            result, encoded = join_pair(example, special, 17), library.encode(*texts)
            if pair and len(example["tokens"]) == len(example["tokens2"]):
                continue  # for equal lengths the library truncates the first
            assert result["lengths"] == sum(encoded.attention_mask)
            np.testing.assert_array_equal(result["types"], encoded.type_ids)
            if not pair or sum(encoded.attention_mask) < 17:
                np.testing.assert_array_equal(result["tokens"], encoded.ids)
