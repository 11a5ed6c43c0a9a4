"""Mirror of a run's local folder in an object store: what a run saves is uploaded while it trains.

Every change leaves a store from which a run can resume: the records are uploaded before the checkpoints that they lead
to, and the list of checksums of a checkpoint after its other files (`stores.layout`).
"""

import json
import os
import shutil
import sys
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

from leanformer.runtime import files, integrity
from leanformer.runtime.integrity import MANIFEST
from leanformer.stores import Store, StoreError
from leanformer.stores.layout import (
    CHECKPOINTS,
    complete_steps,
    download_step,
    in_checkpoints,
    is_step,
    leading_number,
    manifest_of,
    names_of_step,
    steps_of,
)
from leanformer.stores.lease import NAME as LEASE


SESSION = "session.json"  # object with the id of the last run of `train` that wrote to the store
SESSIONS = ".sessions"  # local file with the ids of the runs of `train` on this machine
LINKS = ".uploading"  # hard links to a checkpoint that is being uploaded, which may be deleted meanwhile
NOT_MIRRORED = ("lock", LEASE, SESSION)
NOT_DOWNLOADED = ("tensorboard",)  # a run never reads what it has written there

Signature = tuple[int, int, int]


class Mirror:
    """Local folder of a run and the store to which its files are uploaded.

    Methods raise StoreError if the store cannot be used.

    Attributes:
        steps: complete checkpoints in the store: {step: content of the list of checksums}; filled by `download`.

    Args:
        store: store to write to.
        folder: local folder.
        confirm: function that raises an error if this process must not write to the store any more; `upload` calls it.
    """

    def __init__(self, store: Store, folder: Path, confirm: Callable[[], None]):
        self.store, self.folder, self._confirm = store, folder, confirm
        self.steps: dict[int, bytes] = {}
        self._sent: dict[str, Signature] = {}  # uploaded files

    def download(self) -> str:
        """Make the local folder equal to the store, or keep it if it is ahead, and return a line for the user about it.

        It is ahead if it has a newer complete checkpoint, and no other machine has written to the store since this
        one did. A folder with a newer checkpoint of another history is renamed, never deleted.
        """
        names = self.store.sizes()
        remote = complete_steps(names)
        local = [step for step, listed in self._local_steps().items() if listed and self._is_intact(step)]
        newest, newest_remote = max(local, default=-1), max(remote, default=-1)
        session, ids = self.store.read(SESSION), self._read_ids()
        trusted = session is not None and session.decode(errors="replace") in ids
        shutil.rmtree(self.folder / LINKS, ignore_errors=True)
        equal = newest == newest_remote and (newest < 0 or self._is_equal(newest))
        if trusted and not equal and {step for step in remote if step > newest} <= self._moved_steps():
            line = f"This folder is ahead of the store and is uploaded now: its newest checkpoint is of step {newest}."
            self._remove_incomplete()
        else:
            if newest > newest_remote:
                self._set_aside(newest)
                ids = []
            self._replace(names, remote)
            line = f"Newest checkpoint in the store: {f'step {remote[-1]}' if remote else 'none'}."
        for step in steps_of(names) - {*remote}:
            self.store.delete(names_of_step(names, step))  # a checkpoint of which a killed run uploaded a part
        self.steps = {step: self.store.read(manifest_of(step)) or b"" for step in remote}
        self._remember(names, self._moved_files())
        for step in self.steps.keys() & self._local_steps().keys():
            self._remember(names, self._files_in(f"{CHECKPOINTS}/{step}"))
        # The local file lists this session before the store names it, so that a kill in between loses no trust.
        session = uuid.uuid4().hex
        files.write_text(self.folder / SESSIONS, "\n".join([*ids, session]))
        self.store.write(SESSION, session.encode())
        return line

    def _set_aside(self, newest: int) -> None:
        """Rename the local folder, which has a newer checkpoint than the store."""
        aside = _free_name(self.folder)
        self.folder.rename(aside)
        print(
            f"WARNING: {self.folder} had the checkpoint of step {newest}, which is newer than those in "
            f"{self.store.url}, but another machine has written there since. It was moved to {aside}.",
            file=sys.stderr,
        )

    def _read_ids(self) -> list[str]:
        path = self.folder / SESSIONS
        return path.read_text(encoding="utf-8").split() if path.is_file() else []

    def _is_intact(self, step: int) -> bool:
        return integrity.find_corruption(self.folder / CHECKPOINTS / str(step)) is None

    def _replace(self, names: Mapping[str, int], steps: list[int]) -> None:
        """Make the local folder equal to the store; checkpoints that are equal already are not downloaded again."""
        self.folder.mkdir(parents=True, exist_ok=True)
        small = [name for name in names if not in_checkpoints(name) and name not in NOT_MIRRORED]
        small = [name for name in small if name.split("/")[0] not in NOT_DOWNLOADED]
        for name, path in list(self._small_files()):
            if name not in names and name.split("/")[0] not in NOT_DOWNLOADED:
                path.unlink()
        self.store.download(small, self.folder)
        self._remember(names, ((name, self.folder / name) for name in small))
        for name in self._local_step_names():
            if not (is_step(name) and int(name) in steps and self._is_equal(int(name))):
                shutil.rmtree(self.folder / CHECKPOINTS / name)
        for step in steps:
            download_step(self.store, names, step, self.folder)

    def _is_equal(self, step: int) -> bool:
        listed = self.folder / CHECKPOINTS / str(step) / MANIFEST
        remote = self.store.read(manifest_of(step))
        return listed.is_file() and listed.read_bytes() == remote and self._is_intact(step)

    def _remove_incomplete(self) -> None:
        complete = self._local_steps()
        for name in self._local_step_names():
            if not (is_step(name) and complete.get(int(name))):
                shutil.rmtree(self.folder / CHECKPOINTS / name)

    def _remember(self, names: Mapping[str, int], items: Iterable[tuple[str, Path]]) -> None:
        """Record files that are in the store with the same size as uploaded."""
        for name, path in items:
            if names.get(name) == path.stat().st_size and (signature := _signature(path)) is not None:
                self._sent[name] = signature

    def upload(self, *, small: bool) -> None:
        """Upload what has changed, in an order that leaves the store readable at any time.

        Args:
            small: True to upload changed files outside checkpoints too; with a new checkpoint they always are.
        """
        self._confirm()
        names = self._local_step_names()
        steps = self._local_steps(names)
        pending = len(names) > sum(listed is not None for listed in steps.values())
        new = [step for step, listed in steps.items() if listed and self.steps.get(step) != listed]
        self._send(self._moved_files())
        moved = self._moved_steps()
        newest = max(map(leading_number, names), default=-1)
        # A checkpoint that was moved away goes before the records, which no longer lead to it.
        self._delete(step for step in self.steps if step in moved and step not in steps and step > newest)
        if new or small:
            self._send_small()
        for step in sorted(new):  # oldest first: a store with step N has the best checkpoint before it too
            self._send_step(step)
        if not pending:
            uploaded = max(self.steps.keys() & steps.keys(), default=-1)
            self._delete(step for step in self.steps if step not in steps and step < uploaded)

    def _send(self, items: Iterable[tuple[str, Path]]) -> None:
        """Upload the files that have changed since they were last uploaded."""
        changed = [(path, name, signature) for name, path in items if (signature := _signature(path))]
        changed = [item for item in changed if self._sent.get(item[1]) != item[2]]
        self.store.upload((path, name) for path, name, _ in changed)
        self._sent |= {name: signature for _, name, signature in changed}

    def _send_small(self) -> None:
        """Upload changed files outside checkpoints, and files that were added to uploaded checkpoints."""
        present = dict(self._small_files())
        for name in [name for name in self._sent if name not in present and not in_checkpoints(name)]:
            self.store.delete([name])
            del self._sent[name]
        self._send(present.items())
        for step in self.steps:
            self._send(self._files_in(f"{CHECKPOINTS}/{step}"))

    def _send_step(self, step: int) -> None:
        """Upload a checkpoint, and its list of checksums last. One that is deleted meanwhile is uploaded completely."""
        source, links = self.folder / CHECKPOINTS / str(step), self.folder / LINKS / str(step)
        shutil.rmtree(links, ignore_errors=True)
        try:
            shutil.copytree(source, links, copy_function=_link)
            sizes = {name: size for name, (size, _) in json.loads((links / MANIFEST).read_bytes()).items()}
            whole = all((links / name).stat().st_size == size for name, size in sizes.items())
        except FileNotFoundError:
            whole = False
        except shutil.Error as error:
            if all(Path(name).exists() for name, *_ in error.args[0]):
                raise StoreError(f"Checkpoint {source} cannot be copied to {links}: {error}") from error
            whole = False
        if not whole:  # it is being deleted
            return
        self._delete([step])
        paths = {path.relative_to(links).as_posix(): path for path in links.rglob("*") if path.is_file()}
        items = {f"{CHECKPOINTS}/{step}/{name}": path for name, path in paths.items()}
        listed = manifest_of(step)
        self.store.upload((path, name) for name, path in items.items() if name != listed)
        self._confirm()
        self.store.upload([(items[listed], listed)])
        self.steps[step] = items[listed].read_bytes()
        self._sent |= {name: signature for name, path in items.items() if (signature := _signature(path))}
        shutil.rmtree(links)

    def _delete(self, steps: Iterator[int] | list[int]) -> None:
        """Delete checkpoints from the store, the list of checksums first."""
        for step in list(steps):
            names = self.store.sizes()
            self.store.delete(reversed(names_of_step(names, step)))
            self.steps.pop(step, None)
            self._sent = {name: x for name, x in self._sent.items() if not name.startswith(f"{CHECKPOINTS}/{step}/")}

    def _local_step_names(self) -> list[str]:
        """Return the names of the folders of checkpoints, also of those that are being saved."""
        folder = self.folder / CHECKPOINTS
        return [path.name for path in folder.iterdir() if path.name[:1].isdecimal()] if folder.is_dir() else []

    def _local_steps(self, names: Iterable[str] | None = None) -> dict[int, bytes | None]:
        """Return the lists of checksums by step; None for a checkpoint that is still being saved, or deleted."""
        names = self._local_step_names() if names is None else names
        folder = self.folder / CHECKPOINTS
        return {int(name): _read_file(folder / name / MANIFEST) for name in names if is_step(name)}

    def _files_in(self, folder: str) -> Iterator[tuple[str, Path]]:
        """Yield name and path of the files in a folder, without unfinished ones and those of the mirror."""
        for root, folders, names in os.walk(self.folder / folder):
            folders[:] = [name for name in folders if name != LINKS]
            for name in names:
                path = Path(root) / name
                if not name.endswith(".part") and name != SESSIONS and path.is_file():
                    yield path.relative_to(self.folder).as_posix(), path

    def _small_files(self) -> Iterator[tuple[str, Path]]:
        names = (item for item in self._files_in("") if not in_checkpoints(item[0]))
        return (item for item in names if item[0] not in NOT_MIRRORED)

    def _moved_steps(self) -> set[int]:
        """Return the steps of checkpoints that training has moved to another folder."""
        return {leading_number(name.split("/")[1]) for name, _ in self._moved_files()}

    def _moved_files(self) -> Iterator[tuple[str, Path]]:
        for folder in sorted(self.folder.glob(f"{CHECKPOINTS}_*")):
            yield from self._files_in(folder.name)


def _signature(path: Path) -> Signature | None:
    """Return what changes whenever a file changes; None if it has been deleted."""
    try:
        status = path.stat()
    except FileNotFoundError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino


def _read_file(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None


def _link(source: str, target: str) -> None:
    """Link a file, or copy it on a file system without hard links."""
    try:
        os.link(source, target)
    except FileNotFoundError:
        raise
    except OSError:
        shutil.copy2(source, target)


def _free_name(folder: Path) -> Path:
    number = 1
    while (path := folder.with_name(f"{folder.name}.aside-{number}")).exists():
        number += 1
    return path
