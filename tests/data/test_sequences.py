"""Token sequences from the config to the trained model: sources by name, batches, and the standard trainer."""

import numpy as np
import pytest
from messages import refuses

from leanformer import config, prepare, tasks
from leanformer.data.sequences import build_sequences, open_sequences
from leanformer.errors import ConfigError, DataError
from leanformer.tasks.sequences import SequenceData


RECIPE = {"train": 400, "val": 37, "test": 31, "min_length": 5, "max_length": 30}
MODEL = {"vocabulary": 16, "num_classes": 10, "towers": 1}
SOURCE_OPTIONS = {"dir": None, "recipe": {}, "max_length": 23, "length": None} | MODEL
PAIRS = [(1, b"ab", b"cdefg"), (0, b"h", b"ij"), (1, b"klm", b"n")]


@pytest.fixture(scope="module")
def expressions(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sets") / "listops"
    assert build_dataset(f"listops:{folder}", RECIPE)
    return folder


@pytest.fixture
def papers(tmp_path):
    for split in ("train", "eval"):
        rows = [b"\t".join([b"%d" % label, b"1", b"2", one, two]) for label, one, two in PAIRS]
        (tmp_path / f"new_aan_pairs.{split}.tsv").write_bytes(b"\n".join(rows) + b"\n")
    return tmp_path


def build_dataset(name, recipe):
    return build_sequences(name, None, recipe)


def make_data(**changes):
    options = {"length": 31, "max_length": 23, "full": False, "recipe": RECIPE}
    return SequenceData(**(MODEL | options | changes))


def make_config(folder, **model):
    c = config.sequences()
    c.update(batch_size=16, total_steps=20, dtype="float32", log_every=1)
    c.data.update(name=f"listops:{folder}", eval_split="val", max_length=29, workers=0)
    c.unlock()
    c.data.recipe = dict(RECIPE)
    c.lock()
    c.model.update(max_length=32, width=24, mlp_dim=20, landmarks=4, convolution=3)
    c.model.update(**model)
    c.optim.update(lr=1e-2, warmup_steps=4, ema=0.9)
    c.eval.update(every=0, batch_size=16)
    c.checkpoint.update(every=10, keep=3)
    c.probe.update(every=0, examples=8)
    config.check(c)
    return c


def test_batch_examples_are_truncated_and_padded(expressions):
    sequences = make_data(name=f"listops:{expressions}")
    source = sequences.open("val")
    batches = sequences.eval_batches(source, batch_size=5, process=0, processes=1)
    assert len(batches) == 8
    seen, long = [], 0
    for step in range(len(batches)):
        batch = batches[step]
        for name, spec in (sequences.input_specs() | sequences.target_specs(train=False)).items():
            assert (batch[name].shape[1:], batch[name].dtype) == spec
        for row in np.flatnonzero(batch["mask"]):
            example, length = source[int(batch["index"][row])], int(batch["lengths"][row])
            long += len(example["tokens"]) > 23
            assert length == min(23, len(example["tokens"])) and batch["label"][row] == example["label"]
            np.testing.assert_array_equal(batch["tokens"][row, :length], example["tokens"][:23])
            assert not batch["tokens"][row, length:].any()
            seen.append(int(batch["index"][row]))
    assert seen == list(range(37)) and long > 0


def test_pairs_are_stacked_in_one_batch(papers):
    sequences = make_data(vocabulary=257, num_classes=2, towers=2, max_length=4, length=5, name=f"pairs:{papers}")
    source = sequences.open("eval")
    batch = sequences.eval_batches(source, batch_size=3, process=0, processes=1)[0]
    assert batch["tokens"].shape == (3, 2, 5) and batch["lengths"].tolist() == [[2, 4], [1, 2], [3, 1]]
    assert batch["tokens"][0].tolist() == [[98, 99, 0, 0, 0], [100, 101, 102, 103, 0]]
    assert batch["label"].tolist() == [1, 0, 1]


def test_full_length_pixels_have_no_lengths():
    sequences = make_data(vocabulary=256, full=True, length=49, max_length=49, name="pixels:bundled:fashion_mnist")
    source = sequences.open("t10k")
    batch = sequences.eval_batches(source, batch_size=2, process=0, processes=1)[0]
    assert batch["tokens"].shape == (2, 49) and set(sequences.input_specs()) == {"tokens"}
    np.testing.assert_array_equal(batch["tokens"][1], source[1]["tokens"])


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"vocabulary": 15}, ("model.vocabulary=15", "--config.model.vocabulary=16")),
        ({"num_classes": 9}, ("model.num_classes=9", "--config.model.num_classes=10")),
        ({"towers": 2}, ("model.towers=2", 1)),
        ({"recipe": RECIPE | {"max_length": 31}}, ("max_length=30", 31)),
    ],
)
def test_source_that_does_not_fit_the_model_is_refused(expressions, changes, parts):
    with refuses(*parts, error=DataError):
        open_sequences(f"listops:{expressions}", "val", **(SOURCE_OPTIONS | {"recipe": RECIPE} | changes))


@pytest.mark.parametrize(
    ("name", "error", "parts"),
    [
        ("listops:{}/none", DataError, ("none", "leanformer.prepare build")),
        ("pathfinder:{}/none", DataError, ("pathfinder32", "lra_release.gz")),
        ("imdb:{}", DataError, ("neg",)),
        ("wiki:{}", ConfigError, ("wiki:", "listops:<path>")),
        ("pixels:synthetic", ConfigError, ("model.max_length", 23)),
    ],
)
def test_missing_data_are_refused(tmp_path, name, error, parts):
    with refuses(*parts, error=error):
        open_sequences(name.format(tmp_path), "val", **(SOURCE_OPTIONS | {"length": 23}))


def test_prepare_builds_and_checks(tmp_path):
    c = make_config(tmp_path / "made")
    with refuses(tmp_path / "made", error=DataError):
        prepare.check(c)
    assert tasks.build_task(c).data.build()
    assert [facts["examples"] for facts in prepare.check(c).values()] == [400, 37]
