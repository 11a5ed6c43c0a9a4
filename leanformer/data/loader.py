"""Batches as a function of (seed, step): any step's batch can be asked for, in any order, from any process.

Position p = step · batch_size + place in the batch. Training reads the example at place p of an endless sequence
(`shuffled`), and the randomness of its augmentation is keyed by p. Both come before a process takes its slice,
so neither the number of processes, nor of workers, nor a restart changes what is trained on.
"""

import concurrent.futures
import functools
import signal
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import grain
import numpy as np
from absl import flags

from leanformer.data.pool import SIGNALS, begin_worker
from leanformer.data.source import Source, size
from leanformer.errors import CorruptExample, DataError


# (index, example, draws) to the leaves of a batch, see Batches
Prepare = Callable[[int, Mapping[str, Any], Callable[[], np.random.Generator]], dict[str, np.ndarray]]
ENDLESS = 2**62  # steps, or examples
LARGE = 2**24  # examples of a source whose epochs are not drawn as a whole: 64 MiB for each process that reads
NEIGHBOURS = 16  # unreadable examples in a row before a batch is given up


def shuffled(position: int, length: int, seed: int) -> int:
    """The index, of `length` examples, at a position of the order; each stands once in every epoch.

    A permutation that is drawn as a whole is uniform over all of them; of LARGE sources it is a keyed one, which needs
    no memory (grain's `index_shuffle`).
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
    return int(np.random.Generator(np.random.Philox(key=(seed, epoch))).integers(2**32))


class Batches:
    """Random access from step to the host's part of the global batch.

    Args:
        source: the examples.
        prepare: (index, example, draws) to what the model is fed of it, by name, as arrays of one shape. `draws()` is
            a random generator in the state that belongs to the position, and at every call the same.
        batch_size: global.
        train: shuffled epochs without end, or the examples of an endless source as they come; else each example
            once, in order, the last batch padded.
        seed: of order and augmentation.
        repeats: training views of an example that stand in a row in the order (repeated augmentation).
        process, processes: this host's contiguous slice of every global batch.
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
            raise DataError(f"The global batch of {batch_size} cannot be split over {processes} processes.")
        self.batch_size = batch_size
        self.source, self.prepare, self.train, self.seed, self.repeats = source, prepare, train, seed, repeats
        self.process, self.processes = process, processes
        self._size = size(source)
        if self._size is None and not train:
            raise DataError("An endless source cannot be evaluated on: its split for evaluation needs a length.")

    def __len__(self) -> int:
        return ENDLESS if self.train else -(-self._size // self.batch_size)

    def positions(self, step: int) -> range:
        """Those of this process's part of a step's batch."""
        local = self.batch_size // self.processes
        first = step * self.batch_size + self.process * local
        return range(first, first + local)

    def example(self, position: int) -> int:
        """The index of the example at a position of the global order."""
        if not self.train or self._size is None:
            return position // self.repeats
        return shuffled(position // self.repeats, self._size, self.seed)

    def __getitem__(self, step: int) -> dict[str, np.ndarray]:
        """What `prepare` gives, `mask` (B; False for padding), `index` (B), and `corrupt` (B; the index of
        an unreadable example that its neighbour stands in for, else -1)."""
        positions = self.positions(step)
        present = [p for p in positions if self.train or p < self._size]
        rows = [self._read(p) for p in present] or [self._read(0)]
        batch = {key: np.stack([row[key] for row in rows]) for key in rows[0]}
        padding = len(positions) - len(present)
        if padding:
            kept = {key: value[: len(present)] for key, value in batch.items()}
            batch = {k: np.pad(v, [(0, padding)] + [(0, 0)] * (v.ndim - 1)) for k, v in kept.items()}
            batch["corrupt"][len(present) :] = -1
        batch["mask"] = np.arange(len(positions)) < len(present)
        return batch

    def _read(self, position: int) -> dict[str, np.ndarray | np.generic]:
        wanted = self.example(position)
        for shift in range(NEIGHBOURS):
            index = (wanted + shift) % (self._size or ENDLESS)
            try:
                example = self.source[index]
                fed = self.prepare(index, example, functools.partial(self._generator, position))
            except (CorruptExample, OSError) as error:
                reason = error
                continue
            return {**fed, "index": np.int64(index), "corrupt": np.int64(wanted if shift else -1)}
        raise DataError(
            f"{NEIGHBOURS} examples in a row are unreadable, from {self.source.name(wanted)} on. Last: {reason}"
        )

    def why(self, index: int) -> str:
        """What makes an example unreadable."""
        try:
            self.prepare(index, self.source[index], functools.partial(self._generator, 0))
        except (CorruptExample, OSError) as error:
            return str(error)
        return "it could be read a moment later"

    def _generator(self, position: int) -> np.random.Generator:
        return np.random.Generator(np.random.Philox(key=(self.seed, position)))


def stream(
    batches: Batches, *, start: int = 0, stop: int | None = None, workers: int = 0, prefetch: int = 2
) -> Iterator[dict[str, np.ndarray]]:
    """Iterates over steps `start` to `stop` with prefetching, by `workers` processes or a thread if 0.

    The result is the same for any number of workers. Close it (it is a generator) to stop the workers.
    """
    stop = len(batches) if stop is None else stop
    steps = grain.MapDataset.source(batches)[start:stop]
    threads = grain.ReadOptions(num_threads=1, prefetch_buffer_size=prefetch)
    dataset = steps.to_iter_dataset(threads)
    if workers:
        if not flags.FLAGS.is_parsed():  # grain's worker processes read its flags, which nobody else parses
            flags.FLAGS.mark_as_parsed()
        # grain's reading thread keeps the last batch in shared memory alive until Python has gone. It is cleaned up
        # then, with a warning of leaks that would end every run; the process that gives it reads these options.
        sys.warnoptions.append("ignore:resource_tracker:UserWarning")
        # Never more workers than batches, or the spare ones only cost their start.
        count = min(workers, stop - start)
        options = grain.MultiprocessingOptions(num_workers=count, per_worker_buffer_size=prefetch)
        dataset = dataset.mp_prefetch(options, worker_init_fn=begin_worker)
    iterator = iter(dataset)
    try:
        if workers:
            with concurrent.futures.ThreadPoolExecutor(1, initializer=_hold_signals) as apart:
                yield apart.submit(next, iterator).result()  # it starts the workers
        yield from iterator
    finally:
        iterator.close()


def _hold_signals() -> None:
    """Of this thread, of those that it starts, and of the processes that these start."""
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)


class CorruptLog:
    """Counts and names unreadable examples; stops the run when they are more than a share of the data."""

    def __init__(self, batches: Batches, max_share: float):
        self.batches, self.source, self.max_share = batches, batches.source, max_share
        self.seen: set[int] = set()
        self._read = 0  # examples, of an endless source

    def __call__(self, corrupt: np.ndarray) -> None:
        """Takes a batch's `corrupt` entries. Raises DataError over the share."""
        for index in sorted(set(corrupt[corrupt >= 0].tolist()) - self.seen):
            self.seen.add(index)
            warnings.warn(
                f"Unreadable, its neighbour stands in ({len(self.seen)} so far): {self._name(index)}",
                stacklevel=2,
            )
        self._read += len(corrupt)
        examples = size(self.source) or self._read
        if len(self.seen) > self.max_share * examples:
            names = "\n  ".join(self._name(i) for i in sorted(self.seen)[:10])
            raise DataError(
                f"{len(self.seen)} of {examples} examples are unreadable, over data.max_corrupt="
                f"{self.max_share}. Mend or remove them, or raise the share. The first:\n  {names}"
            )

    def _name(self, index: int) -> str:
        return f"{self.source.name(index)} ({self.batches.why(index)})"
