"""Temporary local copies of runs in object stores, for commands that read a run, and the upload of what they write."""

import atexit
import contextlib
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping, Set
from pathlib import Path

from leanformer.errors import ConfigError
from leanformer.runtime import integrity, multihost
from leanformer.stores import Store, StoreError, is_url, retry
from leanformer.stores.layout import CHECKPOINTS, complete_steps, download_step
from leanformer.stores.mirror import NOT_MIRRORED
from leanformer.stores.shared_folder import VARIABLE, other_process, report_end, share, staging_root


ALL, NEWEST, NAMES, NONE = "all", "newest", "names", "none"  # checkpoints to download, besides the number of a step
NOT_READ = ("tensorboard", "plots", "compare", "probe")  # folders that no command reads
REPORTS = (".html", ".json")  # files in which the name of the temporary folder is replaced by the URL


@contextlib.contextmanager
def downloaded(url: str, checkpoints: str | int = NEWEST, *, upload: bool = True) -> Iterator[Path]:
    """Yield a temporary local copy of a run, or of a folder of runs, in a `with` block; upload the files it changes.

    All processes of a run must call it, as `mirrored`. New and changed files outside checkpoints are uploaded at the
    end of the block; nothing is if the block raises. The copy is then deleted. If the upload fails, the results stay in
    a folder that the error names.

    Args:
        url: URL of the run.
        checkpoints: checkpoints to download: ALL, NEWEST (the newest one that is undamaged), NAMES (an empty folder for
            each), NONE, or the step of one.
        upload: False if the block only reads.

    Raises:
        ConfigError: there is nothing at the URL, no such checkpoint, or the folder is not shared by all hosts.
        StoreError: the store cannot be read or written.
    """
    if not multihost.is_primary():
        with other_process() as folder:
            yield folder
        return
    with contextlib.ExitStack() as stack:
        stack.push(report_end)
        store = Store(url)
        folder = _make_temporary(store.url)
        stack.callback(shutil.rmtree, folder.parent, ignore_errors=True)
        print(f"{store.url} is staged in {folder}.", file=sys.stderr, flush=True)
        retry(lambda: _download(store, folder, checkpoints))
        share(folder)
        before = _changes(folder)
        yield folder
        changed = [name for name, signature in _changes(folder).items() if before.get(name) != signature]
        if not upload or not changed:
            return
        try:
            retry(lambda: _upload(store, folder, changed))
        except StoreError as error:
            results = folder.rename(Path(tempfile.mkdtemp(prefix="results-", dir=folder.parent.parent)) / folder.name)
            raise StoreError(f"{error} The results are in {results}: {', '.join(changed)}.") from error
        print(f"Uploaded {', '.join(changed)} to {store.url}.", file=sys.stderr, flush=True)


def local_copy(workdir: str | Path, step: int | None, *, best: bool) -> str | Path:
    """Return `workdir`, or the folder of a temporary copy of the run if it is a URL.

    The copy is deleted when Python ends. Changes to it are not uploaded.

    Args:
        workdir: folder or URL of the run.
        step: step of the checkpoint to download; the newest if None.
        best: True to download all checkpoints, from which the best is then chosen.

    Raises:
        ConfigError, StoreError: an error of `downloaded`.
    """
    if not is_url(workdir):
        return workdir
    stack = contextlib.ExitStack()
    atexit.register(stack.close)
    return stack.enter_context(downloaded(str(workdir), choose(step, every=best), upload=False))


def choose(step: int | None, *, every: bool) -> str | int:
    """Return the value of `checkpoints` for `downloaded`: ALL, NEWEST or the number of a step.

    Args:
        step: value of --step; None for the newest checkpoint.
        every: True if all checkpoints are needed, as for --best and --all.
    """
    return ALL if every else NEWEST if step is None else step


def _make_temporary(url: str) -> Path:
    """Make a folder with the name of a URL's last part in a new temporary folder."""
    parent = staging_root() if os.environ.get(VARIABLE) else None
    if parent is not None:
        parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="leanformer-", dir=parent)) / url.rpartition("/")[2]
    folder.mkdir()
    return folder


def _download(store: Store, folder: Path, checkpoints: str | int) -> None:
    """Download what commands read: small files, and the chosen checkpoints. Files of an earlier attempt are deleted."""
    shutil.rmtree(folder)
    folder.mkdir()
    names = store.sizes()
    if not names and checkpoints != NAMES:
        raise ConfigError(f"{store.url} is empty or does not exist. Give the URL of a run.")
    runs = {name.rpartition("/")[0] for name in names if name.endswith("/config.json")}
    small = [name for name in names if name not in NOT_MIRRORED and not _is_skipped(name, runs)]
    store.download(small, folder)
    steps = complete_steps(names)
    if isinstance(checkpoints, int) and checkpoints not in steps:
        raise ConfigError(f"--step={checkpoints}: {store.url} has no such checkpoint. Found: {steps or 'none'}.")
    for step in reversed(steps):
        target = folder / CHECKPOINTS / str(step)
        if checkpoints == NAMES:
            target.mkdir(parents=True)
        elif checkpoints in (ALL, NEWEST, step):
            download_step(store, names, step, folder)
            if checkpoints == NEWEST and integrity.find_corruption(target) is None:
                return  # a damaged checkpoint is reported by the command, which then uses an older one


def _is_skipped(name: str, runs: Set[str]) -> bool:
    """Return whether a file is in a folder that commands do not read, unless the folder is one of `runs`."""
    *folders, _ = name.split("/")
    return any(
        (folder in NOT_READ or folder.startswith(CHECKPOINTS)) and "/".join(folders[:depth]) not in runs
        for depth, folder in enumerate(folders, 1)
    )


def _changes(folder: Path) -> Mapping[str, tuple[int, int]]:
    """Return time and size of the files outside checkpoints, by name."""
    paths = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*") if path.is_file()}
    small = {name: path.stat() for name, path in paths.items() if not name.startswith(CHECKPOINTS)}
    return {name: (status.st_mtime_ns, status.st_size) for name, status in small.items()}


def _upload(store: Store, folder: Path, names: list[str]) -> None:
    for name in names:
        content = (folder / name).read_bytes()
        if name.endswith(REPORTS):
            content = content.replace(os.fsencode(folder), store.url.encode())
        store.write(name, content)
