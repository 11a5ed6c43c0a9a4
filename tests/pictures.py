"""Test pictures for transforms and decoding, and both transforms with defaults."""

import io
import math

import numpy as np
from PIL import Image

from leanformer.data.images.transforms import Augmentation, eval_transform, random_view, train_transform


BICUBIC = Image.Resampling.BICUBIC
FILL = (124, 116, 104)
FULL_CROP = {"crop_scale": (1.0, 1.0), "crop_ratio": (1.0, 1.0), "flip": 0.0}


def make_natural_picture(height: int, width: int, seed: int = 0, power: float = 1.0) -> np.ndarray:
    """Return a random colour image with an amplitude spectrum of frequency ** -power; photographs have power 1."""
    frequency = np.hypot(np.fft.fftfreq(height)[:, None], np.fft.rfftfreq(width))
    frequency[0, 0] = np.inf
    noise = np.random.default_rng(seed).standard_normal((4, height, width))
    field = np.fft.irfft2(np.fft.rfft2(noise) / frequency**power, s=(height, width))
    field /= field.std(axis=(1, 2), keepdims=True)
    field = 120 + 50 * (field[:1] + 0.4 * field[1:])  # colours are correlated
    return np.clip(field, 0, 255).astype(np.uint8).transpose(1, 2, 0)


def make_colour_ramps(height: int, width: int) -> np.ndarray:
    """Return an image whose colours encode the position: red grows with x, green with y, blue falls with x."""
    x, y = np.meshgrid(np.linspace(0, 255, width), np.linspace(0, 255, height))
    return np.stack([x, y, 255 - x], axis=-1).round().astype(np.uint8)


def encode(picture: np.ndarray | Image.Image, format: str = "JPEG", **options: object) -> bytes:
    buffer = io.BytesIO()
    picture = picture if isinstance(picture, Image.Image) else Image.fromarray(picture)
    picture.save(buffer, format, **options)
    return buffer.getvalue()


def apply_train_transform(data: bytes | np.ndarray, seed: int = 0, **options: object) -> np.ndarray:
    shape = {name: options.pop(name, default) for name, default in (("size", 32), ("channels", 3))}
    return train_transform(data, np.random.default_rng(seed), **shape, augmentation=Augmentation(**options))


def apply_eval_transform(data: bytes | np.ndarray, **options: object) -> np.ndarray:
    return eval_transform(data, **{"size": 32, "channels": 3, "crop_fraction": 0.875} | options)


def pixel_difference(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    assert a.shape == b.shape
    return np.abs(a.astype(int) - b.astype(int))


def roughness(pixels: np.ndarray) -> float:
    return math.sqrt((np.diff(pixels.astype(float), axis=1) ** 2).mean())


def draw_crop_box(*arguments: object) -> tuple[int, int, int, int]:
    return random_view(*arguments, 0.5)[0]
