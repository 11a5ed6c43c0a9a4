"""Sentences with a label: GLUE's published files and any table, and rows of tokens."""

import itertools

import numpy as np
import pytest
import tokenizers
from messages import mentions, refuses
from tokenizers import models, normalizers, pre_tokenizers

from leanformer.config.sentences import GLUE
from leanformer.data.sentences import KINDS, glue, open_table
from leanformer.data.sentences.encoded import join_pair, truncated_lengths
from leanformer.data.text import tokenizer as readers
from leanformer.errors import DataError


WORDS = "the bear saw a bird and sang of it all day long not no good bad".split()  # noqa: SIM905
HEADERS = {  # of the download, as published; None: without one
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


def words_of(header):
    return header.split("|" if "|" in header else None)


def write(file, header, rows):
    file.parent.mkdir(parents=True, exist_ok=True)
    lines = [*([header] if header else []), *rows]
    file.write_bytes(b"\n".join("\t".join(map(str, line)).encode() for line in lines) + b"\n")


def row(task, first, second, label):
    """A line of the published file, other columns filled with what must not be read."""
    if task == "cola":
        return ["gj04", label, "*", first]
    names, known = words_of(HEADERS[task]), glue.TASKS[task].columns
    cells = {known.sentence: first, known.sentence2: second, known.label: label}
    return [cells.get(name, "xxx") for name in names]


def sentence(draw):
    return " ".join(draw.choice(WORDS, size=draw.integers(3, 9)))


def labels(task):
    known = glue.TASKS[task].classes
    return list(known) if known else ["0.0", "1.25", "3.600", "5"]


@pytest.fixture
def download(tmp_path):
    """GLUE's folder, every task of a few rows, in which `good` decides."""
    draw, folder = np.random.default_rng(7), tmp_path / "glue"
    for task, name in zip(HEADERS, FOLDERS, strict=True):
        splits = ("train", "dev_matched", "dev_mismatched") if task == "mnli" else ("train", "dev")
        for split in splits:
            rows = [row(task, sentence(draw), sentence(draw), draw.choice(labels(task))) for _ in range(37)]
            header = HEADERS[task] and words_of(HEADERS[task])
            write(folder / name / f"{split}.tsv", header, rows)
    return folder


@pytest.fixture
def wordpiece(tmp_path):
    """A tokenizer.json as BERT's, whose words are few."""
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    known = {token: i for i, token in enumerate([*special, *WORDS, "##s", "##ing"])}
    made = tokenizers.Tokenizer(models.WordPiece(known, unk_token="[UNK]"))
    made.normalizer, made.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    made.add_special_tokens(special)
    file = tmp_path / "words" / "tokenizer.json"
    file.parent.mkdir()
    file.write_text(made.to_str())
    return file


def test_torn_lines_of_qqp_are_left_out_and_told(download):
    """As published some are; a thousandth of them at most, and of no other task any."""
    file, good = download / "QQP" / "train.tsv", row("qqp", "who sang?", "what bear?", 1)
    lines = [words_of(HEADERS["qqp"])] + [good] * 1999
    lines[7], lines[900] = good[:4], [*good, "bear"]
    write(file, None, lines)
    with pytest.warns(UserWarning) as warned:
        rows, _ = open_table("qqp", "train", dir=str(download))
    assert mentions(str(warned[0].message), file, 2, 2000, 8, 901)
    assert len(rows) == 1997 and {7, 8, 901, 902} & {result.line for result in rows} == {7, 902}
    lines[3] = good[:4]
    write(file, None, lines)
    with refuses(f"{file}, line 4", "4 columns", 6, 8, 901, error=DataError):
        open_table("qqp", "train", dir=str(download))
    lines[3], lines[900] = row("qqp", "who sang?", "what bear?", 7), good  # another fault is none that may be
    write(file, None, lines)
    with refuses(f"{file}, line 4", "'7'", error=DataError):
        open_table("qqp", "train", dir=str(download))
    file = download / "RTE" / "train.tsv"
    write(file, None, [words_of(HEADERS["rte"]), *([row("rte", "a bear", "a bird", "entailment")] * 1999), ["1"]])
    with refuses(f"{file}, line 2001", "1 columns", 4, error=DataError):
        open_table("rte", "train", dir=str(download))


@pytest.mark.parametrize("task", GLUE)
def test_published_files(task, download):
    known, wanted = glue.TASKS[task], GLUE[task]
    assert task in KINDS and wanted.dev in known.splits
    assert (len(known.classes) if known.classes else 1) == wanted.outputs
    file = download / known.folder / f"{wanted.dev}.tsv"
    written = [line.split("\t") for line in file.read_text().splitlines()][HEADERS[task] is not None :]
    rows, classes = open_table(task, wanted.dev, dir=str(download), numbers=wanted.outputs == 1)
    assert len(rows) == 37 and rows[0].line == (1 if task == "cola" else 2)
    for result, cells in zip(rows, written, strict=True):
        assert cells == row(task, *result.texts, *[None] * (2 - len(result.texts)), cells[cells_label(task)])
        label = cells[cells_label(task)]
        assert result.label == (labels(task).index(label) if classes else float(label))
    assert len(rows[0].texts) == (1 if task in ("cola", "sst2") else 2)
    same, _ = open_table(task, wanted.dev, dir=str(download / known.folder), numbers=wanted.outputs == 1)
    assert [result.texts for result in same] == [result.texts for result in rows]


def cells_label(task):
    return 1 if task == "cola" else words_of(HEADERS[task]).index(glue.TASKS[task].columns.label)


def test_files_as_their_authors_publish_them(tmp_path):
    """Without headers; quotes are letters, and so are what other readers take for ends of lines."""
    write(
        tmp_path / "cola_in_domain_train.tsv", None, [["gj04", 1, "", 'A "quote'], ["gj04", 0, "*", "Two\u2028lines."]]
    )
    for name, text in (("in_domain_dev", "In."), ("out_of_domain_dev", "Out.")):
        write(tmp_path / f"cola_{name}.tsv", None, [["x", 1, "", text]])
    write(tmp_path / "sst2_train.tsv", None, [["it 's good", 1], ["it 's bad", 0]])
    rows, classes = open_table("cola", "train", dir=str(tmp_path))
    assert [(result.texts, result.label) for result in rows] == [(('A "quote',), 1), (("Two\u2028lines.",), 0)]
    assert classes == ("unacceptable", "acceptable")
    both = open_table("cola", "dev", dir=str(tmp_path))[0]
    assert [result.texts[0] for result in both] == ["In.", "Out."] and both[1].path.name == "cola_out_of_domain_dev.tsv"
    assert [result.texts[0] for result in open_table("cola", "out_of_domain_dev", dir=str(tmp_path))[0]] == ["Out."]
    assert [result.label for result in open_table("sst2", "train", dir=str(tmp_path))[0]] == [1, 0]


GOOD = b"sentence\tlabel\nit is good\t1\nit is bad\t0\n"


@pytest.mark.parametrize(
    ("content", "parts"),
    [
        (GOOD + b"short\n", ("line 4", "1 columns", 2)),
        (GOOD + b"a\t1\t2\n", ("line 4", "3 columns", 2)),
        (GOOD + b"a\t2\n", ("line 4", "'2'", 0, 1, "SST-2")),
        (GOOD + b"a\tpositive\n", ("line 4", "'positive'")),
        (GOOD + b"  \t1\n", ("line 4",)),
        (GOOD + b"caf\xe9\t1\n", ("line 4", "UTF-8", "0xe9")),
        (GOOD + b"a\t-1\n", ("line 4", "-1")),
        (GOOD + b"\na\t1\n\n", ("line 4", "1 columns", 2, "line 6")),
        (GOOD + b"x\n" * 12, ("line 4", 11, 5, 12)),
        (b"sentence\tlabel\n", ()),
        (b"", ("line 1", "sentence", "label")),
        (b"text\tlabel\na\t1\n", ("line 1", "sentence", "text, label")),
        (b"index\tsentence\n0\ta\n", ("GLUE",)),
    ],
)
def test_a_file_that_is_not_whole_is_not_used(content, parts, tmp_path):
    (tmp_path / "dev.tsv").write_bytes(content)
    with refuses(tmp_path / "dev.tsv", *parts, error=DataError):
        open_table("sst2", "dev", dir=str(tmp_path))


def test_what_else_is_refused(tmp_path, download):
    (tmp_path / "test.tsv").write_bytes(b"index\tsentence\n0\ta\n")
    with refuses(tmp_path / "test.tsv", "GLUE", error=DataError):
        open_table("cola", "test", dir=str(tmp_path))
    for word in ("5.5", "-0.5", "nan", "good", "inf"):
        write(tmp_path / "dev.tsv", words_of(HEADERS["stsb"]), [row("stsb", "a", "b", word)])
        with refuses("line 2", f"'{word}'", 0, 5, error=DataError):
            open_table("stsb", "dev", dir=str(tmp_path), numbers=True)
    with refuses('data.name="stsb"', "model.num_classes=1", error=DataError):
        open_table("stsb", "dev", dir=str(download))
    with refuses('data.name="rte"', "model.num_classes", error=DataError):
        open_table("rte", "dev", dir=str(download), numbers=True)
    with refuses("RTE", download / "RTE" / "test.tsv", "train", "dev", error=DataError):
        open_table("rte", "test", dir=str(download))
    with refuses("GLUE", "--config.data.dir", error=DataError):
        open_table("rte", "dev")
    with refuses("glue", *GLUE):
        open_table("glue", "dev")
    with refuses(tmp_path / "x.tsv", "dev.tsv", "test.tsv", error=DataError):
        open_table(f"tsv:{tmp_path}", "x")


def test_any_table(tmp_path):
    write(tmp_path / "train.tsv", ["label", "id", "sentence"], [["no", 1, "a"], ["yes", 2, "b"], ["maybe", 3, "c"]])
    write(tmp_path / "dev.tsv", ["sentence", "sentence2", "label"], [["a", "b", "yes"]])
    rows, classes = open_table(f"tsv:{tmp_path}", "train")
    assert classes == ("maybe", "no", "yes") and [result.label for result in rows] == [1, 2, 0]
    (pair,), _ = open_table(f"tsv:{tmp_path}", "dev", classes=classes)
    assert pair.texts == ("a", "b") and pair.label == 2
    with refuses(tmp_path / "dev.tsv", "1 (yes)", error=DataError):
        open_table(f"tsv:{tmp_path}", "dev")
    with refuses("line 2", "'yes'", "no, never", error=DataError):
        open_table(f"tsv:{tmp_path}", "dev", classes=("no", "never"))
    write(tmp_path / "dev.tsv", ["sentence", "label"], [["a", "-7.5"], ["b", "2e3"]])
    assert [result.label for result in open_table(f"tsv:{tmp_path}", "dev", numbers=True)[0]] == [-7.5, 2000]
    (tmp_path / "classes.txt").write_text("yes\nno\nmaybe\n")
    assert open_table(f"tsv:{tmp_path}", "train")[1] == ("yes", "no", "maybe")


@pytest.mark.parametrize("room", range(8))
def test_the_longer_one_is_cut(room):
    for first, second in itertools.product(range(7), range(7)):
        a, b = first, second
        while a + b > room:  # one token at a time
            a, b = (a - 1, b) if a > b else (a, b - 1)
        assert truncated_lengths(first, second, room) == (a, b)


def test_rows_are_what_the_library_makes(wordpiece):
    """The tokenizers library's own template, types, longest-first truncation and padding."""
    text, reader = wordpiece.read_text(), readers.read(wordpiece)
    library = tokenizers.Tokenizer.from_str(text)
    marks = tuple(library.token_to_id(token) for token in ("[CLS]", "[SEP]", "[PAD]"))
    assert marks[0] != marks[1] != marks[2] == 0
    library.post_processor = tokenizers.processors.BertProcessing(("[SEP]", marks[1]), ("[CLS]", marks[0]))
    draw = np.random.default_rng(3)
    library.enable_padding(length=17, pad_id=marks[2])
    library.enable_truncation(17, strategy="longest_first")
    for pair in (False, True):
        for _ in range(60):
            texts = [" ".join(draw.choice(WORDS, size=draw.integers(1, 25))) for _ in range(1 + pair)]
            example = dict(zip(("tokens", "tokens2"), reader.encode(texts), strict=False))
            result, encoded = join_pair(example, marks, 17), library.encode(*texts)
            if pair and len(example["tokens"]) == len(example["tokens2"]):
                continue  # of equals the library cuts the first
            assert result["lengths"] == sum(encoded.attention_mask)
            np.testing.assert_array_equal(result["types"], encoded.type_ids)
            if not pair or sum(encoded.attention_mask) < 17:
                np.testing.assert_array_equal(result["tokens"], encoded.ids)
