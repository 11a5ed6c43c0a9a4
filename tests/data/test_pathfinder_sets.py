"""Pathfinder datasets on disk: generated ones and the published files."""

import io
import json
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from messages import refuses
from PIL import Image
from scipy import stats

from leanformer.data.images.decoding import CorruptImage
from leanformer.data.sequences import pathfinder
from leanformer.data.sequences.pathfinder import Pathfinder, PublishedPathfinder, dataset, snakes
from leanformer.errors import DataError


@pytest.fixture(scope="module")
def generated(tmp_path_factory):
    return pathfinder.write(tmp_path_factory.mktemp("sets") / "easy", contour=6, seed=3, examples=1043)


def test_generated_dataset_equals_the_sampler(generated):
    sources = {split: Pathfinder(generated, split) for split in dataset.SPLITS}
    assert {split: len(source) for split, source in sources.items()} == {"train": 834, "val": 104, "test": 105}
    rows = np.concatenate([source._rows for source in sources.values()])
    assert sorted(rows.tolist()) == list(range(1043))
    assert abs(stats.spearmanr(rows, np.arange(1043)).statistic) < 0.15
    blocks = [pathfinder.sample(6, 3, block) for block in (0, 1)]
    images = np.concatenate([block.images for block in blocks])
    labels = np.concatenate([block.labels for block in blocks])
    for source in sources.values():
        for i in (0, 53, -1):
            example, row = source[i], source._rows[i]
            assert example["tokens"].dtype == np.int32 and example["tokens"].shape == (1024,)
            np.testing.assert_array_equal(example["tokens"], images[row].ravel())
            assert example["label"] == labels[row] and isinstance(example["label"], int)
    assert sources["val"].name(5) == f"{generated}, val, image {sources['val']._rows[5]}"
    assert Pathfinder.num_classes == 2 and max(source[0]["tokens"].max() for source in sources.values()) < 256
    data = pickle.dumps(sources["val"])
    assert len(data) < 10_000
    np.testing.assert_array_equal(pickle.loads(data)[0]["tokens"], sources["val"][0]["tokens"])
    with pytest.raises(IndexError):
        sources["val"][104]


def test_record_of_a_generated_dataset(generated):
    record = json.loads((generated / "pathfinder.json").read_text())
    assert record["pairs_tried"] == 2 * snakes.ROUND and 0.03 < record["pairs_accepted"] / record["pairs_tried"] < 0.06


@pytest.mark.parametrize("name", ["images.npy", "labels.npy"])
def test_damaged_files_are_refused(generated, tmp_path, name):
    for path in generated.iterdir():
        data = bytearray(path.read_bytes())
        if path.name == name:
            data[-1] ^= 1
        (tmp_path / path.name).write_bytes(data)
    with refuses(tmp_path / name, error=DataError):
        Pathfinder(tmp_path, "train")
    (tmp_path / name).unlink()
    with refuses(tmp_path / name, error=DataError):
        Pathfinder(tmp_path, "train")


def test_invalid_arguments_are_refused(generated, tmp_path):
    for arguments in ({"contour": 7}, {"seed": -1}, {"seed": 2**64}, {"examples": 0}, {"workers": 0}):
        ((key, value),) = arguments.items()
        with refuses(key, value):
            pathfinder.write(tmp_path / "x", **arguments)
    with refuses("validation", "train", "val", "test", error=DataError):
        Pathfinder(generated, "validation")


WORKER_SCRIPT = """
import sys
from leanformer.data.sequences import pathfinder
if __name__ == "__main__":
    pathfinder.write(sys.argv[1], contour=6, seed=3, examples=2017, workers=int(sys.argv[2]))
"""


@pytest.mark.slow
def test_workers_do_not_change_files(tmp_path):
    (tmp_path / "workers.py").write_text(WORKER_SCRIPT)
    for workers in ("1", "2"):
        command = [sys.executable, str(tmp_path / "workers.py"), str(tmp_path / workers), workers]
        process = subprocess.run(command, capture_output=True, text=True, timeout=200)
        assert process.returncode == 0, process.stderr
    for name in ("images.npy", "labels.npy", "pathfinder.json"):
        assert (tmp_path / "1" / name).read_bytes() == (tmp_path / "2" / name).read_bytes()


def encode_png(array):
    out = io.BytesIO()
    Image.fromarray(array).save(out, "PNG")
    return out.getvalue()


@pytest.fixture
def release(tmp_path, rng):
    """Write 23 images in folders 2 and 10, one of them empty; return (root, {name: (image, label)})."""
    folder = tmp_path / "pathfinder32" / "curv_contour_length_14"
    (folder / "metadata").mkdir(parents=True)
    examples = {}
    for number, count in ((2, 11), (10, 12)):
        (folder / "imgs" / str(number)).mkdir(parents=True)
        lines = []
        for i in range(count):
            image, label = rng.integers(0, 256, (32, 32), dtype=np.uint8), int(rng.integers(2))
            path = folder / "imgs" / str(number) / f"sample_{i}.png"
            path.write_bytes(b"" if (number, i) == (2, 5) else encode_png(image))
            lines.append(f"imgs/{number} sample_{i}.png {i} {label} 1.0 14 4 2 0.5 1 1\n")
            examples[str(path)] = image, label
        (folder / "metadata" / f"{number}.npy").write_text("".join(lines))
    del examples[str(folder / "imgs" / "2" / "sample_5.png")]
    return tmp_path, examples


def test_published_images_are_split_and_read(release):
    root, examples = release
    sources = [PublishedPathfinder(root, split) for split in dataset.SPLITS]
    assert [len(source) for source in sources] == [17, 2, 3]
    assert [source.skipped for source in sources] == [1, 1, 1]
    names = [source.name(i) for source in sources for i in range(len(source))]
    assert sorted(names) == sorted(examples) and names != list(examples)
    for source in sources:
        for i in range(len(source)):
            image, label = examples[source.name(i)]
            example = source[i]
            assert example["tokens"].dtype == np.int32 and example["label"] == label
            np.testing.assert_array_equal(example["tokens"], image.ravel())
    other = PublishedPathfinder(root, "train", seed=1)
    assert {other.name(i) for i in range(17)} != set(names[:17])


def test_metadata_saved_as_numpy_arrays_are_read(release):
    root, _ = release
    (path,) = root.glob("*/*/metadata/2.npy")
    before = PublishedPathfinder(root, "train")
    rows = [line.split(" ") for line in path.read_text().splitlines()]
    np.save(path, np.array(rows))
    after = PublishedPathfinder(root, "train")
    assert [after.name(i) for i in range(17)] == [before.name(i) for i in range(17)]
    np.save(path, np.array(rows, dtype=object), allow_pickle=True)
    with refuses(path, error=DataError):
        PublishedPathfinder(root, "train")


def test_malformed_metadata_are_refused(release):
    root, _ = release
    (metadata,) = root.glob("*/*/metadata/2.npy")
    for path in (
        "imgs/../../.. sample_0.png",
        "/etc sample_0.png",
        "imgs/2 ../../../sample_0.png",
        "imgs/2 sample_٣.png",
    ):
        metadata.write_text(f"{path} 0 1")
        with refuses("2.npy", error=DataError):
            PublishedPathfinder(root, "train")
    for line in ("imgs/2 sample_0.png 0 2", "imgs/2", "imgs/2 sample_99999999999999999999.png 0 1"):
        metadata.write_text(line)
        with refuses("2.npy", error=DataError):
            PublishedPathfinder(root, "train")


def test_missing_images_and_releases_are_refused(release):
    root, _ = release
    (metadata,) = root.glob("*/*/metadata/2.npy")
    metadata.write_text("imgs/2 sample_77.png 77 1\n")
    with refuses("sample_77.png", error=DataError):
        PublishedPathfinder(root, "train")
    with refuses(root / "imgs", ".npy", error=DataError):
        PublishedPathfinder(root / "imgs", "train")
    with refuses(6, 9, 14):
        PublishedPathfinder(root, "train", contour=7)


def test_broken_image_is_refused(release):
    root, _ = release
    source = PublishedPathfinder(root, "val")
    complete = encode_png(np.arange(1024, dtype=np.uint16).reshape(32, 32).astype(np.uint8))
    broken = [complete[:n] for n in range(1, len(complete))] + [b"x" * 500, complete[:60] + b"?" + complete[61:]]
    for data in broken:
        Path(source.name(0)).write_bytes(data)
        with refuses(f"{len(data)} bytes", Path(source.name(0)).name, error=CorruptImage):
            source[0]


@pytest.mark.parametrize("array", [np.zeros((31, 32), np.uint8), np.zeros((32, 32, 3), np.uint8), np.eye(32) > 0])
def test_image_of_wrong_type_or_shape_is_refused(release, array):
    root, _ = release
    source = PublishedPathfinder(root, "test")
    Path(source.name(2)).write_bytes(encode_png(array))
    with refuses(source.name(2), "('L', (32, 32))", error=DataError):
        source[2]
