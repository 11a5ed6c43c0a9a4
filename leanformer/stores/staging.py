"""Local folder in which `train` works if its workdir is the URL of an object store, and its thread of uploads."""

import contextlib
import hashlib
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

from leanformer.errors import LeanformerError
from leanformer.runtime import multihost, signals
from leanformer.stores import BACKOFF, POLL, Store, StoreError, retry
from leanformer.stores.lease import Lease, LeaseLost
from leanformer.stores.mirror import Mirror
from leanformer.stores.shared_folder import other_process, report_end, share, staging_root


SMALL = 30.0  # seconds between uploads of changed small files, if there is no new checkpoint
PATIENCE = 120.0  # seconds of failures after which the last upload is given up


def local_folder(url: str) -> Path:
    """Return the local folder of a run at a URL.

    It has the name of the URL's last part, because reports print names of runs, in a folder named after a hash of the
    URL.
    """
    url = url.rstrip("/")
    return staging_root() / hashlib.sha256(url.encode()).hexdigest()[:16] / url.rpartition("/")[2]


@contextlib.contextmanager
def mirrored(url: str) -> Iterator[Path]:
    """Yield the local folder of a run that trains, and upload what it saves during and at the end of a `with` block.

    All processes of a run must call it. Process 0 holds the `Lease` of the URL, downloads and uploads; the others use
    the same folder. If another run takes the lease, this process gets SIGTERM. If the block raises, a failure of the
    last upload is a warning.

    Args:
        url: URL of the run's workdir.

    Raises:
        ConfigError: another run uses the URL or takes it over, or the folder is not shared by all hosts.
        StoreError: the store cannot be read, or the last upload fails.
    """
    if not multihost.is_primary():
        with other_process() as folder:
            yield folder
        return
    with contextlib.ExitStack() as stack:
        stack.push(report_end)
        store = Store(url)
        lease = stack.enter_context(Lease(store, lambda: _stop_training(url)))
        folder = local_folder(url)
        mirror = Mirror(store, folder, lease.confirm)
        print(f"{store.url} is staged in {folder}. {retry(mirror.download)}", file=sys.stderr, flush=True)
        share(folder)
        stack.enter_context(_Uploads(mirror))
        yield folder


def _stop_training(url: str) -> None:
    """Have this process save locally and stop, as a scheduler does. The end of `mirrored` raises the error."""
    print(f"WARNING: another run has taken over {url}, or its lock was deleted.", file=sys.stderr, flush=True)
    os.kill(os.getpid(), signal.SIGTERM)


class _Uploads:
    """Thread that uploads what changes in the local folder, and the last upload at the end of a `with` block."""

    def __init__(self, mirror: Mirror):
        self.mirror, self._store = mirror, mirror.store
        self._done = threading.Event()
        self._lost: LeaseLost | None = None
        self._thread = threading.Thread(target=self._work, name="upload", daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        self._done.set()
        if error is not None and not isinstance(error, Exception):  # the second Ctrl-C
            print(f"\n{self._remains()}", file=sys.stderr, flush=True)
            return
        try:
            with _stop_signals_wait(self._store.url):
                self._finish()
        except KeyboardInterrupt:
            print(f"\n{self._remains()}", file=sys.stderr, flush=True)
            raise
        except LeanformerError as failure:
            if kind is None:
                raise
            print(f"WARNING: {failure}", file=sys.stderr, flush=True)  # the error of the run is reported too

    def _work(self) -> None:
        failures, small = 0, -SMALL
        while not self._done.wait(min(BACKOFF, POLL * 2 ** min(failures, 10))):
            try:
                due = time.monotonic() - small >= SMALL
                self.mirror.upload(small=due)
                small = time.monotonic() if due else small
            except LeaseLost as error:
                self._lost = error
                return
            except (LeanformerError, OSError) as error:
                failures += 1
                if failures == 1:
                    self._warn(error)
            else:
                if failures:
                    print(f"{self._store.url} can be written to again.", file=sys.stderr, flush=True)
                failures = 0

    def _warn(self, error: Exception) -> None:
        print(
            f"WARNING: {error} Training continues, and the upload is repeated. {self.mirror.folder} is complete.",
            file=sys.stderr,
            flush=True,
        )

    def _finish(self) -> None:
        """Upload the rest, and report it. Raises StoreError if the store cannot be written to within PATIENCE."""
        begun = time.monotonic()
        self._thread.join()
        try:
            if self._lost is not None:
                raise self._lost
            retry(lambda: self.mirror.upload(small=True), PATIENCE)
        except LeaseLost as error:
            raise LeaseLost(f"{error} What it has saved is in {self.mirror.folder}.") from error
        except StoreError as error:
            raise StoreError(f"{error} {self._remains()}") from error
        steps = sorted(self.mirror.steps)
        about = f"checkpoints of steps {', '.join(map(str, steps))}" if steps else "no checkpoint"
        seconds = time.monotonic() - begun
        print(f"{self._store.url} is up to date: {about}. The last upload took {seconds:.1f} s.", flush=True)

    def _remains(self) -> str:
        return (
            f"The complete run is in {self.mirror.folder}. The same command on this machine uploads it and resumes; "
            f"uploaded so far: {', '.join(map(str, sorted(self.mirror.steps))) or 'no checkpoint'}."
        )


@contextlib.contextmanager
def _stop_signals_wait(url: str) -> Iterator[None]:
    """Have stop signals wait for the end of a short block. Only Ctrl-C ends it, by KeyboardInterrupt."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def report(number: int, _: FrameType | None) -> None:
        if number == signal.SIGINT:
            raise KeyboardInterrupt
        print(f"\n{signal.Signals(number).name}: still uploading to {url}. Ctrl-C stops.", file=sys.stderr, flush=True)

    signals.install()
    before = {number: signal.signal(number, report) for number in signals.handled()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
