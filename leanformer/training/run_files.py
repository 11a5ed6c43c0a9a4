"""Files of a run: its lock, and config.json with the config, versions and devices."""

import contextlib
import fcntl
import importlib.metadata
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import jax
from ml_collections import ConfigDict

from leanformer import models
from leanformer.errors import ConfigError, WorkdirError
from leanformer.runtime import determinism, files, multihost
from leanformer.tasks import artifacts


LIBRARIES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy", "leanformer")


@contextlib.contextmanager
def lock_workdir(
    workdir: Path, patience: float = 120.0, touch: Callable[[str], None] = lambda _: None
) -> Iterator[None]:
    """Context manager that locks a folder for one run, and creates it. Processes other than 0 do nothing.

    The system releases the lock when the process ends.

    Args:
        workdir: folder of the run.
        patience: seconds to wait for the lock; file servers take up to 90 to release that of a lost host.
        touch: `Timer.touch`, called while waiting, so that the watchdog does not take the wait for a hang.

    Raises:
        ConfigError: another run uses the folder.
        WorkdirError: the folder cannot be created.
    """
    if not multihost.is_primary():
        yield
        return
    try:
        workdir.mkdir(parents=True, exist_ok=True)
    except FileNotFoundError as error:  # a file system that has no new folders, such as /proc
        raise WorkdirError(f"--workdir={workdir}: the folder cannot be created. Choose another folder.") from error
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
    """Write `content` to a JSON file atomically; do nothing in processes other than 0."""
    if multihost.is_primary():
        files.write_json(path, content)


def provenance() -> dict[str, Any]:
    """Return the git commit, library versions, devices and environment variables that change numbers, as JSON's types.

    The keys are "git" (commit), "versions" {library: version}, "devices" [platform and type as text] and "environment"
    {variable: value}, with the variables that are set. A commit or version that is unknown is None.
    """
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
    commit = git.stdout.strip() or None
    return {"git": commit, "versions": versions, "devices": devices, "environment": determinism.numerics(os.environ)}


def config_changes(workdir: Path, config: ConfigDict) -> dict[str, tuple[Any, Any]]:
    """Return {key: (value in the config.json of `workdir`, value in `config`)} for the keys that differ.

    All keys are compared, by dotted name. A missing key is None. A key of the model that the older config does not have
    counts as its default. Raises WorkdirError if config.json is broken.
    """
    before, after = (artifacts.flatten_keys(json.loads(c.to_json())) for c in (artifacts.load_config(workdir), config))
    if before["model.name"] == after["model.name"]:
        defaults = json.loads(json.dumps(models.find_class(config.model.name).defaults()))
        before = {key: x for key, x in artifacts.flatten_keys({"model": defaults}).items() if key in after} | before
    keys = sorted(before.keys() | after.keys())
    return {key: (before.get(key), after.get(key)) for key in keys if before.get(key) != after.get(key)}


def warn_changes(workdir: Path, config: ConfigDict, examples: Mapping[str, int | None] | None = None) -> None:
    """Warn about each config key, environment variable that changes numbers, and number of examples that has changed.

    Process 0 prints the warnings to stderr. Does nothing in a new folder.

    Args:
        workdir: folder of the run, with its config.json.
        config: config with which the run resumes.
        examples: number of examples by split.

    Raises:
        ConfigError: the run has another task or architecture.
        WorkdirError: config.json is broken.
    """
    if not (workdir / "config.json").is_file():
        return
    changes = config_changes(workdir, config)
    for key in ("task", "model.name"):
        if key in changes:
            was, now = changes[key]
            raise ConfigError(
                f'{key}="{now}": the run in {workdir} has {key}="{was}". Choose another folder for --workdir.'
            )
    content = files.read_json(workdir / "config.json")
    if "environment" in content:  # not in old runs
        before, after = content["environment"], determinism.numerics(os.environ)
        names = [name for name in determinism.NUMERICS if before.get(name) != after.get(name)]
        changes |= {name: (before.get(name, "unset"), after.get(name, "unset")) for name in names}
    recorded = content.get("examples", {})
    for split, number in (examples or {}).items():
        if recorded.get(split, number) != number:
            changes[f"examples of {split}"] = recorded[split], number
    for key, (was, now) in changes.items() if multihost.is_primary() else ():
        warning = f"WARNING: changed since this run was started: {key}: {was} -> {now}"
        print(warning, file=sys.stderr, flush=True)


def begin(
    workdir: Path, config: ConfigDict, compiled: float | None = None, examples: Mapping[str, int | None] | None = None
) -> None:
    """Write config.json, replacing an older one, and delete summary.json; only process 0 does so.

    A command for a complete run does not call it and keeps both. An extended run is not finished.

    Args:
        workdir: folder of the run.
        config: config of the run.
        compiled: seconds that compilation took, stored rounded to 0.1 for `compiled_seconds`; None if unknown.
        examples: number of examples by split.
    """
    if multihost.is_primary():
        (workdir / "summary.json").unlink(missing_ok=True)
    write_config(workdir, config, compiled_s=compiled and round(compiled, 1), examples=dict(examples or {}))


def compiled_seconds(workdir: Path) -> float | None:
    """Return the seconds that compilation took when the run in `workdir` was last trained, from its config.json.

    None if they or the file do not exist. Raises WorkdirError if the file is broken.
    """
    path = workdir / "config.json"
    return files.read_json(path).get("compiled_s") if path.is_file() else None


def write_config(workdir: Path, config: ConfigDict, **more: Any) -> None:
    """Write config.json: {"config": config}, the keys of `provenance`, and `more`, values of JSON's types by key.

    Creates the folder. Only process 0 writes the file.
    """
    workdir.mkdir(parents=True, exist_ok=True)
    write_json(workdir / "config.json", {"config": json.loads(config.to_json()), **provenance(), **more})
