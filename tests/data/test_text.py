"""Texts as rows of tokens: documents, tokenizers, the cached memory map, windows and packed rows."""

import json
import pickle
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from messages import mentions, refuses

from leanformer.data import Batches
from leanformer.data.text import rows
from leanformer.data.text import tokenizer as tokenizers
from leanformer.data.text.corpus import open_corpus
from leanformer.data.text.rows import Packed, Stream, Windows
from leanformer.errors import DataError


LINES = ["Ein Bär aß – gänzlich ungerührt – 7 Äpfel.", "Twelve brown bears.", "x" * 50, "The bears, the bears!"] * 3


@pytest.fixture
def texts(tmp_path):
    return write_texts(tmp_path / "texts")


def write_texts(folder):
    """Write texts with documents of many lengths, one longer than any row in these tests; return the folder."""
    folder.mkdir()
    (folder / "train.txt").write_text("\n<|end|>\n".join([*LINES, "", " \n"]))
    (folder / "test.jsonl").write_text("\n".join(json.dumps({"text": line, "id": 3}) for line in LINES[:5]) + "\n\n")
    return folder


def load_corpus(texts, split="train", tokenizer="bytes", **other):
    options = {"separator": "<|end|>", "dir": str(texts.parent / "cache"), "train_split": "train"} | other
    return open_corpus(f"text:{texts}", split, tokenizer=tokenizer, **options)


def read_all(tokens):
    return tokens[0 : len(tokens)]


def encode_lines(lines):
    return np.concatenate([[*line.encode(), 256] for line in lines])


def test_tokens_equal_the_encoded_documents(texts):
    np.testing.assert_array_equal(read_all(load_corpus(texts)), encode_lines(LINES))
    np.testing.assert_array_equal(read_all(load_corpus(texts, "test")), encode_lines(LINES[:5]))
    np.testing.assert_array_equal(read_all(load_corpus(texts, documents=2)), encode_lines(LINES[:2]))
    content = (texts / "train.txt").read_text().strip().encode()
    assert load_corpus(texts, separator=None).ends.tolist() == [len(content) + 1]


def test_files_of_a_split_are_read_in_order(texts):
    (texts / "train").mkdir()
    (texts / "train" / "b.txt").write_text("second")
    (texts / "train-00001.txt").write_text("first")
    (texts / "train-0.jsonl").write_text('{"text": "before it"}')
    expected = ["second", "before it", "first", *LINES]
    np.testing.assert_array_equal(read_all(load_corpus(texts)), encode_lines(expected))
    assert len(load_corpus(texts, "all").ends) == len(expected) + 5


def test_hidden_files_and_other_suffixes_are_ignored_and_named(texts):
    before = read_all(load_corpus(texts, "all"))
    for name in (".b.txt", "._train.txt", ".git/objects/c.txt", "train/.d.txt", "notes.md"):
        (texts / name).parent.mkdir(parents=True, exist_ok=True)
        (texts / name).write_bytes(b"\x00\x05\x16\x07 \xb0")
    with pytest.warns(UserWarning) as warned:
        np.testing.assert_array_equal(read_all(load_corpus(texts, "all")), before)
    assert mentions(str(warned[0].message), texts, "5 files", "._train.txt")


def write_parquet(path, texts, name="text", **columns):
    pyarrow.parquet.write_table(pyarrow.table({name: texts, **columns}), path, row_group_size=5)


def test_hub_parquet_files_are_read(texts):
    (texts / "train.txt").unlink()
    write_parquet(texts / "train-00000-of-00002-a09b74b3ef9c3b56.parquet", LINES[:7], id=[*range(7)])
    write_parquet(texts / "train-00001-of-00002-1f00ba2.parquet", [*LINES[7:], " "])
    np.testing.assert_array_equal(read_all(load_corpus(texts)), encode_lines(LINES))


def test_slices_of_a_split(texts):
    every, first, last = (load_corpus(texts, split) for split in ("train", "train[:90%]", "train[90%:]"))
    assert len(first) == len(every) * 9 // 10
    np.testing.assert_array_equal(np.concatenate([read_all(first), read_all(last)]), read_all(every))
    assert first.ends[-1] == len(first) and last.ends[-1] == len(last) and set(first.ends[:-1]) < set(every.ends)


@pytest.mark.parametrize("name", ["bytes", "bpe:300"])
def test_tokenizer_round_trip(texts, name):
    result = load_corpus(texts, tokenizer=name).tokenizer
    assert result.vocabulary == {"bytes": 257}.get(name, 300) == result.end + 1
    for text in (*LINES, "漢字 and \t\n tabs", "a<|endoftext|>b", "<|endoftext|>"):
        (tokens,) = result.encode([text])
        assert result.decode(tokens) == text and result.lengths[tokens].sum() == len(text.encode())
    assert result.lengths[result.end] == 0 and result.decode([result.end]) == ""
    assert len(result.encode([LINES[0]])[0]) < len(LINES[0].encode()) or name == "bytes"
    again = tokenizers.parse(result.json())
    assert again.json() == result.json() and again.end == result.end


def test_bpe_is_trained_on_the_training_split_only(texts):
    (texts / "test.jsonl").write_text(json.dumps({"text": "zqzqzq " * 99}))
    train, test = (load_corpus(texts, split, tokenizer="bpe:290") for split in ("train", "test"))
    assert train.tokenizer.json() == test.tokenizer.json() and "zq" not in train.tokenizer_json


def test_gpt2_tokenizer_files_are_read(tmp_path, texts):
    """Read a vocabulary and its merges under the file names of either publisher."""
    model = json.loads(load_corpus(texts, tokenizer="bpe:300").tokenizer_json)["model"]
    for vocabulary, merges in tokenizers.PAIRS:
        folder = tmp_path / vocabulary
        folder.mkdir()
        vocab = {token: number for token, number in model["vocab"].items() if number < 299}
        (folder / vocabulary).write_text(json.dumps(vocab))
        (folder / merges).write_text("\n".join(["#version: 0.2", *(" ".join(pair) for pair in model["merges"])]))
        ids = read_all(load_corpus(texts, tokenizer=str(folder)))
        np.testing.assert_array_equal(ids, read_all(load_corpus(texts, tokenizer="bpe:300")))


def test_every_token_of_a_stream_is_a_target_once(texts):
    result = load_corpus(texts, "test")
    ids, stream = read_all(result), Stream(result, 13)
    stream_rows = [stream[i] for i in range(len(stream))]
    targets, inputs = (np.concatenate([row[name] for row in stream_rows]) for name in ("targets", "tokens"))
    assert all(row["tokens"].shape == row["targets"].shape == (13,) for row in stream_rows) and len(ids) % 13
    np.testing.assert_array_equal(targets[: len(ids)], ids)
    assert (targets[len(ids) :] == rows.IGNORE).all() and len(targets) - len(ids) < 13
    np.testing.assert_array_equal(inputs[: len(ids)], [256, *ids[:-1]])
    assert sum(int(row["bytes"]) for row in stream_rows) == sum(len(line.encode()) for line in LINES[:5])
    count_bytes = lambda tokens: ((tokens >= 0) & (tokens < 256)).sum()  # noqa: E731  (256 ends a document)
    assert [int(row["bytes"]) for row in stream_rows] == [count_bytes(row["targets"]) for row in stream_rows]
    assert any(count_bytes(row["targets"]) != count_bytes(row["tokens"]) for row in stream_rows)


def test_packed_rows_contain_whole_documents(texts):
    length, result = 97, load_corpus(texts)
    packed, pieces = Packed(result, length), []
    for i in range(len(packed)):
        row = packed[i]
        assert row["tokens"].shape == row["segments"].shape == (length,)
        assert ((row["segments"] == 0) == (row["targets"] == rows.IGNORE)).all()
        for number in range(1, row["segments"].max() + 1):
            inside = row["segments"] == number
            pieces.append((row["tokens"][inside], row["targets"][inside]))
    assert len(packed) < len(pieces)  # some rows hold several
    whole_documents = [(tokens, targets) for tokens, targets in pieces if tokens[0] == 256]
    assert len(whole_documents) == len(LINES)
    np.testing.assert_array_equal(np.concatenate([targets for _, targets in pieces]), read_all(result))
    for tokens, targets in pieces:
        np.testing.assert_array_equal(tokens[1:], targets[:-1])
    assert sum(len(targets) for _, targets in pieces) == len(read_all(result))


def test_document_longer_than_a_row_is_split(texts):
    packed = Packed(load_corpus(texts), 20)
    longest = max(len(line.encode()) for line in LINES)
    pieces = packed.pieces[:, 1] - packed.pieces[:, 0]
    assert longest > 40 and pieces.max() == 20 and pieces.sum() == len(packed.corpus) == packed.pieces[-1, 1]
    second = packed.pieces[1]
    assert second[0] not in packed.corpus.ends
    first_row = pickle.loads(pickle.dumps(packed))[1]  # as in workers
    assert len(pickle.dumps(packed.corpus)) < 20_000
    np.testing.assert_array_equal(first_row["tokens"][:20], packed.corpus[int(second[0]) - 1 : int(second[1]) - 1])


def test_windows_depend_only_on_seed_and_position(texts):
    source = Windows(load_corpus(texts), 11)

    def make_batches(**options):
        return Batches(source, rows.prepare, batch_size=6, train=True, **options)

    every = [make_batches(seed=3)[step] for step in range(40)]
    halves = [make_batches(seed=3, process=p, processes=2)[7] for p in (0, 1)]
    np.testing.assert_array_equal(np.concatenate([h["tokens"] for h in halves]), every[7]["tokens"])
    assert (make_batches(seed=4)[7]["tokens"] != every[7]["tokens"]).any()
    ids = np.concatenate([[256], read_all(source.corpus)])
    windows = {tuple(ids[i : i + 12]) for i in range(len(ids) - 11)}
    seen = {(*row, last) for b in every for row, last in zip(b["tokens"].tolist(), b["targets"][:, -1], strict=True)}
    assert seen <= windows and len(seen) > 60 and tuple(ids[:12]) in {*windows}


@pytest.mark.parametrize(
    ("file", "content", "parts"),
    [
        ("train.txt", b"fine\xff\xfe", ("UTF-8", "byte 4", "0xff")),
        ("train.jsonl", b'{"text": "a"}\n{"texts": "b"}', ("line 2", "JSON")),
        ("train-00000-of-00001.parquet", b"PAR1 and no more", ()),
    ],
)
def test_unreadable_texts_are_refused(texts, file, content, parts):
    (texts / "train.txt").unlink()
    (texts / file).write_bytes(content)
    with refuses(file, *parts, error=DataError):
        load_corpus(texts)
    assert not list((texts.parent / "cache").glob("*"))


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"split": "dev"}, ("dev.txt", ".jsonl", ".parquet", "test, train")),
        ({"split": "train[50:]"}, ("train[50:]", "all[:90%]")),
        ({"tokenizer": "gpt5.json"}, ("gpt5.json",)),
        ({"tokenizer": "bpe:9999"}, ("bpe:9999",)),
    ],
    ids=str,
)
def test_invalid_splits_and_tokenizers_are_refused(texts, changes, parts):
    with refuses(*parts, error=DataError):
        load_corpus(texts, **changes)


def test_short_texts_and_tokenizers_without_end_are_refused(texts, tmp_path):
    with refuses("model.max_length=9999", len(load_corpus(texts)), error=DataError):
        Windows(load_corpus(texts), 9999)
    no_end = json.loads(load_corpus(texts).tokenizer_json) | {"added_tokens": []}
    (tmp_path / "a.json").write_text(json.dumps(no_end))
    with refuses("<|endoftext|>", error=DataError):
        load_corpus(texts, tokenizer=str(tmp_path / "a.json"))


def test_bundled_text_is_read(tmp_path):
    options = {"tokenizer": "bytes", "train_split": "train", "dir": str(tmp_path)}
    result = {split: open_corpus("bundled:austen", split, **options) for split in ("train", "test")}
    assert {split: len(c.ends) for split, c in result.items()} == {"train": 199, "test": 22}
    assert result["test"].tokenizer.decode(result["test"][0:40]) == "Though now the middle of December, there"  # data
    assert len(result["train"]) > 2_800_000
    bundled = Path(rows.__file__).parents[1] / "bundled"
    assert sum(path.stat().st_size for path in bundled.glob("austen*")) < 1_000_000
