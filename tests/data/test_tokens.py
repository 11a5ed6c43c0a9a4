"""Texts and pairs as tokens: their contents, and messages for missing or malformed files."""

import json
import pickle

import numpy as np
import pytest
from messages import refuses

from leanformer.data.sequences.texts import Imdb, LabelledText, Pairs, sorted_labels
from leanformer.data.source import Source
from leanformer.errors import DataError


def decode(tokens: np.ndarray) -> bytes:
    assert tokens.dtype == np.int32 and tokens.ndim == 1 and (tokens > 0).all()
    return bytes(token - 1 for token in tokens.tolist())


@pytest.fixture
def reviews(tmp_path):
    for split in ("train", "test"):
        for kind in ("neg", "pos", "unsup"):
            (tmp_path / split / kind).mkdir(parents=True)
            for number in (0, 1, 10):
                (tmp_path / split / kind / f"{number}_3.txt").write_bytes(b"\x00 %s %d \xff" % (kind.encode(), number))
    (tmp_path / "train" / "pos" / "notes.md").write_text("not a review")
    (tmp_path / "train" / "pos" / "._0_3.txt").write_text("of macOS")
    return tmp_path


def test_imdb_reviews_are_read(reviews):
    source = Imdb(reviews, "train", max_length=6)
    assert isinstance(source, Source)
    assert len(source) == 6 and source.num_classes == 2 and source.vocabulary == 257
    assert [example["label"] for example in source] == [0, 0, 0, 1, 1, 1]
    assert [decode(example["tokens"]) for example in source] == [b"\x00 neg "] * 3 + [b"\x00 pos "] * 3
    assert decode(Imdb(reviews, "test")[4]["tokens"]) == b"\x00 pos 10 \xff"
    assert source.name(4) == str(reviews / "train" / "pos" / "10_3.txt")
    assert decode(pickle.loads(pickle.dumps(source))[5]["tokens"]) == b"\x00 pos "
    (reviews / "train" / "neg" / "0_3.txt").write_bytes(bytes(range(256)) * 20)
    np.testing.assert_array_equal(Imdb(reviews, "train")[0]["tokens"], np.arange(4000) % 256 + 1)


def test_incomplete_imdb_is_refused(reviews):
    with refuses(reviews / "validation", "neg", error=DataError):
        Imdb(reviews, "validation")


ROWS = [("a\u00e9 b", "pos"), ("second", "neg"), ('say "x", y', "pos")]


def write_texts(folder, suffix, rows=ROWS):
    path = folder / f"texts{suffix}"
    if suffix == ".jsonl":
        lines = [json.dumps({"id": 7, "text": text, "label": label}, ensure_ascii=False) for text, label in rows]
    elif suffix == ".csv":
        quoted = [text.replace('"', '""') for text, _ in rows]
        lines = ["id,text,label", *(f'7,"{text}",{label}' for text, (_, label) in zip(quoted, rows, strict=True))]
    else:
        lines = ["id\ttext\tlabel", *(f"7\t{text}\t{label}" for text, label in rows)]
    path.write_bytes("\r\n".join(lines).encode() + b"\r\n\r\n")
    return path


@pytest.mark.parametrize("suffix", [".tsv", ".csv", ".jsonl"])
@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
def test_labelled_texts_are_read(tmp_path, suffix, mark):
    path = write_texts(tmp_path, suffix)
    path.write_bytes(mark + path.read_bytes())
    source = LabelledText(path)
    assert isinstance(source, Source) and source.classes == ["neg", "pos"]
    assert len(source) == 3 and source.num_classes == 2 and source.vocabulary == 257
    assert [decode(example["tokens"]).decode() for example in source] == [row[0] for row in ROWS]
    assert [example["label"] for example in source] == [1, 0, 1]
    assert source.name(1) == f"{path}, line {2 if suffix == '.jsonl' else 3}"
    assert decode(LabelledText(path, max_length=2)[-3]["tokens"]) == b"a\xc3"
    assert decode(pickle.loads(pickle.dumps(source))[1]["tokens"]) == b"second"


def test_columns_in_any_order_with_quoted_lines_and_other_bytes(tmp_path):
    path = tmp_path / "t.csv"
    path.write_bytes(b'label,text\n10,"one\r\ntwo\xff"\n9,' + b"x" * 200_000 + b"\n2,worse\n")
    source = LabelledText(path, max_length=150_000)
    assert sorted_labels({"1", "01", "+1", "0"}) == ["0", "+1", "01", "1"]  # the same in every process
    assert source.classes == ["2", "9", "10"] and [example["label"] for example in source] == [2, 1, 0]
    assert decode(source[0]["tokens"]) == b"one\r\ntwo\xff" and len(source[1]["tokens"]) == 150_000
    assert source.name(0) == f"{path}, line 3"


def test_classes_of_the_training_file_are_used(tmp_path):
    path = write_texts(tmp_path, ".tsv")
    source = LabelledText(path, classes=["pos", "other", "neg"])
    assert source.num_classes == 3 and [example["label"] for example in source] == [0, 2, 0]
    with refuses(path, "1 (neg)", "2 (pos, other)", error=DataError):
        LabelledText(path, classes=["pos", "other"])


@pytest.mark.parametrize(
    ("suffix", "data", "parts"),
    [
        (".tsv", b"text\tlabel\na\t1\nb\n", ("line 3", "1 columns", 2)),
        (".csv", b"text,text,label\na,b,1\n", ("line 1", "text")),
        (".jsonl", b'{"text": "a", "label": 1}\n{"text": "a"\n', ("line 2", "JSON")),
        (".csv", b"text,label\n", ()),
    ],
)
def test_malformed_texts_are_refused(tmp_path, suffix, data, parts):
    (tmp_path / f"t{suffix}").write_bytes(data)
    with refuses(tmp_path / f"t{suffix}", *parts, error=DataError):
        LabelledText(tmp_path / f"t{suffix}")


PAPERS = [(1, b"b'first \\n \"paper\"'", b"\xff" * 10_007), (0, b"x", b"y"), (1, b"z" * 5_003, b"\x00")]


@pytest.fixture
def papers(tmp_path):
    rows = [b"%d%s\tE06-1042\tW%d\t%s\t%s" % (n, b".0" * (n == 0), i, a, b) for i, (n, a, b) in enumerate(PAPERS)]
    (tmp_path / "new_aan_pairs.eval.tsv").write_bytes(b"\r\n".join(rows))
    return tmp_path / "new_aan_pairs.eval.tsv"


def test_pairs(papers):
    source = Pairs(papers)
    assert len(pickle.dumps(source)) < 1000
    assert isinstance(source, Source) and len(source) == 3 and source.num_classes == 2
    for i in (2, 0, 1, -1):  # in any order
        label, first, second = PAPERS[i]
        assert source[i]["label"] == label
        assert (decode(source[i]["tokens"]), decode(source[i]["tokens2"])) == (first[:4000], second[:4000])
    assert source.name(2) == f"{papers}, line 3"
    assert len(Pairs(papers, max_length=20_000)[0]["tokens2"]) == 10_000
    again = pickle.loads(pickle.dumps(source))
    papers.write_bytes(papers.read_bytes().replace(b"x\ty", b"v\tw"))
    assert decode(again[1]["tokens"]) == b"v"  # read from the file at the indexed position, not from memory


@pytest.mark.parametrize(
    ("line", "parts"),
    [
        (b"1\ta\tb\ttext", ("4 columns", 5)),
        (b"2\ta\tb\tone\ttwo", ("'2'", 0, 1)),
    ],
)
def test_malformed_pairs_are_refused(papers, line, parts):
    papers.write_bytes(papers.read_bytes() + b"\n" + line + b"\n")
    with refuses("new_aan_pairs.eval.tsv, line 4", *parts, error=DataError):
        len(Pairs(papers))
