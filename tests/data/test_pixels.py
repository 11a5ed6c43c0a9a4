"""Pixels as tokens: CIFAR-10's binary files, image files in grey, the published Pathfinder images."""

import io
import pickle
from fractions import Fraction

import numpy as np
import pytest
from messages import refuses
from PIL import Image

from leanformer.data.images.sources import Folder
from leanformer.data.sequences.pixels import SPLITS, Cifar10, Pathfinder, Pixels
from leanformer.data.source import Source
from leanformer.errors import CorruptExample, DataError


SIZE = 10_000 * 3073


def write_cifar(folder, records):
    """Write the six files at full size, zero except for `records`: (file, record, label, red, green, blue)."""
    for name in (*(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin"):
        with (folder / name).open("wb") as file:
            file.truncate(SIZE)  # sparse file, needs no disk space
            for _, record, label, *planes in (r for r in records if r[0] == name):
                file.seek(record * 3073)
                file.write(bytes([label]) + b"".join(np.asarray(plane, np.uint8).tobytes() for plane in planes))


@pytest.fixture
def cifar(tmp_path, rng):
    places = ("data_batch_2", 17), ("data_batch_5", 4_999), ("data_batch_5", 5_000), ("test_batch", 9_999)
    planes = rng.integers(0, 256, (4, 3, 32, 32))
    records = [(f"{file}.bin", i, label, *planes[label - 6]) for label, (file, i) in enumerate(places, 6)]
    write_cifar(tmp_path, records)
    return tmp_path, records


def test_cifar_splits(cifar):
    folder, records = cifar
    sources = {split: Cifar10(folder, split) for split in ("train", "val", "test")}
    assert {split: len(source) for split, source in sources.items()} == {"train": 45_000, "val": 5_000, "test": 10_000}
    places = (("train", 10_017), ("train", 44_999), ("val", 0), ("test", 9_999))
    for (split, index), (file, number, label, red, green, blue) in zip(places, records, strict=True):
        source = sources[split]
        image = source[index]["image"]
        assert isinstance(source, Source) and source[index]["label"] == label and image.dtype == np.uint8
        np.testing.assert_array_equal(image, np.stack([red, green, blue], -1))
        assert source.name(index) == f"{folder}/{file}, record {number}"
    assert sources["train"][0]["label"] == 0 and not sources["train"][10_016]["image"].any()
    assert len(pickle.dumps(sources["train"])) < 1000


def test_cifar_as_grey_pixels(cifar):
    folder, records = cifar
    source = Pixels(Cifar10(folder, "val"))
    tokens = source[0]["tokens"]
    assert isinstance(source, Source) and source.num_classes == 10 and source.vocabulary == 256
    assert tokens.dtype == np.int32 and tokens.shape == (1024,) and source[0]["label"] == 8 and len(source) == 5_000
    red, green, blue = (plane.ravel().tolist() for plane in records[2][3:])
    weights = Fraction(2989, 10_000), Fraction(587, 1_000), Fraction(114, 1_000)
    exact = [sum(w * c for w, c in zip(weights, rgb, strict=True)) for rgb in zip(red, green, blue, strict=True)]
    assert tokens.tolist() == [int(grey / 255 * Fraction(511, 2)) for grey in exact]
    assert source.name(0) == f"{folder}/data_batch_5.bin, record 5000"
    assert not source[1]["tokens"].any()  # black pixels are token 0, at full length


def test_pixels_of_image_files(tmp_path, rng):
    (tmp_path / "train" / "a").mkdir(parents=True)
    grey = rng.integers(0, 256, (5, 5), dtype=np.uint8)
    out = io.BytesIO()
    Image.fromarray(grey).save(out, "PNG")
    (tmp_path / "train" / "a" / "0.png").write_bytes(out.getvalue())
    (tmp_path / "train" / "a" / "1.png").write_bytes(out.getvalue()[:-30])
    source = Pixels(Folder(tmp_path, "train"), size=5)
    assert source[0]["tokens"].tolist() == grey.ravel().tolist()  # grey values are not changed
    assert Pixels(Folder(tmp_path, "train"), size=7)[0]["tokens"].shape == (49,)
    with pytest.raises(CorruptExample):
        source[1]


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


def test_images_are_split_and_read(release):
    root, examples = release
    sources = [Pathfinder(root, split) for split in SPLITS]
    assert [len(source) for source in sources] == [17, 2, 3]
    names = [source.name(i) for source in sources for i in range(len(source))]
    assert sorted(names) == sorted(examples) and names != list(examples)
    for source in sources:
        for i in range(len(source)):
            image, label = examples[source.name(i)]
            example = source[i]
            assert example["tokens"].dtype == np.int32 and example["label"] == label
            np.testing.assert_array_equal(example["tokens"], image.ravel())
    other = Pathfinder(root, "train", seed=1)
    assert {other.name(i) for i in range(17)} != set(names[:17])


def test_malformed_and_missing_lists_are_refused(release):
    root, _ = release
    (metadata,) = root.glob("*/*/metadata/2.npy")
    metadata.write_text("imgs/2 sample_0.png 0 2")
    with refuses("2.npy", error=DataError):
        Pathfinder(root, "train")
    with refuses(root / "imgs", error=DataError):
        Pathfinder(root / "imgs", "train")
