"""The published Pathfinder images of the Long Range Arena."""

import io

import numpy as np
import pytest
from messages import refuses
from PIL import Image

from leanformer.data.sequences.pixels import SPLITS, Pathfinder
from leanformer.errors import DataError


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
