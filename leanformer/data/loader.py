"""Loader of batches that are a function of (seed, step), with random access to any step from any process.

Position p = step · batch_size + place in the batch. Training reads the example at position p of an endless sequence
(`shuffled_index`), and p is the key of its random augmentation. Both are defined before a process takes its slice, so
the training data do not depend on the number of processes or workers, or on restarts.
"""

import concurrent.futures
import functools
import signal
import sys
import warnings
from collections.abc import Callable, Generator, Mapping
from typing import Any

import grain
import numpy as np
from absl import flags

from leanformer.data.pool import SIGNALS, begin_worker, check_main_program
from leanformer.data.source import Source, size
from leanformer.errors import EXHAUSTED, CorruptExample, DataError


# function (index, example, draws) -> arrays of one example, see Batches
Prepare = Callable[[int, Mapping[str, Any], Callable[[], np.random.Generator]], dict[str, np.ndarray]]
ENDLESS = 2**62  # number of steps, or of examples, that counts as endless
LARGE = 2**24  # from this many examples, epochs are not drawn as a whole, which takes 64 MiB per reading process
NEIGHBOURS = 16  # consecutive unreadable examples before an error


def shuffled_index(position: int, length: int, seed: int) -> int:
    """Return the index of the example at a position of the shuffled order, in which each index occurs once per epoch.

    Each epoch has a permutation of its own, drawn uniformly. From LARGE (2^24) examples on it is a keyed permutation,
    which needs no memory (grain's `index_shuffle`).

    Args:
        position: position in the endless sequence of epochs, from 0.
        length: number of examples of the source; the result is below it.
        seed: seed of all permutations.
    """
    epoch, place = divmod(position, length)
    if length < LARGE:
        return int(_permutation(seed, epoch, length)[place])
    return grain.experimental.index_shuffle(place, max_index=length - 1, seed=_key(seed, epoch), rounds=4)


@functools.lru_cache(maxsize=2)  # a batch may straddle two epochs
def _permutation(seed: int, epoch: int, length: int) -> np.ndarray:
    return np.random.Generator(np.random.Philox(key=(seed, epoch))).permutation(length).astype(np.int32)


@functools.lru_cache(maxsize=2)
def _key(seed: int, epoch: int) -> int:
    """Return the key of an epoch's permutation for large sources."""
    return int(np.random.Generator(np.random.Philox(key=(seed, epoch))).integers(2**32))


class Batches:
    """Batches by step, with random access: this process's part of each global batch.

    `batches[step]` is a dict of arrays with a leading axis B = batch_size / processes: those of `prepare`, `mask`
    (False for padding), `index` (index of the example in the source), and `corrupt` (index of an unreadable example
    that was replaced by the next readable one, else -1). `len(batches)` is the number of steps, 2^62 in training.

    Args:
        source: source of the examples; one without a length is for training only.
        prepare: function (index, example, draws) to the model's inputs by name, arrays of the same shape for every
            example. `draws()` returns a random generator in the state of the position, the same at every call.
        batch_size: global batch size; each of `processes` takes a contiguous slice of every batch.
        train: if true, shuffled epochs without end, or the examples of an endless source in order; else each example
            once, in order, with the last batch padded.
        seed: seed of order and augmentation.
        repeats: number of consecutive training views of each example (repeated augmentation).
        process, processes: index of this process, and number of processes.

    Raises:
        DataError: `batch_size` is not divisible by `processes`, or an endless source is used for evaluation; from `[]`,
            16 consecutive examples are unreadable.
    """

    def __init__(
        self,
        source: Source,
        prepare: Prepare,
        *,
        batch_size: int,
        train: bool,
        seed: int = 0,
        repeats: int = 1,
        process: int = 0,
        processes: int = 1,
    ):
        if batch_size % processes:
            raise DataError(f"batch_size={batch_size}: not divisible by {processes} processes.")
        self.batch_size = batch_size
        self.source, self.prepare, self.train, self.seed, self.repeats = source, prepare, train, seed, repeats
        self.process, self.processes = process, processes
        self._size: Any = size(source)  # None if endless
        if self._size is None and not train:
            raise DataError("An endless source cannot be used for evaluation. Use an evaluation split with a length.")

    def __len__(self) -> int:
        return ENDLESS if self.train else -(-self._size // self.batch_size)

    def positions(self, step: int) -> range:
        """Return the positions, step · batch_size + place in the batch, of this process's part of a step's batch."""
        local = self.batch_size // self.processes
        first = step * self.batch_size + self.process * local
        return range(first, first + local)

    def example(self, position: int) -> int:
        """Return the index in the source of the example at a position, step · batch_size + place in the batch."""
        if not self.train or self._size is None:
            return position // self.repeats
        return shuffled_index(position // self.repeats, self._size, self.seed)

    def __getitem__(self, step: int) -> dict[str, np.ndarray]:
        """Return this process's part of the batch of a step.

        It has the arrays of `prepare`, `mask` (B; False for padding), `index` (B), and `corrupt` (B; the index of an
        unreadable example that was replaced by its neighbour, else -1).
        """
        positions = self.positions(step)
        present = [p for p in positions if self.train or p < self._size]
        rows = [self._read(p) for p in present] or [self._read(0)]
        batch = {key: np.stack([row[key] for row in rows]) for key in rows[0]}
        padding = len(positions) - len(present)
        if padding:
            values = {key: value[: len(present)] for key, value in batch.items()}
            batch = {k: np.pad(v, [(0, padding)] + [(0, 0)] * (v.ndim - 1)) for k, v in values.items()}
            batch["corrupt"][len(present) :] = -1
        batch["mask"] = np.arange(len(positions)) < len(present)
        return batch

    def _read(self, position: int) -> dict[str, np.ndarray | np.generic]:
        """Return the arrays of the example at a position, or of the next readable one."""
        first = self.example(position)
        for shift in range(NEIGHBOURS):
            index = (first + shift) % (self._size or ENDLESS)
            try:
                example = self.source[index]
                inputs = self.prepare(index, example, functools.partial(self._generator, position))
            except (CorruptExample, OSError) as error:
                if getattr(error, "errno", None) in EXHAUSTED:
                    raise  # the example is not to blame
                reason = error
                continue
            return {**inputs, "index": np.int64(index), "corrupt": np.int64(first if shift else -1)}
        raise DataError(
            f"{NEIGHBOURS} examples in a row are unreadable, from {self.source.name(first)} on. Fix or remove them. "
            f"Last: {reason}."
        )

    def unreadable_reason(self, index: int) -> str:
        """Read an example again by its index; return the text of the error, or a sentence if it can now be read."""
        try:
            self.prepare(index, self.source[index], functools.partial(self._generator, 0))
        except (CorruptExample, OSError) as error:
            return str(error)
        return "it could be read a moment later"

    def _generator(self, position: int) -> np.random.Generator:
        return np.random.Generator(np.random.Philox(key=(self.seed, position)))


def stream(
    batches: Batches, *, start: int = 0, stop: int | None = None, workers: int = 0, prefetch: int = 2
) -> Generator[dict[str, np.ndarray], None, None]:
    """Yield the batches of the steps from `start` to before `stop`, which are read in advance.

    The result does not depend on the number of workers. Close the generator to stop the workers.

    Args:
        batches: batches by step, see `Batches` for their arrays.
        start: first step.
        stop: step after the last; None for all.
        workers: number of processes that read; 0 for a thread of this process.
        prefetch: number of batches that each worker, or the thread, reads in advance.

    Raises:
        ConfigError: workers could not import the main program.
    """
    stop = len(batches) if stop is None else stop
    steps = grain.MapDataset.source(batches)[start:stop]  # ty: ignore[invalid-argument-type] - it has __getitem__
    threads = grain.ReadOptions(num_threads=1, prefetch_buffer_size=prefetch)
    dataset = steps.to_iter_dataset(threads)
    if workers:
        check_main_program(workers)
        if not flags.FLAGS.is_parsed():  # grain's worker processes read absl flags, which nothing else parses
            flags.FLAGS.mark_as_parsed()
        # grain's reading thread keeps the last batch in shared memory until Python exits. The resource tracker process
        # then removes it and warns about leaks at the end of every run. It reads these options.
        sys.warnoptions.append("ignore:resource_tracker:UserWarning")
        # At most one worker per batch: more would only cost start-up time.
        count = min(workers, stop - start)
        options = grain.MultiprocessingOptions(num_workers=count, per_worker_buffer_size=prefetch)
        dataset = dataset.mp_prefetch(options, worker_init_fn=begin_worker)
    iterator: Any = iter(dataset)
    try:
        if workers:
            with concurrent.futures.ThreadPoolExecutor(1, initializer=_block_signals) as executor:
                yield executor.submit(lambda: next(iterator)).result()  # the first call starts the workers
        yield from iterator
    finally:
        iterator.close()


def _block_signals() -> None:
    """Block signals in this thread, in threads that it starts, and in processes that these start."""
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)


class CorruptLog:
    """Log of unreadable examples, which stops the run if they exceed a fraction of the data.

    Call it with the array `corrupt` of each batch of `Batches`. It warns of each example once, with its name and the
    reason.

    Args:
        batches: training batches, whose source names the examples.
        max_share: largest fraction of unreadable examples, 0 to 1; of an endless source, of those read so far.
    """

    def __init__(self, batches: Batches, max_share: float):
        self.batches, self.source, self.max_share = batches, batches.source, max_share
        self.seen: set[int] = set()
        self._read = 0  # number of examples that all processes have read, for an endless source

    def __call__(self, corrupt: np.ndarray) -> None:
        """Record the array `corrupt` (B) of a batch. Raise DataError if too many examples are unreadable."""
        for index in sorted(set(corrupt[corrupt >= 0].tolist()) - self.seen):
            self.seen.add(index)
            warnings.warn(
                f"Unreadable example replaced by its neighbour ({len(self.seen)} so far): {self._name(index)}",
                stacklevel=2,
            )
        self._read += len(corrupt) * self.batches.processes  # `seen` is that of all processes
        examples = size(self.source) or self._read
        if len(self.seen) > self.max_share * examples:
            names = "\n  ".join(self._name(i) for i in sorted(self.seen)[:10])
            raise DataError(
                f"data.max_corrupt={self.max_share}: {len(self.seen)} of {examples} examples are unreadable. "
                f"Fix or remove them, or raise data.max_corrupt. The first:\n  {names}"
            )

    def _name(self, index: int) -> str:
        return f"{self.source.name(index)} ({self.batches.unreadable_reason(index)})"
