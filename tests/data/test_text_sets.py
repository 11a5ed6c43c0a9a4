"""Texts are made into tokens once, shard by shard: whole or not at all, by any number of processes, through kills."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from messages import mentions, refuses

from leanformer.data.text import corpus as corpora
from leanformer.data.text import shards
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
def sharded(texts, monkeypatch):
    """A split of some shards, of 211 documents that go over their ends."""
    monkeypatch.setattr(shards, "SHARD", 500)
    monkeypatch.setattr(corpora, "LEAST", 1)
    lines = [f"{LINES[i % 7]} {'word ' * (i % 11)}{i}" for i in range(211)]
    (texts / "train.txt").write_text("<|end|>".join(lines))
    return texts


def files_of(found):
    return {path.name: path.read_bytes() for path in found.folder.iterdir()}


def cached(texts, name, **other):
    return corpus(texts, dir=str(texts.parent / name), **other)


def test_shards_and_workers_change_nothing(sharded, monkeypatch):
    one = cached(sharded, "one", workers=0)
    with monkeypatch.context() as patch:
        patch.setattr(corpora, "cores", lambda: 3)
        three = cached(sharded, "three", workers=3)
    monkeypatch.setattr(shards, "SHARD", 1 << 23)
    whole_at_once = cached(sharded, "whole")
    assert files_of(one) == files_of(three) == files_of(whole_at_once)
    record = json.loads((one.folder / "tokens.json").read_text())
    documents = (sharded / "train.txt").read_text().split("<|end|>")
    np.testing.assert_array_equal(whole(one), joined(documents))
    assert (record["documents"], record["bytes"]) == (211, sum(len(text.encode()) for text in documents))
    for name in ("one", "three"):
        assert [path.name for path in (sharded.parent / name).iterdir()] == [one.folder.name]


def test_a_kill_loses_the_shards_under_way_alone(sharded, monkeypatch, capsys):
    wanted, encoded = files_of(cached(sharded, "one")), []
    encode = tokenizers.Tokenizer.encode

    def cut(self, texts):
        if len(encoded) == 9:
            raise RuntimeError("power cut")
        encoded.append(texts)
        return encode(self, texts)

    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="power cut"):
        patch.setattr(tokenizers.Tokenizer, "encode", cut)
        cached(sharded, "two")
    (kept,) = (sharded.parent / "two").iterdir()
    assert kept.name.startswith(".tokens-") and kept.name.endswith(".shards")
    made = sorted(path.stem for path in kept.glob("*.json"))
    assert len(made) == 9 and made[0].startswith("000000-")
    (kept / f"{made[2]}.bin").write_bytes(b"torn")  # a power cut's
    (kept / f"{made[4]}.json").unlink()
    capsys.readouterr()
    again = []
    with monkeypatch.context() as patch:
        patch.setattr(tokenizers.Tokenizer, "encode", lambda self, texts: again.append(texts) or encode(self, texts))
        assert files_of(cached(sharded, "two")) == wanted
    err = capsys.readouterr().err
    number = len(list(shards.cut((sharded / "train.txt").read_text().split("<|end|>"))))
    warning, progress, *_ = err.splitlines()
    assert mentions(warning, made[2]) and err.count(made[2]) == 1
    assert mentions(progress, 7, number) and len(again) == number - 7 > 7
    one, two = ([path.name for path in (sharded.parent / name).iterdir()] for name in ("one", "two"))
    assert one == two


MAKER = """
import sys
from leanformer.data.text import corpus, shards
shards.SHARD, corpus.LEAST = 500, 1
corpus.cores = lambda: 2
if __name__ == "__main__":
    how = {"tokenizer": "bytes", "train_split": "train", "separator": "<|end|>", "workers": 2}
    corpus.open_corpus(*sys.argv[1:3], dir=sys.argv[3], **how)
"""


def test_a_process_that_is_killed_leaves_whole_shards_and_no_workers(sharded, tmp_path):
    (sharded / "train.txt").write_text("<|end|>".join(f"{i} " + "word " * 400 for i in range(400)))
    (tmp_path / "maker.py").write_text(MAKER)
    words = [sys.executable, tmp_path / "maker.py", f"text:{sharded}", "train", sharded.parent / "killed"]
    maker = subprocess.Popen([*map(str, words)], start_new_session=True)
    deadline, found = time.monotonic() + 100, []
    while len(found) < 5 and time.monotonic() < deadline:
        time.sleep(0.01)
        found = list((sharded.parent / "killed").glob(".*.shards/*.json"))
    maker.kill()
    assert maker.wait() == -signal.SIGKILL and len(found) >= 5
    while alive(maker.pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not alive(maker.pid)
    assert files_of(cached(sharded, "killed")) == files_of(cached(sharded, "calm"))


def alive(group):
    """Whether a process of a group is left."""
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def test_texts_that_end_badly_leave_nothing(sharded):
    with (sharded / "train.txt").open("ab") as file:
        file.write(b"<|end|>\xff")
    with refuses(sharded / "train.txt", "UTF-8", error=DataError):
        cached(sharded, "bad")
    assert list((sharded.parent / "bad").iterdir()) == []
