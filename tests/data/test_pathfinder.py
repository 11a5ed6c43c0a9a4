"""Pathfinder sampler against a direct reference implementation, rule by rule and as a distribution."""

import hashlib
from collections import Counter

import numpy as np
import pathfinder_reference as direct
import pytest
from pathfinder_replay import DEGREES, Replay, cell, make_closed_mask, mask_to_grid, pixel, replay_image
from scipy import stats

from leanformer.data.sequences import pathfinder
from leanformer.data.sequences.pathfinder import dataset, paddles, snakes


LEVEL = 1e-4  # significance level of every statistical test; seeds are fixed, so results are reproducible


@pytest.fixture(scope="module")
def blocks():
    return {contour: pathfinder.sample(contour, seed=3, block=0) for contour in dataset.CONTOURS}


@pytest.mark.parametrize("contour", dataset.CONTOURS)
def test_images_follow_the_reference_rules(blocks, contour):
    block, player = blocks[contour], Replay()
    assert block.targets.paddle.shape == (1000, 2, contour)
    assert block.distractors.paddle.shape == (1000, 20 // (contour // 3), contour // 3)
    random = snakes.Random(3, contour << 32)
    pairs = snakes.pairs(contour, 1000, random)
    snakes.distractors(pairs.grid, contour, random)
    for row in range(7):
        targets, short, mask = replay_image(block, row, player)
        start, end = block.marks[row]
        assert block.labels[row] == (start == end)
        picture = direct.render_picture([*targets, *short], targets[start].tail, targets[end].head)
        np.testing.assert_array_equal(block.images[row], picture)
        occupied = pairs.grid[row].reshape(48, 48)[paddles.WINDOW, paddles.WINDOW]
        np.testing.assert_array_equal(occupied, np.rint(mask * 255))
    assert len(player.states) > 7 * 2 * (contour - 1)


def test_paddle_draws_follow_the_exact_law(blocks):
    """Compare with the law of up to three draws in states with likely collisions: p (1 + q + q²), failure q³."""
    player = Replay()
    for row in range(9):
        replay_image(blocks[14], row, player)
    tested = 0
    for pivot, orientation, last, mask in player.states:
        if tested == 3:
            break
        next_pivot = direct.move_point(pivot, orientation, 4)
        heads, angles, p = direct.find_candidates(mask, next_pivot, orientation)
        trials = (
            direct.place_on_canvas(direct.draw_paddle(direct.reverse_angle(a))[1], h)
            for a, h in zip(angles, heads, strict=True)
        )
        hits = np.array([direct.collides(mask, paddle) for paddle in trials])
        q = p[hits].sum()
        if not 0.3 < q < 0.7:
            continue
        n = 20_000
        rows, pivots = np.arange(n), np.tile(np.array(pivot) + paddles.FRAME, (n, 1))
        grid = np.repeat(mask_to_grid(mask), n, 0)
        extended, _, result, after = snakes._extend(grid, rows, np.full(n, last), pivots, snakes.Random(5, tested))
        law = {cell(h): chance * (1 + q + q * q) for h, chance, hit in zip(heads, p, hits, strict=True) if not hit}
        likely = [head for head, chance in law.items() if chance * n > 5]
        counts = Counter(result.tolist())
        observed = [*(counts[head] for head in likely), n - len(extended)]
        expected = np.array([*(law[head] for head in likely), q**3]) * n
        assert set(counts) <= set(law) and (after == np.array(next_pivot) + paddles.FRAME).all()
        assert stats.chisquare(observed, expected / expected.sum() * sum(observed)).pvalue > LEVEL
        tested += 1
    assert tested == 3


def test_single_free_head_is_chosen():
    """A single free head is chosen even with a sharp turn; without one the snake cannot be extended."""
    t, random, tested = paddles.tables(), snakes.Random(7, 0), 0
    middle = np.array([[24, 24]])
    for last, column in np.argwhere((t.weight > 2e-4) & (t.weight < 0.02)):
        grid = np.full((1, paddles.CELLS), 255, np.uint8)
        _, heads, _, _ = snakes._choices(grid, np.array([0]), np.array([last]), middle)
        assert not len(snakes._extend(grid, np.array([0]), np.array([last]), middle, random)[0])
        head, paddle = heads[0, column], paddles.DEGREES + t.near[last, column]
        grid[0, head + t.solid_at[paddle]] = 0
        grid[0, head + np.array([0, 1, -1, paddles.STRIDE, -paddles.STRIDE])] = 0
        *_, weight = snakes._choices(grid, np.array([0]), np.array([last]), middle)
        if np.count_nonzero(weight) == 1:
            extended, *new = snakes._extend(grid, np.array([0]), np.array([last]), middle, random)
            assert extended.tolist() == [0] and [new[0][0], new[1][0]] == [paddle, head]
            tested += 1
    assert tested > 20


def test_start_positions_equal_the_reference():
    t = paddles.tables()
    for degree, angle in enumerate(DEGREES):
        starts = t.starts[degree][: t.start_count[degree]].tolist()
        assert sorted(map(pixel, starts)) == sorted(
            map(tuple, direct.find_start_pixels(make_closed_mask(), angle).tolist())
        )
    assert np.flatnonzero(t.open).tolist() == np.flatnonzero(t.start_count).tolist() == list(range(30, 60))


def test_seed_paddles_follow_the_exact_law():
    t = paddles.tables()
    samples = [snakes._seeds(6, snakes.Random(11, stream)) for stream in range(4)]
    paddle, at, pivot = (np.concatenate(arrays) for arrays in zip(*samples, strict=True))
    share = stats.binomtest(len(paddle), 4 * snakes.ROUND, 30 / 360)
    assert share.pvalue > LEVEL
    first, second = paddle[:, 0, 0], paddle[:, 1, 0]
    for sample, n in ((first - 30, 30), (second, 360)):
        assert stats.chisquare(np.bincount(sample, minlength=n)).pvalue > LEVEL
    starts = Counter(zip(first.tolist(), at[:, 0, 0].tolist(), strict=True))
    law = {(d, c): len(paddle) / 30 / t.start_count[d] for d in range(30, 60) for c in t.starts[d][: t.start_count[d]]}
    assert starts.keys() <= law.keys()
    assert stats.chisquare([starts[k] for k in law], list(law.values())).pvalue > LEVEL
    steps = Counter()
    for row in range(500):
        snake = direct.start_snake(pixel(at[row, 1, 0]), DEGREES[second[row]], 1.0)
        assert [c + paddles.FRAME for c in snake.pivot] == pivot[row, 1].tolist()
    for tail, other in zip(at[:, 0, 0].tolist(), at[:, 1, 0].tolist(), strict=True):
        (y, x), (v, u) = pixel(tail), pixel(other)
        steps[y % 2, x % 2, v - y, u - x] += 1
    law = Counter()
    for (y, x), n in Counter((y % 2, x % 2) for y, x in map(pixel, at[:, 0, 0])).items():
        for angle in np.arange(360) * np.pi / 180:
            law[y, x, round(y + 14 + 7 * np.sin(angle)) - y - 14, round(x + 14 + 7 * np.cos(angle)) - x - 14] += n / 360
    assert steps.keys() <= law.keys()
    assert stats.chisquare([steps[k] for k in law], list(law.values())).pvalue > LEVEL


def test_starts_of_short_snakes_are_uniform(blocks):
    """Starts are uniform over the cells that the direct search finds free, for every angle."""
    *_, mask = replay_image(blocks[14], 4, Replay())
    n = 60_000
    rows, paddle, at, _ = snakes._short(np.repeat(mask_to_grid(mask), n, 0), np.arange(n), 1, snakes.Random(13, 0))
    degrees = np.flatnonzero(paddles.tables().open)
    free = {d: [cell(p) for p in direct.find_start_pixels(mask, DEGREES[d]).tolist()] for d in degrees}
    assert min(map(len, free.values())) > 20
    assert stats.binomtest(len(rows), n, 30 / 360).pvalue > LEVEL
    assert all(a in free[d] for d, a in zip(paddle[:, 0].tolist(), at[:, 0].tolist(), strict=True))
    law = Counter()
    for cells in free.values():
        law.update({c: len(rows) / 30 / len(cells) for c in cells})
    counts = Counter(at[:, 0].tolist())
    assert stats.chisquare([counts[c] for c in law], list(law.values())).pvalue > LEVEL


def test_short_snakes_get_five_attempts():
    """In an empty window a short snake exists with probability 1 - (1 - p)^5, in a full one it has no start."""
    full = np.full((50, paddles.CELLS), 255, np.uint8)
    assert not len(snakes._short(full, np.arange(50), 1, snakes.Random(1, 1))[0])
    grid = np.repeat(mask_to_grid(direct.make_frame_mask()), 20_000, 0)
    rows, *_ = snakes._short(grid, np.arange(20_000), 4, snakes.Random(23, 0))
    p = len(rows) / 20_000
    result = snakes.distractors(grid[:3000], 14, snakes.Random(23, 1)).paddle[:, 0, 0] >= 0
    assert stats.binomtest(int(result.sum()), 3000, 1 - (1 - p) ** 5).pvalue > LEVEL


def test_cases_skipped_by_the_fast_search_cannot_occur():
    for degree in np.flatnonzero(paddles.tables().open):
        angle = DEGREES[degree]
        for tail in direct.find_start_pixels(direct.make_frame_mask(), angle).tolist():
            head = direct.move_point(tail, angle, 2)
            assert all(0 <= c < 32 for c in (*head, *direct.move_point(head, direct.reverse_angle(angle), 3)))
    most = (paddles.tables().mask > 255 * paddles.OCCUPIED).sum(1).max()
    assert 124 + most * (2 * 14 + 20) < 0.99 * 32 * 32


def test_collisions_outside_the_image_imply_one_inside():
    """The grid has no border check: pixels that can collide are connected, so none collide in the padding alone."""
    for at, limit in zip(*paddles.tables()[4:6], strict=True):
        y, x = np.divmod(at[limit < 255] + 24 * paddles.STRIDE + 24, paddles.STRIDE)
        reached, todo = set(), {(24, 24)}
        places = set(zip(y.tolist(), x.tolist(), strict=True)) | {(24, 24)}
        while todo:
            reached |= todo
            todo = {(v, u) for v, u in places - reached for b, a in todo if max(abs(v - b), abs(u - a)) == 1}
        assert reached == places


def test_labels_are_balanced_and_black_pixels_as_published(blocks):
    """Reference: 60 images per contour of the published generator, with 77.4, 73.3 and 65.8 % zeros (SE 0.5 %)."""
    for block in blocks.values():
        assert stats.binomtest(int(block.labels.sum()), 1000).pvalue > LEVEL
        assert stats.binomtest(int(block.marks[:, 0].sum()), 1000).pvalue > LEVEL
    for contour, share in ((6, 0.774), (9, 0.733), (14, 0.658)):
        assert (blocks[contour].images == 0).mean() == pytest.approx(share, abs=0.015)
        assert (blocks[contour].images.max(axis=(1, 2)) == 255).all()


def test_images_of_a_seed_never_change(blocks):
    for other in (pathfinder.sample(6, 4, 0), pathfinder.sample(6, 3, 1)):
        assert (other.images != blocks[6].images).any(axis=(1, 2)).all()
    assert len(np.unique(blocks[6].images, axis=0)) == 1000
    digests = {c: hashlib.sha256(b.images.tobytes() + b.labels.tobytes()).hexdigest()[:16] for c, b in blocks.items()}
    assert digests == {6: "cf46c72ac0880158", 9: "2a02a93e8dd10d33", 14: "8dd787f10be5c7e6"}
