"""Which class is taken for which: as counted one by one, on any devices, and never at odds with top-1."""

import csv

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from leanformer.reports import confusion, plots
from leanformer.tasks import artifacts
from leanformer.tasks.classification import Classification, _confusion
from leanformer.tasks.losses import rank_of_label
from leanformer.tasks.sequences import SequenceClassification
from leanformer.training.step import IN_FLIGHT, evaluate


MATRIX = np.array([[5, 1, 0], [2, 0, 2], [0, 0, 0]])


def by_hand(logits, labels, mask):
    """Ties and numbers that are not finite count against the label, which then is taken for another class."""
    counts = np.zeros((logits.shape[-1],) * 2, int)
    for row, label in zip(logits[mask], labels[mask], strict=True):
        others = [(v, -i) for i, v in enumerate(row) if i != label]
        best = max(others)
        counts[label, label if row[label] > best[0] else -best[1]] += 1
    return counts


@pytest.mark.parametrize("devices", [1, 8])
def test_as_counted_one_by_one(rng, meshes, devices):
    logits = rng.integers(0, 4, (104, 7)).astype(np.float32)  # many ties
    labels, mask = rng.integers(0, 7, 104).astype(np.int32), rng.random(104) < 0.8
    place = NamedSharding(meshes(devices, 1), PartitionSpec("data"))
    placed = [jax.device_put(x, place) for x in (logits, labels, mask)]
    count = jax.jit(lambda logits, labels, mask: _confusion(logits, labels, rank_of_label(logits, labels), mask))
    result = np.asarray(count(*placed))
    np.testing.assert_array_equal(result, by_hand(logits, labels, mask))
    top1 = (np.asarray(rank_of_label(jnp.asarray(logits), jnp.asarray(labels))) < 1)[mask].sum()
    assert result.trace() == top1 < mask.sum() == result.sum()


def test_sums_of_a_batch_are_those_of_sorted_logits(rng):
    """The task's model hands out logits that are drawn; the last rows are padding."""
    logits, labels = rng.standard_normal((200, 7)), rng.integers(0, 7, 200)

    class Given(Classification):
        def inputs(self, batch):
            return (batch["logits"],)

        def loss(self, *_):
            raise NotImplementedError

    task, model = Given(num_classes=7), lambda logits: (logits, None)
    batch = {"logits": jnp.float32(logits), "label": jnp.int32(labels), "mask": jnp.arange(200) < 170}
    result = task.statistics(model, batch)
    best = np.argsort(-logits, axis=1)[:170] == labels[:170, None]
    expected = {"examples": 170, "top1": best[:, :1].sum(), "top5": best[:, :5].sum()}
    assert {name: int(result[name]) for name in expected} == expected and best[:, 5].sum() > 10
    each = np.log(np.exp(logits).sum(1)) - logits[np.arange(200), labels]
    assert float(result["loss"]) == pytest.approx(each[:170].sum(), rel=1e-5)


def test_broken_logits_are_never_right():
    labels = jnp.array([0, 1, 2])
    logits = jnp.full((3, 3), jnp.nan)
    result = _confusion(logits, labels, rank_of_label(logits, labels), jnp.ones(3, bool))
    assert result.trace() == 0 and result.sum() == 3


def test_counts_of_all_batches_are_added_and_few_are_under_way():
    handed, done = [], []

    def batches():
        for i in range(9):
            assert i - len(done) <= IN_FLIGHT + 1
            handed.append(i)
            yield i

    class Later:
        """A result that is done when it is fetched."""

        def __init__(self, value):
            self.value = np.asarray(value)

        def __array__(self, dtype=None, copy=None):
            done.append(1) if self.value == 2 else None
            return self.value

    result = evaluate(
        lambda weights, i: {
            "examples": Later(2),
            "loss": np.float32(3),
            "top1": Later(1),
            "confusion": np.full((2, 2), i),
        },
        SequenceClassification(num_classes=2, full=True, label_smoothing=0.0).metrics,
        {"": None},
        batches(),
    )
    np.testing.assert_array_equal(result["confusion"], np.full((2, 2), 36))
    assert result["top1"] == 0.5 and result["examples"] == 18 and len(handed) == 9


def test_figures_of_a_matrix():
    assert confusion.accuracy(MATRIX) == [5 / 6, 0.0, None]
    assert confusion.most_confused(MATRIX, 2) == [(1, 0, 2), (1, 2, 2)]
    assert confusion.most_confused(MATRIX, 9) == [(1, 0, 2), (1, 2, 2), (0, 1, 1)]
    assert artifacts.output_names(("cat", "dog"), 3) == ["cat", "dog", "2"]
    assert artifacts.output_names(None, 2) == [
        "0",
        "1",
    ]


def test_the_table_can_be_read_back(tmp_path):
    confusion.write_csv(tmp_path / "c.csv", MATRIX, ["cat", "dog, big", "ü"])
    with (tmp_path / "c.csv").open(newline="", encoding="utf-8") as file:
        head, *rows = csv.reader(file)
    assert head[1:] == ["cat", "dog, big", "ü"] == [row[0] for row in rows]
    np.testing.assert_array_equal([list(map(int, row[1:])) for row in rows], MATRIX)


@pytest.mark.parametrize("number", [3, 61])
def test_the_chart_is_drawn(tmp_path, number):
    matrix = np.eye(number, dtype=int)
    matrix[0, 0] = 0
    plots.plot_confusion(matrix, [f"class {i}" for i in range(number)], tmp_path / "c.png", "A run")
    assert (tmp_path / "c.png").stat().st_size > 5000
