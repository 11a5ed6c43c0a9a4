"""What a run writes: its folder with the config and the records; for `pages`, tables of text.

`metrics.jsonl` is the record: one object a report, `{"step", "kind": "train" | "eval" | "eval NAME" | "probe" |
"abort", ...}`. All of it but the keys in TIMING is a function of config and seed; a resumed run goes on in the same
file, cut to the restored step.
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
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import jax
from ml_collections import ConfigDict

from leanformer.errors import ConfigError, WorkdirError
from leanformer.runtime import files, peers
from leanformer.tasks import artifacts
from leanformer.training.loggers import Logger, Several
from leanformer.training.progress import Progress


TIMING = ("examples_per_s", "data_wait", "mfu", "wall_s")
LIBRARIES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy", "leanformer")


@contextlib.contextmanager
def claim(workdir: Path, patience: float = 120.0) -> Iterator[None]:
    """Holds a folder for one run at a time. The system lets go of it when the process ends, however it ends.

    Args:
        patience: seconds to wait for it: longer than a file server takes to notice that a host is gone (90).

    Raises:
        ConfigError: another run holds it.
    """
    if not peers.first():
        yield
        return
    workdir.mkdir(parents=True, exist_ok=True)
    with (workdir / "lock").open("a") as file:
        begun = time.monotonic()
        if not _lock(file):
            print(f"Another run is at work in {workdir}: waiting {patience:.0f} s for its end.", flush=True)
        while not _lock(file):
            if time.monotonic() - begun > patience:
                raise ConfigError(
                    f"--workdir={workdir}: another run is at work there, and two would write over one another. "
                    "Stop it or wait for its end, or take another folder."
                )
            time.sleep(0.2)
        yield


def _lock(file: IO[str]) -> bool:
    """Whether the file is ours now; True also where the file system has no locks, which is said."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        print(f"*** {file.name} CANNOT BE LOCKED ({error.strerror}): let no other run use its folder.", file=sys.stderr)
    return True


def write_json(path: Path, content: Any) -> None:
    """Writes a JSON file whole or not at all, from process 0 alone."""
    if peers.first():
        files.write_json(path, content)


def read_records(path: Path) -> list[dict[str, Any]]:
    """The records of a metrics.jsonl, without a last line that was cut off in the writing.

    Raises:
        WorkdirError: another line is no record.
    """
    found = files.read_lines(path)
    for record in found:
        if not {"step", "kind"} <= record.keys():
            raise WorkdirError(f"{path} has a line without step and kind: {str(record)[:60]}. Delete it.")
    return found


def read_scores(workdir: Path, name: str) -> dict[int, float]:
    """What every evaluation in a run's records found under `name`, by step; NaN for what was not finite."""
    records = read_records(workdir / "metrics.jsonl")
    found = {record["step"]: record[name] for record in records if record["kind"] == "eval" and name in record}
    return {step: math.nan if value is None else value for step, value in found.items()}


def provenance() -> dict[str, Any]:
    """Git commit, library versions and devices, as far as they can be known."""
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


def changes(workdir: Path, config: ConfigDict) -> dict[str, tuple[Any, Any]]:
    """Keys in which `config` differs from that of the run in `workdir`, with the run's value and its own."""
    before, after = (artifacts.flat(json.loads(c.to_json())) for c in (artifacts.load_config(workdir), config))
    keys = sorted(before.keys() | after.keys())
    return {key: (before.get(key), after.get(key)) for key in keys if before.get(key) != after.get(key)}


def tell_changes(workdir: Path, config: ConfigDict) -> None:
    """Says, in lines nobody can miss, which keys differ from those an earlier run in `workdir` was begun with."""
    if not peers.first() or not (workdir / "config.json").is_file():
        return
    for key, (was, now) in changes(workdir, config).items():
        said = f"{key}: {was} -> {now}"
        print(f"*** THE CONFIG CHANGED SINCE THIS RUN WAS BEGUN: {said}", file=sys.stderr, flush=True)


def begin(workdir: Path, config: ConfigDict) -> None:
    """Writes the config of what trains from now on. The end of a run that goes on for longer is its end no more."""
    if peers.first():
        (workdir / "summary.json").unlink(missing_ok=True)
    write_config(workdir, config)


def write_config(workdir: Path, config: ConfigDict) -> None:
    """Writes config.json: the config, and what it was run with."""
    workdir.mkdir(parents=True, exist_ok=True)
    write_json(workdir / "config.json", {"config": json.loads(config.to_json()), **provenance()})


def rounded(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return values as they are shown, fractions with four significant digits; files hold all digits."""
    return {
        name: (f"{x:.4g}" if abs(x) < 1e4 else f"{x:,.0f}") if isinstance(x, float) else x for name, x in values.items()
    }


def page(title: str, rows: dict[str, Any]) -> str:
    """A titled block of aligned rows."""
    rows = {files.printable(name): value for name, value in rows.items()}
    width = max(map(len, rows))
    return "\n".join([title, *(f"  {name:<{width}}  {value}" for name, value in rows.items()), ""])


class Recorder:
    """Writes a run's records to metrics.jsonl, hands them to loggers, and shows progress.

    Process 0 alone writes, and reads the records of earlier attempts.

    Args:
        workdir: the run's folder.
        start: the step training starts from; later records of an earlier attempt are cut off.
        total: steps of the whole run.
        logger: gets every record too, and is closed at the end.
    """

    def __init__(self, workdir: Path, *, start: int, total: int, logger: Logger | None = None):
        self.path = workdir / "metrics.jsonl"
        self.records = []
        self._silent = not peers.first()
        if self._silent:
            return
        self.records += [record for record in read_records(self.path) if record["step"] <= start]
        files.write_text(self.path, "".join(json.dumps(record) + "\n" for record in self.records))
        self._file = self.path.open("ab", buffering=0)  # a failed write leaves nothing to be written at the end
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
        """One record, on disk when this returns. Numbers that are not finite become null."""
        values = {name: _number(value) for name, value in values.items()}
        record = {"step": step, "kind": kind, **values}
        self.records.append(record)
        if self._silent:
            return
        with files.named(self.path):
            line = memoryview(json.dumps(record).encode() + b"\n")
            while line:
                line = line[self._file.write(line) :]
            os.fsync(self._file.fileno())
        self._logger.log(step, kind, values)
        self._progress.say(step, kind, values)

    def advance(self, step: int) -> None:
        """Moves the progress bar to `step`."""
        if not self._silent:
            self._progress.advance(step)

    def has(self, step: int, kind: str) -> bool:
        """Whether a record of that kind was written at that step."""
        return any(record["step"] == step and record["kind"] == kind for record in self.records)


def _number(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _number(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_number(item) for item in value]
    if isinstance(value, str | bool | int) or value is None:
        return value
    value = float(value)
    return value if math.isfinite(value) else None
