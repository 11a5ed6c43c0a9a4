"""Image transforms on the host: crop, flip, RandAugment and jitter for training, resize and crop for evaluation.

Every step is defined as in timm, which ignores EXIF orientation too. Images are encoded bytes or uint8 arrays (height,
width[, channels]), and colours are RGB. Results may share memory with an input array that needed no change.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import cv2
import numpy as np
from PIL import Image

from leanformer.config.rules import image_sides
from leanformer.data.images.decoding import decode_jpeg, decode_whole, jpeg_size


BYTE = np.arange(256)


@dataclasses.dataclass(frozen=True)
class Augmentation:
    """Random transformations of training images."""

    crop_scale: tuple[float, float] = (0.08, 1.0)  # range of the crop's fraction of the image's area
    crop_ratio: tuple[float, float] = (3 / 4, 4 / 3)  # range of the crop's width / height, drawn log-uniformly
    flip: float = 0.5  # probability of the horizontal flip
    rand_magnitude: float = 0.0  # mean strength of RandAugment's operations, 0 to 10; 0 is off
    rand_std: float = 0.5  # standard deviation of that strength
    rand_layers: int = 2  # operations that RandAugment draws per image
    rand_prob: float = 0.5  # probability that a drawn operation is applied
    color_jitter: float = 0.0  # half-width of the range around 1 of the factors of brightness, contrast and saturation
    fill: Sequence[int] = (124, 116, 104)  # colour of pixels that rotation, shear and translation uncover


def train_transform(
    image: bytes | np.ndarray,
    rng: np.random.Generator,
    *,
    size: int | Sequence[int],
    channels: int,
    augmentation: Augmentation = Augmentation(),
) -> np.ndarray:
    """Apply random resized crop, flip, RandAugment and colour jitter; return uint8 (height, width, channels)."""
    a = augmentation
    height, width = image_sides(size)
    shrink = 1
    if isinstance(image, bytes) and (of_jpeg := jpeg_size(image)):
        box, flipped = random_view(*of_jpeg, rng, a.crop_scale, a.crop_ratio, a.flip)
        # A JPEG decodes faster at 1/2, 1/4 or 1/8; the crop must keep at least `size` pixels.
        across, down = box[2] - box[0], box[3] - box[1]
        shrink = next((k for k in (8, 4, 2) if across // k >= width and down // k >= height), 1)
        pixels = decode_jpeg(image, channels, shrink)
    else:
        pixels = decode_whole(image, channels)
        box, flipped = random_view(*pixels.shape[1::-1], rng, a.crop_scale, a.crop_ratio, a.flip)
    left, top, right, bottom = (round(edge / shrink) for edge in box)
    pixels = _resize(pixels[top:bottom, left:right], height, width)
    if flipped:
        pixels = cv2.flip(pixels, 1)
    fill = a.fill if channels == 3 else (sum(a.fill) / len(a.fill),)
    for index in rng.integers(len(OPERATIONS), size=a.rand_layers if a.rand_magnitude else 0):
        if rng.random() < a.rand_prob:
            level = min(max(rng.normal(a.rand_magnitude, a.rand_std), 0.0), 10.0) / 10
            signed = level if rng.random() < 0.5 else -level
            pixels = list(OPERATIONS.values())[index](pixels, level, signed, fill)
    if a.color_jitter:
        for index in rng.permutation(3):
            factor = rng.uniform(max(0.0, 1 - a.color_jitter), 1 + a.color_jitter)
            pixels = (brightness, contrast, color)[index](pixels, factor)
    return np.ascontiguousarray(pixels).reshape(height, width, channels)


def eval_transform(
    image: bytes | np.ndarray | Image.Image, *, size: int | Sequence[int], channels: int, crop_fraction: float
) -> np.ndarray:
    """Resize to cover floor(size / crop_fraction) with the aspect ratio kept, then crop `size` from the centre.

    Pillow decodes and resizes, so that the pixels equal timm's. The result is uint8 (height, width, channels).
    """
    pixels = decode_whole(image, channels)
    rows, columns = image_sides(size)
    least = (math.floor(side / crop_fraction) for side in (rows, columns))
    height, width = _covering_size(*pixels.shape[:2], *least)
    if (height, width) != pixels.shape[:2]:
        pixels = np.asarray(Image.fromarray(pixels).resize((width, height), Image.Resampling.BICUBIC))
    top, left = round((height - rows) / 2), round((width - columns) / 2)
    return np.ascontiguousarray(pixels[top : top + rows, left : left + columns]).reshape(rows, columns, channels)


def _covering_size(height: int, width: int, rows: int, columns: int) -> tuple[int, int]:
    """Return the least height and width, in the old ratio, that cover rows x columns, rounded as in timm."""
    if rows != columns:
        scale = min(height / rows, width / columns)
        return round(height / scale), round(width / scale)
    long = int(rows * max(height, width) / min(height, width))
    return (long, rows) if width <= height else (rows, long)


def random_view(
    width: int, height: int, rng: np.random.Generator, scale: Sequence[float], ratio: Sequence[float], flip: float
) -> tuple[tuple[int, int, int, int], bool]:
    """Draw a random crop of an image. Return its edges (left, top, right, bottom) in pixels, and True if it is flipped.

    If none of ten drawn crops fits into the image, the crop is the largest central one with an aspect ratio in range.
    """
    for _ in range(10):
        area = rng.uniform(scale[0], scale[1]) * width * height
        aspect = math.exp(rng.uniform(math.log(ratio[0]), math.log(ratio[1])))
        w, h = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
        if 0 < w <= width and 0 < h <= height:
            left, top = int(rng.integers(width - w + 1)), int(rng.integers(height - h + 1))
            break
    else:
        w, h = min(width, max(1, round(height * ratio[1]))), min(height, max(1, round(width / ratio[0])))
        left, top = (width - w) // 2, (height - h) // 2
    return (left, top, left + w, top + h), rng.random() < flip


def _resize(pixels: np.ndarray, rows: int, columns: int) -> np.ndarray:
    """Resize with a bicubic filter, antialiased like Pillow's."""
    height, width = pixels.shape[:2]
    if height > rows or width > columns:
        # OpenCV's bicubic does not antialias, so first filter with Pillow's kernel for this scale. On 1/f noise the
        # mean difference to Pillow is then 0.6 to 1.5 grey levels, with sharpness within 5 %, in a quarter of the time.
        # INTER_AREA is slower and differs by 2 to 4 levels; INTER_CUBIC alone by 3 to 14, and is far sharper.
        kernels = _cubic_kernel(width, columns), _cubic_kernel(height, rows)
        pixels = cv2.sepFilter2D(pixels, -1, *kernels, borderType=cv2.BORDER_REPLICATE)
    return cv2.resize(pixels, (columns, rows), interpolation=cv2.INTER_CUBIC)


@functools.lru_cache(4096)
def _cubic_kernel(length: int, size: int) -> np.ndarray:
    """Return Pillow's bicubic kernel (a = -1/2) for shrinking `length` to `size`, without faint ends."""
    scale = max(length / size, 1.0)
    reach = int(1.75 * scale)
    x = np.abs(np.arange(-reach, reach + 1)) / scale
    kernel = np.where(x < 1, (1.5 * x - 2.5) * x**2 + 1, ((2.5 - 0.5 * x) * x - 4) * x + 2)
    return kernel / kernel.sum()


def affine(pixels: np.ndarray, matrix: Sequence[float | int], fill: Sequence[Any]) -> np.ndarray:
    """Return an image whose value at (x, y) is the input's at (a x + b y + c, d x + e y + f).

    Here x is the column and y the row, in pixels; centres of pixels are at halves. The interpolation is nearly bicubic.
    """
    a, b, c, d, e, f = matrix
    fx, fy = 1 if (a, b, c) == (1, 0, 0) else 2, 1 if (d, e, f) == (0, 1, 0) else 2
    enlarged = [[fx * a, fx * b, fx * (c + (a + b) / 2) - 0.5], [fy * d, fy * e, fy * (f + (d + e) / 2) - 0.5]]
    # Bicubic enlargement of the axes that move, then a bilinear warp of four channels, takes less than half the time
    # of OpenCV's bicubic warp, and halves the difference to Pillow's bicubic compared with a bilinear warp alone.
    source = pixels if pixels.ndim == 2 else cv2.cvtColor(pixels, cv2.COLOR_RGB2RGBA)
    source = cv2.resize(source, None, fx=fx, fy=fy, interpolation=cv2.INTER_CUBIC)
    flags = cv2.INTER_LINEAR | cv2.WARP_INVERSE_MAP
    result = cv2.warpAffine(source, np.array(enlarged), pixels.shape[1::-1], flags=flags, borderValue=fill)
    return result if pixels.ndim == 2 else cv2.cvtColor(result, cv2.COLOR_RGBA2RGB)


def rotate(pixels: np.ndarray, degrees: float, fill: Sequence[Any]) -> np.ndarray:
    """Return an image of the same shape, rotated counter-clockwise about its centre."""
    cos, sin = math.cos(math.radians(degrees)), math.sin(math.radians(degrees))
    y, x = pixels.shape[0] / 2, pixels.shape[1] / 2
    return affine(pixels, (cos, -sin, x - cos * x + sin * y, sin, cos, y - sin * x - cos * y), fill)


def _lut(pixels: np.ndarray, table: np.ndarray) -> np.ndarray:
    """Replace value v of channel c by table[v] or table[c, v], clipped to a byte."""
    table = np.clip(table, 0, 255).astype(np.uint8)
    return cv2.LUT(pixels, table if table.ndim == 1 else np.ascontiguousarray(table.T)[None])


def _lut_by_histogram(pixels: np.ndarray, table: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
    """Replace the values of each channel by a table computed from its histogram."""
    channels = range(pixels.size // (pixels.shape[0] * pixels.shape[1]))
    histograms = (cv2.calcHist([pixels], [c], None, [256], [0, 256]).ravel().astype(int) for c in channels)
    return _lut(pixels, np.array([table(histogram) for histogram in histograms]))


def _stretch_table(histogram: np.ndarray) -> np.ndarray:
    low, high = np.flatnonzero(histogram)[[0, -1]]
    scale = 255.0 / max(high - low, 1)
    return BYTE * scale + -low * scale if low < high else BYTE


def _equalize_table(histogram: np.ndarray) -> np.ndarray:
    step = (histogram.sum() - histogram[histogram > 0][-1]) // 255
    return (step // 2 + np.cumsum(histogram) - histogram) // step if step else BYTE


def brightness(pixels: np.ndarray, factor: float, around: int = 0) -> np.ndarray:
    """Return an image with values v replaced by around + factor (v - around), clipped to 0-255."""
    return _lut(pixels, around + np.float32(factor) * (BYTE - around).astype(np.float32))


def contrast(pixels: np.ndarray, factor: float) -> np.ndarray:
    """Return an image with values moved away from its mean grey (factor above 1) or towards it (below 1)."""
    grey = pixels if pixels.ndim == 2 else cv2.cvtColor(pixels, cv2.COLOR_RGB2GRAY)
    return brightness(pixels, factor, around=int(cv2.mean(grey)[0] + 0.5))


def color(pixels: np.ndarray, factor: float) -> np.ndarray:
    """Return an image with pixels moved away from their grey (factor above 1: more saturated) or towards it."""
    if pixels.ndim == 2:
        return pixels
    grey = cv2.cvtColor(cv2.cvtColor(pixels, cv2.COLOR_RGB2GRAY), cv2.COLOR_GRAY2RGB)
    return cv2.addWeighted(pixels, factor, grey, 1 - factor, 0)


def sharpness(pixels: np.ndarray, factor: float) -> np.ndarray:
    """Return an image moved away from its smoothed version (factor above 1, sharper) or towards it (below 1)."""
    kernel = np.full((3, 3), (1 - factor) / 13)
    kernel[1, 1] += factor + 4 * (1 - factor) / 13
    result = pixels.copy()  # Pillow does not change the outermost pixels
    result[1:-1, 1:-1] = cv2.filter2D(pixels, -1, kernel)[1:-1, 1:-1]
    return result


# timm's "increasing" set: (pixels x, level m in 0..1, s = ±m with a random sign, fill colour f) -> pixels.
OPERATIONS: dict[str, Callable[[np.ndarray, float, float, Sequence[Any]], np.ndarray]] = {
    "AutoContrast": lambda x, m, s, f: _lut_by_histogram(x, _stretch_table),
    "Equalize": lambda x, m, s, f: _lut_by_histogram(x, _equalize_table),
    "Invert": lambda x, m, s, f: _lut(x, 255 - BYTE),
    "Rotate": lambda x, m, s, f: rotate(x, 30 * s, f),
    "PosterizeIncreasing": lambda x, m, s, f: _lut(x, BYTE & -(1 << 4 + int(4 * m))),
    "SolarizeIncreasing": lambda x, m, s, f: _lut(x, np.where(BYTE + int(256 * m) < 256, BYTE, 255 - BYTE)),
    "SolarizeAdd": lambda x, m, s, f: _lut(x, np.where(BYTE < 128, BYTE + int(110 * m), BYTE)),
    "ColorIncreasing": lambda x, m, s, f: color(x, max(0.1, 1 + 0.9 * s)),
    "ContrastIncreasing": lambda x, m, s, f: contrast(x, max(0.1, 1 + 0.9 * s)),
    "BrightnessIncreasing": lambda x, m, s, f: brightness(x, max(0.1, 1 + 0.9 * s)),
    "SharpnessIncreasing": lambda x, m, s, f: sharpness(x, max(0.1, 1 + 0.9 * s)),
    "ShearX": lambda x, m, s, f: affine(x, (1, 0.3 * s, 0, 0, 1, 0), f),
    "ShearY": lambda x, m, s, f: affine(x, (1, 0, 0, 0.3 * s, 1, 0), f),
    "TranslateXRel": lambda x, m, s, f: affine(x, (1, 0, 0.45 * s * x.shape[1], 0, 1, 0), f),
    "TranslateYRel": lambda x, m, s, f: affine(x, (1, 0, 0, 0, 1, 0.45 * s * x.shape[0]), f),
}
