"""Vectorised two-snake sampler of Pathfinder, and rendering of the snakes.

Each rule is that of the published generator (see `__init__`), with the same probabilities; only the order of work
differs. Thousands of candidate pairs grow side by side on grids of bytes, and those that fail are dropped. Acceptance
depends only on the pair itself, so accepted pairs have the distribution of pairs drawn one at a time. Every array has
one row per candidate.
"""

import functools
from typing import NamedTuple

import numpy as np

from leanformer.data.sequences.pathfinder.paddles import (
    CELLS,
    DEGREES,
    FIRST,
    FRAME,
    LAST,
    MARKER_RADIUS,
    OCCUPIED,
    SCALE,
    SIZE,
    STRIDE,
    WINDOW,
    resize,
    tables,
)


ROUND = 1 << 15  # candidate pairs drawn at once
PADDLE_DRAWS, SNAKE_DRAWS = 3, 5  # the first and the published 2 and 4 retries
DEAD_END = 1e-4 * 255  # smallest sum of weights, which are multiplied by bytes here
PADDLES_OF_DISTRACTORS = 20
TARGET, DISTRACTOR = 0.75 * 2, 2.0  # brightness of a line's full pixel; a marker's is 1


class Random:
    """Philox4x64-10 generator with the key (seed, stream), the same on every machine and NumPy version."""

    def __init__(self, seed: int, stream: int):
        self._bits = np.random.Philox(key=np.array([seed, stream], np.uint64))

    def below(self, limit: int | np.ndarray, count: int) -> np.ndarray:
        """Return `count` integers, int64, from 0 to below `limit`, one number or `count`; uniform to 1 in 10^7."""
        high = self._bits.random_raw(count) >> np.uint64(32)
        return (high * np.asarray(limit, np.uint64) >> np.uint64(32)).astype(np.int64)

    def uniform(self, count: int) -> np.ndarray:
        """Return `count` random multiples of 2^-53 in [0, 1), float64."""
        return (self._bits.random_raw(count) >> np.uint64(11)) * 2.0**-53


class Snakes(NamedTuple):
    """Snakes of several images, as paddles at cells; see `paddles` for both. -1 marks a missing paddle.

    Attributes:
        paddle: numbers of the paddles, 0 to 377, (image, snake, place in the snake).
        at: cells that the paddles start from, of the same shape.
    """

    paddle: np.ndarray
    at: np.ndarray


class Pairs(NamedTuple):
    """Accepted pairs of target snakes, one per image.

    Attributes:
        snakes: two snakes per image.
        grid: occupied pixels, uint8 (images, CELLS), 255 for fully occupied.
        tried: number of candidate pairs that were drawn.
        accepted: number of candidates in which both snakes could be completed, at least as many as are returned.
    """

    snakes: Snakes
    grid: np.ndarray
    tried: int
    accepted: int


def pairs(contour: int, count: int, random: Random) -> Pairs:
    """Draw pairs of target snakes, each pair in an empty image.

    Args:
        contour: number of paddles of each snake.
        count: number of pairs, which is the number of images.
        random: generator of all draws.
    """
    rounds, tried, accepted = [], 0, 0
    while accepted < count:
        paddle, at, pivot = _seeds(contour, random)
        grid = np.zeros((len(paddle), SIZE + 2 * FRAME, STRIDE), np.uint8)
        grid[:, WINDOW, WINDOW] = 255
        grid[:, FIRST : LAST + 1, FIRST : LAST + 1] = 0
        grid = grid.reshape(len(paddle), CELLS)
        rows = _grow(grid, paddle, at, pivot, random)
        rounds.append((paddle[rows], at[rows], grid[rows]))
        tried, accepted = tried + ROUND, accepted + len(rows)
    paddle, at, grid = (np.concatenate(arrays)[:count] for arrays in zip(*rounds, strict=True))
    return Pairs(Snakes(paddle, at), grid, tried, accepted)


def _seeds(contour: int, random: Random) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Draw both first paddles of a round's candidates; return paddles, cells and (y, x) pivots of the valid ones."""
    t = tables()
    first = random.below(DEGREES, ROUND)
    first = first[t.start_count[first] > 0]
    n = len(first)
    tail = t.starts[first, random.below(t.start_count[first], n)]
    direction, second = random.below(360, n), random.below(DEGREES, n)
    paddle, at = np.full((2, n, 2, contour), -1)
    pivot = np.empty((n, 2, 2), np.int64)
    y, x = np.divmod(tail, STRIDE)
    for snake, degree in enumerate((first, second)):
        paddle[:, snake, 0], at[:, snake, 0] = degree, y * STRIDE + x
        pivot[:, snake] = np.stack([t.behind[0, degree, y], t.behind[1, degree, x]], 1)
        y, x = t.second_tail[0, direction, y], t.second_tail[1, direction, x]
    return paddle, at, pivot


def distractors(grid: np.ndarray, contour: int, random: Random) -> Snakes:
    """Draw the distractors of each image: snakes of `contour` // 3 paddles on free cells, at most 20 paddles in all.

    Args:
        grid: occupied pixels, uint8 (images, CELLS), such as `Pairs.grid`; those of the distractors are added in place.
        contour: number of paddles of a target snake.
        random: generator of all draws.

    Returns:
        Paddles and cells (images, distractors, contour // 3); -1 for a snake that found no place in SNAKE_DRAWS tries.
    """
    length = contour // 3
    shape = (len(grid), PADDLES_OF_DISTRACTORS // length, length)
    snakes = Snakes(*np.full((2, *shape), -1))
    for snake in range(shape[1]):
        waiting = np.arange(len(grid))
        for _ in range(SNAKE_DRAWS):
            rows, paddle, at, tried = _short(grid, waiting, length, random)
            snakes.paddle[rows, snake], snakes.at[rows, snake], grid[rows] = paddle, at, tried
            waiting = np.setdiff1d(waiting, rows, assume_unique=True)
    return snakes


def _short(
    grid: np.ndarray, rows: np.ndarray, length: int, random: Random
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Try once to draw a short snake in each of `rows`; return the rows that succeed, the snakes, and their grids.

    Two parts of the published search can never act with these parameters and are left out: giving up when less than
    1 % of the image is free (a paddle takes 12 pixels at most), and drawing anew if head or pivot fall outside.
    """
    t = tables()
    degree = random.below(DEGREES, len(rows))
    rows, degree = rows[t.open[degree]], degree[t.open[degree]]
    grid = grid[rows]
    taken = np.zeros((len(rows), SIZE + 2 * FRAME, STRIDE), bool)
    taken[:, WINDOW, WINDOW] = grid.reshape(taken.shape)[:, WINDOW, WINDOW] > 255 * OCCUPIED
    window = np.add.outer(np.arange(SIZE) * STRIDE, np.arange(SIZE)).ravel() + FRAME * (STRIDE + 1)
    cells = np.arange(len(rows))[:, None] * CELLS + window
    hit = [taken.ravel()[cells + kernel[:, None]] for kernel in t.kernel_at[degree].T]
    order = np.cumsum(~np.logical_or.reduce(hit), axis=1, dtype=np.int64)
    chosen = random.below(order[:, -1], len(rows))
    some = np.flatnonzero(order[:, -1])
    tail = window[np.argmax(order > chosen[:, None], axis=1)]
    rows, degree, tail, grid = rows[some], degree[some], tail[some], grid[some]
    paddle, at = np.full((2, len(rows), 1, length), -1)
    paddle[:, 0, 0], at[:, 0, 0] = degree, tail
    pivot = np.stack([t.behind[axis, degree, c] for axis, c in enumerate(np.divmod(tail, STRIDE))], 1)[:, None]
    on = _grow(grid, paddle, at, pivot, random)
    return rows[on], paddle[on, 0], at[on, 0], grid[on]


def _grow(grid: np.ndarray, paddle: np.ndarray, at: np.ndarray, pivot: np.ndarray, random: Random) -> np.ndarray:
    """Extend all snakes in turn, from their first paddles to full length, in place.

    A paddle enters the grid when its snake has the next one. At the end only the last snake's last paddle enters it,
    so later snakes may cross the end of the first one.

    Returns:
        The rows in which every snake is complete.
    """
    t = tables()
    rows = np.arange(len(grid))
    for place in range(1, paddle.shape[2]):
        for snake in range(paddle.shape[1]):
            on, *new = _extend(grid, rows, paddle[rows, snake, place - 1], pivot[rows, snake], random)
            rows = rows[on]
            paddle[rows, snake, place], at[rows, snake, place], pivot[rows, snake] = new
            stamp(grid, rows, at[rows, snake, place - 1], paddle[rows, snake, place - 1], t.mask_at, t.mask)
    stamp(grid, rows, at[rows, -1, -1], paddle[rows, -1, -1], t.mask_at, t.mask)
    return rows


def _extend(
    grid: np.ndarray, rows: np.ndarray, last: np.ndarray, pivot: np.ndarray, random: Random
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Draw one more paddle for each of `rows`, after paddle `last`.

    Returns:
        The indices into `rows` that succeed, and for these the new paddle, its cell and its pivot.
    """
    t = tables()
    near, heads, pivot, weight = _choices(grid, rows, last, pivot)
    chances = np.cumsum(weight, axis=1)
    waiting = np.flatnonzero(chances[:, -1] >= DEAD_END)
    choice = np.full(len(rows), -1)
    for _ in range(PADDLE_DRAWS):
        level = random.uniform(len(waiting)) * chances[waiting, -1]
        drawn = np.argmax(chances[waiting] > level[:, None], axis=1)
        paddle = DEGREES + near[waiting, drawn]
        under = heads[waiting, drawn][:, None] + t.solid_at[paddle]
        hit = (grid[rows[waiting][:, None], under] > t.solid_limit[paddle]).any(axis=1)
        choice[waiting[~hit]] = drawn[~hit]
        waiting = waiting[hit]
    on = np.flatnonzero(choice >= 0)
    return on, DEGREES + near[on, choice[on]], heads[on, choice[on]], pivot[on]


def _choices(
    grid: np.ndarray, rows: np.ndarray, last: np.ndarray, pivot: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return possible next heads by number, their cells, the (y, x) pivot, and their weights times 255."""
    t = tables()
    pivot = np.stack([t.ahead[axis, last, pivot[:, axis]] for axis in (0, 1)], 1)
    near = t.near[last]
    # A head on or beyond the padding has weight zero; moved to the padding's inner edge, it has that too.
    y = np.clip(pivot[:, :1] + t.head_y[near], FIRST, LAST)
    x = np.clip(pivot[:, 1:] + t.head_x[near], FIRST, LAST)
    heads = y * STRIDE + x
    cells = rows[:, None] * CELLS + heads
    around = [grid.ravel()[cells + step] for step in (0, 1, -1, STRIDE, -STRIDE)]
    return near, heads, pivot, t.weight[last] * (255 - np.maximum.reduce(around))


def stamp(
    grid: np.ndarray, rows: np.ndarray, at: np.ndarray, paddle: np.ndarray, pixels: np.ndarray, values: np.ndarray
) -> None:
    """Draw one paddle into each of some rows of a grid, in place: the maximum of old values and those of the paddle.

    Args:
        grid: values of the cells of all images, uint8 (images, CELLS).
        rows: distinct indices of images (n,).
        at: cells of the paddles (n,).
        paddle: numbers of the paddles (n,).
        pixels, values: offsets and values of the pixels by paddle, such as `mask_at` and `mask` of `paddles.Tables`.
    """
    cells = (rows * CELLS + at)[:, None] + pixels[paddle]
    flat = grid.reshape(-1)
    flat[cells] = np.maximum(flat[cells], values[paddle])


def render(targets: Snakes, distractors: Snakes, origin: np.ndarray, terminal: np.ndarray) -> np.ndarray:
    """Return Pathfinder images (n, 32, 32), uint8 with maximum 255: all snakes, and two discs.

    Args:
        targets, distractors: snakes of n images; distractors are drawn with less contrast.
        origin, terminal: cells (n,) that are marked with discs.
    """
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
