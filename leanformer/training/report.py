"""Files of a run: lock, config.json, metrics.jsonl; and tables of text for `pages`.

`metrics.jsonl` is the metrics log, with one object per record: `{"step", "kind": "train" | "eval" | "eval NAME" |
"probe" | "abort", ...}`. Everything except the keys in TIMING is a function of config and seed. A resumed run truncates
the file to the restored step and appends to it.
"""

import contextlib
import fcntl
import importlib.metadata
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import jax
from ml_collections import ConfigDict

from leanformer.errors import ConfigError, WorkdirError
from leanformer.runtime import files, multihost
from leanformer.tasks import artifacts
from leanformer.training.loggers import Logger, Several
from leanformer.training.progress import Progress


TIMING = ("examples_per_s", "data_wait", "mfu", "wall_s")
LIBRARIES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy", "leanformer")


@contextlib.contextmanager
def lock_workdir(
    workdir: Path, patience: float = 120.0, touch: Callable[[str], None] = lambda _: None
) -> Iterator[None]:
    """Lock a folder for one run, within a `with` block. The system releases the lock when the process ends.

    Args:
        workdir: folder of the run.
        patience: seconds to wait for the lock; file servers take up to 90 to release that of a lost host.
        touch: `Timer.touch`, called while waiting, so that the watchdog does not take the wait for a hang.

    Raises:
        ConfigError: another run uses the folder.
    """
    if not multihost.is_primary():
        yield
        return
    workdir.mkdir(parents=True, exist_ok=True)
    with (workdir / "lock").open("a") as file:
        begun = time.monotonic()
        if not _lock(file):
            print(f"{workdir} is in use by another run. Waiting up to {patience:.0f} s for its end.", flush=True)
        while not _lock(file):
            if time.monotonic() - begun > patience:
                raise ConfigError(
                    f"--workdir={workdir}: the folder is in use by another run. Stop that run, wait for its end, or "
                    "use another folder."
                )
            touch("the end of another run")
            time.sleep(0.2)
        yield


def _lock(file: IO[str]) -> bool:
    """Try to lock a file, and return whether it worked; True, with a warning, if the file system has no locks."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        print(
            f"WARNING: {file.name} cannot be locked: {error.strerror}. Make sure that no other run uses this folder.",
            file=sys.stderr,
        )
    return True


def write_json(path: Path, content: Any) -> None:
    """Write a JSON file atomically, only in process 0."""
    if multihost.is_primary():
        files.write_json(path, content)


def read_records(path: Path) -> list[dict[str, Any]]:
    """Return the records of a metrics.jsonl, without an incomplete last line.

    Raises:
        WorkdirError: a line other than the last is not a record.
    """
    records = files.read_lines(path)
    for record in records:
        if not {"step", "kind"} <= record.keys():
            raise WorkdirError(f"{path} has a line without step and kind: {str(record)[:60]}. Delete this line.")
    return records


def read_scores(workdir: Path, name: str) -> dict[int, float]:
    """Return the metric `name` of all evaluations in a run's records, by step; NaN for values that were not finite."""
    records = read_records(workdir / "metrics.jsonl")
    scores = {record["step"]: record[name] for record in records if record["kind"] == "eval" and name in record}
    return {step: math.nan if value is None else value for step, value in scores.items()}


def provenance() -> dict[str, Any]:
    """Return the git commit, library versions and devices; None for a commit or version that is unknown."""
    here = Path(__file__).parent
    git = subprocess.run(
        ["git", "-C", str(here), "describe", "--always", "--dirty", "--abbrev=12"],
        capture_output=True,
        text=True,
        check=False,
    )
    versions = {}
    for name in LIBRARIES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = None
    devices = [f"{device.platform} {device.device_kind}" for device in jax.devices()]
    return {"git": git.stdout.strip() or None, "versions": versions, "devices": devices}


def config_changes(workdir: Path, config: ConfigDict) -> dict[str, tuple[Any, Any]]:
    """Return the keys in which `config` differs from the config in `workdir`, with both values."""
    before, after = (artifacts.flatten_keys(json.loads(c.to_json())) for c in (artifacts.load_config(workdir), config))
    keys = sorted(before.keys() | after.keys())
    return {key: (before.get(key), after.get(key)) for key in keys if before.get(key) != after.get(key)}


def warn_changes(workdir: Path, config: ConfigDict) -> None:
    """Warn about each key whose value differs from that in the config.json of `workdir`."""
    if not multihost.is_primary() or not (workdir / "config.json").is_file():
        return
    for key, (was, now) in config_changes(workdir, config).items():
        warning = f"WARNING: the config has changed since this run was started: {key}: {was} -> {now}"
        print(warning, file=sys.stderr, flush=True)


def begin(workdir: Path, config: ConfigDict) -> None:
    """Write config.json, and delete the summary.json of a shorter run that is being extended."""
    if multihost.is_primary():
        (workdir / "summary.json").unlink(missing_ok=True)
    write_config(workdir, config)


def write_config(workdir: Path, config: ConfigDict) -> None:
    """Write config.json: the config with its provenance (commit, versions, devices)."""
    workdir.mkdir(parents=True, exist_ok=True)
    write_json(workdir / "config.json", {"config": json.loads(config.to_json()), **provenance()})


def round_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return values for printing: fractions with four significant digits. Files contain all digits."""
    return {
        name: (f"{x:.4g}" if abs(x) < 1e4 else f"{x:,.0f}") if isinstance(x, float) else x for name, x in values.items()
    }


def format_page(title: str, rows: dict[str, Any]) -> str:
    """Format a title and aligned rows."""
    rows = {files.printable(name): value for name, value in rows.items()}
    width = max(map(len, rows))
    return "\n".join([title, *(f"  {name:<{width}}  {value}" for name, value in rows.items()), ""])


class Recorder:
    """Writer of a run's records to metrics.jsonl, to loggers and to the progress output.

    Only process 0 writes, and reads the records of earlier attempts.

    Args:
        workdir: folder of the run.
        start: step from which training starts; later records of an earlier attempt are removed.
        total: number of steps of the whole run.
        logger: logger that receives every record, and is closed at the end.
    """

    def __init__(self, workdir: Path, *, start: int, total: int, logger: Logger | None = None):
        self.path = workdir / "metrics.jsonl"
        self.records = []
        self._silent = not multihost.is_primary()
        if self._silent:
            return
        self.records += [record for record in read_records(self.path) if record["step"] <= start]
        files.write_text(self.path, "".join(json.dumps(record) + "\n" for record in self.records))
        self._file = self.path.open("ab", buffering=0)  # unbuffered, so that nothing is pending after a failed write
        self._logger = logger or Several({})
        self._progress = Progress(start=start, total=total)

    def __enter__(self) -> "Recorder":
        return self

    def __exit__(self, *_: object) -> None:
        if not self._silent:
            self._file.close()
            self._logger.close()
            self._progress.close()

    def write(self, step: int, kind: str, values: dict[str, Any]) -> None:
        """Write a record and wait until it is on disk. Numbers that are not finite become null."""
        values = {name: _to_json(value) for name, value in values.items()}
        record = {"step": step, "kind": kind, **values}
        self.records.append(record)
        if self._silent:
            return
        with files.name_file_in_errors(self.path):
            line = memoryview(json.dumps(record).encode() + b"\n")
            while line:
                line = line[self._file.write(line) :]
            os.fsync(self._file.fileno())
        self._logger.log(step, kind, values)
        self._progress.print(step, kind, values)

    def advance(self, step: int) -> None:
        """Move the progress bar to `step`."""
        if not self._silent:
            self._progress.advance(step)

    def has(self, step: int, kind: str) -> bool:
        """Return whether there is a record of this kind at this step."""
        return any(record["step"] == step and record["kind"] == kind for record in self.records)


def _to_json(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _to_json(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_to_json(item) for item in value]
    if isinstance(value, str | bool | int) or value is None:
        return value
    value = float(value)
    return value if math.isfinite(value) else None
