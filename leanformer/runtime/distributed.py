"""Start and end of a multi-process run.

A single process (`cluster.py`) opens no connection. If another process is killed or disconnected, this process ends
within HEARTBEAT seconds. A process that fails reports its error first, and the others end with its exit status.
"""

import contextlib
import faulthandler
import ipaddress
import os
import re
import signal
import socket
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any, NoReturn

import jax

from leanformer.errors import USER_ERROR, ConfigError
from leanformer.runtime import cluster as clusters
from leanformer.runtime import cuda, jax_internals, multihost, signals
from leanformer.runtime.jax_internals import coordinator_address


HEARTBEAT = 30  # seconds without a heartbeat after which a process counts as dead
LEAVE = 300  # seconds that a process waits at its normal end for the other processes to end
ESTABLISHED = "01"  # state of a connection in /proc/net/tcp
LINGER = 5  # seconds that process 0 stays after a failure so that the other processes can read the error
REMEDY = (
    "Start all processes with the same address. Every host must reach it, and its port must be free on the host of "
    "process 0."
)


def start(
    coordinator: str | None = None, processes: int | None = None, process: int | None = None, connect_seconds: int = 300
) -> None:
    """Connect to the other processes, if flags or the environment name any. Call this before anything uses a device.

    Afterwards only process 0 writes to the standard output. All processes write to the standard error.

    Args:
        coordinator, processes, process: values of --coordinator, --processes and --process; None if not given.
        connect_seconds: time limit for all processes to connect; a process that exceeds it ends with status 2.

    Raises:
        ConfigError: the layout is invalid, JAX cannot connect, or two processes use one GPU.
    """
    cluster = clusters.detect(os.environ, coordinator, processes, process)
    _kind[:] = [cluster.kind]
    if cluster.processes == 1:
        return
    jax_internals.check_processes()
    _check_address(cluster)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.config.update("jax_enable_preemption_service", False)  # it would handle SIGTERM instead of stopping.py
    # JAX alone would abort without a message for the user.
    timer = threading.Timer(connect_seconds, _exit_on_timeout, [cluster, connect_seconds])
    timer.daemon = True
    timer.start()
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
    except Exception as error:  # JAX and its cluster detection raise errors of many classes
        raise ConfigError(f"{_describe_target(cluster)}: {error}\n{REMEDY}") from error
    finally:
        timer.cancel()
    cuda.check_shared(multihost.all_gather_host([socket.gethostname(), cuda.uuids(os.environ, cluster.devices)]))
    if not multihost.is_primary():
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    _watcher.start()
    signals.report_to(fail)  # until training handles signals, the process that gets one ends all of them


def _check_address(cluster: clusters.Cluster) -> None:
    """Raise ConfigError if the coordinator's name is that of another host and resolves to this one.

    Some systems list every name as 127.0.1.1; then all processes but those on one host would wait in vain.
    """
    host = cluster.coordinator.rpartition(":")[0] if cluster.coordinator else next(iter(_nodes(cluster)), "")
    if host in ("", "localhost") or host.partition(".")[0] == socket.gethostname().partition(".")[0]:
        return
    with contextlib.suppress(OSError):  # `_diagnose` reports a name that cannot be resolved
        address = ipaddress.ip_address(socket.gethostbyname(host))
        if address.is_loopback and not re.match(r"[\d.:\[\]]+$", host):
            raise ConfigError(
                f"Coordinator {host} resolves to {address} on {socket.gethostname()}, which is this host itself. "
                "Correct /etc/hosts, or pass --coordinator with an address that every host reaches."
            )


def _nodes(cluster: clusters.Cluster) -> list[str]:
    return clusters.list_nodes(os.environ) if cluster.kind == "SLURM" else []


def _check_port(port: int) -> None:
    """Raise OSError if a port is in use; JAX's coordinator would crash without a message."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(("", port))


def describe() -> dict[str, str]:
    """Return {"processes": text} for the run header: their number and, if several, the coordinator and this index."""
    if multihost.count() == 1:
        return {"processes": "1 (single process)"}
    where = coordinator_address()
    return {
        "processes": f"{multihost.count()} (from {_kind[0]}); this is process {multihost.index()}; coordinator {where}"
    }


def _describe_target(cluster: clusters.Cluster) -> str:
    where = cluster.coordinator or coordinator_address() or "an address that JAX did not find"
    return f"Process {cluster.process} of {cluster.processes} ({cluster.kind}) could not connect at {where}"


def _exit_on_timeout(cluster: clusters.Cluster, seconds: int) -> NoReturn:
    problem = f"after {seconds} s (--connect_seconds) {_diagnose(cluster)}"
    print(f"\nError: {_describe_target(cluster)}: {problem}.\n{REMEDY}", file=sys.stderr, flush=True)
    os._exit(USER_ERROR)


def _diagnose(cluster: clusters.Cluster) -> str:
    """Return the result of a test connection to the coordinator, as a clause."""
    address = cluster.coordinator or coordinator_address()
    if cluster.process == 0 or address is None:
        connected = _connected_hosts(int(address.rpartition(":")[2])) if address else []
        missing = [name for name in _nodes(cluster)[1:] if not _addresses(name) & set(connected)]
        known = f"connected: {', '.join(connected) or 'none'}" + (f"; missing: {', '.join(missing)}" if missing else "")
        return f"not all of the other {cluster.processes - 1} processes have connected ({known})"
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=5).close()
    except socket.gaierror:
        return f"the host name {host} cannot be resolved here"
    except OSError as error:
        return f"the coordinator cannot be reached ({error.strerror or error})"
    return "process 0 answers, but other processes have not connected"


def _addresses(host: str) -> set[str]:
    """Return the addresses of a host; none if its name cannot be resolved."""
    with contextlib.suppress(OSError):
        return {str(entry[4][0]) for entry in socket.getaddrinfo(host, None)}
    return set()


def _connected_hosts(port: int, folder: Path = Path("/proc/net")) -> list[str]:
    """Return the addresses of other hosts with a connection to a port of this one, by Linux's tables."""
    hosts = set()
    for path in (folder / "tcp", folder / "tcp6"):
        for line in path.read_text(encoding="utf-8").splitlines()[1:] if path.is_file() else ():
            _, local, remote, state, *_ = line.split()
            if state == ESTABLISHED and int(local.rpartition(":")[2], 16) == port:
                words = bytes.fromhex(remote.partition(":")[0])  # 32-bit words in the order of the machine
                packed = b"".join(
                    words[i : i + 4][:: 1 if sys.byteorder == "big" else -1] for i in range(0, len(words), 4)
                )
                address: Any = ipaddress.ip_address(packed)
                address = getattr(address, "ipv4_mapped", None) or address
                hosts |= set() if address.is_loopback else {str(address)}
    return sorted(hosts)


def _watch_peers() -> None:
    """End this process when another process reports a failure."""
    while not _leaving.wait(1.0):
        try:
            failed = multihost.kv_list("failed")
            if failed and not _leaving.is_set():
                peer, (status, message) = min(failed.items())
                print(
                    f"\nProcess {multihost.index()} ends because process {peer} ended: {message}",
                    file=sys.stderr,
                    flush=True,
                )
                _end("read", True, status)
        except jax.errors.JaxRuntimeError:
            pass  # no coordinator: JAX ends this process by its heartbeats


def _end(folder: str, content: Any, status: int) -> NoReturn:
    """Publish `content` and end this process at once; process 0, which holds the store, waits for the others first.

    A normal end would have JAX wait for all processes.
    """
    with contextlib.suppress(jax.errors.JaxRuntimeError):  # the coordinator has already ended
        multihost.kv_set(f"{folder}/{multihost.index()}", content)
        deadline = time.monotonic() + LINGER
        while multihost.is_primary() and time.monotonic() < deadline:
            time.sleep(0.2)
            if len(multihost.kv_list("read") | multihost.kv_list("failed")) == multihost.count():
                break
    sys.stderr.flush()
    os._exit(status)


def leave() -> None:
    """Wait for the other processes, if any, to end normally too, and disconnect. Call this at the end of a command."""
    if multihost.count() > 1:
        _leaving.set()
        _watcher.join()  # a thread that uses the store while Python ends would abort the process
        jax.distributed.shutdown()


def fail(status: int, message: str) -> NoReturn:
    """End this process at once and report `message` to the other processes, which then end with the same exit status.

    Only for a run of several processes.
    """
    _leaving.set()
    _end("failed", (status, message), status)


def crash(error: BaseException) -> NoReturn:
    """Print `error` and the stacks of all threads, then end this process and, as in `fail`, the others.

    Call it in an except clause, in a run of several processes. The exit status is 130 for KeyboardInterrupt, else 1.
    Such an error may be the first sign that another process is dead.
    """
    traceback.print_exception(error)
    faulthandler.dump_traceback(all_threads=True)
    status = 128 + signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    fail(status, f"{type(error).__name__}: {str(error)[:300]}")


_kind = ["single process"]  # source of the process layout (`Cluster.kind`)
_leaving = threading.Event()
_watcher = threading.Thread(target=_watch_peers, name="peers", daemon=True)
