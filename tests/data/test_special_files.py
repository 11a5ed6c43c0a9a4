"""Pipes, sockets and devices among the data: skipped with a warning or named in an error, never waited for."""

import os

import numpy as np
import pytest
from messages import refuses
from PIL import Image

from leanformer import predict
from leanformer.data import loader
from leanformer.data import source as sources
from leanformer.data.images.sources import Folder
from leanformer.data.text import documents, tokenizer
from leanformer.errors import DataError, WeightsError
from leanformer.pretrained import storage


@pytest.fixture
def root(tmp_path, rng):
    """Write an image and a text; return the folder, which also has a pipe of each kind and a link to a device."""
    folder = tmp_path / "train" / "ant"
    folder.mkdir(parents=True)
    Image.fromarray(rng.integers(0, 256, (9, 9), dtype=np.uint8)).save(folder / "a.png")
    (folder / "a.txt").write_text("text")
    for name in ("b.png", "b.txt", "b.json", "b.safetensors"):
        os.mkfifo(folder / name)
    (folder / "c.png").symlink_to("/dev/zero")
    (folder / "folder.png").mkdir()
    return tmp_path


def test_folder_of_images_skips_them_with_a_warning(root):
    with pytest.warns(
        UserWarning, match="b.png, train/ant/b.safetensors, train/ant/b.txt, train/ant/c.png, train/ant/folder.png"
    ):
        source = Folder(root, "train")
    assert [source.name(i) for i in range(len(source))] == [f"{root}/train/ant/a.png"]


def test_listed_pipe_is_an_unreadable_image(root):
    (root / "val.txt").write_text("train/ant/b.png\ntrain/ant/c.png\n")
    source = Folder(root, "val")
    for i in range(2):
        with pytest.raises(OSError, match=r"[bc]\.png"):
            source[i]


def test_folder_of_texts_skips_them_with_a_warning(root):
    with pytest.warns(UserWarning, match=r"b\.txt"):
        assert [*documents.find(f"text:{root}", "train")] == ["text"]


def test_predict_skips_them_and_other_files_in_folders_with_a_warning(root, capsys):
    folder = root / "train" / "ant"
    (folder / "d.gif").touch()
    (folder / ".hidden").touch()
    assert predict.find_files([str(folder)], (".png",)) == [folder / "a.png"]
    warning = capsys.readouterr().err
    assert all(name in warning for name in ("a.txt", "b.png", "c.png", "d.gif")) and ".hidden" not in warning
    assert predict.find_files([str(folder / "d.gif")], (".png",)) == [folder / "d.gif"]  # by name
    assert capsys.readouterr().err == ""


def test_named_pipe_is_refused(root):
    folder = root / "train" / "ant"
    with refuses("b.png", error=DataError):
        sources.read_content(folder / "b.png", images=True)
    with refuses("b.json", error=DataError):
        tokenizer.read(folder / "b.json")
    with refuses("b.safetensors", error=WeightsError):
        storage.read(folder / "b.safetensors")


def test_too_many_open_files_is_no_unreadable_example():
    class Source:
        def __len__(self):
            return 20

        def __getitem__(self, index):
            raise OSError(self.number, "")

        def name(self, index):
            return f"example {index}"

    source = Source()
    batches = loader.Batches(source, lambda *_: {}, batch_size=1, train=True)
    source.number = 5  # EIO
    with pytest.raises(DataError):
        batches[0]
    source.number = 24  # EMFILE
    with pytest.raises(OSError, match="24"):
        batches[0]
