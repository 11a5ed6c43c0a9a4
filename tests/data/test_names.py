"""File names that are not UTF-8, links to themselves, and class lists in other encodings."""

import json
import os

import numpy as np
import pytest
from messages import refuses
from PIL import Image

from leanformer.analysis import confusion
from leanformer.data.images.cache import Cache, write
from leanformer.data.images.sources import Folder
from leanformer.errors import DataError
from leanformer.runtime import files


CAFE = b"caf\xe9"  # Latin-1, not UTF-8
DECODED = os.fsdecode(CAFE)  # as Python reads it: a surrogate
ESCAPED = "caf\\udce9"


@pytest.fixture
def root(tmp_path, rng):
    """Write two images for each of two classes, one with a name that is not UTF-8; return the folder."""
    for label in (b"ant", CAFE):
        folder = os.path.join(os.fsencode(tmp_path), b"train", label)  # noqa: PTH118
        os.makedirs(folder)  # noqa: PTH103
        for i in range(2):
            path = os.fsdecode(folder) + f"/{i}.png"
            Image.fromarray(rng.integers(0, 256, (9, 9), dtype=np.uint8)).save(path)
    return tmp_path


def test_class_name_that_is_not_utf_8_is_read(root):
    source = Folder(root, "train")
    assert source.classes == ["ant", DECODED] and source[3]["label"] == 1
    assert source[3]["image"].startswith(b"\x89PNG")


@pytest.mark.parametrize("name", ["dog", "dog/"])
def test_link_to_itself_is_skipped_with_a_warning(root, name):
    (root / "train" / "dog").symlink_to("dog")
    with pytest.warns(UserWarning, match="train/dog"):
        assert Folder(root, "train").classes == ["ant", DECODED]


def test_classes_file_matches_folder_names_by_bytes(root):
    # Windows writes a byte-order mark before UTF-8.
    (root / "classes.txt").write_bytes(b"\xef\xbb\xbf" + CAFE + b"\nant\n")
    assert Folder(root, "train").classes == [DECODED, "ant"]


def test_split_file_matches_file_names_by_bytes(root):
    (root / "val.txt").write_bytes(b"train/" + CAFE + b"/1.png\ntrain/ant/0.png\n")
    source = Folder(root, "val")
    assert source.classes == ["ant", DECODED] and [source[i]["label"] for i in range(2)] == [1, 0]


@pytest.mark.parametrize("name", ["classes.txt", "train.txt"])
@pytest.mark.parametrize("content", ["ant\nbee\n".encode("utf-16"), "ant\n".encode("utf-16-be"), b"\0"])
def test_utf_16_lists_are_refused(root, name, content):
    (root / name).write_bytes(content)
    with refuses(str(root / name), "UTF-16", error=DataError):
        Folder(root, "train")


def test_text_files_contain_escaped_names(tmp_path):
    files.write_text(tmp_path / "page.html", f"<p>{DECODED} ü</p>")
    assert (tmp_path / "page.html").read_text(encoding="utf-8") == f"<p>{ESCAPED} ü</p>"
    files.write_json(tmp_path / "classes.json", [DECODED])
    assert files.read_json(tmp_path / "classes.json") == [DECODED]
    confusion.write_csv(tmp_path / "confusion.csv", np.eye(2, dtype=int), ["ant", DECODED])
    assert confusion.read_csv(tmp_path / "confusion.csv")[1] == ["ant", ESCAPED]


@pytest.mark.parametrize("key", ["bytes", "channels", "num_classes", "classes"])
def test_malformed_cache_record_is_refused(root, key):
    folder = root / "cache"
    write(Folder(root, "train"), folder, name="x", split="train", short_side=None, channels=1, processes=0)
    cache = Cache(folder, "train", 1)
    assert cache.classes == ["ant", DECODED] and len(cache) == 4
    path = folder / "train" / "cache.json"
    record = json.loads(path.read_text())
    for value in ([3], "b", -1, 1.5, {"../a": 1}):
        path.write_text(json.dumps(record | {key: value}))
        with refuses(str(path), key, error=DataError):
            Cache(folder, "train", 1)
    path.write_text(json.dumps(record | {"version": 2}))
    with refuses(path, "version 1", error=DataError):
        Cache(folder, "train", 1)
    record.pop(key)
    path.write_text(json.dumps(record))
    with refuses(str(path), key, error=DataError):
        Cache(folder, "train", 1)
