"""Evaluation subsets of a split: selected examples, and attributes forwarded from the source."""

import pickle

import numpy as np
import pytest

from leanformer import config, data, tasks
from leanformer.data.images.sources import Synthetic


@pytest.fixture
def source():
    return Synthetic("test", 8, 1, 7)  # 2,048 examples


@pytest.mark.parametrize("examples", [1, 5, 97, 2047])
def test_subset_is_evenly_spaced_without_repeats(source, examples):
    part = pickle.loads(pickle.dumps(data.take_subset(source, examples)))  # as sent to workers
    names = [part.name(i) for i in range(len(part))]
    assert len(set(names)) == len(part) == examples
    places = np.array([int(name.rsplit(" ", 1)[1]) for name in names])
    gaps = np.diff(places)
    assert places[0] == 0 and (examples == 1 or (places[-1] == 2047 and gaps.max() - gaps.min() <= 1))
    np.testing.assert_array_equal(part[examples - 1]["image"], source[int(places[-1])]["image"])


def test_subset_forwards_source_attributes(source):
    assert all(data.take_subset(source, examples) is source for examples in (0, 2048, 5000))
    part = data.take_subset(source, 3)
    assert part.num_classes == 7 and part.classes is source.classes
    assert not hasattr(part, "vocabulary")
    source.vocabulary, source.tokenizer = 31, "of masked text"
    part = data.take_subset(source, 3)
    assert part.vocabulary == 31 and part.tokenizer == "of masked text"


def test_subset_of_point_sets_is_read_in_batches():
    """The last batch also reads an example beyond the subset, which is masked."""
    c = config.points()
    task = tasks.build(c)
    whole = tasks.open_data(task.data, c)[1][""]
    batches = task.data.eval_batches(data.take_subset(whole, 7), batch_size=4)
    assert batches[0]["mask"].all() and list(batches[1]["mask"]) == [True] * 3 + [False]
    result = np.concatenate([batches[0]["points"], batches[1]["points"][:3]])
    places = np.linspace(0, len(whole) - 1, 7).round().astype(int)
    np.testing.assert_array_equal(result, np.stack([whole[int(i)]["points"] for i in places]).astype(np.float32))
