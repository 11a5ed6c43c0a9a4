"""Classification: losses and ranks against NumPy; confusion matrices against counts by hand on any devices."""

import csv

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from leanformer import evaluate as command
from leanformer.reports import plots
from leanformer.tasks.classification import Classification, _confusion, classify, rank_of_label
from leanformer.tasks.sequences import SequenceClassification
from leanformer.training import run_files
from leanformer.training.step import IN_FLIGHT, evaluate


MATRIX = np.array([[5, 1, 0], [2, 0, 2], [0, 0, 0]])


B, V = 5, 7
# Logits are below 20 and rounded to float32 at each of some ten operations: 10 x 20 x 6e-8. Omitting one of seven terms
# changes a sum by 0.01 or more.
CLOSE = {"rtol": 1e-5, "atol": 1.2e-5}


@pytest.fixture
def logits(rng):
    return np.float32(4 * rng.standard_normal((B, V)))


@pytest.fixture
def targets(rng):
    x = rng.random((B, V))
    return np.float32(x / x.sum(-1, keepdims=True))


def test_losses_equal_numpy(logits, targets):
    p = np.exp(logits.astype(np.float64))
    expected = -(targets * np.log(p / p.sum(-1, keepdims=True))).sum(-1)
    np.testing.assert_allclose(classify(jnp.asarray(logits), jnp.asarray(targets), "softmax"), expected, **CLOSE)
    p = 1 / (1 + np.exp(-logits.astype(np.float64)))
    expected = -(targets * np.log(p) + (1 - targets) * np.log(1 - p)).sum(-1)
    np.testing.assert_allclose(classify(jnp.asarray(logits), jnp.asarray(targets), "sigmoid"), expected, **CLOSE)


def test_bfloat16_logits_are_computed_in_float32(logits, targets):
    rounded = jnp.asarray(logits, jnp.bfloat16)
    result = classify(rounded, jnp.asarray(targets), "softmax")
    assert result.dtype == jnp.float32
    np.testing.assert_array_equal(result, classify(rounded.astype(jnp.float32), jnp.asarray(targets), "softmax"))


def test_rank_is_the_position_in_sorted_order(logits):
    labels, logits = np.arange(B) % V, np.round(logits / 4)  # with ties, as in bfloat16
    order = np.argsort(-logits, axis=-1, stable=True)
    expected = np.nonzero(order == labels[:, None])[1]
    np.testing.assert_array_equal(rank_of_label(jnp.asarray(logits), jnp.asarray(labels)), expected)


def test_nan_logits_are_never_correct():
    labels = jnp.arange(3)
    assert (rank_of_label(jnp.full((3, V), jnp.nan), labels) >= V - 1).all()
    one_nan = jnp.zeros((3, V)).at[:, 5].set(jnp.nan).at[jnp.arange(3), labels].set(1.0)
    assert (rank_of_label(one_nan, labels) == 1).all()


@pytest.mark.parametrize("devices", [1, 8])
def test_matrix_equals_counts_by_hand(rng, meshes, devices):
    logits = rng.integers(0, 4, (104, 7)).astype(np.float32)  # many ties
    labels, mask = rng.integers(0, 7, 104).astype(np.int32), rng.random(104) < 0.8
    place = NamedSharding(meshes(devices, 1), PartitionSpec("data"))
    placed = [jax.device_put(x, place) for x in (logits, labels, mask)]
    count = jax.jit(lambda logits, labels, mask: _confusion(logits, labels, rank_of_label(logits, labels), mask))
    result = np.asarray(count(*placed))
    expected = np.zeros((7, 7), int)
    np.add.at(expected, (labels[mask], logits[mask].argmax(-1)), 1)
    np.testing.assert_array_equal(result, expected)
    top1 = (np.asarray(rank_of_label(jnp.asarray(logits), jnp.asarray(labels))) < 1)[mask].sum()
    assert result.trace() == top1 < mask.sum() == result.sum()


def test_batch_statistics_equal_counts_of_sorted_logits(rng):
    """The model returns random logits; the last rows are padding."""
    logits, labels = rng.standard_normal((200, 7)), rng.integers(0, 7, 200)

    class FixedLogits(Classification):
        def inputs(self, batch):
            return (batch["logits"],)

        def loss(self, *_):
            raise NotImplementedError

    task, model = FixedLogits(num_classes=7), lambda logits: (logits, None)
    assert FixedLogits(num_classes=5).metrics({"loss": 1, "top1": 1, "examples": 2}).keys() == {"loss", "top1"}
    batch = {"logits": jnp.float32(logits), "label": jnp.int32(labels), "mask": jnp.arange(200) < 170}
    result = task.statistics(model, batch)
    best = np.argsort(-logits, axis=1)[:170] == labels[:170, None]
    expected = {"examples": 170, "top1": best[:, :1].sum(), "top5": best[:, :5].sum()}
    assert {name: int(result[name]) for name in expected} == expected and best[:, 5].sum() > 10
    losses = np.log(np.exp(logits).sum(1)) - logits[np.arange(200), labels]
    assert float(result["loss"]) == pytest.approx(losses[:170].sum(), rel=1e-5)


def test_batches_are_summed_with_few_in_flight():
    issued, done = [], []

    def batches():
        for i in range(9):
            assert i - len(done) <= IN_FLIGHT + 1
            issued.append(i)
            yield i

    class PendingResult:
        """Result that completes when it is fetched."""

        def __init__(self, value):
            self.value = np.asarray(value)

        def __array__(self, dtype=None, copy=None):
            done.append(1) if self.value == 2 else None
            return self.value

    def statistics(weights, i):
        sums = {"examples": PendingResult(2), "top1": PendingResult(1)}
        return sums | {"loss": np.float32(3), "confusion": np.full((2, 2), i)}

    metrics = SequenceClassification(num_classes=2, full=True, label_smoothing=0.0).metrics
    result = evaluate(statistics, metrics, {"": None}, batches())
    np.testing.assert_array_equal(result["confusion"], np.full((2, 2), 36))
    assert result["top1"] == 0.5 and result["examples"] == 18 and len(issued) == 9


def test_accuracy_and_most_confused_classes():
    assert command.class_accuracy(MATRIX) == [5 / 6, 0.0, None]
    assert command.most_confused(MATRIX, 2) == [(1, 0, 2), (1, 2, 2)]
    assert command.most_confused(MATRIX, 9) == [(1, 0, 2), (1, 2, 2), (0, 1, 1)]
    assert run_files.output_names(("cat", "dog"), 3) == ["cat", "dog", "2"]
    assert run_files.output_names(None, 2) == ["0", "1"]


def test_csv_and_plot_are_written(tmp_path):
    command.write_confusion(tmp_path / "c.csv", MATRIX, ["cat", "dog, big", "ü"])
    with (tmp_path / "c.csv").open(newline="", encoding="utf-8") as file:
        head, *rows = csv.reader(file)
    assert head[1:] == ["cat", "dog, big", "ü"] == [row[0] for row in rows]
    np.testing.assert_array_equal([list(map(int, row[1:])) for row in rows], MATRIX)
    plots.plot_confusion(np.eye(2, dtype=int), ["$0_$10", "_$10_$20"], tmp_path / "d.png", "A $run$_")
    plots.plot_confusion(np.eye(61, dtype=int), [f"class {i}" for i in range(61)], tmp_path / "c.png", "A run")
    assert (tmp_path / "c.png").stat().st_size > 5000
