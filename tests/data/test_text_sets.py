"""Texts are made into tokens once: whole or not at all, by any number of processes, through kills."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from messages import refuses

from leanformer.data import pool
from leanformer.data.text import corpus as corpora
from leanformer.data.text import tokenizer as tokenizers
from leanformer.errors import DataError
from tests.data.test_text import LINES, corpus, joined, whole, write


@pytest.fixture
def texts(tmp_path):
    return write(tmp_path / "texts")


def test_a_set_is_made_once(texts):
    first = corpus(texts, tokenizer="bpe:300")
    made = {path: path.stat().st_mtime_ns for path in texts.parent.glob("cache/*/*")}
    assert corpus(texts, tokenizer="bpe:300") == first
    assert {path: path.stat().st_mtime_ns for path in texts.parent.glob("cache/*/*")} == made and len(made) == 5
    assert not list(texts.parent.glob("cache/.*"))
    with (texts / "train.txt").open("a") as file:
        file.write("<|end|>More.")
    np.testing.assert_array_equal(whole(corpus(texts)), joined([*LINES, "More."]))


def test_what_was_not_finished_is_refused(texts, monkeypatch):
    folder = corpus(texts).folder
    whole_file = (folder / "tokens.bin").read_bytes()
    (folder / "tokens.bin").write_bytes(whole_file[:-2])
    with refuses(folder / "tokens.bin", len(whole_file) // 2 - 1, len(whole_file) // 2, error=DataError):
        corpus(texts)
    (folder / "tokens.bin").write_bytes(whole_file)
    (folder / "tokens.json").unlink()
    with refuses(folder, "tokens.json", error=DataError):
        corpus(texts)
    shutil.rmtree(folder)
    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="power cut"):
        patch.setattr(tokenizers.Tokenizer, "encode", lambda *_: (_ for _ in ()).throw(RuntimeError("power cut")))
        corpus(texts)
    assert list((texts.parent / "cache").iterdir()) == []
    assert len(corpus(texts)) == len(joined(LINES))


@pytest.fixture
def pieces(texts, monkeypatch):
    """A split of some pieces, of 211 documents that go over their ends."""
    monkeypatch.setattr(corpora, "PIECE", 500)
    monkeypatch.setattr(corpora, "LEAST", 1)
    lines = [f"{LINES[i % 7]} {'word ' * (i % 11)}{i}" for i in range(211)]
    (texts / "train.txt").write_text("<|end|>".join(lines))
    return texts


def files_of(found):
    return {path.name: path.read_bytes() for path in found.folder.iterdir()}


def cached(texts, name, **other):
    return corpus(texts, dir=str(texts.parent / name), **other)


def test_pieces_and_workers_change_nothing(pieces, monkeypatch):
    one = cached(pieces, "one", workers=0)
    with monkeypatch.context() as patch:
        patch.setattr(pool, "count_cores", lambda: 3)
        three = cached(pieces, "three", workers=3)
    monkeypatch.setattr(corpora, "PIECE", 1 << 23)
    whole_at_once = cached(pieces, "whole")
    assert files_of(one) == files_of(three) == files_of(whole_at_once)
    record = json.loads((one.folder / "tokens.json").read_text())
    documents = (pieces / "train.txt").read_text().split("<|end|>")
    np.testing.assert_array_equal(whole(one), joined(documents))
    assert (record["documents"], record["bytes"]) == (211, sum(len(text.encode()) for text in documents))
    for name in ("one", "three"):
        assert [path.name for path in (pieces.parent / name).iterdir()] == [one.folder.name]


MAKER = """
import sys
from leanformer.data import pool
from leanformer.data.text import corpus
corpus.PIECE, corpus.LEAST = 500, 1
pool.cores = lambda: 2
if __name__ == "__main__":
    how = {"tokenizer": "bytes", "train_split": "train", "separator": "<|end|>", "workers": 2}
    corpus.open_corpus(*sys.argv[1:3], dir=sys.argv[3], **how)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_process_that_is_killed_leaves_no_set_and_no_workers(number, pieces, tmp_path):
    (pieces / "train.txt").write_text("<|end|>".join(f"{i} " + "word " * 400 for i in range(4000)))
    (tmp_path / "maker.py").write_text(MAKER)
    words = [sys.executable, tmp_path / "maker.py", f"text:{pieces}", "train", pieces.parent / "killed"]
    maker = subprocess.Popen([*map(str, words)], start_new_session=True)
    deadline = time.monotonic() + 100
    while time.monotonic() < deadline:
        time.sleep(0.01)
        if any(path.stat().st_size for path in (pieces.parent / "killed").glob(".tokens-*/tokens.bin")):
            break
    maker.send_signal(number)
    assert maker.wait() == -number
    while alive(maker.pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not alive(maker.pid) and not list((pieces.parent / "killed").glob("tokens-*"))


def test_a_worker_that_is_killed_is_one_sentence():
    with refuses("data.workers", error=DataError):
        list(pool.map_ordered(os._exit, [3], 1))


def alive(group):
    """Whether a process of a group is left."""
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def test_texts_that_end_badly_leave_nothing(pieces):
    with (pieces / "train.txt").open("ab") as file:
        file.write(b"<|end|>\xff")
    with refuses(pieces / "train.txt", "UTF-8", error=DataError):
        cached(pieces, "bad")
    assert list((pieces.parent / "bad").iterdir()) == []
