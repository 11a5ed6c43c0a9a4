"""Pixels as tokens: images in grey, the published Pathfinder images."""

import io
from fractions import Fraction

import numpy as np
import pytest
from messages import refuses
from PIL import Image

from leanformer.data.images.sources import Folder
from leanformer.data.sequences.pixels import SPLITS, Pathfinder, Pixels
from leanformer.data.source import Source
from leanformer.errors import CorruptExample, DataError


class Colours(list):
    """Source of images and labels."""

    num_classes, classes = 10, None

    def name(self, index):
        return f"image {index}"


def test_colours_as_grey_pixels(rng):
    image = rng.integers(0, 256, (32, 32, 3), dtype=np.uint8)
    source = Pixels(Colours([{"image": image, "label": 8}, {"image": np.zeros_like(image), "label": 0}]))
    tokens = source[0]["tokens"]
    assert isinstance(source, Source) and source.num_classes == 10 and source.vocabulary == 256
    assert tokens.dtype == np.int32 and tokens.shape == (1024,) and source[0]["label"] == 8 and len(source) == 2
    weights = Fraction(2989, 10_000), Fraction(587, 1_000), Fraction(114, 1_000)
    exact = [sum(w * c for w, c in zip(weights, rgb, strict=True)) for rgb in image.reshape(-1, 3).tolist()]
    assert tokens.tolist() == [int(grey / 255 * Fraction(511, 2)) for grey in exact]
    assert source.name(0) == "image 0"
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
