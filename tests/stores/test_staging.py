"""Local folders of commands whose workdir is in an object store: the uploading thread, its failures, and reading."""

import os
import shutil
import signal
import time
from pathlib import Path

import pytest
from fake_stores import URL, FailingFiles, check_readable, save, use_memory
from messages import mentions, refuses

from leanformer.errors import TrainingError
from leanformer.stores import Store, StoreError, downloads, lease, mirror, shared_folder, staging
from leanformer.stores.downloads import downloaded
from leanformer.stores.layout import complete_steps
from leanformer.stores.shared_folder import staging_root
from leanformer.stores.staging import mirrored


@pytest.fixture(autouse=True)
def fast(monkeypatch, tmp_path):
    use_memory(monkeypatch)
    monkeypatch.setenv(shared_folder.VARIABLE, str(tmp_path / "staging"))
    monkeypatch.setattr(staging, "POLL", 0.01)
    monkeypatch.setattr(staging, "BACKOFF", 0.02)
    monkeypatch.setattr(staging, "PATIENCE", 0.2)
    monkeypatch.setattr(lease, "RENEW", 0.05)


def wait_until(condition):
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def break_stores(monkeypatch, broken):
    """Have every change of every store fail while `broken` is not empty. Return the file systems."""
    opened, start = [], Store.__init__

    class Failing(FailingFiles):
        @property
        def error(self):
            return OSError("no route") if broken else None

        @error.setter
        def error(self, _):
            pass

    def init(store, url):
        start(store, url)
        store.fs = Failing(store.fs)
        opened.append(store.fs)

    monkeypatch.setattr(Store, "__init__", init)
    return opened


def test_training_is_mirrored_while_it_runs(capsys):
    with mirrored(URL) as folder:
        assert folder.name == "run" and folder.is_relative_to(staging_root())
        save(folder, 10)
        wait_until(lambda: complete_steps(Store(URL).sizes()) == [10])
        assert Store(URL).read(lease.NAME) is not None
        (folder / "summary.json").write_text("{}")
    out, err = capsys.readouterr()
    assert Store(URL).sizes().keys() >= {"metrics.jsonl", "summary.json", "checkpoints/10/files.json"}
    assert Store(URL).read(lease.NAME) is None
    assert mentions(err, URL, folder) and mentions(out, URL, 10)


def test_small_files_are_uploaded_at_intervals(monkeypatch):
    monkeypatch.setattr(staging, "SMALL", 0.3)
    with mirrored(URL) as folder:
        (folder / "a").write_text("1")
        wait_until(lambda: Store(URL).read("a") == b"1")
        begun = time.monotonic()
        (folder / "a").write_text("2")
        wait_until(lambda: Store(URL).read("a") == b"2")
        assert time.monotonic() - begun > 0.1
        (folder / "a").write_text("3")
    assert Store(URL).read("a") == b"3"


def test_store_that_is_down_does_not_stop_training(monkeypatch, capsys):
    broken = []
    break_stores(monkeypatch, broken)
    with mirrored(URL) as folder:
        broken.append(True)
        save(folder, 10)
        time.sleep(0.3)
        save(folder, 20)
        broken.clear()
        wait_until(lambda: complete_steps(Store(URL).sizes()) == [10, 20])
    err = capsys.readouterr().err
    assert mentions(err, "OSError", folder) and err.count(f"{folder} is complete") == 1


def test_uploads_go_on_after_thousands_of_failures(monkeypatch):
    """An outage of a night: powers of two no longer are numbers of seconds."""
    monkeypatch.setattr(staging, "BACKOFF", 0.0)
    broken = []
    opened = break_stores(monkeypatch, broken)
    with mirrored(URL) as folder:
        failures, upload = [], mirror.Mirror.upload

        def count(self, **options):
            failures.append(True)
            return upload(self, **options)

        monkeypatch.setattr(mirror.Mirror, "upload", count)
        broken.append(True)
        save(folder, 10)
        wait_until(lambda: len(failures) > 1100)
        broken.clear()
        wait_until(lambda: complete_steps(Store(URL).sizes()) == [10])
    assert opened


def test_upload_that_fails_at_the_end_names_the_local_copy(monkeypatch):
    broken = []
    break_stores(monkeypatch, broken)
    with refuses(URL, "OSError", staging.local_folder(URL), error=StoreError), mirrored(URL) as folder:
        save(folder, 10)
        wait_until(lambda: complete_steps(Store(URL).sizes()) == [10])
        broken.append(True)
        save(folder, 20)
    broken.clear()
    with mirrored(URL) as folder:  # the same command uploads it
        check_readable(folder, [10, 20])
    assert complete_steps(Store(URL).sizes()) == [10, 20]


def test_error_of_the_run_is_raised_after_the_upload(monkeypatch, capsys):
    broken = []
    break_stores(monkeypatch, broken)
    with refuses("diverged", error=TrainingError), mirrored(URL) as folder:
        save(folder, 10)
        raise TrainingError("diverged")
    assert complete_steps(Store(URL).sizes()) == [10]
    with refuses("diverged", error=TrainingError), mirrored(URL) as folder:
        broken.append(True)
        save(folder, 20)
        raise TrainingError("diverged")
    assert mentions(capsys.readouterr().err, folder, "OSError")


def test_second_interrupt_does_not_wait(capsys):
    with pytest.raises(KeyboardInterrupt), mirrored(URL) as folder:
        save(folder, 10)
        raise KeyboardInterrupt
    assert mentions(capsys.readouterr().err, folder)


def test_stop_signal_during_the_last_upload_waits(monkeypatch, capsys):
    upload = staging.Mirror.upload

    def upload_with_signal(mirror, small):
        if mirror.folder.joinpath("end").exists():
            os.kill(os.getpid(), signal.SIGTERM)
        upload(mirror, small=small)

    with mirrored(URL) as folder:
        monkeypatch.setattr(staging.Mirror, "upload", upload_with_signal)
        monkeypatch.setattr(staging._Uploads, "_work", lambda _: None)
        save(folder, 10)
        (folder / "end").touch()
        before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, before)
    assert complete_steps(Store(URL).sizes()) == [10]
    assert mentions(capsys.readouterr().err, "SIGTERM", URL)


def test_run_whose_lease_is_taken_stops_and_leaves_the_store_alone(monkeypatch):
    stops = []
    monkeypatch.setattr(staging, "_stop_training", stops.append)
    with refuses(URL, 77, "elsewhere", staging.local_folder(URL), error=lease.LeaseLost), mirrored(URL) as folder:
        save(folder, 10)
        wait_until(lambda: complete_steps(Store(URL).sizes()) == [10])
        other = b'{"id": "other", "pid": 77, "host": "elsewhere", "time": 9e9}'
        wait_until(lambda: Store(URL).write(lease.NAME, other) or stops)
        save(folder, 20)
    assert complete_steps(Store(URL).sizes()) == [10] and b"other" in Store(URL).read(lease.NAME)


def test_readers_upload_what_they_write(capsys):
    with mirrored(URL) as folder:
        save(folder, 10)
    with downloaded(URL) as copy:
        assert copy.name == "run"
        check_readable(copy, [10])
        (copy / "probe").mkdir()
        (copy / "probe" / "probe.json").write_text(f'"{copy}/probe"')
        (copy / "checkpoints" / "10" / "score.json").write_text("{}")
    names = Store(URL).sizes()
    assert "checkpoints/10/score.json" not in names and lease.NAME not in names
    assert Store(URL).read("probe/probe.json").decode() == f'"{URL}/probe"'
    assert not copy.parent.exists()
    assert mentions(capsys.readouterr().err, URL, "probe/probe.json")


def test_results_that_cannot_be_uploaded_stay(monkeypatch):
    with mirrored(URL) as folder:
        save(folder, 10)
    broken = []
    break_stores(monkeypatch, broken)
    monkeypatch.setattr(downloads, "retry", lambda function: function())
    with refuses(URL, "a.txt", error=StoreError) as caught, downloaded(URL) as copy:
        broken.append(True)
        (copy / "a.txt").write_text("result")
    (results,) = copy.parent.parent.glob("results-*/run/a.txt")
    assert results.read_text() == "result" and str(results.parent) in str(caught.value)
    shutil.rmtree(results.parents[1])


def test_choice_of_checkpoints():
    with mirrored(URL) as folder:
        for step in (10, 20, 30):
            save(folder, step)
        (folder / "tensorboard").mkdir()
        (folder / "tensorboard" / "events").write_text("large")
    for checkpoints, expected in {"all": [10, 20, 30], "newest": [30], "none": [], 20: [20], "names": []}.items():
        with downloaded(URL, checkpoints) as copy:
            names = {path.relative_to(copy).as_posix() for path in copy.rglob("*") if path.is_file()}
            assert complete_steps(dict.fromkeys(names, 0)) == expected
            assert "metrics.jsonl" in names and "tensorboard/events" not in names
            assert (copy / "checkpoints" / "30").is_dir() == (checkpoints in ("all", "newest", "names"))
    with refuses("--step=5", URL, 10, 20, 30), downloaded(URL, 5):
        pass
    with refuses(f"{URL}-other"), downloaded(f"{URL}-other"):
        pass
    assert not [*staging_root().glob("leanformer-*")]


def test_runs_named_like_folders_of_results_are_read():
    with mirrored(URL) as folder:
        for name in ("probe", "compare", "a"):
            (folder / name / "plots").mkdir(parents=True)
            (folder / name / "summary.json").write_text("{}")
            (folder / name / "plots" / "x.json").write_text("{}")
        (folder / "probe" / "config.json").write_text("{}")
    with downloaded(URL, "none") as copy:
        assert (copy / "probe" / "summary.json").is_file() and (copy / "a" / "summary.json").is_file()
        assert not (copy / "compare").exists() and not [*copy.rglob("x.json")]


def test_folder_that_other_hosts_do_not_see_is_refused(monkeypatch, tmp_path):
    monkeypatch.setattr(shared_folder, "VISIBLE", 0.0)
    monkeypatch.setattr(shared_folder.multihost, "all_gather_host", lambda seen: [True, seen])
    with refuses(shared_folder.VARIABLE, tmp_path, 1):
        shared_folder._check_shared(tmp_path, Path(tmp_path / "token"))
