"""Commands on a run in an object store in memory: training, resuming, evaluation, prediction, probing, comparison."""

import json
import signal
import threading
import time

import numpy as np
import pytest
from commands import check_refused, command, run_in_process
from fake_stores import URL, use_memory
from messages import mentions
from PIL import Image

import leanformer
from leanformer.stores import Store, lease, shared_folder, staging
from leanformer.stores.layout import complete_steps
from leanformer.training import metrics_log


TINY = {
    **{"total_epochs": 0.0, "total_steps": 2, "batch_size": 32, "log_every": 1, "data.workers": 0, "probe.every": 0},
    **{"model.width": 24, "model.depth": 2, "model.num_heads": 2, "model.head_dim": 8, "model.mlp_dim": 32},
    **{"eval.every": 1, "eval.examples": 32, "eval.batch_size": 32, "checkpoint.every": 1, "probe.examples": 8},
    **{"optim.warmup_epochs": 0.0, "augment.mixup": 0.0, "augment.cutmix": 0.0},
}


@pytest.fixture
def store(monkeypatch, tmp_path, one_device):
    use_memory(monkeypatch)
    monkeypatch.setenv(shared_folder.VARIABLE, str(tmp_path / "staging"))
    monkeypatch.setattr(staging, "POLL", 0.05)
    return Store(URL)


def train(**changes):
    return run_in_process(command("train", URL, TINY | changes))


@pytest.mark.slow
def test_commands_on_a_run_in_a_store(store, tmp_path):
    status, out, err = run_in_process([*command("train", URL, TINY), "--dry_run"])
    assert status == 0 and not store.sizes(), err
    status, out, err = train(total_steps=1)
    assert status == 0, err
    assert mentions(out, URL, 1) and mentions(err, URL, staging.local_folder(URL))
    status, out, err = run_in_process([*command("train", URL, TINY), "--dry_run"])
    assert status == 0 and mentions(out, 1), err
    staging.local_folder(URL).rename(tmp_path / "lost")  # another machine
    status, out, err = train()
    assert status == 0, err
    assert complete_steps(store.sizes()) == [1, 2] and store.sizes().keys() >= {"summary.json", "classes.json"}
    rows = metrics_log.read_records(staging.local_folder(URL) / "metrics.jsonl")
    assert [row["step"] for row in rows if row["kind"] == "train"] == [1, 2]
    assert store.read("metrics.jsonl") == (staging.local_folder(URL) / "metrics.jsonl").read_bytes()

    status, out, err = run_in_process([*command("evaluate", URL, config=None), "--best"])
    assert status == 0 and json.loads(store.read("evaluation.json"))["step"] in (1, 2), err
    check_refused_in_store(command("evaluate", URL, config=None), "--step=7", URL, 1, 2)
    Image.fromarray(np.zeros((30, 21), np.uint8)).save(tmp_path / "a.png")
    status, out, err = run_in_process([*command("predict", URL, config=None), str(tmp_path / "a.png")])
    assert status == 0 and len(json.loads(out)["classes"]) == 5, err
    status, out, err = run_in_process([*command("probe", URL, config=None), "--all"])
    assert status == 0, err
    assert [snapshot["step"] for snapshot in json.loads(store.read("probe/probe.json"))["snapshots"]] == [1, 2]
    status, out, err = run_in_process([*command("compare", config=None), URL])
    assert status == 0 and f"--workdir={URL}".encode() in store.read("compare/run.html"), err
    status, out, err = run_in_process([*command("convert", config=None), URL, f"--out={tmp_path / 'out'}"])
    assert status == 0 and (tmp_path / "out" / "weights.safetensors").is_file(), err
    model = leanformer.load(URL, step=1)
    assert model.step == 1 and len(model.predict([tmp_path / "a.png"])) == 1
    assert complete_steps(store.sizes()) == [1, 2] and store.read(lease.NAME) is None


def check_refused_in_store(words, flag, *parts):
    status, _, err = run_in_process([*words, flag])
    assert status == 2 and mentions(err, flag, *parts), err


def test_errors_name_the_url_instead_of_the_local_copy(store):
    store.write("config.json", b'{"exported": {"step": 1, "averaged": false}}')
    status, _, err = train()
    message = err.partition("Error:")[2]
    assert status == 2 and mentions(message, URL, "--config.init_from.path"), err
    assert str(staging.local_folder(URL)) not in message


def test_run_whose_folder_is_taken_over_stops_with_a_message(store, monkeypatch):
    monkeypatch.setattr(lease, "RENEW", 0.05)
    before = signal.getsignal(signal.SIGTERM)

    def take_over():
        while not complete_steps(store.sizes()):
            time.sleep(0.02)
        while not ended.wait(0.02):
            store.write(lease.NAME, b'{"id": "other", "pid": 77, "host": "elsewhere", "time": 9e9}')

    ended = threading.Event()
    thief = threading.Thread(target=take_over, daemon=True)
    thief.start()
    status, _, err = train(total_steps=100_000, **{"eval.every": 0})
    ended.set()
    thief.join()
    assert status == 2 and mentions(err, URL, 77, "elsewhere", "SIGTERM"), err
    assert signal.getsignal(signal.SIGTERM) == before and b"other" in store.read(lease.NAME)


def test_workdir_in_use(store, monkeypatch):
    monkeypatch.setattr(lease, "PATIENCE", 0.0)
    store.write(lease.NAME, json.dumps({"id": "x", "host": "elsewhere", "pid": 7, "time": time.time()}).encode())
    status, _, err = train()
    assert status == 2 and mentions(err, f"--workdir={URL}", "elsewhere", 7), err


def test_missing_package_and_sweeps(store, tmp_path):
    check_refused(command("sweep", "memory://bucket/sweep"), "--workdir=memory://bucket/sweep")
    text = {"data.dir": "gs://bucket/texts", "data.name": f"text:{tmp_path}"}
    check_refused(command("train", tmp_path / "run", text, "configs/quickstart_gpt.py"), "data.dir=gs://bucket/texts")
    check_refused(command("train", tmp_path / "run", {"data.name": "cache:s3://bucket/set"}), "cache:s3://bucket/set")
    check_refused(
        command("train", tmp_path / "run", {"data.name": "tfds:mnist", "data.dir": "s3://bucket"}),
        "data.dir=s3://bucket",
    )
