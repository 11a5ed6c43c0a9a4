"""Names as file systems have them: bytes that are not UTF-8, links to themselves, lists in other encodings."""

import io
import json
import os
import sys

import numpy as np
import pytest
from messages import refuses
from PIL import Image

from leanformer import cli
from leanformer.data.images.cache import FIELDS, Cache, write
from leanformer.data.images.folder import Folder
from leanformer.errors import DataError
from leanformer.reports import confusion, plots
from leanformer.runtime import files


CAFE = b"caf\xe9"  # Latin-1, and no UTF-8
READ = os.fsdecode(CAFE)  # as Python reads it: a surrogate
SHOWN = "caf\\udce9"


@pytest.fixture
def root(tmp_path, rng):
    """Two images each of two classes, one of which has no name in UTF-8."""
    for label in (b"ant", CAFE):
        folder = os.path.join(os.fsencode(tmp_path), b"train", label)  # noqa: PTH118
        os.makedirs(folder)  # noqa: PTH103
        for i in range(2):
            path = os.fsdecode(folder) + f"/{i}.png"
            Image.fromarray(rng.integers(0, 256, (9, 9), dtype=np.uint8)).save(path)
    return tmp_path


def test_a_class_with_a_name_that_is_not_utf_8(root):
    source = Folder(root, "train")
    assert source.classes == ["ant", READ] and source[3]["label"] == 1
    assert source[3]["image"].startswith(b"\x89PNG")


@pytest.mark.parametrize("name", ["dog", "dog/"])
def test_a_link_to_itself_is_set_aside(root, name):
    (root / "train" / "dog").symlink_to("dog")
    with pytest.warns(UserWarning, match="train/dog"):
        assert Folder(root, "train").classes == ["ant", READ]


def test_a_list_of_classes_has_the_bytes_of_the_folders(root):
    (root / "classes.txt").write_bytes(b"\xef\xbb\xbf" + CAFE + b"\nant\n")  # Windows puts a mark before UTF-8
    assert Folder(root, "train").classes == [READ, "ant"]


def test_a_split_file_has_the_bytes_of_the_files(root):
    (root / "val.txt").write_bytes(b"train/" + CAFE + b"/1.png\ntrain/ant/0.png\n")
    source = Folder(root, "val")
    assert source.classes == ["ant", READ] and [source[i]["label"] for i in range(2)] == [1, 0]


@pytest.mark.parametrize("name", ["classes.txt", "train.txt"])
@pytest.mark.parametrize("content", ["ant\nbee\n".encode("utf-16"), "ant\n".encode("utf-16-be"), b"\0"])
def test_a_list_in_utf_16_is_refused(root, name, content):
    (root / name).write_bytes(content)
    with refuses(str(root / name), "UTF-16", error=DataError):
        Folder(root, "train")


def test_names_are_printed_escaped(monkeypatch):
    out = io.TextIOWrapper(io.BytesIO(), "utf-8")
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(cli.gc, "freeze", lambda: None)
    monkeypatch.setattr(cli.faulthandler, "enable", lambda: None)
    monkeypatch.setattr(cli.malloc, "keep_freed", lambda: None)
    monkeypatch.setattr(cli.warnings, "formatwarning", None)
    monkeypatch.setattr(cli.logging, "set_verbosity", lambda _: None)
    with pytest.raises(SystemExit) as caught:
        cli.run(lambda: print(READ) or 4)
    out.flush()
    assert caught.value.code == 4 and out.buffer.getvalue() == f"{SHOWN}\n".encode()


def test_a_confusion_matrix_shows_names_escaped(tmp_path):
    matrix = np.array([[3, 1], [0, 2]])
    confusion.write_csv(tmp_path / "confusion.csv", matrix, ["ant", READ])
    assert confusion.read_csv(tmp_path / "confusion.csv")[1] == ["ant", SHOWN]
    plots.plot_confusion(matrix, ["ant", READ], tmp_path / "confusion.png", f"of {READ}")
    with Image.open(tmp_path / "confusion.png") as image:
        assert image.size[0] > 100


def test_text_files_hold_names_escaped(tmp_path):
    files.write_text(tmp_path / "page.html", f"<p>{READ} ü</p>")
    assert (tmp_path / "page.html").read_text(encoding="utf-8") == f"<p>{SHOWN} ü</p>"
    files.write_json(tmp_path / "classes.json", [READ])
    assert files.read_json(tmp_path / "classes.json") == [READ]


@pytest.fixture
def cached(root):
    write(Folder(root, "train"), root / "cache", name="x", split="train", short_side=None, channels=1, processes=0)
    return root / "cache"


def test_a_whole_cache_is_read(cached):
    cache = Cache(cached, "train", 1)
    assert cache.classes == ["ant", READ] and len(cache) == 4
    assert json.loads((cached / "train" / "cache.json").read_text()).keys() == FIELDS.keys() | {"version"}


@pytest.mark.parametrize("key", FIELDS)
def test_a_field_of_another_type_is_refused(cached, key):
    path = cached / "train" / "cache.json"
    record = json.loads(path.read_text())
    fits = {"short_side": (None,), "num_classes": (None,), "classes": (None,), "source": ("b",), "split": ("b",)}
    for value in ([3], None, "b", -1, True, 1.5, {"a": "b"}, {"../a": 1}):
        if value not in fits.get(key, ()):
            path.write_text(json.dumps(record | {key: value}))
            with refuses(str(path), key, error=DataError):
                Cache(cached, "train", 1)
    record.pop(key)
    path.write_text(json.dumps(record))
    with refuses(str(path), key, error=DataError):
        Cache(cached, "train", 1)
