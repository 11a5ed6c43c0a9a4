"""Lease of a run's folder in an object store."""

import json
import os
import socket
import time

import pytest
from fake_stores import URL, use_memory
from messages import mentions, refuses

from leanformer.stores import Store, lease
from leanformer.stores.lease import Lease, LeaseLost


DEAD = 2**22 + 1  # larger than any process id


@pytest.fixture
def store(monkeypatch):
    use_memory(monkeypatch)
    monkeypatch.setattr(lease, "SETTLE", 0.01)
    monkeypatch.setattr(lease, "RENEW", 0.05)
    monkeypatch.setattr(lease, "PATIENCE", 0.5)
    return Store(URL)


def write(store, **changes):
    content = {"id": "other", "host": lease._host(), "pid": os.getppid(), "time": time.time(), **changes}
    store.write(lease.NAME, json.dumps(content).encode())


def read(store):
    return json.loads(store.read(lease.NAME))


def test_lease_is_renewed_and_released(store):
    with Lease(store) as taken:
        begun = read(store)
        assert begun["id"] == taken.id and begun["pid"] == os.getpid() and socket.gethostname() in begun["host"]
        time.sleep(0.3)
        assert read(store)["time"] > begun["time"]
        taken.confirm()
    assert store.read(lease.NAME) is None


def test_lease_in_use_is_refused_after_a_wait(store, capsys):
    write(store)
    begun = time.monotonic()
    with refuses(f"--workdir={URL}", os.getppid(), socket.gethostname(), lease.NAME), Lease(store):
        pass
    assert time.monotonic() - begun > 0.5 and read(store)["id"] == "other"
    assert mentions(capsys.readouterr().err, URL, os.getppid())


@pytest.mark.parametrize(
    "changes",
    [{"pid": DEAD}, {"pid": os.getpid()}, {"time": time.time() - 91}, {"time": "now"}, {"host": "x", "time": 0}],
)
def test_lease_of_a_dead_process_or_without_renewal_is_taken(store, changes):
    write(store, **changes)
    with Lease(store) as taken:
        assert read(store)["id"] == taken.id


@pytest.mark.parametrize("content", [b"", b"[]", b"\xff", b'{"id": 3}'])
def test_object_that_is_no_lease_is_replaced(store, content):
    store.write(lease.NAME, content)
    with Lease(store) as taken:
        assert read(store)["id"] == taken.id


@pytest.mark.parametrize("changes", [{"host": "elsewhere", "pid": DEAD}, {"time": time.time() + 3600}])
def test_process_of_another_host_is_not_taken_for_dead(store, changes):
    write(store, **{"time": time.time()} | changes)
    with refuses(lease.NAME), Lease(store):
        pass


def test_end_of_the_other_run_is_awaited(store, monkeypatch):
    write(store)
    begun = time.monotonic()
    monkeypatch.setattr(lease, "PATIENCE", 60.0)
    monkeypatch.setattr(lease.time, "sleep", lambda _: store.delete([lease.NAME]))
    with Lease(store) as taken:
        assert read(store)["id"] == taken.id
    assert time.monotonic() - begun < 10


@pytest.mark.parametrize("by", ["another run", "deletion"])
def test_loss_is_noticed(store, by):
    losses = []
    with Lease(store, lambda: losses.append(1)) as lost:
        deadline = time.monotonic() + 5
        while not losses and time.monotonic() < deadline:  # a renewal at the same moment may overwrite it once
            write(store, pid=77, host="elsewhere") if by == "another run" else store.delete([lease.NAME])
            time.sleep(0.01)
        with refuses(URL, *([77, "elsewhere"] if by == "another run" else [lease.NAME]), error=LeaseLost):
            lost.confirm()
    assert losses == [1]
    assert by == "deletion" or read(store)["id"] == "other"  # the lease of the other run stays


def test_frozen_run_asks_the_store_before_it_writes(store, monkeypatch):
    monkeypatch.setattr(lease, "RENEW", 1000.0)
    with Lease(store) as lost:
        write(store)
        lost.confirm()  # renewed a moment ago
        lost._renewed -= 3000
        with pytest.raises(LeaseLost):
            lost.confirm()


def test_two_leases_at_once(store):
    """Conditional creation lets only one in, also if both saw that there was none."""
    first, second = Lease(store), Lease(store)
    assert first._try()
    second._read = lambda: None
    assert not second._try()
