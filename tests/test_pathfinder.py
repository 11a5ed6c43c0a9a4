"""Pathfinder: the sampler against a plain one, rule by rule and as a whole; written sets; the published files."""

import hashlib
import io
import json
import pickle
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pathfinder_direct as direct
import pytest
from PIL import Image
from scipy import stats

from leanformer.data.images.decoding import CorruptImage
from leanformer.data.sequences import pathfinder
from leanformer.data.sequences.pathfinder import Pathfinder, PublishedPathfinder, dataset, paddles, snakes
from leanformer.errors import ConfigError, DataError


LEVEL = 1e-4  # of each statistical test; seeds are fixed, so a test that passes once passes always
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


@pytest.fixture(scope="module")
def blocks():
    return {contour: pathfinder.sample(contour, seed=3, block=0) for contour in dataset.CONTOURS}


@pytest.mark.parametrize("contour", dataset.CONTOURS)
def test_images_follow_the_plain_rules(blocks, contour):
    block, player = blocks[contour], Replay()
    assert block.targets.paddle.shape == (1000, 2, contour)
    assert block.distractors.paddle.shape == (1000, 20 // (contour // 3), contour // 3)
    random = snakes.Random(3, contour << 32)
    made = snakes.pairs(contour, 1000, random)
    snakes.distractors(made.grid, contour, random)
    for row in range(7):
        targets, short, mask = replay(block, row, player)
        start, end = block.marks[row]
        assert block.labels[row] == (start == end)
        picture = direct.finished([*targets, *short], targets[start].tail, targets[end].head)
        np.testing.assert_array_equal(block.images[row], picture)
        occupied = made.grid[row].reshape(48, 48)[paddles.WINDOW, paddles.WINDOW]
        np.testing.assert_array_equal(occupied, np.rint(mask * 255))
    assert len(player.states) > 7 * 2 * (contour - 1)


def test_draws_of_a_paddle(blocks):
    """The law of up to three draws, in states where collisions are likely: p (1 + q + q²), and q³ to fail."""
    player = Replay()
    for row in range(9):
        replay(blocks[14], row, player)
    tested = 0
    for pivot, orientation, last, mask in player.states:
        if tested == 3:
            break
        next_pivot = direct.moved(pivot, orientation, 4)
        heads, angles, p = direct.candidates(mask, next_pivot, orientation)
        drawn = (direct.placed(direct.drawn(direct.opposite(a))[1], h) for a, h in zip(angles, heads, strict=True))
        hits = np.array([direct.collides(mask, paddle) for paddle in drawn])
        q = p[hits].sum()
        if not 0.3 < q < 0.7:
            continue
        n = 20_000
        rows, pivots = np.arange(n), np.tile(np.array(pivot) + paddles.FRAME, (n, 1))
        grid = np.repeat(framed(mask), n, 0)
        on, _, found, after = snakes._extend(grid, rows, np.full(n, last), pivots, snakes.Random(5, tested))
        law = {cell(h): chance * (1 + q + q * q) for h, chance, hit in zip(heads, p, hits, strict=True) if not hit}
        likely = [where for where, chance in law.items() if chance * n > 5]
        counts = Counter(found.tolist())
        observed = [*(counts[where] for where in likely), n - len(on)]
        expected = np.array([*(law[where] for where in likely), q**3]) * n
        assert set(counts) <= set(law) and (after == np.array(next_pivot) + paddles.FRAME).all()
        assert stats.chisquare(observed, expected / expected.sum() * sum(observed)).pvalue > LEVEL
        tested += 1
    assert tested == 3


def test_the_last_way_out_is_taken():
    """One free head with a sharp turn is enough; none is a dead end."""
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
            on, *new = snakes._extend(grid, np.array([0]), np.array([last]), middle, random)
            assert on.tolist() == [0] and [new[0][0], new[1][0]] == [paddle, head]
            tested += 1
    assert tested > 20


def test_first_starts():
    t = paddles.tables()
    for degree, angle in enumerate(DEGREES):
        starts = t.starts[degree][: t.start_count[degree]].tolist()
        assert sorted(map(pixel, starts)) == sorted(map(tuple, direct.starts(closed(), angle).tolist()))
    assert np.flatnonzero(t.open).tolist() == np.flatnonzero(t.start_count).tolist() == list(range(30, 60))


def test_seeds():
    t = paddles.tables()
    drawn = [snakes._seeds(6, snakes.Random(11, stream)) for stream in range(4)]
    paddle, at, pivot = (np.concatenate(arrays) for arrays in zip(*drawn, strict=True))
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
        snake = direct.seeded(pixel(at[row, 1, 0]), DEGREES[second[row]], 1.0)
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


def test_starts_of_short_snakes(blocks):
    """Uniform over what the plain search leaves free, in every degree."""
    *_, mask = replay(blocks[14], 4, Replay())
    n = 60_000
    rows, paddle, at, _ = snakes._short(np.repeat(framed(mask), n, 0), np.arange(n), 1, snakes.Random(13, 0))
    degrees = np.flatnonzero(paddles.tables().open)
    free = {d: [cell(p) for p in direct.starts(mask, DEGREES[d]).tolist()] for d in degrees}
    assert min(map(len, free.values())) > 20
    assert stats.binomtest(len(rows), n, 30 / 360).pvalue > LEVEL
    assert all(a in free[d] for d, a in zip(paddle[:, 0].tolist(), at[:, 0].tolist(), strict=True))
    law = Counter()
    for cells in free.values():
        law.update({c: len(rows) / 30 / len(cells) for c in cells})
    counts = Counter(at[:, 0].tolist())
    assert stats.chisquare([counts[c] for c in law], list(law.values())).pvalue > LEVEL


def test_attempts_at_short_snakes():
    """Five of them: in an empty window one is there with probability 1 - (1 - p)^5."""
    grid = np.repeat(framed(direct.framed()), 20_000, 0)
    rows, *_ = snakes._short(grid, np.arange(20_000), 4, snakes.Random(23, 0))
    p = len(rows) / 20_000
    found = snakes.distractors(grid[:3000], 14, snakes.Random(23, 1)).paddle[:, 0, 0] >= 0
    assert stats.binomtest(int(found.sum()), 3000, 1 - (1 - p) ** 5).pvalue > LEVEL


def test_no_start_where_none_is_free():
    full = np.full((50, paddles.CELLS), 255, np.uint8)
    rows, *_ = snakes._short(full, np.arange(50), 1, snakes.Random(1, 1))
    assert len(rows) == 0


def test_what_the_fast_search_leaves_out_cannot_happen():
    for degree in np.flatnonzero(paddles.tables().open):
        angle = DEGREES[degree]
        for tail in direct.starts(direct.framed(), angle).tolist():
            head = direct.moved(tail, angle, 2)
            assert all(0 <= c < 32 for c in (*head, *direct.moved(head, direct.opposite(angle), 3)))
    most = (paddles.tables().mask > 255 * paddles.OCCUPIED).sum(1).max()
    assert 124 + most * (2 * 14 + 20) < 0.99 * 32 * 32


def test_a_collision_outside_the_image_is_one_inside_too():
    """The grid has no edge: pixels that can collide are connected, so none lie beyond the padding alone."""
    for at, limit in zip(*paddles.tables()[4:6], strict=True):
        y, x = np.divmod(at[limit < 255] + 24 * paddles.STRIDE + 24, paddles.STRIDE)
        reached, todo = set(), {(24, 24)}
        places = set(zip(y.tolist(), x.tolist(), strict=True)) | {(24, 24)}
        while todo:
            reached |= todo
            todo = {(v, u) for v, u in places - reached for b, a in todo if max(abs(v - b), abs(u - a)) == 1}
        assert reached == places


def test_labels_are_fair(blocks):
    for block in blocks.values():
        assert stats.binomtest(int(block.labels.sum()), 1000).pvalue > LEVEL
        assert stats.binomtest(int(block.marks[:, 0].sum()), 1000).pvalue > LEVEL


def test_share_of_black(blocks):
    """60 images of the published generator each had 77.4, 73.3 and 65.8 % of zeros, with a standard error of 0.5 %."""
    for contour, share in ((6, 0.774), (9, 0.733), (14, 0.658)):
        assert (blocks[contour].images == 0).mean() == pytest.approx(share, abs=0.015)
        assert (blocks[contour].images.max(axis=(1, 2)) == 255).all()


@pytest.mark.slow
def test_the_same_distribution_as_the_plain_sampler():
    """Survival of pairs by length; and of whole images: blackness, short snakes, turns, ends, brightness."""
    rng = np.random.default_rng(17)
    n = 8_000
    lasted = [found if isinstance(found, int) else 26 for found in (direct.pair(14, rng) for _ in range(n))]
    for contour, images in ((6, 120), (9, 60), (14, 24)):
        two = [pathfinder.sample(contour, 19, block) for block in (0, 1)]
        alive = np.sum(np.array(lasted) >= 2 * (contour - 1))
        tried, accepted = (sum(getattr(block, name) for block in two) for name in ("tried", "accepted"))
        table = [[alive, n - alive], [accepted, tried - accepted]]
        assert stats.fisher_exact(table).pvalue > LEVEL
        plain = [direct.sample(contour, rng) for _ in range(images)]
        for fast, slow in zip(features_of_blocks(two), features_of_samples(plain), strict=True):
            assert stats.ks_2samp(fast, slow).pvalue > LEVEL


def turns(points):
    """Angles between the steps of chains, (..., place, 2)."""
    step = np.diff(points, axis=-2)
    angle = np.arctan2(step[..., 0], step[..., 1])
    return np.abs((np.diff(angle, axis=-1) + np.pi) % (2 * np.pi) - np.pi).mean(-1).ravel()


def features(images, chains, short):
    black, light = (images == 0).mean(axis=(1, 2)), images.mean(axis=(1, 2))
    apart = np.hypot(*np.moveaxis(chains[:, 0, -1] - chains[:, 1, -1], -1, 0))
    return black, light, short, apart, turns(chains), chains[..., 0].mean((1, 2)), chains[..., 1].mean((1, 2))


def features_of_blocks(blocks):
    at = np.concatenate([block.targets.at for block in blocks])
    short = np.concatenate([(block.distractors.paddle[..., 0] >= 0).sum(1) for block in blocks])
    chains = np.stack(np.divmod(at, paddles.STRIDE), -1) - paddles.FRAME
    return features(np.concatenate([block.images for block in blocks]), chains, short)


def features_of_samples(samples):
    chains = np.array([[[at for at, _ in snake.paddles] for snake in record[0]] for _, _, record in samples])
    short = np.array([len(record[1]) for _, _, record in samples])
    return features(np.stack([image for image, _, _ in samples]), chains, short)


def test_a_block_is_a_function_of_seed_and_number(blocks):
    again = pathfinder.sample(6, 3, 0)
    np.testing.assert_array_equal(again.images, blocks[6].images)
    np.testing.assert_array_equal(again.labels, blocks[6].labels)
    for other in (pathfinder.sample(6, 4, 0), pathfinder.sample(6, 3, 1)):
        assert (other.images != again.images).any(axis=(1, 2)).all()
    assert len(np.unique(again.images, axis=0)) == 1000


def test_seeds_mean_the_same_for_ever(blocks):
    digests = {c: hashlib.sha256(b.images.tobytes() + b.labels.tobytes()).hexdigest()[:16] for c, b in blocks.items()}
    assert digests == {6: "cf46c72ac0880158", 9: "2a02a93e8dd10d33", 14: "8dd787f10be5c7e6"}


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    return pathfinder.write(tmp_path_factory.mktemp("sets") / "easy", contour=6, seed=3, examples=1043)


def test_written_set(written, blocks):
    sources = {split: Pathfinder(written, split) for split in dataset.SPLITS}
    assert {split: len(source) for split, source in sources.items()} == {"train": 834, "val": 104, "test": 105}
    rows = np.concatenate([source._rows for source in sources.values()])
    assert sorted(rows.tolist()) == list(range(1043))
    assert abs(stats.spearmanr(rows, np.arange(1043)).statistic) < 0.15
    more = pathfinder.sample(6, 3, 1)
    images = np.concatenate([blocks[6].images, more.images])
    labels = np.concatenate([blocks[6].labels, more.labels])
    for source in sources.values():
        for i in (0, 53, -1):
            example, row = source[i], source._rows[i]
            assert example["tokens"].dtype == np.int32 and example["tokens"].shape == (1024,)
            np.testing.assert_array_equal(example["tokens"], images[row].ravel())
            assert example["label"] == labels[row] and isinstance(example["label"], int)
    assert sources["val"].name(5) == f"{written}, val, image {sources['val']._rows[5]}"
    assert Pathfinder.num_classes == 2 and max(source[0]["tokens"].max() for source in sources.values()) < 256
    with pytest.raises(IndexError):
        sources["val"][104]


def test_a_set_is_written_once(written):
    before = {path.name: path.stat().st_mtime_ns for path in written.iterdir()}
    assert sorted(before) == ["images.npy", "labels.npy", "pathfinder.json"]
    assert pathfinder.write(written, 6, 3, 1043) == written
    assert {path.name: path.stat().st_mtime_ns for path in written.iterdir()} == before
    assert [path.name for path in written.parent.iterdir()] == ["easy"]
    record = json.loads((written / "pathfinder.json").read_text())
    assert record["pairs_tried"] == 2 * snakes.ROUND and 0.03 < record["pairs_accepted"] / record["pairs_tried"] < 0.06


@pytest.mark.parametrize(("change", "said"), [({"contour": 9}, "contour=6 .asked for 9"), ({"seed": 4}, "seed=3")])
def test_another_set_is_not_overwritten(written, change, said):
    with pytest.raises(DataError, match=f"another Pathfinder set: {said}"):
        pathfinder.write(written, **{"contour": 6, "seed": 3, "examples": 1043, **change})


def test_a_pickled_source_is_small_and_whole(written):
    source = Pathfinder(written, "train")
    first = source[0]
    data = pickle.dumps(source)
    assert len(data) < 10_000
    np.testing.assert_array_equal(pickle.loads(data)[0]["tokens"], first["tokens"])


@pytest.mark.parametrize("stop", [KeyboardInterrupt, OSError("disk full")])
def test_an_interrupted_set_is_no_set(tmp_path, monkeypatch, stop):
    draw = dataset.sample

    def interrupted(contour, seed, block):
        if block == 1:
            assert [path.name[:6] for path in tmp_path.iterdir()] == [".half."]
            raise stop
        return draw(contour, seed, block)

    monkeypatch.setattr(dataset, "sample", interrupted)
    with pytest.raises(KeyboardInterrupt if stop is KeyboardInterrupt else DataError):
        pathfinder.write(tmp_path / "half", contour=6, examples=1001)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(DataError, match="holds no Pathfinder set"):
        Pathfinder(tmp_path / "half", "train")
    monkeypatch.undo()
    (tmp_path / ".half.killed00").mkdir()  # what a killed run leaves
    assert len(Pathfinder(pathfinder.write(tmp_path / "half", contour=6, examples=10), "train")) == 8


def test_a_set_made_meanwhile_by_another_process_is_taken(tmp_path, monkeypatch):
    draw = dataset.sample

    def overtaken(contour, seed, block):
        monkeypatch.setattr(dataset, "sample", draw)
        pathfinder.write(tmp_path / "set", contour=6, examples=10)
        return draw(contour, seed, block)

    monkeypatch.setattr(dataset, "sample", overtaken)
    pathfinder.write(tmp_path / "set", contour=6, examples=10)
    assert [path.name for path in tmp_path.iterdir()] == ["set"]


@pytest.mark.parametrize("name", ["images.npy", "labels.npy"])
def test_damage_is_found(written, tmp_path, name):
    for path in written.iterdir():
        data = bytearray(path.read_bytes())
        if path.name == name:
            data[-1] ^= 1
        (tmp_path / path.name).write_bytes(data)
    with pytest.raises(DataError, match=f"{name} is missing or not what was written"):
        Pathfinder(tmp_path, "train")
    (tmp_path / name).unlink()
    with pytest.raises(DataError, match=f"{name} is missing"):
        Pathfinder(tmp_path, "train")


@pytest.mark.parametrize("text", [None, "", "[]", "{", '{"version": 1}', '{"version": 1, "contour": 6, "sha256": 5}'])
def test_a_folder_of_something_else(tmp_path, text):
    (tmp_path / "notes.txt").write_text("mine")
    if text is not None:
        (tmp_path / "pathfinder.json").write_text(text)
    for use in (lambda: Pathfinder(tmp_path, "train"), lambda: pathfinder.write(tmp_path, 6, 0, 10)):
        with pytest.raises(DataError, match="holds no Pathfinder set"):
            use()


def test_another_version(written, tmp_path):
    record = json.loads((written / "pathfinder.json").read_text())
    (tmp_path / "pathfinder.json").write_text(json.dumps({**record, "version": 0}))
    with pytest.raises(DataError, match="version 0, wanted is 1"):
        Pathfinder(tmp_path, "train")


def test_bad_requests(written, tmp_path):
    for bad in ({"contour": 7}, {"seed": -1}, {"seed": 2**64}, {"examples": 0}, {"workers": 0}):
        with pytest.raises(ConfigError, match="wanted are contour 6, 9 or 14"):
            pathfinder.write(tmp_path / "x", **bad)
    with pytest.raises(DataError, match='no split "validation". Found: train, val, test'):
        Pathfinder(written, "validation")
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="cannot be written"):
        pathfinder.write(tmp_path / "file" / "x", 6, 0, 10)


WORKERS = """
import sys
from leanformer.data.sequences import pathfinder
if __name__ == "__main__":
    pathfinder.write(sys.argv[1], contour=6, seed=3, examples=2017, workers=int(sys.argv[2]))
"""


@pytest.mark.slow
def test_workers_change_nothing(tmp_path):
    (tmp_path / "workers.py").write_text(WORKERS)
    for workers in ("1", "2"):
        words = [sys.executable, str(tmp_path / "workers.py"), str(tmp_path / workers), workers]
        done = subprocess.run(words, capture_output=True, text=True, timeout=200)
        assert done.returncode == 0, done.stderr
    for name in ("images.npy", "labels.npy", "pathfinder.json"):
        assert (tmp_path / "1" / name).read_bytes() == (tmp_path / "2" / name).read_bytes()


def png(array):
    out = io.BytesIO()
    Image.fromarray(array).save(out, "PNG")
    return out.getvalue()


@pytest.fixture
def release(tmp_path, rng):
    """23 images in folders 2 and 10, of which one is empty; (root, {name: (image, label)})."""
    folder = tmp_path / "pathfinder32" / "curv_contour_length_14"
    (folder / "metadata").mkdir(parents=True)
    kept = {}
    for number, count in ((2, 11), (10, 12)):
        (folder / "imgs" / str(number)).mkdir(parents=True)
        lines = []
        for i in range(count):
            image, label = rng.integers(0, 256, (32, 32), dtype=np.uint8), int(rng.integers(2))
            path = folder / "imgs" / str(number) / f"sample_{i}.png"
            path.write_bytes(b"" if (number, i) == (2, 5) else png(image))
            lines.append(f"imgs/{number} sample_{i}.png {i} {label} 1.0 14 4 2 0.5 1 1\n")
            kept[str(path)] = image, label
        (folder / "metadata" / f"{number}.npy").write_text("".join(lines))
    del kept[str(folder / "imgs" / "2" / "sample_5.png")]
    return tmp_path, kept


def rewrite(root, line):
    (root / "pathfinder32" / "curv_contour_length_14" / "metadata" / "2.npy").write_text(line)


def test_published_images(release):
    root, kept = release
    sources = [PublishedPathfinder(root, split) for split in dataset.SPLITS]
    assert [len(source) for source in sources] == [17, 2, 3]
    assert [source.skipped for source in sources] == [1, 1, 1]
    names = [source.name(i) for source in sources for i in range(len(source))]
    assert sorted(names) == sorted(kept) and names != list(kept)
    for source in sources:
        for i in range(len(source)):
            image, label = kept[source.name(i)]
            example = source[i]
            assert example["tokens"].dtype == np.int32 and example["label"] == label
            np.testing.assert_array_equal(example["tokens"], image.ravel())
    other = PublishedPathfinder(root, "train", seed=1)
    assert {other.name(i) for i in range(17)} != set(names[:17])


def test_metadata_as_the_generator_saves_them(release):
    root, _ = release
    path = root / "pathfinder32" / "curv_contour_length_14" / "metadata" / "2.npy"
    before = PublishedPathfinder(root, "train")
    rows = [line.split(" ") for line in path.read_text().splitlines()]
    np.save(path, np.array(rows))
    after = PublishedPathfinder(root, "train")
    assert [after.name(i) for i in range(17)] == [before.name(i) for i in range(17)]
    np.save(path, np.array(rows, dtype=object), allow_pickle=True)
    with pytest.raises(DataError, match="pickled objects are never read"):
        PublishedPathfinder(root, "train")


@pytest.mark.parametrize(
    "line",
    [
        "imgs/../../.. sample_0.png 0 1",
        "imgs/2/.. sample_0.png 0 1",
        "/etc sample_0.png 0 1",
        "imgs/2 ../../../sample_0.png 0 1",
        "imgs/2 sample_0.png/../x.png 0 1",
        "imgs/2 sample_0.jpg 0 1",
        "imgs/2 sample_٣.png 0 1",
        "imgs/2 sample_0.png 0 2",
        "imgs/2 sample_0.png 0",
        "imgs/2",
        "imgs/2 sample_99999999999999999999.png 0 1",
    ],
)
def test_metadata_of_another_form(release, line):
    root, _ = release
    rewrite(root, line)
    with pytest.raises(DataError, match="2.npy is no published Pathfinder metadata"):
        PublishedPathfinder(root, "train")


def test_an_image_that_is_not_there(release):
    root, _ = release
    rewrite(root, "imgs/2 sample_77.png 77 1\n")
    with pytest.raises(DataError, match=r"sample_77\.png is in the metadata but cannot be found"):
        PublishedPathfinder(root, "train")


def test_no_release(tmp_path):
    with pytest.raises(DataError, match=r"no \.npy file\. Unpack"):
        PublishedPathfinder(tmp_path, "train")
    with pytest.raises(ConfigError, match="found: 6, 9, 14"):
        PublishedPathfinder(tmp_path, "train", contour=7)


def test_a_broken_image(release):
    root, _ = release
    source = PublishedPathfinder(root, "val")
    whole = png(np.arange(1024, dtype=np.uint16).reshape(32, 32).astype(np.uint8))
    broken = [whole[:n] for n in range(1, len(whole))] + [b"x" * 500, whole[:60] + b"?" + whole[61:]]
    for data in broken:
        Path(source.name(0)).write_bytes(data)
        with pytest.raises(CorruptImage, match=f"sample_.*{len(data)} bytes"):
            source[0]


@pytest.mark.parametrize("array", [np.zeros((31, 32), np.uint8), np.zeros((32, 32, 3), np.uint8), np.eye(32) > 0])
def test_an_image_of_another_kind(release, array):
    root, _ = release
    source = PublishedPathfinder(root, "test")
    Path(source.name(2)).write_bytes(png(array))
    with pytest.raises(DataError, match=r"published images have \('L', \(32, 32\)\)"):
        source[2]
