"""Losses and ranks against NumPy."""

import math
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
import pytest

from leanformer.tasks.distillation import label_tokens, lesson, token_shares
from leanformer.tasks.losses import classify, divergence, rank_of_label


B, V = 5, 7
SIDE, ROWS, COLUMNS, K, PIXELS = 3, 8, 5, 2, 12


@pytest.fixture
def logits(rng):
    return np.float32(4 * rng.standard_normal((B, V)))


@pytest.fixture
def targets(rng):
    x = rng.random((B, V))
    return np.float32(x / x.sum(-1, keepdims=True))


def test_softmax_cross_entropy(logits, targets):
    p = np.exp(logits.astype(np.float64))
    expected = -(targets * np.log(p / p.sum(-1, keepdims=True))).sum(-1)
    np.testing.assert_allclose(classify(jnp.asarray(logits), jnp.asarray(targets), "softmax"), expected, rtol=1e-5)


def test_sigmoid_cross_entropy_sums_over_classes(logits, targets):
    p = 1 / (1 + np.exp(-logits.astype(np.float64)))
    expected = -(targets * np.log(p) + (1 - targets) * np.log(1 - p)).sum(-1)
    np.testing.assert_allclose(classify(jnp.asarray(logits), jnp.asarray(targets), "sigmoid"), expected, rtol=1e-5)


def test_bfloat16_logits_lose_nothing_more(logits, targets):
    rounded = jnp.asarray(logits, jnp.bfloat16)
    found = classify(rounded, jnp.asarray(targets), "softmax")
    assert found.dtype == jnp.float32
    np.testing.assert_array_equal(found, classify(rounded.astype(jnp.float32), jnp.asarray(targets), "softmax"))


def test_unknown_loss(logits, targets):
    with pytest.raises(ValueError, match="not one of softmax, sigmoid"):
        classify(jnp.asarray(logits), jnp.asarray(targets), "hinge")


def test_rank_is_the_place_in_the_sorted_order(logits):
    labels = np.arange(B) % V
    expected = [int(np.flatnonzero(np.argsort(-row) == label)[0]) for row, label in zip(logits, labels, strict=True)]
    np.testing.assert_array_equal(rank_of_label(jnp.asarray(logits), jnp.asarray(labels)), expected)


def test_broken_logits_are_never_right():
    labels = jnp.arange(3)
    assert (rank_of_label(jnp.zeros((3, V)), labels) == V - 1).all()
    assert (rank_of_label(jnp.full((3, V), jnp.nan), labels) >= V - 1).all()
    one_nan = jnp.zeros((3, V)).at[:, 5].set(jnp.nan).at[jnp.arange(3), labels].set(1.0)
    assert (rank_of_label(one_nan, labels) == 1).all()


# With a teacher.


class Mix(NamedTuple):
    """As augment.Mix."""

    weight: float
    inside: np.ndarray
    share: float


def boxed():
    inside = np.zeros((PIXELS, PIXELS), bool)
    inside[2:9, 5:] = True
    return inside


MIXES = {
    "none": None,
    "mixup": Mix(0.3, np.zeros((PIXELS, PIXELS), bool), 0.3),
    "cutmix": Mix(1.0, boxed(), 1 - boxed().mean()),
}


def softmax(x):
    e = np.exp(np.float64(x) - np.max(x, axis=-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def cross_entropy(targets, logits):
    return -(targets * np.log(softmax(logits))).sum(-1)


@pytest.fixture
def heads(rng):
    draw = rng.standard_normal
    shapes = {"class": (B, V), "distilled": (B, V), "tokens": (B, SIDE**2, V)}
    return {name: np.float32(3 * draw(shape)) for name, shape in shapes.items()}


def answered(part):
    """Every leaf of the batch and of the partners."""
    mirrored = {f"partner_{name}": np.flip(x, axis=0) for name, x in part.items()}
    return {name: jnp.asarray(x) for name, x in (part | mirrored).items()}


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("kind", ["hard", "soft"])
def test_distillation(rng, heads, targets, kind, mix):
    """Touvron et al. 2021, equations 2 and 3, the teacher's part mixed as labels are."""
    weight, temperature, share = 0.3, 2.5, MIXES[mix].share if MIXES[mix] else 1.0
    teacher = np.float16(4 * rng.standard_normal((B, V)))
    asked = np.eye(V)[teacher.argmax(-1)] if kind == "hard" else softmax(np.float64(teacher) / temperature)
    asked = share * asked + (1 - share) * asked[::-1]
    if kind == "hard":
        taught = cross_entropy(asked, heads["distilled"])
    else:
        student = np.log(softmax(np.float64(heads["distilled"]) / temperature))
        taught = temperature**2 * (asked * (np.log(asked) - student)).sum(-1)
    expected = (1 - weight) * cross_entropy(targets, heads["class"]) + weight * taught
    loss = lesson("distilled", kind=kind, temperature=temperature, weight=weight)
    found = loss(
        {k: jnp.asarray(x) for k, x in heads.items()},
        jnp.asarray(targets),
        answered({"teacher_logits": teacher}),
        MIXES[mix],
    )
    assert found.dtype == jnp.float32
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_divergence_is_zero_where_both_agree(logits):
    probabilities = softmax(np.float64(logits) / 3)
    agree = divergence(jnp.asarray(logits), jnp.asarray(probabilities, jnp.float32), 3.0)
    np.testing.assert_allclose(agree, 0, atol=1e-5)
    sure = divergence(jnp.asarray(logits), jnp.eye(V)[:B], 1.0)  # 0 log 0 is 0
    np.testing.assert_allclose(sure, cross_entropy(np.eye(V)[:B], logits), rtol=1e-5)


def roi_align(cells, box, side):
    """He et al. 2017, one channel, point by point; the box in shares of the picture, top, left, bottom, right."""
    (rows, columns), found = cells.shape, np.zeros((side, side))

    def at(y, x):
        y, x = np.clip([y, x], 0, [rows - 1, columns - 1])
        i, j = min(int(y), rows - 2), min(int(x), columns - 2)
        a, b = y - i, x - j
        upper, lower = ((1 - b) * cells[k, j] + b * cells[k, j + 1] for k in (i, i + 1))
        return (1 - a) * upper + a * lower

    top, left, bottom, right = np.float64(box) * [rows, columns, rows, columns]
    high, wide = (bottom - top) / side, (right - left) / side
    n, m = math.ceil(high), math.ceil(wide)
    for i in range(side):
        for j in range(side):
            ys = [top + high * (i + (p + 0.5) / n) - 0.5 for p in range(n)]
            xs = [left + wide * (j + (p + 0.5) / m) - 0.5 for p in range(m)]
            found[i, j] = np.mean([[at(y, x) for x in xs] for y in ys])
    return found


@pytest.fixture
def maps(rng):
    """Maps, and what the images show of them: two whole pictures, one of them flipped, and crops of 1 to 3 points."""
    classes = rng.permuted(np.tile(np.arange(V, dtype=np.int16), (B, ROWS, COLUMNS, 1)), axis=-1)[..., :K]
    scores = np.float16(4 * rng.standard_normal(classes.shape))
    views = [[0, 0, 1, 1], [0, 1, 1, 0], [0.1, 0.2, 0.4, 0.7], [0.55, 0.9, 1, 0.15], [0.3, 0, 0.98, 0.57]]
    return {"teacher_classes": classes, "teacher_scores": scores, "teacher_view": np.float32(views)}


def tokens_of(maps):
    """Probabilities, B T V, by the definitions."""
    found = []
    for classes, scores, (top, left, bottom, right) in zip(*maps.values(), strict=True):
        dense = np.zeros((ROWS, COLUMNS, V))
        np.put_along_axis(dense, classes.astype(int), np.float64(scores), axis=-1)
        box = (top, min(left, right), bottom, max(left, right))
        aligned = np.stack([roi_align(dense[..., v], box, SIDE) for v in range(V)], axis=-1)
        found.append(softmax(aligned[:, ::-1] if left > right else aligned).reshape(-1, V))
    return np.stack(found)


def test_label_tokens_are_roi_aligned(maps):
    found = label_tokens(*map(jnp.asarray, maps.values()), (SIDE, SIDE), V)
    np.testing.assert_allclose(found, tokens_of(maps), atol=2e-6)
    np.testing.assert_allclose(found.sum(-1), 1, atol=1e-6)


def test_token_shares():
    """4 x 4 pixels a token; the box is rows 2 to 8, columns 5 to 11."""
    expected = np.outer([2, 4, 1], [0, 3, 4]) / 16
    np.testing.assert_allclose(token_shares(jnp.asarray(boxed()), (SIDE, SIDE)), expected.ravel(), rtol=1e-6)


@pytest.mark.parametrize("mix", MIXES)
def test_token_labels(heads, targets, maps, mix):
    """Jiang et al. 2021, section 3.2; a mixed image's tokens by what each of the two images has of their pixels."""
    asked, weight = tokens_of(maps), 0.5
    if mix != "none":
        outside = np.where(MIXES[mix].inside, 0, MIXES[mix].weight).reshape(SIDE, 4, SIDE, 4).mean((1, 3))
        own = outside.reshape(1, -1, 1)
        asked = own * asked + (1 - own) * asked[::-1]
    expected = cross_entropy(targets, heads["class"]) + weight * cross_entropy(asked, heads["tokens"]).mean(-1)
    loss = lesson("tokens", kind="hard", temperature=3.0, weight=weight)
    chosen = MIXES[mix] and MIXES[mix]._replace(inside=jnp.asarray(MIXES[mix].inside))
    maps = answered(maps | {"image": np.zeros((B, 4 * SIDE, 4 * SIDE, 1), np.uint8)})
    found = loss({k: jnp.asarray(x) for k, x in heads.items()}, jnp.asarray(targets), maps, chosen)
    np.testing.assert_allclose(found, expected, rtol=1e-5)
