"""Tables of Pathfinder paddles: their pixels, occupied cells, and possible next paddles.

A snake's first paddle points in a whole degree; every later one runs from one of 18 pixels around its pivot back
towards it. So there are 378 paddles in all, numbered 0 to 359 by degree from -180 and 360 to 377 by head. Angles are
measured from +x towards +y, which points down. Images and masks lie in a frame `FRAME` pixels wide, so that nothing
near the window's edge needs care; coordinates are those of the framed grid, and a cell (y, x) is y * STRIDE + x.
"""

import functools
from typing import NamedTuple

import numpy as np
from PIL import Image, ImageDraw


# Long Range Arena, data/pathfinder.py (Pathfinder32).
SIZE, LENGTH, MARGIN, SCALE = 32, 2, 1, 2
SEED_DISTANCE, MARKER_RADIUS = 7, 1.5
FRAME = 8
STRIDE = SIZE + 2 * FRAME
CELLS = STRIDE * STRIDE
WINDOW = slice(FRAME, FRAME + SIZE)
DEGREES = 360
REACH = LENGTH + 1 + MARGIN  # half a pixel of thickness counts as a whole one
FULL = 1.8  # a paddle is rejected if its mask and the common mask sum to this or more at a pixel
OCCUPIED = 0.3  # no snake starts at a pixel whose mask is above this
FIRST, LAST = FRAME + 1, FRAME + SIZE - 2  # the outermost pixels inside the padding of 1, which counts as occupied


class Tables(NamedTuple):
    """Tables with one row per paddle (378), or per degree (360) or head (18) if noted.

    Pixels are offsets from the cell of a paddle. Rows with fewer pixels than others are padded with values of 0. The
    common mask is the grid of occupied pixels, uint8. Axes are y and x.

    Attributes:
        line_at, line: pixels of the paddle's line, and their values 0 to 255.
        mask_at, mask: pixels that the paddle occupies, and their values 0 to 255.
        solid_at, solid_limit: pixels that can collide, and the highest value of the common mask at which they do not.
        near, weight: heads of a next paddle that turns by less than 90 degrees, and the weight cos² of the turn.
        head_y, head_x: position of each head relative to the pivot (18,).
        ahead: coordinate of the next pivot, by (axis, paddle, coordinate of the pivot).
        behind: coordinate of the first pivot, by (axis, degree, coordinate of the snake's tail).
        second_tail: coordinate of the second snake's tail, by (axis, degree of the direction, coordinate of the first
            snake's tail).
        open: by degree, True if the search for a first paddle can succeed.
        kernel_at: by degree, pixels that must be free for a start.
        starts: by degree, cells at which the first target can start, repeated to the length of the longest row.
        start_count: by degree, number of different cells in `starts`.
    """

    line_at: np.ndarray
    line: np.ndarray
    mask_at: np.ndarray
    mask: np.ndarray
    solid_at: np.ndarray
    solid_limit: np.ndarray
    near: np.ndarray
    weight: np.ndarray
    head_y: np.ndarray
    head_x: np.ndarray
    ahead: np.ndarray
    behind: np.ndarray
    second_tail: np.ndarray
    open: np.ndarray
    kernel_at: np.ndarray
    starts: np.ndarray
    start_count: np.ndarray


@functools.cache
def tables() -> Tables:
    """Return the tables of Pathfinder's paddles, which are computed once per process in a tenth of a second."""
    degrees = np.arange(-180, 180) * np.pi / 180
    heads = _heads()
    outward = np.arctan2(heads[:, 0], heads[:, 1])
    drawn = [_draw(angle) for angle in np.concatenate([degrees, _opposite(outward)])]
    line, mask = (np.stack(pictures) for pictures in zip(*drawn, strict=True))
    headings = np.concatenate([degrees, outward])
    turn = np.abs(outward - headings[:, None])
    weight = np.cos(np.minimum(np.minimum(turn, 2 * np.pi - turn), np.pi / 2)) ** 2
    near, weight = _largest(np.where(weight > 1e-20, weight, 0))  # cos² of 90 degrees is 4e-33 in floats
    return Tables(
        *_pixels(line),
        *_pixels(mask),
        *_solid(mask),
        near,
        weight,
        *heads.T,
        _translated(headings, LENGTH + 2 * MARGIN),
        _behind(degrees),
        np.rint(_shifts(np.arange(360) * np.pi / 180, SEED_DISTANCE)).astype(int) + FRAME,
        *_searches(mask[:DEGREES]),
    )


def resize(image: np.ndarray, size: int) -> np.ndarray:
    """Resize a uint8 image (height, width) to `size` x `size` pixels with Pillow's 8-bit Lanczos filter."""
    return np.asarray(Image.fromarray(image).resize((size, size), Image.Resampling.LANCZOS))


def _heads() -> np.ndarray:
    """Return the (18, 2) distinct pixels of a circle of radius 3, sampled at every pixel of length and rounded down."""
    radius = LENGTH + MARGIN
    angle = np.arange(0, 2 * np.pi, 1 / radius)
    return np.unique(np.floor(radius * np.stack([np.sin(angle), np.cos(angle)], 1)).astype(int), axis=0)


def _opposite(angle: np.ndarray) -> np.ndarray:
    return np.where(angle < 0, angle + np.pi, angle - np.pi)


def _draw(angle: float) -> tuple[np.ndarray, np.ndarray]:
    """Draw line and mask, (9, 9) uint8, of a paddle that starts in the middle, at twice the size, and reduce them."""
    middle, length = REACH * SCALE, LENGTH * SCALE
    picture = Image.new("L", (2 * middle + 1, 2 * middle + 1))
    tip = (int(np.ceil(middle + length * np.cos(angle))), int(np.ceil(middle + length * np.sin(angle))))
    ImageDraw.Draw(picture).line([(middle, middle), tip], fill=255)
    line = np.asarray(picture)
    thick = np.zeros_like(line)
    y, x = np.ogrid[: len(line), : len(line)]
    for at in np.argwhere(line):
        thick[(y - at[0]) ** 2 + (x - at[1]) ** 2 <= (MARGIN * SCALE) ** 2] = 255
    return resize(line, 2 * REACH + 1), resize(thick, 2 * REACH + 1)


def _largest(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return columns and values of the largest values of each row, as many as the most non-zero values of a row."""
    columns = np.argsort(-values.astype(float), axis=1, kind="stable")[:, : np.count_nonzero(values, axis=1).max()]
    return columns, np.take_along_axis(values, columns, 1)


def _pixels(pictures: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return offsets and values of all non-zero pixels, padded with pixels of value zero."""
    columns, values = _largest(pictures.reshape(len(pictures), -1))
    y, x = np.divmod(columns, 2 * REACH + 1)
    return (y - REACH) * STRIDE + x - REACH, values


def _solid(masks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    level = (np.arange(256) / 255).astype(np.float32).astype(float)  # masks are published as float32, summed as float64
    limit = np.array([np.count_nonzero(level + other < FULL) - 1 for other in level])
    at, value = _pixels(np.where(limit[masks] < 255, masks, 0))
    return at, limit[value].astype(np.uint8)


def _shifts(angles: np.ndarray, distance: int) -> np.ndarray:
    """Return (axis, angle, coordinate): each coordinate, counted from the window's edge, moved by a distance.

    Callers round the sums, since rounding in floating point depends on the coordinate too.
    """
    return np.arange(-FRAME, STRIDE - FRAME) + distance * np.stack([np.sin(angles), np.cos(angles)])[..., None]


def _translated(angles: np.ndarray, distance: int) -> np.ndarray:
    moved = np.ceil(_shifts(angles, distance)).astype(int) + FRAME
    return np.clip(moved, 0, STRIDE - 1)  # no snake comes near these ends


def _behind(degrees: np.ndarray) -> np.ndarray:
    """Return coordinates of first pivots: a paddle and its margin behind the head, one paddle before the tail."""
    head = _translated(degrees, LENGTH)
    return np.take_along_axis(_translated(_opposite(degrees), LENGTH + MARGIN), head, axis=2)


def _searches(masks: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return the tables of the search for a snake's first paddle, by the paddle's direction in degrees (see `Tables`).

    The published search drops a start if a pixel under the paddle's full mask, drawn one pixel to the lower right, is
    occupied; and it gives up if, for any pixel of the image, all of that mask lies outside. That leaves 30 degrees,
    those to the upper left.
    """
    inside, middle = np.zeros((2, STRIDE, STRIDE), bool)
    inside[WINDOW, WINDOW] = True
    block = slice(FRAME + 2 * SEED_DISTANCE, FRAME + SIZE - 2 * SEED_DISTANCE)
    middle[block, block] = True
    cells = np.flatnonzero(inside)
    kernels = [np.argwhere(mask[:7, :7] == 255) @ (STRIDE, 1) - 3 * (STRIDE + 1) for mask in masks]
    opened = np.zeros(len(masks), bool)
    starts = []
    for degree, kernel in enumerate(kernels):
        under = cells[:, None] + kernel
        seen = inside.ravel()[under]
        opened[degree] = seen.any(axis=1).all()
        free = (middle.ravel()[under] | ~seen).all(axis=1) & opened[degree]
        starts.append(cells[free])
    return opened, _padded(kernels), _padded(starts), np.array([len(s) for s in starts])


def _padded(rows: list[np.ndarray]) -> np.ndarray:
    """Stack rows of unequal length, repeated to the length of the longest."""
    return np.stack([np.resize(row, max(map(len, rows))) for row in rows])
