"""The state of a folder is that of the run that trained there: a command that trains nothing changes none of it."""

import errno
import json
import os
import types
from pathlib import Path

import numpy as np
import pytest
from commands import command, inside
from messages import mentions, refuses

from leanformer import pretrained
from leanformer.errors import WeightsError, WorkdirError
from leanformer.runtime import files
from leanformer.tasks import artifacts
from leanformer.train import train
from leanformer.training import metrics_log, run_files, train_setup


@pytest.fixture
def small(plain, one_device):
    """Two steps."""
    plain.update(total_steps=2, batch_size=8)
    plain.eval.update(every=0, batch_size=1024)
    plain.probe.every = 0
    return plain


@pytest.mark.slow
def test_a_finished_run_keeps_its_config(small, tmp_path, capfd):
    assert train(small, tmp_path) == 0
    before = (tmp_path / "config.json").read_bytes()
    small.optim.lr = 0.5
    assert train(small, tmp_path) == 0
    assert mentions(capfd.readouterr().out, "2 steps", tmp_path, "total_steps")
    assert (tmp_path / "config.json").read_bytes() == before
    small.total_steps = 3
    assert train(small, tmp_path) == 0
    assert artifacts.load_config(tmp_path).optim.lr == 0.5


@pytest.mark.slow
def test_a_start_that_fails_leaves_no_config_and_the_next_is_told_of_no_change(small, tmp_path, capfd, monkeypatch):
    pretrained.write(tmp_path / "other.safetensors", {"x": np.zeros(3)})
    small.init_from.path = str(tmp_path / "other.safetensors")
    run = tmp_path / "run"
    with pytest.raises(WeightsError):
        train(small, run)
    small.init_from.path = None
    with monkeypatch.context() as broken:
        broken.setattr("leanformer.data.images.synthetic.Synthetic.__getitem__", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            train(small, run)
    assert not (run / "config.json").exists()
    small.optim.lr = 0.5
    assert train(small, run) == 0
    assert "optim.lr" not in capfd.readouterr().err and artifacts.load_config(run).optim.lr == 0.5


@pytest.mark.slow
def test_a_run_that_goes_on_for_longer_has_not_ended_until_it_does(small, tmp_path, monkeypatch):
    """Whatever reads finished runs would take the end of the shorter one for its."""
    assert train(small, tmp_path) == 0 and files.read_json(tmp_path / "summary.json")["steps"] == 2

    def stopped(self):
        self.status = 75
        return True

    small.total_steps = 5
    with monkeypatch.context() as patch:
        patch.setattr("leanformer.train.StopRequest.now", stopped)
        assert train(small, tmp_path) == 75
    assert not (tmp_path / "summary.json").exists() and artifacts.load_config(tmp_path).total_steps == 5
    assert train(small, tmp_path) == 0 and files.read_json(tmp_path / "summary.json")["steps"] == 5


@pytest.mark.slow
def test_a_run_whose_records_are_gone_still_ends(small, tmp_path):
    """Without a record of training there is no speed to tell."""
    assert train(small, tmp_path) == 0
    for name in ("metrics.jsonl", "summary.json"):
        (tmp_path / name).unlink()
    assert train(small, tmp_path) == 0
    summary = files.read_json(tmp_path / "summary.json")
    assert summary["examples_per_s"] is None and summary["steps"] == 2 and summary["final"]["step"] == 2


READERS = {
    "train": ["--config=configs/quickstart.py", "--config.data.name=synthetic", "--workdir=DIR"],
    "evaluate": ["--workdir=DIR"],
    "probe": ["--workdir=DIR"],
    "predict": ["--workdir=DIR", "picture.png"],
    "convert": ["--weights=DIR", "--out=DIR/out"],
}
BROKEN = {
    "cut off": ('{"config": {"seed": 0,', []),
    "not text": (b"\xff\xfe\x00", []),
    "a list": ("[]", ["model", "data", "optim"]),
    "without sections": ('{"config": {"seed": 0, "model": 3}}', ["model", "data", "optim"]),
}


def told(name, folder):
    """What a command says that ends with one sentence and status 2."""
    given = [word.replace("DIR", str(folder)) for word in READERS[name]]
    status, _, err = inside([*command(name, config=None), *given])
    assert status == 2 and err.count("Error: ") == 1, err
    return err


@pytest.mark.parametrize("content", BROKEN)
@pytest.mark.parametrize("name", ["evaluate", "probe", "predict", "convert"])
def test_a_broken_config_is_one_sentence(name, content, tmp_path):
    (tmp_path / "checkpoints").mkdir()
    text, parts = BROKEN[content]
    (tmp_path / "config.json").write_bytes(text if isinstance(text, bytes) else text.encode())
    assert mentions(told(name, tmp_path), tmp_path / "config.json", *parts)


def test_a_training_command_reads_the_same_files(small, tmp_path):
    run_files.write_config(tmp_path, small)
    good = {"step": 1, "kind": "train", "loss": 1.0}
    (tmp_path / "metrics.jsonl").write_text(f'{json.dumps(good)}\n{{"step": 2, "ki\n{json.dumps(good)}\n')
    assert mentions(told("train", tmp_path), tmp_path / "metrics.jsonl", "line 2", '{"step": 2, "ki')
    (tmp_path / "config.json").write_text("{")
    assert mentions(told("train", tmp_path), tmp_path / "config.json")


def test_a_line_that_is_no_record_is_told_and_one_cut_off_at_the_end_is_left_out(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1, "kind": "eval", "top1": 0.5}\n\n{"step": 2, "kind": "ev\xc3')
    assert metrics_log.read_records(path) == [{"step": 1, "kind": "eval", "top1": 0.5}]
    path.write_text('{"step": 1, "loss": 0.5}\n')
    with refuses(path, "step", "kind", "{'step': 1, 'loss': 0.5}", error=WorkdirError):
        metrics_log.read_records(path)


@pytest.mark.parametrize("below", ["", "run"])
@pytest.mark.parametrize("name", ["train", "convert"])
def test_a_file_as_workdir_is_refused_before_anything_is_built(name, below, tmp_path, monkeypatch):
    monkeypatch.setattr(train_setup, "build", lambda *_, **__: 1 / 0)
    (tmp_path / "file").write_text("text")
    given = [word.replace("DIR", str(tmp_path / "file" / below)) for word in READERS[name]]
    status, out, err = inside([*command(name, config=None), *given])
    assert (status, out) == (2, "") and mentions(err, tmp_path / "file", os.strerror(errno.ENOTDIR))
    assert (tmp_path / "file").read_text() == "text"


@pytest.mark.parametrize(("read_only", "number"), [(True, errno.EROFS), (False, errno.EACCES)])
def test_a_folder_that_takes_no_files_is_refused_before_anything_is_built(read_only, number, tmp_path, monkeypatch):
    """Root may write anywhere, so it is said of the folder, by the two calls that are asked."""
    monkeypatch.setattr(train_setup, "build", lambda *_, **__: 1 / 0)
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    monkeypatch.setattr(os, "statvfs", lambda path: types.SimpleNamespace(f_flag=os.ST_RDONLY * read_only))
    err = told("train", tmp_path / "new" / "run")
    assert mentions(err, tmp_path / "new" / "run", tmp_path, os.strerror(number))
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    "number", [errno.EROFS, errno.EACCES, errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.ENAMETOOLONG]
)
def test_a_writer_that_fails_is_one_sentence(number, tmp_path, monkeypatch):
    """What a file server allows first and refuses then: the one writer raises."""

    def refuse(path, *_, **__):
        raise OSError(number, os.strerror(number), str(path))

    monkeypatch.setattr(files.Path, "write_text", refuse)
    monkeypatch.setattr(train_setup, "build", lambda *_, **__: files.write_json(tmp_path / "x.json", {}))
    assert mentions(told("train", tmp_path), tmp_path / "x.json.part", os.strerror(number))


@pytest.mark.parametrize("error", [OSError(errno.ENOTCONN, "not connected", "x"), OSError("no number"), KeyError("x")])
def test_what_no_user_can_mend_is_raised(error, tmp_path, monkeypatch):
    def fail(*_, **__):
        raise error

    monkeypatch.setattr(train_setup, "build", fail)
    with pytest.raises(type(error)):
        told("train", tmp_path)


def test_a_folder_that_cannot_be_created_is_refused():
    with refuses("--workdir=/proc/x", error=WorkdirError), run_files.lock_workdir(Path("/proc/x")):
        pass
