"""Token caches of texts: written once and atomically, by any number of processes, also after kills."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
import warnings

import numpy as np
import pytest
from messages import refuses

from leanformer.data import loader
from leanformer.data.text import corpus as corpora
from leanformer.errors import DataError
from tests.data.test_text import LINES, encode_lines, load_corpus, read_all, write_texts


@pytest.fixture
def texts(tmp_path):
    return write_texts(tmp_path / "texts")


def test_token_cache_is_written_once(texts):
    first = load_corpus(texts, tokenizer="bpe:300")
    times = {path: path.stat().st_mtime_ns for path in texts.parent.glob("cache/*/*")}
    assert load_corpus(texts, tokenizer="bpe:300") == first
    assert {path: path.stat().st_mtime_ns for path in texts.parent.glob("cache/*/*")} == times and len(times) == 5
    assert not list(texts.parent.glob("cache/.*"))
    with (texts / "train.txt").open("a") as file:
        file.write("<|end|>More.")
    np.testing.assert_array_equal(read_all(load_corpus(texts)), encode_lines([*LINES, "More."]))


def test_separator_that_splits_nothing_is_named(texts):
    """As Bash passes it, "\\n\\n" is four characters."""
    (texts / "train.txt").write_text("a\n\nb\n\nc")
    with pytest.warns(UserWarning, match=re.escape(r"data.separator='\\n\\n' splits none of the 1 files")):
        assert load_corpus(texts, separator=r"\n\n").ends.size == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert load_corpus(texts, separator="\n\n").ends.size == 3
        assert load_corpus(texts, separator=None).ends.size == 1


@pytest.fixture
def pieces(texts, monkeypatch):
    """Write a split of 211 documents in several pieces, whose documents cross piece boundaries."""
    monkeypatch.setattr(corpora, "PIECE_BYTES", 500)
    monkeypatch.setattr(corpora, "PIECES_PER_WORKER", 1)
    lines = [f"{LINES[i % 7]} {'word ' * (i % 11)}{i}" for i in range(211)]
    (texts / "train.txt").write_text("<|end|>".join(lines))
    return texts


def read_files(corpus):
    return {path.name: path.read_bytes() for path in corpus.folder.iterdir()}


def load_cached(texts, name, **other):
    return load_corpus(texts, dir=str(texts.parent / name), **other)


def test_pieces_and_workers_do_not_change_the_cache(pieces, monkeypatch):
    one = load_cached(pieces, "one", workers=0)
    with monkeypatch.context() as patch:
        patch.setattr(corpora, "count_cores", lambda: 3)
        three = load_cached(pieces, "three", workers=3)
    monkeypatch.setattr(corpora, "PIECE_BYTES", 1 << 23)
    single_piece = load_cached(pieces, "whole")
    assert read_files(one) == read_files(three) == read_files(single_piece)
    record = json.loads((one.folder / "recipe.json").read_text())
    documents = (pieces / "train.txt").read_text().split("<|end|>")
    np.testing.assert_array_equal(read_all(one), encode_lines(documents))
    assert (record["documents"], record["bytes"]) == (211, sum(len(text.encode()) for text in documents))
    for name in ("one", "three"):
        assert [path.name for path in (pieces.parent / name).iterdir()] == [one.folder.name]


SCRIPT = """
import sys
from leanformer.data.text import corpus
corpus.PIECE_BYTES, corpus.PIECES_PER_WORKER = 500, 1
corpus.count_cores = lambda: 2
if __name__ == "__main__":
    options = {"tokenizer": "bytes", "train_split": "train", "separator": "<|end|>", "workers": 2}
    corpus.open_corpus(*sys.argv[1:3], dir=sys.argv[3], **options)
"""


def test_killed_process_leaves_no_cache_and_no_workers(pieces, tmp_path):
    (pieces / "train.txt").write_text("<|end|>".join(f"{i} " + "word " * 400 for i in range(4000)))
    (tmp_path / "maker.py").write_text(SCRIPT)
    command = [sys.executable, tmp_path / "maker.py", f"text:{pieces}", "train", pieces.parent / "killed"]
    process = subprocess.Popen([*map(str, command)], start_new_session=True)
    deadline = time.monotonic() + 100
    while time.monotonic() < deadline:
        time.sleep(0.01)
        if any(path.stat().st_size for path in (pieces.parent / "killed").glob(".tokens-*/tokens.bin")):
            break
    process.kill()
    assert process.wait() == -signal.SIGKILL
    while is_alive(process.pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not is_alive(process.pid) and not list((pieces.parent / "killed").glob("tokens-*"))


def test_killed_worker_is_reported():
    with refuses("data.workers", error=DataError):
        list(loader.map_ordered(os._exit, [3], 1))


def is_alive(group):
    """Return whether a process of the group is left."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, 0)
        return True
    return False
