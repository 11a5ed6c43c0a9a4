"""Lease of a folder in an object store, which has no locks: an object that its holder renews while it runs."""

import contextlib
import json
import os
import socket
import sys
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from leanformer.errors import ConfigError
from leanformer.stores import Store, StoreError, retry


NAME = "lock.json"
RENEW = 20.0  # seconds between renewals
EXPIRE = 90.0  # seconds without renewal after which another run may take the lease
PATIENCE = 120.0  # seconds to wait for a lease in use, as for the lock of a local workdir
SETTLE = 1.0  # seconds after which a run that took an expired lease checks that no other run took it too


class LeaseLost(ConfigError):
    """Lease that another run has taken; this run must not write to the store any more."""


class Lease:
    """Context manager that holds the lease of a store, which a thread renews.

    Entering it waits up to PATIENCE seconds for another run that holds the lease, then raises ConfigError. The lease is
    created conditionally, so that of two runs that start at once only one gets it. Its age is computed from the clocks
    of two hosts, so a clock that is wrong by more than a minute can let two runs in. The first of them then finds at
    its next renewal that the lease is no longer its own.

    Args:
        store: store to lease.
        on_loss: function that is called from the thread when another run has taken the lease.
    """

    def __init__(self, store: Store, on_loss: Callable[[], None] = lambda: None):
        self.store, self._on_loss = store, on_loss
        self.id = uuid.uuid4().hex
        self._renewed = 0.0  # time.monotonic() of the last renewal
        self._taken_by: dict[str, Any] | None = None  # the other lease, once this one is lost
        self._lock = threading.Lock()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._keep, name="lease", daemon=True)

    def __enter__(self) -> "Lease":
        begun, reported = time.monotonic(), False
        while not retry(self._try):
            about = f"{self.store.url} is in use by {_describe_holder(self._read())}"
            if time.monotonic() - begun > PATIENCE:
                raise ConfigError(
                    f"--workdir={about}. Stop that run, wait for its end, or use another folder. If it no longer runs, "
                    f"delete {self.store.url}/{NAME}."
                )
            if not reported:
                print(f"{about}. Waiting up to {PATIENCE:.0f} s for its end.", file=sys.stderr, flush=True)
                reported = True
            time.sleep(1.0)
        self._renewed = time.monotonic()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join(RENEW)  # it may be waiting for a store that is down
        if time.monotonic() - self._renewed > EXPIRE:
            return
        try:
            if self._read_id() == self.id:
                self.store.delete([NAME])
        except StoreError as error:
            print(f"WARNING: {NAME} was not deleted, and expires in {EXPIRE:.0f} s: {error}", file=sys.stderr)

    def confirm(self) -> None:
        """Raise LeaseLost if another run has taken the lease, or its object was deleted.

        The store is read only if no renewal was recent; StoreError if it cannot be read.
        """
        if time.monotonic() - self._renewed > 2 * RENEW:
            self._renew()
        if self._taken_by is not None:
            raise LeaseLost(
                f"--workdir={self.store.url}: {_describe_holder(self._taken_by)} has taken over this folder, or its "
                f"{NAME} was deleted. This run has stopped writing to it. Let only one of them run."
            )

    def _try(self) -> bool:
        """Try to get the lease, and return whether it worked. An expired lease is deleted first."""
        lease = self._read()
        if lease is not None:
            if not _is_free(lease):
                return False
            self.store.delete([NAME])
        if not self.store.create(NAME, self._content()):
            return False
        if lease is not None:
            time.sleep(SETTLE)
        return self._read_id() == self.id

    def _renew(self) -> None:
        with self._lock:
            lease = self._read() or {}
            if self._taken_by is None and lease.get("id") != self.id:
                self._taken_by = lease
            if self._taken_by is None:
                self.store.write(NAME, self._content())
                self._renewed = time.monotonic()

    def _keep(self) -> None:
        while not self._done.wait(RENEW):
            with contextlib.suppress(StoreError):  # the upload thread reports a store that is down
                self._renew()
            if self._taken_by is not None:
                self._on_loss()
                return

    def _read_id(self) -> Any:
        return (self._read() or {}).get("id")

    def _read(self) -> dict[str, Any] | None:
        """Return the content of the lease; None if there is none; empty if it is not one."""
        content = self.store.read(NAME)
        try:
            lease = json.loads(content) if content is not None else None
        except ValueError:
            return {}
        return lease if lease is None or isinstance(lease, dict) else {}

    def _content(self) -> bytes:
        return json.dumps({"id": self.id, "host": _host(), "pid": os.getpid(), "time": time.time()}).encode()


def _describe_holder(lease: dict[str, Any] | None) -> str:
    """Describe the process that holds a lease."""
    lease = lease or {}
    return f"process {lease.get('pid', 'unknown')} on {str(lease.get('host', 'an unknown host')).split(' ')[0]}"


def _host() -> str:
    """Return the name of this host and the namespace of its process ids, which differs between containers."""
    namespace = Path("/proc/self/ns/pid")
    return f"{socket.gethostname()} {namespace.readlink() if namespace.exists() else ''}"


def _is_free(lease: dict[str, Any]) -> bool:
    """Return whether a lease may be taken: it has expired, is no lease, or belongs to a dead process of this host."""
    pid, written = lease.get("pid"), lease.get("time")
    if not isinstance(pid, int) or not isinstance(written, int | float):
        return True
    if lease.get("host") == _host() and (pid == os.getpid() or not Path(f"/proc/{pid}").exists()):
        return Path("/proc/self").exists()
    return time.time() - written > EXPIRE
