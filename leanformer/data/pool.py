"""Worker processes that generate parts of a dataset or read examples."""

import collections
import concurrent.futures
import itertools
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from leanformer.errors import ConfigError, DataError
from leanformer.runtime import signals


SIGNALS = tuple(signals.STATUS)  # signals that stop a run


def count_cores() -> int:
    """Return the number of CPU cores that this process may use, or of all cores if the system does not tell."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def check_main_program(workers: int) -> None:
    """Raise ConfigError if worker processes could not import the main program, as each does when it starts.

    A worker that dies then can leave its parent waiting for ever: with more than 64 KB to send, Python blocks.
    """
    if not workers:
        return
    if getattr(multiprocessing.current_process(), "_inheriting", False):  # what Python's own check reads
        raise ConfigError(
            "A worker process imports the main program, which would begin this run again. Put what it runs under "
            f'`if __name__ == "__main__":`, or set data.workers=0 (now {workers}).'
        )
    main = sys.modules["__main__"]
    path = getattr(main, "__file__", None)
    if path and getattr(main, "__spec__", None) is None and not Path(path).exists():
        raise ConfigError(
            f"data.workers={workers}: worker processes import the main program, and there is no file {path} (a program "
            "on standard input has none). Save it as a file, or set data.workers=0."
        )


def map_ordered(function: Callable[[Any], Any], items: Iterable[Any], workers: int) -> Iterator[Any]:
    """Yield function(item) for each item, in order, computed by worker processes, or in this process for 0 workers.

    At most 2 x workers + 1 results are in memory at a time. With workers, function, items and results must be
    picklable. An error of `function` is raised in place of its result.

    Raises:
        ConfigError: workers could not import the main program.
        DataError: a worker was killed.
    """
    if not workers:
        yield from map(function, items)
        return
    check_main_program(workers)
    spawned = multiprocessing.get_context("spawn")  # not forked: this process has threads
    pool = concurrent.futures.ProcessPoolExecutor(workers, mp_context=spawned, initializer=begin_worker)
    running: collections.deque[concurrent.futures.Future[Any]] = collections.deque()
    rest = iter(items)
    try:
        running.extend(pool.submit(function, item) for item in itertools.islice(rest, 2 * workers))
        while running:
            running.extend(pool.submit(function, item) for item in itertools.islice(rest, 1))
            yield running.popleft().result()
    except concurrent.futures.BrokenExecutor as error:
        raise DataError(
            "A worker process ended early. If no error of its own is above, it was killed, probably out of memory: use "
            "fewer data.workers."
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


def begin_worker(*_: int) -> None:
    """Prepare this process to be a worker; arguments are ignored.

    It ignores signals to stop, which schedulers and Ctrl-C send to all processes but only the parent handles. It ends
    with its parent, sees no GPU, and tokenises with one core. A signal before this call would end the worker, so the
    parent may block signals, which are unblocked here.
    """
    hide_gpus()
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    threading.Thread(target=_end_with_parent, daemon=True).start()


def hide_gpus() -> None:
    """Make JAX use the CPU in this process and its children, by environment variables and, if imported, JAX's config.

    A reader or a library that starts JAX would otherwise take memory of every GPU.
    """
    os.environ.update(CUDA_VISIBLE_DEVICES="", JAX_PLATFORMS="cpu")
    if "jax" in sys.modules:  # which has read the variable
        sys.modules["jax"].config.update("jax_platforms", "cpu")


def _end_with_parent() -> None:
    if (parent := multiprocessing.parent_process()) is not None:
        parent.join()
    os._exit(1)
