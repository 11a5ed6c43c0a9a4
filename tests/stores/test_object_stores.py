"""Runs in emulators of Google Cloud Storage and Amazon S3: kills, all commands, two processes, data.

`make test-all` installs the emulators.
"""

import json
import random

import numpy as np
import pytest
from commands import command, run
from emulators import SCHEMES, is_installed, run_emulator, upload_folder
from messages import mentions
from pictures import encode
from PIL import Image
from processes import read_records_by_step, start_processes, wait_for_processes
from tiny_tfds import prepare_tiny_images

from leanformer.data.images import cache, open_images
from leanformer.stores import Store, StoreError, downloads, shared_folder
from leanformer.stores.layout import complete_steps
from stress import kills


pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # the stores' libraries warn of old Python etc.
SMALL = {
    **{"total_epochs": 0.0, "total_steps": 6, "batch_size": 32, "log_every": 2, "data.workers": 0, "probe.every": 0},
    **{"model.width": 24, "model.num_heads": 4, "model.head_dim": 8, "model.mlp_dim": 32, "hang_seconds": 100},
    **{"eval.every": 3, "eval.examples": 32, "eval.batch_size": 32, "checkpoint.every": 2, "probe.examples": 4},
    **{"optim.warmup_epochs": 0.0},
}


@pytest.fixture(scope="module", params=SCHEMES)
def bucket(request):
    if not is_installed(request.param):
        pytest.skip(f"the emulator of {request.param} is not installed: make test-all")
    with run_emulator(request.param) as url:
        yield url


@pytest.fixture(autouse=True)
def staging(monkeypatch, tmp_path):
    monkeypatch.setenv(shared_folder.VARIABLE, str(tmp_path / "staging"))


def test_objects_of_a_store(bucket, tmp_path):
    store = Store(f"{bucket}/objects/run")
    assert store.sizes() == {} and store.read("a") is None
    assert store.create("a", b"1") and store.read("a") == b"1"
    if bucket.startswith("s3"):  # the emulator of gs ignores the condition
        assert not store.create("a", b"2") and store.read("a") == b"1"
    (tmp_path / "large").write_bytes(bytes(range(256)) * 2**18)  # 64 MiB, in several parts
    store.upload([(tmp_path / "large", "d/large"), (tmp_path / "vanished", "d/vanished")])
    store.fs.pipe_file(store.path("plots/"), b"")
    assert store.sizes() == {"a": 1, "d/large": 2**26}
    store.download(["d/large"], tmp_path / "copy")
    assert (tmp_path / "copy" / "d" / "large").read_bytes() == (tmp_path / "large").read_bytes()
    store.delete(["a", "d/large", "missing"])
    assert store.sizes() == {}
    for content in (b"", b"\r", b"1\r", b"1\r\n", b"1\n"):
        store.write("a", content)
        assert store.read("a") == content
    with pytest.raises(StoreError):
        Store(f"{bucket}-missing/run").write("a", b"1")


def test_damaged_upload_is_an_error(bucket):
    if bucket.startswith("s3"):
        pytest.skip("the emulator of s3 damages nothing")
    store = Store(f"{bucket}/objects/damaged")
    # The emulator of gs drops the carriage return of an upload in one request, which Store.write avoids.
    with pytest.raises(StoreError) as caught, store._errors():
        store.fs.pipe_file(store.path("a"), b"1\r", **store._verified)
    assert mentions(str(caught.value), "MD5")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    return kills.run_undisturbed("image", tmp_path_factory.mktemp("undisturbed"), 1)


@pytest.mark.parametrize("kind", ["kill", "term"])
def test_killed_run_in_a_store_equals_an_undisturbed_local_run(bucket, kind, undisturbed, tmp_path):
    row = kills.measure_row("image", kind, 2, undisturbed, tmp_path, random.Random(f"2 {bucket} {kind}"), bucket)
    assert row["same"] == "yes" and row["kills"] == 2


def test_commands_on_a_run_in_two_processes(bucket, tmp_path):
    url = f"{bucket}/runs/two"
    running = start_processes("train", url, tmp_path / "cache", processes=2, config=SMALL)
    statuses, _, errors = wait_for_processes(running)
    assert statuses == [0, 0], errors
    store = Store(url)
    assert complete_steps(store.sizes())[-1] == 6
    with downloads.downloaded(url, upload=False) as copy:
        assert [*read_records_by_step(copy, "train")] == [2, 4, 6]
    running = start_processes("evaluate", url, tmp_path / "cache", processes=2, config={})
    statuses, _, errors = wait_for_processes(running)
    assert statuses == [0, 0] and json.loads(store.read("evaluation.json"))["step"] == 6, errors
    Image.fromarray(np.zeros((30, 21), np.uint8)).save(tmp_path / "a.png")
    status, out, err = run([*command("predict", url, config=None), "--best", str(tmp_path / "a.png")])
    assert status == 0 and len(json.loads(out)["classes"]) == 5, err
    status, _, err = run([*command("probe", url, config=None), "--all"])
    assert status == 0 and "probe/by_layer.png" in store.sizes(), err
    status, _, err = run([*command("compare", config=None), url])
    assert status == 0 and f"--workdir={url}".encode() in store.read("compare/run.html"), err


def test_data_are_read_from_gs(bucket, tmp_path):
    if bucket.startswith("s3"):
        pytest.skip("ArrayRecord files are read from gs:// only")
    pictures = [(encode(np.full((8, 8), i, np.uint8), "PNG"), i % 3) for i in range(6)]
    prepare_tiny_images(tmp_path / "tfds", pictures)
    upload_folder(tmp_path / "tfds", f"{bucket}/tfds")
    shape = {"image_size": 8, "channels": 1, "num_classes": 3}
    source = open_images("tfds:tiny_images", "train", dir=f"{bucket}/tfds", **shape)
    examples = [source[i] for i in range(len(source))]
    assert sorted((example["image"], example["label"]) for example in examples) == sorted(pictures)
    options = {"name": "tfds:tiny_images", "split": "train", "short_side": None, "channels": 1, "processes": 0}
    cache.write(source, tmp_path / "cached", **options)
    upload_folder(tmp_path / "cached", f"{bucket}/cached")
    cached = open_images(f"cache:{bucket}/cached", "train", **shape)
    assert [cached[i] for i in range(len(cached))] == examples
