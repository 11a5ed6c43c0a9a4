"""Pathfinder images by the plain rules, one paddle at a time: slow, and what data.sequences.pathfinder must equal.

Written from the parameters in the Long Range Arena's `data/pathfinder.py` and the behaviour of the two-snake generator
of Linsley, Kim and others (github.com/drewlinsley/pathfinder, 2019): image arithmetic in floats, masks drawn anew for
every paddle, no tables. Coordinates are (y, x), angles are measured from +x towards +y.
"""

import dataclasses
import math

import numpy as np
from PIL import Image, ImageDraw


SIZE, LENGTH, MARGIN, SCALE = 32, 2, 1, 2
REACH = LENGTH + 1 + MARGIN  # the half pixel of thickness counts as a whole one
BETWEEN_SEEDS, DISC = 7, 1.5
TARGET, DISTRACTOR = 0.75 * 2, 2.0
PADDLE_DRAWS, SNAKE_DRAWS = 3, 5


@dataclasses.dataclass
class Snake:
    """A growing chain; `mask` is its newest paddle, which is not yet in the common mask."""

    pivot: tuple[int, int]
    orientation: float
    mask: np.ndarray
    tail: tuple[int, int]
    head: tuple[int, int]
    image: np.ndarray
    paddles: list[tuple[tuple[int, int], float]]  # where a paddle was drawn from, in which direction
    pivots: list[tuple[int, int]]


def moved(point, angle, distance):
    return math.ceil(point[0] + distance * np.sin(angle)), math.ceil(point[1] + distance * np.cos(angle))


def opposite(angle):
    return angle + np.pi if angle < 0 else angle - np.pi


def dilated(image, kernel):
    """Maximum over the kernel's cells around each pixel; cells outside the image are left out, -inf if all are."""
    reach = len(kernel) // 2
    padded = np.pad(image.astype(float), reach, constant_values=-np.inf)
    shifts = [padded[y : y + len(image), x : x + len(image)] for y, x in np.argwhere(kernel)]
    return np.max(shifts, axis=0)


def ball(radius):
    y, x = np.ogrid[-radius : radius + 1, -radius : radius + 1]
    return x**2 + y**2 <= radius**2


def resized(image, size):
    return np.asarray(Image.fromarray(image).resize((size, size), Image.Resampling.LANCZOS)) / 255


def drawn(angle):
    """Line and mask of a paddle from the centre of a small square, drawn twice as large and reduced."""
    centre = REACH * SCALE
    big = Image.new("L", (2 * centre + 1, 2 * centre + 1))
    y, x = moved((centre, centre), angle, LENGTH * SCALE)
    ImageDraw.Draw(big).line([(centre, centre), (x, y)], fill=255, width=1)
    big = np.asarray(big)
    fat = dilated(big, ball(MARGIN * SCALE)).astype(np.uint8)
    return resized(big, 2 * REACH + 1), resized(fat, 2 * REACH + 1)


def placed(small, at, size=SIZE):
    """A float32 picture of zeros with `small` centred at a pixel; what lies outside is cut off."""
    picture = np.zeros((size + 4 * REACH, size + 4 * REACH), np.float32)
    top, left = at[0] + REACH, at[1] + REACH
    picture[top : top + len(small), left : left + len(small)] = small
    return picture[2 * REACH : -2 * REACH, 2 * REACH : -2 * REACH]


def starts(mask, angle):
    """Pixels where a snake may start with this orientation."""
    # The kernel is a paddle drawn one pixel off the middle of its square, and only where its mask is exactly one.
    side = 2 * (LENGTH + MARGIN) + 1
    kernel = placed(drawn(angle)[1], (side // 2 + 1, side // 2 + 1), side) == 1
    rounded = np.ceil(dilated(mask, kernel) - 0.3)
    # A kernel that lies wholly outside the image for some pixel makes the published search give up.
    return np.empty((0, 2), int) if rounded.min() < 0 else np.argwhere(rounded == 0)


def whole_degrees(rng):
    return rng.integers(-180, 180) * np.pi / 180


def seeded(tail, angle, contrast):
    line, mask = drawn(angle)
    pivot = moved(moved(tail, angle, LENGTH), opposite(angle), LENGTH + MARGIN)
    image = placed(line * contrast, tail)
    return Snake(pivot, angle, placed(mask, tail), tail, None, image, [(tail, angle)], [pivot])


def seed_target(mask, rng):
    angle, closed = whole_degrees(rng), np.ones_like(mask)
    closed[2 * BETWEEN_SEEDS : -2 * BETWEEN_SEEDS, 2 * BETWEEN_SEEDS : -2 * BETWEEN_SEEDS] = 0
    free = starts(np.maximum(mask, closed), angle)
    return seeded(tuple(free[rng.integers(len(free))].tolist()), angle, TARGET) if len(free) else None


def seed_beside(tail, rng):
    angle, direction = whole_degrees(rng), rng.integers(360) * np.pi / 180
    y, x = tail[0] + BETWEEN_SEEDS * np.sin(direction), tail[1] + BETWEEN_SEEDS * np.cos(direction)
    return seeded((round(y), round(x)), angle, TARGET)


def seed_distractor(mask, rng):
    for _ in range(PADDLE_DRAWS):
        angle = whole_degrees(rng)
        free = starts(mask, angle)
        if not len(free):
            return None
        snake = seeded(tuple(free[rng.integers(len(free))].tolist()), angle, DISTRACTOR)
        if all(0 <= c < SIZE for c in (*moved(snake.tail, angle, LENGTH), *snake.pivot)):
            return snake
    return None


def candidates(mask, pivot, orientation):
    """Heads that a paddle may have, their orientations and probabilities; no heads at a dead end."""
    angle = np.arange(0, 2 * np.pi, 1 / (LENGTH + MARGIN))
    y, x = pivot[0] + (LENGTH + MARGIN) * np.sin(angle), pivot[1] + (LENGTH + MARGIN) * np.cos(angle)
    inside = (y >= 0) & (y < SIZE) & (x >= 0) & (x < SIZE)
    heads = np.unique(np.stack([y[inside], x[inside]], 1).astype(int), axis=0)
    if not len(heads):
        return heads, np.empty(0), np.empty(0)
    new = np.arctan2(heads[:, 0] - pivot[0], heads[:, 1] - pivot[1])
    turn = np.abs(new - orientation)
    turn = np.minimum(np.minimum(turn, 2 * np.pi - turn), np.pi / 2)
    weight = (1 - dilated(mask, ball(MARGIN))[heads[:, 0], heads[:, 1]]) * np.cos(turn) ** 2
    if weight.sum() < 1e-4:
        return heads[:0], np.empty(0), np.empty(0)
    return heads, new, weight / weight.sum()


def collides(mask, paddle):
    return (mask + paddle).max() >= 1.8


def extend(snake, mask, contrast, rng):
    """The common mask after one more paddle, or None."""
    pivot = moved(snake.pivot, snake.orientation, LENGTH + 2 * MARGIN)
    heads, orientations, probability = candidates(mask, pivot, snake.orientation)
    for _ in range(PADDLE_DRAWS if len(heads) else 0):
        i = rng.choice(len(heads), p=probability)
        line, small = drawn(opposite(orientations[i]))
        head = tuple(heads[i].tolist())
        paddle = placed(small, head)
        if not collides(mask, paddle):
            mask = np.maximum(mask, snake.mask)
            snake.pivot, snake.orientation, snake.mask, snake.head = pivot, orientations[i], paddle, head
            snake.image = np.maximum(snake.image, placed(line * contrast, head))
            snake.paddles.append((head, opposite(orientations[i])))
            snake.pivots.append(pivot)
            return mask
    return None


def framed():
    return np.pad(np.zeros((SIZE - 2, SIZE - 2)), 1, constant_values=1.0)


def pair(contour, rng):
    """One attempt at two target snakes: (snakes, mask), or the number of extensions that it survived."""
    mask = framed()
    first = seed_target(mask, rng)
    if first is None:
        return -1
    snakes = (first, seed_beside(first.tail, rng))
    for i in range(2 * (contour - 1)):
        mask = extend(snakes[i % 2], mask, TARGET, rng)
        if mask is None:
            return i
    return snakes, np.maximum(mask, snakes[1].mask)  # the last paddle of the first snake is forgotten


def distractor(mask, length, rng):
    """(snake, mask) for one attempt at a short snake, or None."""
    snake = seed_distractor(mask, rng)
    for _ in range(length - 1 if snake else 0):
        mask = extend(snake, mask, DISTRACTOR, rng)
        if mask is None:
            return None
    return (snake, np.maximum(mask, snake.mask)) if snake else None


def disc(centre):
    y, x = np.ogrid[: SIZE * SCALE, : SIZE * SCALE]
    big = (y - SCALE * centre[0]) ** 2 + (x - SCALE * centre[1]) ** 2 <= (DISC * SCALE) ** 2
    return resized(big.astype(np.uint8) * 255, SIZE)


def finished(snakes, origin, terminal):
    """8-bit picture of all snakes, with discs at a tail and at a head."""
    picture = np.maximum.reduce([disc(origin), disc(terminal), *(snake.image for snake in snakes)])
    return ((picture - picture.min()) * (255 / (picture.max() - picture.min())) + 0.5).astype(np.uint8)


def sample(contour, rng):
    """One image, its label, and all that was drawn: targets, distractors, attempts at a pair."""
    attempts, result = 1, pair(contour, rng)
    while isinstance(result, int):
        attempts, result = attempts + 1, pair(contour, rng)
    targets, mask = result
    length, distractors = contour // 3, []
    for _ in range(20 // length):
        for _ in range(SNAKE_DRAWS):
            if (made := distractor(mask, length, rng)) is not None:
                snake, mask = made
                distractors.append(snake)
                break
    label, marked = int(rng.integers(2)), int(rng.integers(2))
    origin, terminal = targets[marked].tail, targets[marked if label else 1 - marked].head
    return finished([*targets, *distractors], origin, terminal), label, (targets, distractors, attempts)
