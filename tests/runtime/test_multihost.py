"""Exchange of values between processes, here threads with one store."""

import concurrent.futures
import itertools
import threading

import pytest

from leanformer.runtime import multihost


PROCESSES, CALLS = 3, 20


class Store(dict):
    def key_value_set(self, key, value, allow_overwrite):
        self[key] = value

    def key_value_dir_get(self, folder):
        return [(key, value) for key, value in [*self.items()] if key.startswith(folder)]

    def key_value_delete(self, key):
        del self[key]


@pytest.fixture
def store(monkeypatch):
    result, process = Store(), threading.local()
    calls = [itertools.count() for _ in range(PROCESSES)]

    class Calls:
        def __next__(self):
            return next(calls[process.index])

    monkeypatch.setattr(multihost, "store", lambda: result)
    monkeypatch.setattr(multihost, "count", lambda: PROCESSES)
    monkeypatch.setattr(multihost, "index", lambda: process.index)
    monkeypatch.setattr(multihost, "_calls", Calls())
    result.process = process
    return result


def test_values_are_exchanged_and_forgotten(store):
    def run(index):
        store.process.index = index
        gathered = [multihost.all_gather_host([index, call]) for call in range(CALLS)]
        return gathered, [multihost.broadcast_from_primary({"from": index, "call": call}) for call in range(CALLS)]

    with concurrent.futures.ThreadPoolExecutor(PROCESSES) as pool:
        for gathered, sent in pool.map(run, range(PROCESSES)):
            assert gathered == [[[index, call] for index in range(PROCESSES)] for call in range(CALLS)]
            assert sent == [{"from": 0, "call": call} for call in range(CALLS)]
    assert len(store) == PROCESSES  # the values of the last call
