"""Snakes of Pathfinder's sampler drawn again by the plain rules, step by step."""

from collections import Counter

import numpy as np
import pathfinder_direct as direct
import pytest

from leanformer.data.sequences.pathfinder import paddles, snakes


DEGREES = np.arange(-180, 180) * np.pi / 180


def pixel(cell):
    y, x = divmod(int(cell), paddles.STRIDE)
    return y - paddles.FRAME, x - paddles.FRAME


def cell(point):
    return (point[0] + paddles.FRAME) * paddles.STRIDE + point[1] + paddles.FRAME


def framed(mask):
    """A plain sampler's mask as a grid of the fast one."""
    return np.pad(np.rint(mask * 255).astype(np.uint8), paddles.FRAME).reshape(1, -1)


def closed():
    mask = np.ones((32, 32))
    mask[14:18, 14:18] = 0
    return mask


class Chosen:
    """Stands in for a generator: choices are made already."""

    def __init__(self, index):
        self.index = index

    def choice(self, n, p):
        return self.index


class Replay:
    """Draws recorded snakes by the plain rules; fails where a step breaks one, or has another probability."""

    def __init__(self):
        self.states = []  # (snake's pivot and orientation, mask) before each extension

    def start(self, paddle, at, contrast):
        return direct.seeded(pixel(at), DEGREES[paddle], contrast)

    def extend(self, snake, mask, last, head, contrast):
        pivot = direct.moved(snake.pivot, snake.orientation, 4)
        heads, _, probability = direct.candidates(mask, pivot, snake.orientation)
        before = np.array([[c + paddles.FRAME for c in snake.pivot]])
        _, cells, _, weight = snakes._choices(framed(mask), np.array([0]), np.array([last]), before)
        fast = Counter()
        for where, w in zip(cells[0], weight[0] / weight.sum(), strict=True):
            fast[pixel(where)] += w
        plain = dict(zip(map(tuple, heads.tolist()), probability, strict=True))
        for where in fast.keys() | plain.keys():
            assert fast[where] == pytest.approx(plain.get(where, 0), abs=1e-7)
        self.states.append((tuple(snake.pivot), snake.orientation, last, mask))
        mask = direct.extend(snake, mask, contrast, Chosen(list(plain).index(pixel(head))))
        assert mask is not None, "it collides"
        return mask


def replay(block, row, player):
    """All snakes of an image, and the mask."""
    mask = direct.framed()
    paddle, at = (array[row] for array in block.targets)
    targets = [player.start(paddle[s, 0], at[s, 0], direct.TARGET) for s in (0, 1)]
    assert list(pixel(at[0, 0])) in direct.starts(closed(), DEGREES[paddle[0, 0]]).tolist()
    for place in range(1, paddle.shape[1]):
        for s, snake in enumerate(targets):
            mask = player.extend(snake, mask, paddle[s, place - 1], at[s, place], direct.TARGET)
    mask = np.maximum(mask, targets[1].mask)
    short = []
    for paddle, at in zip(block.distractors.paddle[row], block.distractors.at[row], strict=True):
        if paddle[0] < 0:
            assert (paddle == -1).all()
            continue
        assert list(pixel(at[0])) in direct.starts(mask, DEGREES[paddle[0]]).tolist()
        short.append(player.start(paddle[0], at[0], direct.DISTRACTOR))
        for place in range(1, len(paddle)):
            mask = player.extend(short[-1], mask, paddle[place - 1], at[place], direct.DISTRACTOR)
        mask = np.maximum(mask, short[-1].mask)
    return targets, short, mask
