"""Source of synthetic images."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from leanformer.config.rules import image_sides


class Synthetic:
    """Synthetic images: one random picture per class plus noise. They can be learned and need no files."""

    classes = None

    def __init__(self, split: str, image_size: int | Sequence[int], channels: int, num_classes: int):
        self.split, self.num_classes = split, num_classes
        self._length = 65536 if split == "train" else 2048
        self._salt = 0 if split == "train" else 1
        shape = (min(num_classes, 64), *image_sides(image_size), channels)
        self._pictures = np.random.default_rng(0).integers(0, 192, shape, dtype=np.uint8)

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> dict[str, Any]:
        label = index % self.num_classes
        picture = self._pictures[label % len(self._pictures)]
        noise = np.random.default_rng((self._salt, index)).integers(0, 64, picture.shape, dtype=np.uint8)
        return {"image": picture + noise, "label": label}

    def name(self, index: int) -> str:
        return f"synthetic {self.split} example {index}"
