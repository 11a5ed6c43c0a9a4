"""Object stores in memory, which can fail, and folders that look like a run."""

import json
from pathlib import Path

from fsspec.implementations.memory import MemoryFileSystem

from leanformer import stores
from leanformer.runtime import integrity


URL = "memory://bucket/run"


class Killed(BaseException):
    """End of a process in the middle of an upload."""


def use_memory(monkeypatch):
    """Accept memory:// URLs, with an empty store, one transfer at a time and no pauses before a retry."""
    monkeypatch.setitem(stores.PACKAGES, "memory", ("fsspec", "memory"))
    monkeypatch.setattr(MemoryFileSystem, "store", {})
    monkeypatch.setattr(MemoryFileSystem, "pseudo_dirs", [""])
    # Readers of fsspec's memory share the position in a file, so that two threads would read parts of it.
    monkeypatch.setattr(MemoryFileSystem, "cat_file", read_whole)
    monkeypatch.setattr(
        MemoryFileSystem, "get_file", lambda fs, name, path: Path(path).write_bytes(read_whole(fs, name))
    )
    monkeypatch.setattr(stores, "PARALLEL", 1)
    monkeypatch.setattr(stores, "POLL", 0.01)


def read_whole(fs, name):
    """Return the content of an object in memory."""
    try:
        return fs.store[fs._strip_protocol(name)].getvalue()
    except KeyError as error:
        raise FileNotFoundError(name) from error


class FailingFiles:
    """File system that fails: `error` is raised by every change from the one of number `after` on.

    Attributes:
        changes: number of changes so far.
        log: names of the changed objects.
    """

    def __init__(self, fs, error=None, after=0):
        self._fs, self.error, self.after, self.changes, self.log = fs, error, after, 0, []

    def __getattr__(self, name):
        method = getattr(self._fs, name)
        if name not in ("pipe_file", "put_file", "rm_file"):
            return method

        def change(*args, **options):
            if self.error is not None and self.changes >= self.after:
                raise self.error
            self.changes += 1
            self.log.append(f"{'-' if name == 'rm_file' else '+'}{args[1 if name == 'put_file' else 0]}")
            return method(*args, **options)

        return change


def record(folder, last):
    """Write the records of all steps up to `last`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "metrics.jsonl").write_text("".join(f'{{"step": {i}, "kind": "train"}}\n' for i in range(1, last + 1)))


def save(folder, step, content="state"):
    """Write the records up to a step and its checkpoint."""
    record(folder, step)
    checkpoint = folder / "checkpoints" / str(step)
    (checkpoint / "d").mkdir(parents=True)
    (checkpoint / "_METADATA").write_text("{}")
    (checkpoint / "d" / "array").write_text(f"{content} {step}")
    integrity.write_checksums(checkpoint)


def check_readable(folder, steps):
    """Assert that the checkpoints in a folder are undamaged, and the records reach the newest."""
    for step in steps:
        assert integrity.find_corruption(folder / "checkpoints" / str(step)) is None
        assert (folder / "checkpoints" / str(step) / "files.json").is_file()
    records = [json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert records == [*range(1, len(records) + 1)] and len(records) >= max(steps)
