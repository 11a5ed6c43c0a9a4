"""Agreement of the processes of a run on the local folder of process 0, which downloads and uploads for all."""

import contextlib
import math
import os
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from leanformer.errors import ConfigError, LeanformerError
from leanformer.runtime import multihost
from leanformer.stores import StoreError


VARIABLE = "LEANFORMER_STAGING"  # environment variable: folder of the local copies
DEFAULT = "~/.cache/leanformer/staging"
VISIBLE = 15.0  # seconds for a file to become visible on other hosts
END_AFTER_ERROR = 60.0  # seconds that other processes wait for process 0 if all of them have failed
AGREED = "staging"  # folder of the values that process 0 publishes


def staging_root() -> Path:
    """Return the folder in which runs of object stores have their local copies, from the environment or by default."""
    return Path(os.environ.get(VARIABLE) or DEFAULT).expanduser().absolute()


def _report(name: str, content: Any) -> None:
    """Publish a value to the other processes."""
    if multihost.count() > 1:
        multihost.kv_set(f"{AGREED}/{name}", content)


def report_end(kind: type[BaseException] | None, *_: object) -> None:
    """Tell the other processes that process 0 has uploaded everything, or has failed; exit function of an ExitStack.

    Args:
        kind: class of the exception that ended the block; None for success.
    """
    _report("end", kind is None)


def _wait_for(name: str, seconds: float = math.inf) -> Any:
    """Return the value that process 0 publishes, or None after `seconds`. If process 0 fails, this process is ended."""
    deadline = time.monotonic() + seconds
    while (content := multihost.kv_list(AGREED).get(name)) is None and time.monotonic() < deadline:
        time.sleep(0.2)
    return content


def share(folder: Path) -> None:
    """Publish the local folder of process 0, and check that the other processes see it. Only process 0 calls it.

    It does nothing in a single process.

    Args:
        folder: local folder, which exists.

    Raises:
        ConfigError: another process does not see it.
    """
    if multihost.count() == 1:
        return
    token = folder.parent / f"shared-{uuid.uuid4().hex}"
    token.touch()
    _report("folder", [str(folder), str(token)])
    try:
        _check_shared(folder, token)
    finally:
        token.unlink()


def _check_shared(folder: Path, token: Path) -> None:
    """Raise ConfigError in all processes if one of them does not see a file. All processes must call it."""
    deadline = time.monotonic() + VISIBLE
    while not token.exists() and time.monotonic() < deadline:
        time.sleep(0.2)
    visible = multihost.all_gather_host(token.exists())
    if not all(visible):
        missing = ", ".join(str(index) for index, seen in enumerate(visible) if not seen)
        raise ConfigError(
            f"{VARIABLE}: {folder} of process 0 is not visible to these processes: {missing}. Set {VARIABLE} to "
            "a folder on a file system that all hosts share, or mount the bucket as a folder, for example with gcsfuse."
        )


@contextlib.contextmanager
def other_process() -> Iterator[Path]:
    """Yield the local folder of process 0 to another process in a `with` block; wait until process 0 has uploaded all.

    After a LeanformerError in the block the wait is at most END_AFTER_ERROR seconds, and after other exceptions there
    is none.

    Raises:
        ConfigError: a process does not see the folder.
        StoreError: process 0 has failed.
    """
    folder, token = map(Path, _wait_for("folder"))
    _check_shared(folder, token)
    try:
        yield folder
    except LeanformerError:
        _wait_for("end", END_AFTER_ERROR)  # reporting the error would end process 0, which may still upload
        raise
    if not _wait_for("end"):
        raise StoreError("Process 0 has failed; its message has the reason.")
