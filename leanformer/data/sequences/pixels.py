"""Images as sequences of grey values: the Long Range Arena's image task (Tay et al. 2021, section 2.2.4).

A token is a pixel's value, so 0 is black: padding, or a mask, cannot be told from a black pixel by its token. All
sequences of a source have one length and need no padding.
"""

from pathlib import Path
from typing import Any

import numpy as np

from leanformer.data.images.transforms import eval_transform
from leanformer.data.source import Labelled
from leanformer.errors import DataError


class Cifar10:
    """CIFAR-10 in its binary version, `data_batch_1.bin` to `_5.bin` and `test_batch.bin`.

    An example is {"image": uint8 (32, 32, 3), "label": int}.

    Splits as in LRA, 45,000 `train` (the first 90 %), 5,000 `val` and 10,000 `test`, but in the order of these files;
    LRA splits in the order of TensorFlow Datasets, so its `val` has other images. To use LRA's, set `data.name` to
    `pixels:tfds:cifar10` with the splits `train[:90%]` and `train[90%:]`.

    Args:
        folder: folder of the files.
        split: "train", "val" or "test".

    Raises:
        DataError: the split has another name; or a file is missing or not 30,730,000 bytes long.
    """

    num_classes = 10
    classes = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
    RECORD, RECORDS = 1 + 3 * 32 * 32, 10_000  # label, then red, green and blue planes; in a file

    def __init__(self, folder: str | Path, split: str):
        spans = {"train": (0, 45_000), "val": (45_000, 50_000), "test": (50_000, 60_000)}
        if split not in spans:
            raise DataError(f'CIFAR-10 has no split "{split}". Choose one of {", ".join(spans)}.')
        self.folder, self.split, self._span = Path(folder).expanduser(), split, range(*spans[split])
        for path in sorted({self._place(i)[0] for i in self._span[:: self.RECORDS // 2]}):
            size = path.stat().st_size if path.is_file() else "no"
            if size != self.RECORD * self.RECORDS:
                raise DataError(
                    f"{path} has {size} bytes instead of 30,730,000. Download cifar-10-binary.tar.gz again."
                )

    def _place(self, number: int) -> tuple[Path, int]:
        file, record = divmod(number, self.RECORDS)
        return self.folder / ("test_batch.bin" if file == 5 else f"data_batch_{file + 1}.bin"), record

    def __len__(self) -> int:
        return len(self._span)

    def __getitem__(self, index: int) -> dict[str, Any]:
        path, record = self._place(self._span[index])
        data = np.fromfile(path, np.uint8, self.RECORD, offset=record * self.RECORD)
        return {"image": data[1:].reshape(3, 32, 32).transpose(1, 2, 0), "label": int(data[0])}

    def name(self, index: int) -> str:
        path, record = self._place(self._span[index])
        return f"{path}, record {record}"


def grey(picture: bytes | np.ndarray, size: int) -> np.ndarray:
    """Return the grey values, 0 to 255, of an image's `size`² pixels in raster order, int32.

    The image is resized and centre-cropped as for evaluation. Grey values are those of TensorFlow, as in LRA:
    255.5 / 255 (0.2989 R + 0.5870 G + 0.1140 B), rounded down.

    Args:
        picture: content of a file, or uint8 array (height, width[, channels]).
        size: side of the square of pixels.

    Raises:
        CorruptImage: the bytes are not an image.
    """
    pixels = eval_transform(picture, size=size, channels=3, crop_fraction=1.0)
    # Integer arithmetic, so that the result is the same everywhere: 255.5 / 255 = 511 / 510.
    return (pixels.reshape(-1, 3) @ np.array([2989, 5870, 1140]) * 511 // 5_100_000).astype(np.int32)


class Pixels:
    """Source of grey values of the images of any image source, as sequences.

    An example has `tokens`, int32 (`size`²,), grey values 0 to 255 in raster order, and the `label` of the image.
    Images of another size are resized and centre-cropped as for evaluation, see `grey`.

    Args:
        source: source of images, such as `Cifar10`.
        size: side of the square of pixels; 32 in LRA's image task.
    """

    vocabulary = 256

    def __init__(self, source: Labelled, size: int = 32):
        self.source, self.size = source, size
        self.num_classes, self.classes = source.num_classes, source.classes

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int) -> dict[str, Any]:
        example = self.source[index]
        return {"tokens": grey(example["image"], self.size), "label": example["label"]}

    def name(self, index: int) -> str:
        return self.source.name(index)
