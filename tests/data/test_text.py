"""Texts to rows of tokens: documents, tokenizers, the memory map that is made once, windows and packed rows."""

import json
import pickle
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from messages import refuses

from leanformer.data import Batches
from leanformer.data.text import Packed, Stream, Windows, open_corpus, rows
from leanformer.data.text import tokenizer as tokenizers
from leanformer.errors import DataError


LINES = ["Ein Bär aß – gänzlich ungerührt – 7 Äpfel.", "Twelve brown bears.", "x" * 50, "The bears, the bears!"] * 3


@pytest.fixture
def texts(tmp_path):
    return write(tmp_path / "texts")


def write(folder):
    """A folder of texts with documents of many lengths, among them one over any row of these tests."""
    folder.mkdir()
    (folder / "train.txt").write_text("\n<|end|>\n".join([*LINES, "", " \n"]))
    (folder / "test.jsonl").write_text("\n".join(json.dumps({"text": line, "id": 3}) for line in LINES[:5]) + "\n\n")
    return folder


def corpus(texts, split="train", tokenizer="bytes", **other):
    given = {"separator": "<|end|>", "dir": str(texts.parent / "cache"), "train_split": "train"} | other
    return open_corpus(f"text:{texts}", split, tokenizer=tokenizer, **given)


def whole(found):
    return found[0 : len(found)]


def joined(lines):
    return np.concatenate([[*line.encode(), 256] for line in lines])


def test_tokens_are_those_of_the_documents(texts):
    np.testing.assert_array_equal(whole(corpus(texts)), joined(LINES))
    np.testing.assert_array_equal(whole(corpus(texts, "test")), joined(LINES[:5]))
    np.testing.assert_array_equal(whole(corpus(texts, documents=2)), joined(LINES[:2]))
    assert corpus(texts, separator=None).ends.tolist() == [len((texts / "train.txt").read_text().strip().encode()) + 1]


def test_files_of_a_split(texts):
    (texts / "train").mkdir()
    (texts / "train" / "b.txt").write_text("second")
    (texts / "train-00001.txt").write_text("first")
    (texts / "train-0.jsonl").write_text('{"text": "before it"}')
    wanted = ["second", "before it", "first", *LINES]
    np.testing.assert_array_equal(whole(corpus(texts)), joined(wanted))
    assert len(corpus(texts, "all").ends) == len(wanted) + 5


def parquet(path, texts, name="text", **columns):
    pyarrow.parquet.write_table(pyarrow.table({name: texts, **columns}), path, row_group_size=5)


def test_parquet_of_the_hub(texts):
    (texts / "train.txt").unlink()
    parquet(texts / "train-00000-of-00002-a09b74b3ef9c3b56.parquet", LINES[:7], id=[*range(7)])
    parquet(texts / "train-00001-of-00002-1f00ba2.parquet", [*LINES[7:], " "])
    np.testing.assert_array_equal(whole(corpus(texts)), joined(LINES))


@pytest.mark.parametrize(
    ("write", "parts"),
    [
        (lambda path: parquet(path, ["a", None]), ("row 2", '"text"', "NoneType")),
        (lambda path: parquet(path, [b"\xff"]), ("row 1", '"text"', "bytes")),
        (lambda path: parquet(path, ["a"], name="body"), ('"text"',)),
        (lambda path: parquet(path, pyarrow.array([], "string"), name="body"), ('"text"',)),
        (lambda path: path.write_bytes(b"PAR1 and no more"), (".parquet",)),
    ],
    ids=["null", "bytes", "column", "column of no rows", "cut"],
)
def test_parquet_that_cannot_be_read(texts, write, parts):
    (texts / "train.txt").unlink()
    write(texts / "train-00000-of-00001.parquet")
    with refuses("train-00000-of-00001.parquet", *parts, error=DataError):
        corpus(texts)


def test_parts_of_a_split(texts):
    every, first, last = (corpus(texts, split) for split in ("train", "train[:90%]", "train[90%:]"))
    assert len(first) == len(every) * 9 // 10
    np.testing.assert_array_equal(np.concatenate([whole(first), whole(last)]), whole(every))
    assert first.ends[-1] == len(first) and last.ends[-1] == len(last) and set(first.ends[:-1]) < set(every.ends)


@pytest.mark.parametrize("words", ["bytes", "bpe:300"])
def test_a_tokenizer_goes_both_ways(texts, words):
    result = corpus(texts, tokenizer=words).tokenizer
    assert result.vocabulary == {"bytes": 257}.get(words, 300) == result.end + 1
    for text in (*LINES, "漢字 and \t\n tabs"):
        (tokens,) = result.encode([text])
        assert result.decode(tokens) == text and result.lengths[tokens].sum() == len(text.encode())
    assert result.lengths[result.end] == 0 and result.decode([result.end]) == ""
    assert len(result.encode([LINES[0]])[0]) < len(LINES[0].encode()) or words == "bytes"
    again = tokenizers.parse(result.json(), "again")
    assert again.json() == result.json() and again.end == result.end


def test_bpe_is_of_the_training_split_alone(texts):
    (texts / "test.jsonl").write_text(json.dumps({"text": "zqzqzq " * 99}))
    train, test = (corpus(texts, split, tokenizer="bpe:290") for split in ("train", "test"))
    assert train.tokenizer.json() == test.tokenizer.json() and "zq" not in train.tokenizer_json


def test_gpt2_files(tmp_path, texts):
    """A vocabulary and its merges, by the names of either publisher."""
    model = json.loads(corpus(texts, tokenizer="bpe:300").tokenizer_json)["model"]
    for vocabulary, merges in tokenizers.PAIRS:
        folder = tmp_path / vocabulary
        folder.mkdir()
        vocab = {token: number for token, number in model["vocab"].items() if number < 299}
        (folder / vocabulary).write_text(json.dumps(vocab))
        (folder / merges).write_text("\n".join(["#version: 0.2", *(" ".join(pair) for pair in model["merges"])]))
        ids = whole(corpus(texts, tokenizer=str(folder)))
        np.testing.assert_array_equal(ids, whole(corpus(texts, tokenizer="bpe:300")))


def test_every_token_of_a_stream_is_a_target_once(texts):
    result = corpus(texts, "test")
    ids, stream = whole(result), Stream(result, 13)
    each = [stream[i] for i in range(len(stream))]
    targets, inputs = (np.concatenate([row[name] for row in each]) for name in ("targets", "tokens"))
    assert all(row["tokens"].shape == row["targets"].shape == (13,) for row in each) and len(ids) % 13
    np.testing.assert_array_equal(targets[: len(ids)], ids)
    assert (targets[len(ids) :] == rows.IGNORE).all() and len(targets) - len(ids) < 13
    np.testing.assert_array_equal(inputs[: len(ids)], [256, *ids[:-1]])
    assert sum(int(row["bytes"]) for row in each) == sum(len(line.encode()) for line in LINES[:5])
    text = lambda tokens: ((tokens >= 0) & (tokens < 256)).sum()  # noqa: E731  (the end of a document is no byte)
    assert [int(row["bytes"]) for row in each] == [text(row["targets"]) for row in each]
    assert any(text(row["targets"]) != text(row["tokens"]) for row in each)


def test_packed_rows_hold_whole_documents(texts):
    length, result = 97, corpus(texts)
    packed, pieces = Packed(result, length), []
    for i in range(len(packed)):
        row = packed[i]
        assert row["tokens"].shape == row["segments"].shape == (length,)
        assert ((row["segments"] == 0) == (row["targets"] == rows.IGNORE)).all()
        for number in range(1, row["segments"].max() + 1):
            own = row["segments"] == number
            pieces.append((row["tokens"][own], row["targets"][own]))
    assert len(packed) < len(pieces)  # some rows hold several
    whole_ones = [(tokens, targets) for tokens, targets in pieces if tokens[0] == 256]
    assert len(whole_ones) == len(LINES)
    np.testing.assert_array_equal(np.concatenate([targets for _, targets in pieces]), whole(result))
    for tokens, targets in pieces:
        np.testing.assert_array_equal(tokens[1:], targets[:-1])
    assert sum(len(targets) for _, targets in pieces) == len(whole(result))


def test_a_document_over_the_length_is_cut(texts):
    packed = Packed(corpus(texts), 20)
    longest = max(len(line.encode()) for line in LINES)
    pieces = packed.pieces[:, 1] - packed.pieces[:, 0]
    assert longest > 40 and pieces.max() == 20 and pieces.sum() == len(packed.corpus) == packed.pieces[-1, 1]
    second = packed.pieces[1]
    assert second[0] not in packed.corpus.ends
    first_row = packed[1]
    np.testing.assert_array_equal(first_row["tokens"][:20], packed.corpus[int(second[0]) - 1 : int(second[1]) - 1])


def test_windows_are_a_function_of_seed_and_position(texts):
    source = Windows(corpus(texts), 11)

    def batches(**where):
        return Batches(source, rows.prepare, batch_size=6, train=True, **where)

    every = [batches(seed=3)[step] for step in range(40)]
    halves = [batches(seed=3, process=p, processes=2)[7] for p in (0, 1)]
    np.testing.assert_array_equal(np.concatenate([h["tokens"] for h in halves]), every[7]["tokens"])
    assert (batches(seed=4)[7]["tokens"] != every[7]["tokens"]).any()
    ids = np.concatenate([[256], whole(source.corpus)])
    known = {tuple(ids[i : i + 12]) for i in range(len(ids) - 11)}
    seen = {(*row, last) for b in every for row, last in zip(b["tokens"].tolist(), b["targets"][:, -1], strict=True)}
    assert seen <= known and len(seen) > 60 and tuple(ids[:12]) in {*known}


def test_a_source_goes_to_workers(texts):
    source = Packed(corpus(texts), 20)
    source[0]
    again = pickle.loads(pickle.dumps(source))
    np.testing.assert_array_equal(again[3]["tokens"], source[3]["tokens"])
    assert len(pickle.dumps(source.corpus)) < 20_000


@pytest.mark.parametrize(
    ("file", "content", "parts"),
    [
        ("train.txt", b"fine\xff\xfe", ("UTF-8", "byte 4", "0xff")),
        ("train.txt", b" \n <|end|>\n", ()),
        ("train.jsonl", b'{"text": "a"}\n{"texts": "b"}', ("line 2", "JSON")),
        ("train.jsonl", b'{"text": 3}', ("line 1", '"text"', "int")),
        ("train.txt.xz", b"\xfd7zXZ\x00not", (".xz",)),
    ],
)
def test_texts_that_cannot_be_read(texts, file, content, parts):
    (texts / "train.txt").unlink()
    (texts / file).write_bytes(content)
    with refuses(file, *parts, error=DataError):
        corpus(texts)
    assert not list((texts.parent / "cache").glob("*"))


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"split": "dev"}, ("dev.txt", ".jsonl", ".parquet", "test, train")),
        ({"split": "train[90%:20%]"}, ("train[90%:20%]",)),
        ({"split": "test[:1%]", "documents": 1}, ("test[:1%]",)),
        ({"tokenizer": "gpt5.json"}, ("gpt5.json",)),
        ({"tokenizer": "bpe:many"}, ("bpe:many", "bpe:<vocabulary>", "bpe:1024")),
        ({"tokenizer": "bpe:100"}, ("bpe:100", 257)),
        ({"tokenizer": "bpe:9999"}, ("bpe:9999",)),
    ],
    ids=str,
)
def test_what_cannot_be(texts, changes, parts):
    with refuses(*parts, error=DataError):
        corpus(texts, **changes)


def test_a_file_that_is_no_tokenizer(texts, tmp_path):
    for content, part in [("{}", tmp_path / "a.json"), (json.dumps(_without_end(texts)), "<|endoftext|>")]:
        (tmp_path / "a.json").write_text(content)
        with refuses(part, error=DataError):
            corpus(texts, tokenizer=str(tmp_path / "a.json"))


def _without_end(texts):
    content = json.loads(corpus(texts).tokenizer_json)
    content["added_tokens"] = []
    return content


def test_too_little_for_a_row(texts):
    with refuses("model.max_length=9999", len(corpus(texts)), error=DataError):
        Windows(corpus(texts), 9999)


def test_the_bundled_text(tmp_path):
    result = {
        s: open_corpus("bundled:austen", s, tokenizer="bytes", train_split="train", dir=str(tmp_path))
        for s in ("train", "test")
    }
    assert {split: len(c.ends) for split, c in result.items()} == {"train": 199, "test": 22}
    assert result["test"].tokenizer.decode(result["test"][0:40]) == "Though now the middle of December, there"  # data
    assert len(result["train"]) > 2_800_000
    bundled = Path(rows.__file__).parents[1] / "bundled"
    assert sum(path.stat().st_size for path in bundled.glob("austen*")) < 1_000_000
    with refuses("dev", "train", "test", error=DataError):
        open_corpus("bundled:austen", "dev", tokenizer="bytes", train_split="train", dir=str(tmp_path))
