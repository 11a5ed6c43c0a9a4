"""Loader of batches that are a function of (seed, step), with random access to any step, and its worker processes.

Position p = step · batch_size + place in the batch. Training reads the example at position p of an endless sequence of
shuffled epochs, and p is the key of its random augmentation. Both are defined before a process takes its slice, so the
training data do not depend on the number of processes or workers, or on restarts.
"""

import collections
import concurrent.futures
import functools
import itertools
import math
import multiprocessing
import os
import pickle
import shutil
import signal
import tempfile
import threading
import warnings
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from leanformer.data.source import Source, size
from leanformer.errors import ConfigError, CorruptExample, DataError


# function (index, example, draws) -> arrays of one example, see Batches
Prepare = Callable[[int, Mapping[str, Any], Callable[[], np.random.Generator]], dict[str, np.ndarray]]
ENDLESS = 2**62  # number of steps, or of examples, that counts as endless
MAX_UNREADABLE = 16  # consecutive unreadable examples before an error
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)  # for the parent only
SHARED_FOLDER = "/dev/shm" if Path("/dev/shm").is_dir() else tempfile.gettempdir()  # in memory, if there is one


class Batches:
    """Batches by step, with random access: this process's part of each global batch, which `batch_size` counts.

    `batches[step]` is a dict of arrays with a leading axis B = batch_size / processes: the inputs, `mask`
    (False for padding), `index` (index of the example in the source), and `corrupt` (index of an unreadable example
    that was replaced by the next readable one, else -1). `len(batches)` is the number of steps, 2^62 in training.

    Training (`train`) has shuffled epochs without end, or the examples of an endless source in order, and `repeats`
    consecutive views of each; evaluation has each example once, in order, and pads the last batch. In `prepare`,
    `draws()` returns a random generator in the state of the position, the same at every call.
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
        self.batch_size = batch_size
        self.source, self.prepare, self.train, self.seed, self.repeats = source, prepare, train, seed, repeats
        self.process, self.processes = process, processes
        self._size: Any = size(source)  # None if endless
        self._orders: dict[int, np.ndarray] = {}  # permutation by epoch, of the last two: a batch may straddle them

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_orders": {}}

    def __len__(self) -> int:
        return ENDLESS if self.train else -(-self._size // self.batch_size)

    def positions(self, step: int) -> range:
        """Return the positions of this process's part of a step's batch."""
        local = self.batch_size // self.processes
        first = step * self.batch_size + self.process * local
        return range(first, first + local)

    def example(self, position: int) -> int:
        """Return the index in the source of the example at a position; in training each index occurs once per epoch."""
        position //= self.repeats
        if not self.train or self._size is None:
            return position
        epoch, place = divmod(position, self._size)
        if epoch not in self._orders:
            self._orders = {old: self._orders[old] for old in [*self._orders][-1:]}
            order = np.random.Generator(np.random.Philox(key=(self.seed, epoch))).permutation(self._size)
            self._orders[epoch] = order.astype(np.int32 if self._size < 2**31 else np.int64)
        return int(self._orders[epoch][place])

    def __getitem__(self, step: int) -> dict[str, np.ndarray]:
        positions = self.positions(step)
        present = [p for p in positions if self.train or p < self._size]
        rows = [self._read(p) for p in present] or [self._read(0)]
        batch = {key: np.stack([row[key] for row in rows])[: len(present)] for key in rows[0]}
        if padding := len(positions) - len(present):
            batch = {key: np.pad(x, [(0, padding)] + [(0, 0)] * (x.ndim - 1)) for key, x in batch.items()}
            batch["corrupt"][len(present) :] = -1
        batch["mask"] = np.arange(len(positions)) < len(present)
        return batch

    def _read(self, position: int) -> dict[str, np.ndarray | np.generic]:
        """Return the arrays of the example at a position, or of the next readable one."""
        first, reason = self.example(position), None
        for shift in range(MAX_UNREADABLE):
            index = (first + shift) % (self._size or ENDLESS)
            try:
                inputs = self.prepare(index, self.source[index], functools.partial(self._generator, position))
            except (CorruptExample, OSError) as error:
                reason = error
                continue
            return {**inputs, "index": np.int64(index), "corrupt": np.int64(first if shift else -1)}
        raise DataError(
            f"{MAX_UNREADABLE} examples in a row are unreadable, from {self.source.name(first)} on. Fix or remove "
            f"them. Last: {reason}."
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


def batches(
    source: Batches, *, start: int = 0, stop: int | None = None, workers: int = 0, prefetch: int = 2
) -> Generator[dict[str, np.ndarray], None, None]:
    """Yield the batches of the steps from `start` to before `stop`, all if None, read `prefetch` batches in advance.

    `workers` processes read, which stay for later calls, or a thread of this process if 0; the batches are the same.
    """
    steps = range(start, len(source) if stop is None else stop)
    if not workers:
        import grain  # which imports JAX; worker processes do not need it

        options = grain.ReadOptions(num_threads=1, prefetch_buffer_size=prefetch)
        every = grain.MapDataset.source(source)  # ty: ignore[invalid-argument-type] - it has __getitem__
        yield from every[steps.start : steps.stop].to_iter_dataset(options)
        return
    # Through files in memory, as pipes between processes are several times slower.
    with tempfile.TemporaryDirectory(prefix=folder_prefix(os.getpid()), dir=SHARED_FOLDER) as folder:
        path = Path(folder) / "batches"
        path.write_bytes(pickle.dumps(source))  # sent once, not with every step
        for header, file in map_ordered(functools.partial(_write_step, path), steps, workers, ahead=prefetch):
            yield _take(header, file)


def _write_step(path: Path, step: int) -> tuple[list[tuple[str, Any, tuple[int, ...]]], Path]:
    """Write the arrays of a batch to a file; return their names, dtypes and shapes, and the file."""
    batch, file = _load(path)[step], path.with_name(f"{step}")
    with file.open("wb") as out:
        for array in batch.values():
            out.write(np.ascontiguousarray(array).data)
    return [(name, array.dtype, array.shape) for name, array in batch.items()], file


def _take(header: list[tuple[str, Any, tuple[int, ...]]], file: Path) -> dict[str, np.ndarray]:
    """Return the arrays in a file of `_write_step`, which is removed."""
    with file.open("rb") as content:
        batch = {name: np.fromfile(content, dtype, math.prod(shape)).reshape(shape) for name, dtype, shape in header}
    file.unlink()
    return batch


@functools.lru_cache(maxsize=4)  # training and a few evaluation splits
def _load(path: Path) -> Batches:
    return pickle.loads(path.read_bytes())


class CorruptLog:
    """Log of unreadable examples, called with the array `corrupt` of each batch; it warns of each once.

    It stops the run if they exceed a fraction of the data, or of the examples read so far if the data are endless.
    """

    def __init__(self, batches: Batches, max_share: float):
        self.batches, self.source, self.max_share = batches, batches.source, max_share
        self.seen: set[int] = set()
        self._read = 0  # number of examples that all processes have read, for an endless source

    def __call__(self, corrupt: np.ndarray) -> None:
        for index in sorted(set(corrupt[corrupt >= 0].tolist()) - self.seen):
            self.seen.add(index)
            warnings.warn(
                f"Unreadable example replaced by its neighbour ({len(self.seen)} so far): {self._name(index)}",
                stacklevel=2,
            )
        self._read += len(corrupt) * self.batches.processes  # `seen` is of all processes
        examples = size(self.source) or self._read
        if len(self.seen) > self.max_share * examples:
            names = "\n  ".join(self._name(i) for i in sorted(self.seen)[:10])
            raise DataError(
                f"data.max_corrupt={self.max_share}: {len(self.seen)} of {examples} examples are unreadable. "
                f"Fix or remove them, or raise data.max_corrupt. The first:\n  {names}"
            )

    def _name(self, index: int) -> str:
        return f"{self.source.name(index)} ({self.batches.unreadable_reason(index)})"


def folder_prefix(process: int | None) -> str:
    """Return the prefix of the folders through which a process exchanges arrays with its workers."""
    return f"leanformer-{process}-"


def count_cores() -> int:
    """Return the number of CPU cores that this process may use, or of all cores if the system does not tell."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def check_main_program(workers: int) -> None:
    """Raise ConfigError in a worker process that imports the main program and thereby begins the run again."""
    if workers and getattr(multiprocessing.current_process(), "_inheriting", False):  # what Python's own check reads
        raise ConfigError(
            "A worker process imports the main program, which would begin this run again. Put what it runs under "
            f'`if __name__ == "__main__":`, or set data.workers=0 (now {workers}).'
        )


def map_ordered(function: Callable[[Any], Any], items: Iterable[Any], workers: int, *, ahead: int = 2) -> Iterator[Any]:
    """Yield function(item) for each item, in order; worker processes compute `ahead` results each in advance.

    With workers, which stay for later calls, the function, items and results are pickled. Items may be endless.
    """
    if not workers:
        yield from map(function, items)
        return
    executor = _processes(workers)
    running: collections.deque[concurrent.futures.Future[Any]] = collections.deque()
    rest = iter(items)
    try:
        running.extend(executor.submit(function, item) for item in itertools.islice(rest, ahead * workers))
        while running:
            running.extend(executor.submit(function, item) for item in itertools.islice(rest, 1))
            yield running.popleft().result()
    except concurrent.futures.BrokenExecutor as error:
        _processes.cache_clear()
        raise DataError(
            "A worker process ended early. If no error of its own is above, it was killed, probably out of memory: use "
            "fewer data.workers."
        ) from error
    finally:
        concurrent.futures.wait([future for future in running if not future.cancel()])


@functools.cache
def _processes(workers: int) -> concurrent.futures.ProcessPoolExecutor:
    spawned = multiprocessing.get_context("spawn")  # not forked: this process has threads
    return concurrent.futures.ProcessPoolExecutor(workers, mp_context=spawned, initializer=_begin_worker)


def _begin_worker() -> None:
    """Ignore the signals that schedulers and Ctrl-C send to all processes; hide GPUs; end with the parent."""
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    os.environ.update(CUDA_VISIBLE_DEVICES="", JAX_PLATFORMS="cpu", TOKENIZERS_PARALLELISM="false")
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    if (parent := multiprocessing.parent_process()) is not None:
        parent.join()
        for folder in Path(SHARED_FOLDER).glob(f"{folder_prefix(parent.pid)}*"):  # a killed parent leaves them
            shutil.rmtree(folder, ignore_errors=True)
    os._exit(1)
