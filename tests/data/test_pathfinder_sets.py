"""Sets of Pathfinder on disk: those written here, and the published files."""

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
def written(tmp_path_factory):
    return pathfinder.write(tmp_path_factory.mktemp("sets") / "easy", contour=6, seed=3, examples=1043)


def test_written_set(written):
    sources = {split: Pathfinder(written, split) for split in dataset.SPLITS}
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
    assert sources["val"].name(5) == f"{written}, val, image {sources['val']._rows[5]}"
    assert Pathfinder.num_classes == 2 and max(source[0]["tokens"].max() for source in sources.values()) < 256
    with pytest.raises(IndexError):
        sources["val"][104]


def test_a_set_is_written_once(written):
    before = {path.name: path.stat().st_mtime_ns for path in written.iterdir()}
    assert sorted(before) == ["images.npy", "labels.npy", "pathfinder.json"]
    assert pathfinder.write(written, 6, 3, 1043) == written
    assert {path.name: path.stat().st_mtime_ns for path in written.iterdir()} == before
    assert [path.name for path in written.parent.iterdir()] == ["easy"]
    record = json.loads((written / "pathfinder.json").read_text())
    assert record["pairs_tried"] == 2 * snakes.ROUND and 0.03 < record["pairs_accepted"] / record["pairs_tried"] < 0.06


def test_a_pickled_source_is_small_and_whole(written):
    source = Pathfinder(written, "train")
    first = source[0]
    data = pickle.dumps(source)
    assert len(data) < 10_000
    np.testing.assert_array_equal(pickle.loads(data)[0]["tokens"], first["tokens"])


@pytest.mark.parametrize("name", ["images.npy", "labels.npy"])
def test_damage_is_found(written, tmp_path, name):
    for path in written.iterdir():
        data = bytearray(path.read_bytes())
        if path.name == name:
            data[-1] ^= 1
        (tmp_path / path.name).write_bytes(data)
    with refuses(tmp_path / name, error=DataError):
        Pathfinder(tmp_path, "train")
    (tmp_path / name).unlink()
    with refuses(tmp_path / name, error=DataError):
        Pathfinder(tmp_path, "train")


def test_bad_requests(written, tmp_path):
    for bad in ({"contour": 7}, {"seed": -1}, {"seed": 2**64}, {"examples": 0}, {"workers": 0}):
        ((key, value),) = bad.items()
        with refuses(key, value):
            pathfinder.write(tmp_path / "x", **bad)
    with refuses("validation", "train", "val", "test", error=DataError):
        Pathfinder(written, "validation")


WORKERS = """
import sys
from leanformer.data.sequences import pathfinder
if __name__ == "__main__":
    pathfinder.write(sys.argv[1], contour=6, seed=3, examples=2017, workers=int(sys.argv[2]))
"""


@pytest.mark.slow
def test_workers_change_nothing(tmp_path):
    (tmp_path / "workers.py").write_text(WORKERS)
    for workers in ("1", "2"):
        words = [sys.executable, str(tmp_path / "workers.py"), str(tmp_path / workers), workers]
        done = subprocess.run(words, capture_output=True, text=True, timeout=200)
        assert done.returncode == 0, done.stderr
    for name in ("images.npy", "labels.npy", "pathfinder.json"):
        assert (tmp_path / "1" / name).read_bytes() == (tmp_path / "2" / name).read_bytes()


def png(array):
    out = io.BytesIO()
    Image.fromarray(array).save(out, "PNG")
    return out.getvalue()


@pytest.fixture
def release(tmp_path, rng):
    """23 images in folders 2 and 10, of which one is empty; (root, {name: (image, label)})."""
    folder = tmp_path / "pathfinder32" / "curv_contour_length_14"
    (folder / "metadata").mkdir(parents=True)
    kept = {}
    for number, count in ((2, 11), (10, 12)):
        (folder / "imgs" / str(number)).mkdir(parents=True)
        lines = []
        for i in range(count):
            image, label = rng.integers(0, 256, (32, 32), dtype=np.uint8), int(rng.integers(2))
            path = folder / "imgs" / str(number) / f"sample_{i}.png"
            path.write_bytes(b"" if (number, i) == (2, 5) else png(image))
            lines.append(f"imgs/{number} sample_{i}.png {i} {label} 1.0 14 4 2 0.5 1 1\n")
            kept[str(path)] = image, label
        (folder / "metadata" / f"{number}.npy").write_text("".join(lines))
    del kept[str(folder / "imgs" / "2" / "sample_5.png")]
    return tmp_path, kept


def rewrite(root, line):
    (root / "pathfinder32" / "curv_contour_length_14" / "metadata" / "2.npy").write_text(line)


def test_published_images(release):
    root, kept = release
    sources = [PublishedPathfinder(root, split) for split in dataset.SPLITS]
    assert [len(source) for source in sources] == [17, 2, 3]
    assert [source.skipped for source in sources] == [1, 1, 1]
    names = [source.name(i) for source in sources for i in range(len(source))]
    assert sorted(names) == sorted(kept) and names != list(kept)
    for source in sources:
        for i in range(len(source)):
            image, label = kept[source.name(i)]
            example = source[i]
            assert example["tokens"].dtype == np.int32 and example["label"] == label
            np.testing.assert_array_equal(example["tokens"], image.ravel())
    other = PublishedPathfinder(root, "train", seed=1)
    assert {other.name(i) for i in range(17)} != set(names[:17])


def test_metadata_as_the_generator_saves_them(release):
    root, _ = release
    path = root / "pathfinder32" / "curv_contour_length_14" / "metadata" / "2.npy"
    before = PublishedPathfinder(root, "train")
    rows = [line.split(" ") for line in path.read_text().splitlines()]
    np.save(path, np.array(rows))
    after = PublishedPathfinder(root, "train")
    assert [after.name(i) for i in range(17)] == [before.name(i) for i in range(17)]
    np.save(path, np.array(rows, dtype=object), allow_pickle=True)
    with refuses(path, error=DataError):
        PublishedPathfinder(root, "train")


@pytest.mark.parametrize(
    "line",
    [
        "imgs/../../.. sample_0.png 0 1",
        "imgs/2/.. sample_0.png 0 1",
        "/etc sample_0.png 0 1",
        "imgs/2 ../../../sample_0.png 0 1",
        "imgs/2 sample_0.png/../x.png 0 1",
        "imgs/2 sample_0.jpg 0 1",
        "imgs/2 sample_٣.png 0 1",
        "imgs/2 sample_0.png 0 2",
        "imgs/2 sample_0.png 0",
        "imgs/2",
        "imgs/2 sample_99999999999999999999.png 0 1",
    ],
)
def test_metadata_of_another_form(release, line):
    root, _ = release
    rewrite(root, line)
    with refuses("2.npy", error=DataError):
        PublishedPathfinder(root, "train")


def test_an_image_that_is_not_there(release):
    root, _ = release
    rewrite(root, "imgs/2 sample_77.png 77 1\n")
    with refuses("sample_77.png", error=DataError):
        PublishedPathfinder(root, "train")


def test_no_release(tmp_path):
    with refuses(tmp_path, ".npy", error=DataError):
        PublishedPathfinder(tmp_path, "train")
    with refuses(6, 9, 14):
        PublishedPathfinder(tmp_path, "train", contour=7)


def test_a_broken_image(release):
    root, _ = release
    source = PublishedPathfinder(root, "val")
    whole = png(np.arange(1024, dtype=np.uint16).reshape(32, 32).astype(np.uint8))
    broken = [whole[:n] for n in range(1, len(whole))] + [b"x" * 500, whole[:60] + b"?" + whole[61:]]
    for data in broken:
        Path(source.name(0)).write_bytes(data)
        with refuses(f"{len(data)} bytes", Path(source.name(0)).name, error=CorruptImage):
            source[0]


@pytest.mark.parametrize("array", [np.zeros((31, 32), np.uint8), np.zeros((32, 32, 3), np.uint8), np.eye(32) > 0])
def test_an_image_of_another_kind(release, array):
    root, _ = release
    source = PublishedPathfinder(root, "test")
    Path(source.name(2)).write_bytes(png(array))
    with refuses(source.name(2), "('L', (32, 32))", error=DataError):
        source[2]
