"""Fingerprints of splits, files in several splits, split files with spaces, and checksums of token datasets."""

import numpy as np
import pytest
from messages import mentions, refuses

from leanformer.data import fingerprints, generated
from leanformer.data.images.sources import Folder, Idx
from leanformer.data.source import read_lines
from leanformer.data.text import corpus, rows
from leanformer.errors import DataError
from tests.data.test_source import make_png, write_idx


@pytest.fixture
def pictures(tmp_path):
    for split in ("train", "val"):
        for label in ("ape", "bee"):
            (tmp_path / split / label).mkdir(parents=True)
            for i in range(3):
                (tmp_path / split / label / f"{i}.png").write_bytes(make_png(10 * i))
    return tmp_path


def compute(root, split="train"):
    return fingerprints.compute(Folder(root, split))


def test_changes_of_a_folder_are_described(pictures):
    before = compute(pictures)
    assert fingerprints.describe_changes(before, compute(pictures)) == "" and before["examples"] == 6
    (pictures / "train" / "ape" / "0.png").write_bytes(make_png(10) + b" ")
    assert mentions(fingerprints.describe_changes(before, compute(pictures)), "sizes")
    (pictures / "train" / "ape" / "0.png").rename(pictures / "train" / "ape" / "9.png")
    assert mentions(fingerprints.describe_changes(before, compute(pictures)), "other names")
    (pictures / "train" / "ape" / "9.png").unlink()
    assert mentions(fingerprints.describe_changes(before, compute(pictures)), "6 -> 5 examples")
    assert fingerprints.describe_changes({"examples": 5}, compute(pictures)) == ""  # recorded by another version


def test_changed_classes_of_listed_files_are_described(pictures):
    (pictures / "train.txt").write_text("train/ape/0.png ape\ntrain/bee/0.png bee\n")
    before = compute(pictures)
    (pictures / "train.txt").write_text("train/ape/0.png bee\ntrain/bee/0.png ape\n")
    assert fingerprints.describe_changes(before, compute(pictures)) == "other classes"
    (pictures / "train.txt").write_text("train/bee/0.png bee\ntrain/ape/0.png ape\n")
    assert mentions(fingerprints.describe_changes(before, compute(pictures)), "other names")  # another order


def test_changed_pixels_of_idx_files_are_described(tmp_path):
    images = np.zeros((4, 5, 5), np.uint8)
    write_idx(tmp_path / "train-labels-idx1-ubyte", np.arange(4, dtype=np.uint8))
    write_idx(tmp_path / "train-images-idx3-ubyte", images)
    before = fingerprints.compute(Idx(tmp_path, "train"))
    images[3, 4, 4] = 1
    write_idx(tmp_path / "train-images-idx3-ubyte", images)
    assert fingerprints.describe_changes(before, fingerprints.compute(Idx(tmp_path, "train"))) == "other images"


def test_few_sizes_are_read_of_many_files(monkeypatch):
    monkeypatch.setattr(fingerprints, "SAMPLED", 5)
    asked = []
    fingerprints.digest_sizes(lambda i: asked.append(i) or "/nowhere", 1001)
    assert asked == [0, 250, 500, 750, 1000]
    assert fingerprints.digest_sizes(lambda _: "/nowhere", 0) == fingerprints.digest(b"")


def test_repeated_and_shared_files_are_described(pictures):
    (pictures / "train.txt").write_text("train/ape/0.png\n./train/ape//0.png\ntrain/bee/0.png\n")
    (pictures / "test.txt").write_text("train/bee/0.png\nval/bee/0.png\n")
    train, held_out = Folder(pictures, "train"), {"test": Folder(pictures, "test"), "val": Folder(pictures, "val")}
    repeated, shared = fingerprints.describe_repeats(train, held_out)
    assert mentions(repeated, "1 of 3", "train/ape/0.png") and mentions(shared, 1, "test", "train/bee/0.png")
    assert fingerprints.describe_repeats(held_out["val"], {"test": held_out["test"]}) == []


def test_shared_tokens_are_described(tmp_path):
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text("a bear saw a bird " * 50)
    options = {"tokenizer": "bytes", "train_split": "all[:90%]", "dir": str(tmp_path / "tokens")}
    name = f"text:{tmp_path / 'texts'}"
    train, held, late = (
        rows.Stream(corpus.open_corpus(name, split, **options), 8) for split in ("all[:90%]", "all[80%:]", "all[90%:]")
    )
    (sentence,) = fingerprints.describe_repeats(train, {"held": held, "late": late})
    assert mentions(sentence, "held", 90)
    assert fingerprints.compute(train) != fingerprints.compute(late) != fingerprints.compute(held)


@pytest.mark.parametrize(
    ("line", "file", "label"),
    [
        ("a b/c d.jpg", "a b/c d.jpg", "a b"),
        ("a b/c d.jpg dog", "a b/c d.jpg", "dog"),
        ("a b/c d.JPG\tguide dog", "a b/c d.JPG", "guide dog"),
        ("cat/x.jpg copy.png", "cat/x.jpg copy.png", "cat"),
        ("cat/1.jpg", "cat/1.jpg", "cat"),
        ("1.jpg guide dog", "1.jpg", "guide dog"),
        ("cat/0001 dog", "cat/0001", "dog"),
        ("a\u2028b/\x851.jpg", "a\u2028b/\x851.jpg", "a\u2028b"),
    ],
)
def test_paths_of_split_files_may_have_spaces(tmp_path, line, file, label):
    (tmp_path / "train.txt").write_text(f"{line}\r\n\nother.png other\n", encoding="utf-8")
    source = Folder(tmp_path, "train")
    assert source.files == [file.encode(), b"other.png"] and source.classes == sorted({label, "other"})


def test_image_without_a_class_is_refused(tmp_path):
    (tmp_path / "train.txt").write_text("cat/1.jpg\n\ntop.png\n")
    with refuses(tmp_path / "train.txt", 3, "top.png", error=DataError):
        Folder(tmp_path, "train")


def test_lines_end_as_on_any_system(tmp_path):
    (tmp_path / "names.txt").write_bytes(b"a\r\nb\rc\nd\x0ce")
    assert read_lines(tmp_path / "names.txt") == ["a", "b", "c", "d\x0ce"]


def open_texts(folder):
    return corpus.open_corpus(
        f"text:{folder / 'texts'}", "all", tokenizer="bpe:280", train_split="all", dir=str(folder / "tokens")
    )


@pytest.mark.parametrize("name", ["tokens.bin", "ends.npy", "tokenizer.json"])
@pytest.mark.parametrize("whole", [True, False])
def test_flipped_bytes_of_a_token_dataset_are_refused(tmp_path, monkeypatch, name, whole):
    if not whole:  # files above the limit are verified by blocks
        monkeypatch.setattr(generated, "WHOLE", 0)
        monkeypatch.setattr(generated, "BLOCK", 64)
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text("the bear saw a bird and sang all day long " * 99)
    open_texts(tmp_path)
    open_texts(tmp_path)
    (path,) = (tmp_path / "tokens").glob(f"*/{name}")
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with refuses(path, error=DataError):
        open_texts(tmp_path)


def test_blocks_of_large_files_are_sampled(tmp_path, monkeypatch):
    for key, value in {"WHOLE": 8, "BLOCK": 4, "SAMPLED": 3}.items():
        monkeypatch.setattr(generated, key, value)

    def fill(folder):
        (folder / "x").write_bytes(bytes(range(38)))
        return {}

    folder = generated.make(tmp_path / "set", "Kind", 1, {}, fill)
    record = generated.read(folder, "Kind", 1, {})
    assert len(record["blocks"]["x"]) == 10 and record["blocks"].keys() == {"x"}
    for place, seen in ((0, True), (5, False), (17, True), (37, True)):  # blocks 0, 4 and 9
        content = bytearray(range(38))
        content[place] ^= 255
        (folder / "x").write_bytes(content)
        if seen:
            with refuses(folder / "x", error=DataError):
                generated.check_files(folder, record)
        else:
            generated.check_files(folder, record)
    (folder / "x").write_bytes(bytes(range(38)) + b"1234")
    with refuses(folder / "x", error=DataError):
        generated.check_files(folder, record)
    generated.check_files(folder, {key: x for key, x in record.items() if key != "blocks"})  # of an older version
