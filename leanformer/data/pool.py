"""Worker processes that generate parts of a dataset or read examples, started once and shared by all callers."""

import collections
import concurrent.futures
import functools
import itertools
import multiprocessing
import os
import shutil
import signal
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from leanformer.errors import ConfigError, DataError


STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)  # for the parent only
SHARED_FOLDER = "/dev/shm" if Path("/dev/shm").is_dir() else tempfile.gettempdir()  # in memory, if there is one


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
    """Yield function(item) for each item, in order, computed in advance by worker processes.

    With workers, function, items and results are pickled. An error of `function` is raised in place of its result.

    Args:
        function: function of one item; with workers it is sent with every item.
        items: items, also endless.
        workers: number of processes, which stay for later calls; 0 for this process.
        ahead: number of results per worker that are computed in advance.
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
