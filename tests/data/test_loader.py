"""Batches: order and augmentation depend on (seed, step) alone."""

import re
import sys

import numpy as np
import pytest
from commands import run
from messages import mentions, refuses

from leanformer.data.loader import MAX_UNREADABLE, Batches, CorruptLog, batches
from leanformer.errors import CorruptExample, DataError
from leanformer.tasks.classification import labelled


class Numbers:
    """Source whose example i is an image of the number i; indices in `bad` cannot be read."""

    num_classes, classes = 7, None

    def __init__(self, length, bad=()):
        self.length, self.bad = length, set(bad)

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        if index in self.bad:
            raise CorruptExample(f"number {index} is broken")
        return {"image": np.full((2, 2, 1), index % 256, np.uint8), "label": index % 7}

    def name(self, index):
        return f"number {index}"


def append_noise(index, example, draws):
    return {"image": np.concatenate([example["image"], draws().integers(0, 256, (2, 2, 1), dtype=np.uint8)])}


def make_batches(length=23, bad=(), **options):
    defaults = {"batch_size": 4, "train": True, "seed": 5}
    source = Numbers(length, bad)
    return Batches(source, labelled(source, append_noise), **(defaults | options))


def assert_same(a, b):
    assert a.keys() == b.keys()
    for key in a:
        np.testing.assert_array_equal(a[key], b[key])


def test_epoch_contains_every_example_once():
    data = make_batches()
    seen = np.concatenate([data[step]["index"] for step in range(23)])  # 92 positions are 4 epochs of 23
    for epoch in range(4):
        assert sorted(seen[23 * epoch : 23 * (epoch + 1)]) == list(range(23))
    assert seen[:23].tolist() != seen[23:46].tolist()


@pytest.mark.parametrize("processes", [1, 2, 4])
def test_processes_split_the_same_global_batch(processes):
    """In training, in any order, and in an uneven evaluation, in which every process has as many steps."""
    data = make_batches()
    whole = [data[step] for step in range(20)]
    parts = [make_batches(process=p, processes=processes) for p in range(processes)]
    for step in reversed(range(20)):
        result = [part[step] for part in parts]
        assert_same({k: np.concatenate([f[k] for f in result]) for k in result[0]}, whole[step])
    parts = [make_batches(length=9, train=False, process=p, processes=processes) for p in range(processes)]
    assert {len(part) for part in parts} == {3}
    uneven = [part[step] for step in range(3) for part in parts]
    assert {len(batch["image"]) for batch in uneven} == {4 // processes}
    assert np.concatenate([batch["index"][batch["mask"]] for batch in uneven]).tolist() == list(range(9))


def test_seeds_differ():
    assert make_batches(seed=1)[0]["index"].tolist() != make_batches(seed=2)[0]["index"].tolist()
    # Neighbouring seeds must not be each other's later epochs, or runs that should be independent share their order.
    first, second = make_batches(seed=1, batch_size=23), make_batches(seed=2, batch_size=23)
    assert first[1]["index"].tolist() != second[0]["index"].tolist()


def test_augmentation_differs_between_epochs():
    data = make_batches(batch_size=23)
    one, two = data[0], data[1]
    first = {int(i): image[2:].tobytes() for i, image in zip(one["index"], one["image"], strict=True)}
    second = {int(i): image[2:].tobytes() for i, image in zip(two["index"], two["image"], strict=True)}
    assert sum(first[i] == second[i] for i in range(23)) < 3


def test_repeats_are_different_views_of_the_same_example():
    batch = make_batches(repeats=2, batch_size=6)[3]
    assert (batch["index"][::2] == batch["index"][1::2]).all()
    assert (batch["image"][::2, 2:] != batch["image"][1::2, 2:]).any()


def test_a_broken_example_is_replaced_by_its_neighbour():
    clean, broken = make_batches(batch_size=23), make_batches(batch_size=23, bad={4, 5, 22})
    a, b = clean[0], broken[0]
    for i, j, corrupt in zip(a["index"], b["index"], b["corrupt"], strict=True):
        assert (j, corrupt) == {4: (6, 4), 5: (6, 5), 22: (0, 22)}.get(int(i), (i, -1))


def test_broken_examples_are_reported_and_too_many_are_refused():
    log = CorruptLog(make_batches(length=100, bad={4, 7}), max_share=0.02)
    with pytest.warns(UserWarning) as warned:
        log(np.array([-1, 4, -1]))
    assert mentions(str(warned[0].message), 1, "number 4", "(number 4 is broken)")
    with (
        pytest.warns(UserWarning),
        refuses("3 of 100", "data.max_corrupt=0.02", "number 9 (", error=DataError) as error,
    ):
        log(np.array([7, 9]))
    assert "number 9 is broken" not in str(error.value)  # example 9 is readable in this source


def test_many_consecutive_broken_examples_are_refused():
    with refuses(MAX_UNREADABLE, error=DataError) as error:
        make_batches(length=40, bad=range(40))[0]
    assert re.search(r"number \d+ .*number \d+ is broken", str(error.value), re.DOTALL)  # the first and the last


def test_labels_are_integers_below_the_number_of_classes(monkeypatch):
    for label in (6, np.uint8(6), np.int64(6), 3.8, np.float32(2), "2", -1, 7, 2**40):
        example = {"image": np.zeros((2, 2, 1), np.uint8), "label": label}
        monkeypatch.setattr(Numbers, "__getitem__", lambda *_, example=example: example)
        if label == 6:
            result = make_batches()[0]["label"]
            assert result.dtype == np.int32 and (result == 6).all()
            continue
        with refuses(repr(label), 7, error=DataError) as error:
            make_batches()[0]
        assert re.search(r"number \d+", str(error.value))


class Endless:
    """Endless source whose example i is the number i; those in `bad` cannot be read."""

    def __init__(self, bad=()):
        self.bad = bad

    def __getitem__(self, index):
        if index in self.bad:
            raise CorruptExample(f"number {index} is broken")
        return {"number": index}

    def name(self, index):
        return f"number {index}"


def prepare_number(index, example, draws):
    return {"number": np.array(example["number"]), "drawn": np.array(draws().integers(2**40))}


def test_endless_source_is_read_in_order():
    whole = Batches(Endless(), prepare_number, batch_size=4, train=True, seed=5)
    assert whole[10**12]["number"].tolist() == [4 * 10**12 + i for i in range(4)]
    other = Batches(Endless(), prepare_number, batch_size=4, train=True, seed=6)
    assert (whole[7]["drawn"] != other[7]["drawn"]).all()


def test_corrupt_share_of_an_endless_source_counts_read_examples():
    data = Batches(Endless(bad=(1, 5)), prepare_number, batch_size=4, train=True, seed=5)
    with pytest.warns(UserWarning), refuses("1 of 4", "data.max_corrupt=0.24", error=DataError):
        CorruptLog(data, 0.24)(data[0]["corrupt"])
    # One of two processes has read 2 of 4 examples; its log has the unreadable ones of both.
    half = Batches(Endless(bad=(1, 5)), prepare_number, batch_size=4, train=True, seed=5, processes=2)
    with pytest.warns(UserWarning):
        CorruptLog(half, 0.25)(half[0]["corrupt"])


def test_stream_starts_at_any_step():
    data = make_batches()
    result = list(batches(data, start=3, stop=8))
    assert len(result) == 5
    for step, batch in enumerate(result, 3):
        assert_same(batch, data[step])


WORKER_SCRIPT = """
import sys, warnings
import numpy as np
from leanformer import config, data
from leanformer.tasks.images import ImageData

if __name__ == "__main__":
    shape = {"size": 28, "channels": 1, "num_classes": 10, "mean": (0.5,), "crop_fraction": 1.0}
    images = ImageData(**shape, name="bundled:fashion_mnist", augment=config.base().augment.to_dict())
    source = images.open("train")
    batches, options = images.train_batches(source, batch_size=4, seed=5), list(sys.warnoptions)
    for workers in (0, 2, 3):
        steps = 2
        for batch in data.batches(batches, start=2, stop=9, workers=workers):
            for name, value in batches[steps].items():
                np.testing.assert_array_equal(batch[name], value)
            steps += 1
        assert steps == 9
    assert sys.warnoptions == options
    print("the same")
"""


@pytest.mark.slow
def test_workers_do_not_change_batches(tmp_path):
    assert run_program(tmp_path, WORKER_SCRIPT) == (0, "the same\n", "")


def run_program(folder, text):
    """Run a program in a file, since worker processes import it, and return its status and outputs."""
    (folder / "program.py").write_text(text)
    return run([sys.executable, folder / "program.py"])


POOL_SCRIPT = """
import os, sys
from pathlib import Path
import numpy as np
from leanformer import data
from leanformer.data.loader import SHARED_FOLDER, Batches, folder_prefix

class Source:
    def __len__(self):
        return 8
    def __getitem__(self, index):
        return {}
    def name(self, index):
        return str(index)

def look(*_):
    names = ("CUDA_VISIBLE_DEVICES", "JAX_PLATFORMS")
    seen = [os.environ.get(name) for name in names] == ["", "cpu"]
    loaded = [name for name in ("jax", "flax", "orbax") if name in sys.modules]
    return {"worker": np.int64(os.getpid()), "hidden": np.bool_(seen), "loaded": np.int64(len(loaded))}

if __name__ == "__main__":
    workers, options = [], list(sys.warnoptions)
    for _ in range(3):  # as many evaluations
        split = Batches(Source(), look, batch_size=4, train=False)
        for batch in data.batches(split, workers=1):
            assert batch["hidden"].all() and not batch["loaded"].any(), batch
            workers += batch["worker"].tolist()
    assert len(set(workers)) == 1 and os.getpid() not in workers, workers
    assert sys.warnoptions == options
    assert not list(Path(SHARED_FOLDER).glob(f"{folder_prefix(os.getpid())}*"))
    print("one worker")
"""


def test_evaluations_share_one_worker_without_gpu_and_jax(tmp_path):
    assert run_program(tmp_path, POOL_SCRIPT) == (0, "one worker\n", "")


def test_program_without_a_guard_is_refused(tmp_path):
    """The worker would begin the program again."""
    text = "import math\nfrom leanformer.data import loader\nloader.check_main_program(1)\n"
    status, out, err = run_program(tmp_path, text + "print(*loader.map_ordered(math.sqrt, [4, 9], 1))\n")
    assert status == 1 and not out and mentions(err, "ConfigError", "data.workers=0", "__main__")
