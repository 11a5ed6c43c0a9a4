"""Image sources, generated datasets and subsets: contents, and messages for missing or broken data."""

import io
import json
import pickle
import struct

import numpy as np
import pytest
from messages import refuses
from PIL import Image
from tiny_tfds import prepare_tiny_images

from leanformer import config, data, tasks
from leanformer.data.images import open_images
from leanformer.data.images.sources import Folder, Idx, Synthetic
from leanformer.data.source import RECORD, Source, make_dataset, read_record
from leanformer.errors import ConfigError, DataError


SHAPE = {"image_size": 8, "channels": 1, "num_classes": 3}


def make_png(value: int) -> bytes:
    out = io.BytesIO()
    Image.fromarray(np.full((8, 8), value, np.uint8)).save(out, "PNG")
    return out.getvalue()


@pytest.fixture
def folder(tmp_path):
    for split in ("train", "val"):
        for number, label in enumerate(("ape", "bee", "cat")):
            (tmp_path / split / label).mkdir(parents=True)
            for i in range(2):
                (tmp_path / split / label / f"{i}.png").write_bytes(make_png(10 * number + i))
    return tmp_path


def write_idx(path, array, magic=None):
    head = magic or bytes((0, 0, 8, array.ndim))
    path.write_bytes(head + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes())


@pytest.fixture
def idx(tmp_path, rng):
    images, labels = rng.integers(0, 256, (7, 5, 4), dtype=np.uint8), np.arange(7, dtype=np.uint8) % 3
    write_idx(tmp_path / "train-images-idx3-ubyte", images)
    write_idx(tmp_path / "train-labels-idx1-ubyte", labels)
    return tmp_path, images, labels


def test_folder_of_classes(folder):
    source = open_images(f"folder:{folder}", "train", **SHAPE)
    assert isinstance(source, Source) and len(source) == 6 and source.classes == ["ape", "bee", "cat"]
    assert [source[i]["label"] for i in range(6)] == [0, 0, 1, 1, 2, 2]
    assert source[3]["image"] == make_png(11)
    assert source.name(3) == str(folder / "train" / "bee" / "1.png")


def test_files_that_are_not_images_are_ignored(folder):
    before = Folder(folder, "train")
    for name in ("ape/._0.png", "ape/.DS_Store", "bee/Thumbs.db", ".ipynb_checkpoints/0.png", "notes.txt", "yak/x.txt"):
        path = folder / "train" / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"no image")
    with pytest.warns(UserWarning, match="yak"), pytest.warns(UserWarning, match="3 files"):
        after = Folder(folder, "train")
    assert after.classes == before.classes == ["ape", "bee", "cat"]
    assert [after.name(i) for i in range(len(after))] == [before.name(i) for i in range(6)]


@pytest.mark.parametrize(
    ("line", "file", "label"),
    [
        ("a b/c d.png", "a b/c d.png", "a b"),
        ("a b/c d.jpg cat", "a b/c d.jpg", "cat"),
        ("a/b.png\tmy cat", "a/b.png", "my cat"),
    ],
)
def test_split_file_may_have_spaces(folder, line, file, label):
    (folder / "few.txt").write_text(line)
    source = Folder(folder, "few")
    assert (source.name(0), source.classes) == (str(folder / file), [label])


def test_split_file(folder):
    (folder / "few.txt").write_text("train/cat/0.png\n\nval/ape/1.png ape\n")
    source = Folder(folder, "few")
    assert [source[i]["label"] for i in range(2)] == [1, 0] and source[1]["image"] == make_png(1)


@pytest.mark.parametrize(
    ("name", "split", "changes", "error", "parts"),
    [
        ("folder:{}/nowhere", "train", {}, DataError, ["nowhere"]),
        ("folder:{}", "validation", {}, DataError, ["validation"]),
        ("folder:{}", "train", {"num_classes": 2}, DataError, ["3 classes", "--config.model.num_classes=3"]),
        ("tfds:cifar10", "train", {}, DataError, ["cifar10", "leanformer.prepare build"]),
        ("webdataset:x", "train", {}, ConfigError, ["tfds:<name>", "folder:<path>"]),
    ],
)
def test_missing_or_unfitting_data_are_refused(folder, name, split, changes, error, parts):
    with refuses(*parts, error=error):
        open_images(name.format(folder), split, dir=str(folder), **SHAPE | changes)


def test_idx(idx):
    path, images, labels = idx
    source = open_images(f"idx:{path}", "train", **SHAPE)
    assert len(source) == 7 and source.num_classes == 3
    np.testing.assert_array_equal(source[4]["image"], images[4])
    assert [source[i]["label"] for i in range(7)] == labels.tolist()


def test_missing_or_damaged_idx_files_are_refused(idx):
    path, labels = idx[0] / "train-images-idx3-ubyte", idx[0] / "train-labels-idx1-ubyte"
    with refuses("test-images-idx3-ubyte", error=DataError):
        Idx(idx[0], "test")
    write_idx(labels, np.zeros(6, np.uint8))
    with refuses("7 images", "6 labels", error=DataError):
        Idx(idx[0], "train")
    path.write_bytes(b"PNG" + path.read_bytes())
    with refuses(path, "PNG", error=DataError):
        Idx(idx[0], "train")


@pytest.mark.parametrize(("split", "per_class"), [("train", 1000), ("t10k", 200)])
def test_bundled_images_are_balanced(split, per_class):
    source = open_images("bundled:fashion_mnist", split, image_size=28, channels=1, num_classes=10)
    labels = [source[i]["label"] for i in range(len(source))]
    assert np.bincount(labels).tolist() == [per_class] * 10
    assert source[0]["image"].shape == (28, 28)


def test_synthetic_is_a_function_of_the_index():
    one, two = (open_images("synthetic", "train", **SHAPE) for _ in range(2))
    np.testing.assert_array_equal(one[12345]["image"], two[12345]["image"])
    assert (one[0]["image"] != one[3]["image"]).any() and one[0]["label"] == one[3]["label"]


def test_prepared_tfds_is_read(tmp_path):
    """Prepare and read a real TFDS dataset in array_record without TensorFlow."""
    prepare_tiny_images(tmp_path, [(make_png(i), i % 3) for i in range(6)])
    source = open_images("tfds:tiny_images", "train", dir=str(tmp_path), **SHAPE)
    assert len(source) == 6 and source.num_classes == 3
    seen = {source[i]["image"]: source[i]["label"] for i in range(6)}
    assert seen == {make_png(i): i % 3 for i in range(6)}


@pytest.fixture
def synthetic():
    return Synthetic("test", 8, 1, 7)  # 2,048 examples


@pytest.mark.parametrize("examples", [1, 5, 97, 2047])
def test_subset_is_evenly_spaced_without_repeats(synthetic, examples):
    part = pickle.loads(pickle.dumps(data.take_subset(synthetic, examples)))  # as sent to workers
    names = [part.name(i) for i in range(len(part))]
    assert len(set(names)) == len(part) == examples
    places = np.array([int(name.rsplit(" ", 1)[1]) for name in names])
    gaps = np.diff(places)
    assert places[0] == 0 and (examples == 1 or (places[-1] == 2047 and gaps.max() - gaps.min() <= 1))
    np.testing.assert_array_equal(part[examples - 1]["image"], synthetic[int(places[-1])]["image"])


def test_subset_forwards_source_attributes(synthetic):
    assert all(data.take_subset(synthetic, examples) is synthetic for examples in (0, 2048, 5000))
    part = data.take_subset(synthetic, 3)
    assert part.num_classes == 7 and part.classes is synthetic.classes
    assert not hasattr(part, "vocabulary")
    synthetic.vocabulary, synthetic.tokenizer = 31, "of masked text"
    part = data.take_subset(synthetic, 3)
    assert part.vocabulary == 31 and part.tokenizer == "of masked text"


def test_subset_of_point_sets_is_read_in_batches():
    """The last batch also reads an example beyond the subset, which is masked."""
    c = config.points()
    task = tasks.build_task(c)
    whole = tasks.open_data(task.data, c)[1][""]
    batches = task.data.eval_batches(data.take_subset(whole, 7), batch_size=4)
    assert batches[0]["mask"].all() and list(batches[1]["mask"]) == [True] * 3 + [False]
    result = np.concatenate([batches[0]["points"], batches[1]["points"][:3]])
    places = np.linspace(0, len(whole) - 1, 7).round().astype(int)
    np.testing.assert_array_equal(result, np.stack([whole[int(i)]["points"] for i in places]).astype(np.float32))


RECIPE = {"seed": 1}


def fill(folder):
    np.save(folder / "numbers.npy", np.arange(5))
    return {"count": 5}


def test_dataset_is_generated_once_with_a_record(tmp_path):
    folder = make_dataset(tmp_path / "a" / "set", RECIPE, fill)
    assert read_record(folder, RECIPE) == {"recipe": RECIPE, "count": 5}
    assert make_dataset(folder, RECIPE, lambda _: pytest.fail("written again")) == folder
    assert {path.name for path in folder.iterdir()} == {"numbers.npy", RECORD}
    with refuses("seed=1", "(configured 2)", error=DataError):
        make_dataset(folder, {"seed": 2}, fill)


@pytest.mark.parametrize("stop", [KeyboardInterrupt, OSError("disk full")])
def test_interrupted_generation_leaves_no_dataset(tmp_path, stop):
    def broken(folder):
        fill(folder)
        raise stop

    with pytest.raises((KeyboardInterrupt, OSError)):
        make_dataset(tmp_path / "set", RECIPE, broken)
    assert not list(tmp_path.iterdir())


def test_dataset_generated_by_another_process_is_used(tmp_path):
    def late(folder):
        make_dataset(tmp_path / "set", RECIPE, fill)
        return {}

    assert read_record(make_dataset(tmp_path / "set", RECIPE, late), RECIPE)["count"] == 5


def test_unrelated_folder_is_refused_and_unchanged(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with refuses(tmp_path, RECORD, error=DataError):
        make_dataset(tmp_path, RECIPE, fill)
    (tmp_path / RECORD).write_text(json.dumps({"recipe": RECIPE})[:-4])  # torn
    with refuses(tmp_path, error=DataError):
        make_dataset(tmp_path, RECIPE, fill)
    assert len(list(tmp_path.iterdir())) == 2
