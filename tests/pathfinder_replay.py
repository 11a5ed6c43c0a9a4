"""Replay of snakes from the Pathfinder sampler by the reference rules of pathfinder_reference.py, step by step."""

from collections import Counter

import numpy as np
import pathfinder_reference as direct
import pytest

from leanformer.data.sequences.pathfinder import paddles, snakes


DEGREES = np.arange(-180, 180) * np.pi / 180


def pixel(cell):
    """Return the (y, x) of a cell index of the fast sampler's grid."""
    y, x = divmod(int(cell), paddles.STRIDE)
    return y - paddles.FRAME, x - paddles.FRAME


def cell(point):
    """Return the cell index of (y, x) in the fast sampler's grid."""
    return (point[0] + paddles.FRAME) * paddles.STRIDE + point[1] + paddles.FRAME


def mask_to_grid(mask):
    """Return a mask of the reference sampler as a grid of the fast sampler."""
    return np.pad(np.rint(mask * 255).astype(np.uint8), paddles.FRAME).reshape(1, -1)


def make_closed_mask():
    """Return a mask that leaves only the centre free."""
    mask = np.ones((32, 32))
    mask[14:18, 14:18] = 0
    return mask


class FixedChoice:
    """Fake random generator whose `choice` returns a fixed index."""

    def __init__(self, index):
        self.index = index

    def choice(self, n, p):
        return self.index


class Replay:
    """Redraw recorded snakes by the reference rules; fail if a step is not allowed or has another probability."""

    def __init__(self):
        self.states = []  # (pivot, orientation, previous paddle, mask) before each extension

    def start(self, paddle, at, contrast):
        return direct.start_snake(pixel(at), DEGREES[paddle], contrast)

    def extend(self, snake, mask, previous, head, contrast):
        pivot = direct.move_point(snake.pivot, snake.orientation, 4)
        heads, _, probability = direct.find_candidates(mask, pivot, snake.orientation)
        start_pivot = np.array([[c + paddles.FRAME for c in snake.pivot]])
        _, cells, _, weight = snakes._choices(mask_to_grid(mask), np.array([0]), np.array([previous]), start_pivot)
        fast = Counter()
        for position, w in zip(cells[0], weight[0] / weight.sum(), strict=True):
            fast[pixel(position)] += w
        reference = dict(zip(map(tuple, heads.tolist()), probability, strict=True))
        for position in fast.keys() | reference.keys():
            assert fast[position] == pytest.approx(reference.get(position, 0), abs=1e-7)
        self.states.append((tuple(snake.pivot), snake.orientation, previous, mask))
        mask = direct.extend(snake, mask, contrast, FixedChoice(list(reference).index(pixel(head))))
        assert mask is not None, "it collides"
        return mask


def replay_image(block, row, player):
    """Return targets, distractors and the mask of an image."""
    mask = direct.make_frame_mask()
    paddle, at = (array[row] for array in block.targets)
    targets = [player.start(paddle[s, 0], at[s, 0], direct.TARGET_CONTRAST) for s in (0, 1)]
    assert list(pixel(at[0, 0])) in direct.find_start_pixels(make_closed_mask(), DEGREES[paddle[0, 0]]).tolist()
    for step in range(1, paddle.shape[1]):
        for s, snake in enumerate(targets):
            mask = player.extend(snake, mask, paddle[s, step - 1], at[s, step], direct.TARGET_CONTRAST)
    mask = np.maximum(mask, targets[1].mask)
    distractors = []
    for paddle, at in zip(block.distractors.paddle[row], block.distractors.at[row], strict=True):
        if paddle[0] < 0:
            assert (paddle == -1).all()
            continue
        assert list(pixel(at[0])) in direct.find_start_pixels(mask, DEGREES[paddle[0]]).tolist()
        distractors.append(player.start(paddle[0], at[0], direct.DISTRACTOR_CONTRAST))
        for step in range(1, len(paddle)):
            mask = player.extend(distractors[-1], mask, paddle[step - 1], at[step], direct.DISTRACTOR_CONTRAST)
        mask = np.maximum(mask, distractors[-1].mask)
    return targets, distractors, mask
