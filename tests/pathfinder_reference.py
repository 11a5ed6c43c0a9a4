"""Reference rules of Pathfinder images, one paddle at a time: slow; data.sequences.pathfinder must follow them.

Written from the parameters in the Long Range Arena's `data/pathfinder.py` and the behaviour of the two-snake generator
of Linsley, Kim and others (github.com/drewlinsley/pathfinder, 2019): image arithmetic in floats, a new mask for every
paddle, no tables. Coordinates are (y, x), angles are measured from +x towards +y.
"""

import dataclasses
import math

import numpy as np
from PIL import Image, ImageDraw


SIZE, LENGTH, MARGIN, SCALE = 32, 2, 1, 2
REACH = LENGTH + 1 + MARGIN  # half a pixel of line thickness, rounded up to one
SEED_DISTANCE, DISC_RADIUS = 7, 1.5
TARGET_CONTRAST, DISTRACTOR_CONTRAST = 0.75 * 2, 2.0
PADDLE_DRAWS = 3


@dataclasses.dataclass
class Snake:
    """A growing chain of paddles. `mask` is that of the newest paddle, which is not yet part of the common mask."""

    pivot: tuple[int, int]
    orientation: float
    mask: np.ndarray
    tail: tuple[int, int]
    head: tuple[int, int]
    image: np.ndarray
    paddles: list[tuple[tuple[int, int], float]]  # start point and direction of each paddle
    pivots: list[tuple[int, int]]


def move_point(point, angle, distance):
    return math.ceil(point[0] + distance * np.sin(angle)), math.ceil(point[1] + distance * np.cos(angle))


def reverse_angle(angle):
    return angle + np.pi if angle < 0 else angle - np.pi


def dilate(image, kernel):
    """Return the maximum over the kernel's cells around each pixel; cells outside the image count as -inf."""
    reach = len(kernel) // 2
    padded = np.pad(image.astype(float), reach, constant_values=-np.inf)
    shifts = [padded[y : y + len(image), x : x + len(image)] for y, x in np.argwhere(kernel)]
    return np.max(shifts, axis=0)


def make_ball(radius):
    y, x = np.ogrid[-radius : radius + 1, -radius : radius + 1]
    return x**2 + y**2 <= radius**2


def resize(image, size):
    return np.asarray(Image.fromarray(image).resize((size, size), Image.Resampling.LANCZOS)) / 255


def draw_paddle(angle):
    """Return line and mask of a paddle that starts at the centre of a small square, drawn at twice the size."""
    middle = REACH * SCALE
    big = Image.new("L", (2 * middle + 1, 2 * middle + 1))
    y, x = move_point((middle, middle), angle, LENGTH * SCALE)
    ImageDraw.Draw(big).line([(middle, middle), (x, y)], fill=255, width=1)
    big = np.asarray(big)
    thick = dilate(big, make_ball(MARGIN * SCALE)).astype(np.uint8)
    return resize(big, 2 * REACH + 1), resize(thick, 2 * REACH + 1)


def place_on_canvas(small, at, size=SIZE):
    """Return a float32 picture of zeros with `small` centred at pixel `at`, cropped to the picture."""
    picture = np.zeros((size + 4 * REACH, size + 4 * REACH), np.float32)
    top, left = at[0] + REACH, at[1] + REACH
    picture[top : top + len(small), left : left + len(small)] = small
    return picture[2 * REACH : -2 * REACH, 2 * REACH : -2 * REACH]


def find_start_pixels(mask, angle):
    """Return the pixels at which a snake with this orientation may start."""
    # The kernel is a paddle one pixel off the middle of its square, restricted to cells where its mask is exactly one.
    side = 2 * (LENGTH + MARGIN) + 1
    kernel = place_on_canvas(draw_paddle(angle)[1], (side // 2 + 1, side // 2 + 1), side) == 1
    rounded = np.ceil(dilate(mask, kernel) - 0.3)
    # The published search returns nothing if the kernel lies fully outside the image for any pixel.
    return np.empty((0, 2), int) if rounded.min() < 0 else np.argwhere(rounded == 0)


def start_snake(tail, angle, contrast):
    line, mask = draw_paddle(angle)
    pivot = move_point(move_point(tail, angle, LENGTH), reverse_angle(angle), LENGTH + MARGIN)
    image = place_on_canvas(line * contrast, tail)
    return Snake(pivot, angle, place_on_canvas(mask, tail), tail, None, image, [(tail, angle)], [pivot])


def find_candidates(mask, pivot, orientation):
    """Return the possible heads of the next paddle, their orientations and probabilities; none at a dead end."""
    angle = np.arange(0, 2 * np.pi, 1 / (LENGTH + MARGIN))
    y, x = pivot[0] + (LENGTH + MARGIN) * np.sin(angle), pivot[1] + (LENGTH + MARGIN) * np.cos(angle)
    inside = (y >= 0) & (y < SIZE) & (x >= 0) & (x < SIZE)
    heads = np.unique(np.stack([y[inside], x[inside]], 1).astype(int), axis=0)
    if not len(heads):
        return heads, np.empty(0), np.empty(0)
    new = np.arctan2(heads[:, 0] - pivot[0], heads[:, 1] - pivot[1])
    turn = np.abs(new - orientation)
    turn = np.minimum(np.minimum(turn, 2 * np.pi - turn), np.pi / 2)
    weight = (1 - dilate(mask, make_ball(MARGIN))[heads[:, 0], heads[:, 1]]) * np.cos(turn) ** 2
    if weight.sum() < 1e-4:
        return heads[:0], np.empty(0), np.empty(0)
    return heads, new, weight / weight.sum()


def collides(mask, paddle):
    return (mask + paddle).max() >= 1.8


def extend(snake, mask, contrast, rng):
    """Add a paddle to the snake; return the new common mask, or None if no paddle fits."""
    pivot = move_point(snake.pivot, snake.orientation, LENGTH + 2 * MARGIN)
    heads, orientations, probability = find_candidates(mask, pivot, snake.orientation)
    for _ in range(PADDLE_DRAWS if len(heads) else 0):
        i = rng.choice(len(heads), p=probability)
        line, small = draw_paddle(reverse_angle(orientations[i]))
        head = tuple(heads[i].tolist())
        paddle = place_on_canvas(small, head)
        if not collides(mask, paddle):
            mask = np.maximum(mask, snake.mask)
            snake.pivot, snake.orientation, snake.mask, snake.head = pivot, orientations[i], paddle, head
            snake.image = np.maximum(snake.image, place_on_canvas(line * contrast, head))
            snake.paddles.append((head, reverse_angle(orientations[i])))
            snake.pivots.append(pivot)
            return mask
    return None


def make_frame_mask():
    return np.pad(np.zeros((SIZE - 2, SIZE - 2)), 1, constant_values=1.0)


def draw_disc(middle):
    y, x = np.ogrid[: SIZE * SCALE, : SIZE * SCALE]
    big = (y - SCALE * middle[0]) ** 2 + (x - SCALE * middle[1]) ** 2 <= (DISC_RADIUS * SCALE) ** 2
    return resize(big.astype(np.uint8) * 255, SIZE)


def render_picture(snakes, origin, terminal):
    """Return the 8-bit picture of all snakes, with discs at a tail and at a head."""
    picture = np.maximum.reduce([draw_disc(origin), draw_disc(terminal), *(snake.image for snake in snakes)])
    return ((picture - picture.min()) * (255 / (picture.max() - picture.min())) + 0.5).astype(np.uint8)
