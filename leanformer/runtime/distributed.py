"""Several processes as one program: how they meet, and how all of them end when one does.

A process that nobody told about others (`cluster.py`) runs alone and opens no connection. A peer that is killed or cut
off is noticed within HEARTBEAT seconds and ends this process; one that ends on an error says so first, and the others
end with its status.
"""

import contextlib
import faulthandler
import os
import signal
import socket
import sys
import threading
import time
import traceback
from typing import Any, NoReturn

import jax

from leanformer.errors import USER_ERROR, ConfigError
from leanformer.runtime import cluster as clusters
from leanformer.runtime import peers
from leanformer.runtime.jax_internals import coordinator_address


HEARTBEAT = 30  # seconds without a sign of life after which a process counts as dead
LEAVE = 300  # seconds that a process in good order waits for the others to end too
LINGER = 5  # seconds that process 0 stays after a failure, for the others to read of it
REMEDY = "Start all of them, with one address that every host can reach and whose port is free on that of process 0."


def start(
    coordinator: str | None = None,
    processes: int | None = None,
    process: int | None = None,
    connect_seconds: int = 300,
) -> None:
    """Meets the other processes, if flags or the environment say that there are any, within `connect_seconds`. Call it
    before anything touches a device.

    From here on the standard output of all but process 0 is dropped, and their errors are kept.

    Raises:
        ConfigError: not all of the processes came in time, or who they are is unclear.
    """
    cluster = clusters.detect(os.environ, coordinator, processes, process)
    _kind[:] = [cluster.kind]
    if cluster.processes == 1:
        return
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.config.update("jax_enable_preemption_service", False)  # it would take SIGTERM away from interrupt.py
    # JAX would abort without a word to the user.
    late = threading.Timer(connect_seconds, _too_late, [cluster, connect_seconds])
    late.daemon = True
    late.start()
    try:
        if cluster.process == 0 and cluster.coordinator:
            _check_port(int(cluster.coordinator.rpartition(":")[2]))
        jax.distributed.initialize(
            cluster.coordinator,
            cluster.processes,
            cluster.process,
            local_device_ids=cluster.devices,
            initialization_timeout=connect_seconds + 60,
            heartbeat_timeout_seconds=HEARTBEAT,
            shutdown_timeout_seconds=LEAVE,
        )
    except Exception as error:  # whatever JAX and its cluster detection make of a wrong environment
        raise ConfigError(f"{_asked(cluster)} They cannot meet: {error}\n{REMEDY}") from error
    finally:
        late.cancel()
    if not peers.first():
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    _watcher.start()


def _check_port(port: int) -> None:
    """Raises OSError where a port is taken: the coordinator would only crash."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(("", port))


def describe() -> dict[str, str]:
    """For people: how many processes, who asked for them, and where they met."""
    if peers.count() == 1:
        return {"processes": "one, on its own"}
    where = coordinator_address()
    return {"processes": f"{peers.count()}, asked for by: {_kind[0]}; this is process {peers.index()}; met at {where}"}


def _asked(cluster: clusters.Cluster) -> str:
    where = cluster.coordinator or coordinator_address() or "a place that JAX was to find"
    return f"Process {cluster.process} of {cluster.processes} ({cluster.kind}) was to meet the others at {where}."


def _too_late(cluster: clusters.Cluster, seconds: int) -> NoReturn:
    words = f"After {seconds} s (--connect_seconds) {_found(cluster)}."
    print(f"\nError: {_asked(cluster)} {words}\n{REMEDY}", file=sys.stderr, flush=True)
    os._exit(USER_ERROR)


def _found(cluster: clusters.Cluster) -> str:
    """What is at the meeting place."""
    address = cluster.coordinator or coordinator_address()
    if cluster.process == 0 or address is None:
        return f"not all of the other {cluster.processes - 1} have come"
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=5).close()
    except socket.gaierror:
        return f"the name {host} is still unknown here"
    except OSError as error:
        return f"nobody can be reached there ({error.strerror or error})"
    return "process 0 answers there, but others have not come"


def _watch_peers() -> None:
    """Ends this process when another says that it failed."""
    while not _leaving.wait(1.0):
        try:
            failed = peers.told("failed")
            if failed and not _leaving.is_set():
                who, (status, words) = min(failed.items())
                print(f"\nProcess {peers.index()} ends, for process {who} failed: {words}", file=sys.stderr, flush=True)
                _end("read", True, status)
        except jax.errors.JaxRuntimeError:
            pass  # no coordinator: JAX ends this process by its heartbeats


def _end(folder: str, content: Any, status: int) -> NoReturn:
    """Leaves a word and ends this process at once; process 0, which keeps the words, once all others have left one.
    The usual way to end would have JAX wait for all of them."""
    with contextlib.suppress(jax.errors.JaxRuntimeError):  # no coordinator any more: nobody to tell
        peers.tell(f"{folder}/{peers.index()}", content)
        deadline = time.monotonic() + LINGER
        while peers.first() and time.monotonic() < deadline:
            time.sleep(0.2)
            if len(peers.told("read") | peers.told("failed")) == peers.count():
                break
    sys.stderr.flush()
    os._exit(status)


def leave() -> None:
    """Waits for the other processes to end in good order too; the last thing that a process does."""
    if peers.count() > 1:
        _leaving.set()
        _watcher.join()  # a thread inside the store when Python ends would abort the process
        jax.distributed.shutdown()


def fail(status: int, words: str) -> NoReturn:
    """Ends this process, and tells the others, which then end too, with its status."""
    _leaving.set()
    _end("failed", (status, words), status)


def crash(error: BaseException) -> NoReturn:
    """Ends a process on an error that nobody expected, which may be the first sign that another one is dead: shows it
    with the stacks of all threads."""
    traceback.print_exception(error)
    faulthandler.dump_traceback(all_threads=True)
    status = 128 + signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    fail(status, f"{type(error).__name__}: {str(error)[:300]}")


_kind = ["nobody"]  # who asked for the processes that met
_leaving = threading.Event()
_watcher = threading.Thread(target=_watch_peers, name="peers", daemon=True)
