"""Rendering of snakes and their marks as 8-bit images."""

import functools

import numpy as np

from leanformer.data.sequences.pathfinder.paddles import (
    CELLS,
    FRAME,
    MARKER_RADIUS,
    SCALE,
    SIZE,
    STRIDE,
    WINDOW,
    resize,
    tables,
)
from leanformer.data.sequences.pathfinder.snakes import Snakes, stamp


TARGET, DISTRACTOR = 0.75 * 2, 2.0  # brightness of a line's full pixel; a marker's is 1


def render(targets: Snakes, distractors: Snakes, origin: np.ndarray, terminal: np.ndarray) -> np.ndarray:
    """Draw all snakes, and discs around `origin` and `terminal`, (n, 32, 32) uint8, scaled to a maximum of 255."""
    steps = np.arange(256) / 255
    pictures = [_markers()[_window(cell)] for cell in (origin, terminal)]
    value = steps[np.maximum(*pictures)]
    for snakes, contrast in ((targets, TARGET), (distractors, DISTRACTOR)):
        brightness = (steps * contrast).astype(np.float32).astype(float)  # lines are published as float32
        np.maximum(value, brightness[_lines(snakes)], out=value)
    scale = 255 / value.max(axis=(1, 2), keepdims=True)
    return (value * scale + 0.5).astype(np.uint8)


def _window(cell: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    y, x = np.divmod(cell, STRIDE)
    return y - FRAME, x - FRAME


def _lines(snakes: Snakes) -> np.ndarray:
    t = tables()
    n = len(snakes.paddle)
    picture = np.zeros((n, CELLS), np.uint8)
    columns = (array.reshape(n, -1).T for array in snakes)
    for paddle, at in zip(*columns, strict=True):
        rows = np.flatnonzero(paddle >= 0)
        stamp(picture, rows, at[rows], paddle[rows], t.line_at, t.line)
    return picture.reshape(n, STRIDE, STRIDE)[:, WINDOW, WINDOW]


@functools.cache
def _markers() -> np.ndarray:
    """Return the disc around each pixel, (32, 32, 32, 32) uint8, drawn at twice the size and reduced."""
    y, x = np.ogrid[: SIZE * SCALE, : SIZE * SCALE]
    discs = np.empty((SIZE, SIZE, SIZE, SIZE), np.uint8)
    for top, left in np.ndindex(SIZE, SIZE):
        disc = (y - SCALE * top) ** 2 + (x - SCALE * left) ** 2 <= (SCALE * MARKER_RADIUS) ** 2
        discs[top, left] = resize(disc * np.uint8(255), SIZE)
    return discs
