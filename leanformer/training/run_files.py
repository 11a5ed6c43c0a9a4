"""Files of a run: its lock, and config.json with the config, versions and devices."""

import contextlib
import fcntl
import importlib.metadata
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import jax
from ml_collections import ConfigDict

from leanformer.errors import ConfigError
from leanformer.runtime import files, multihost
from leanformer.tasks import artifacts


NUMERICS = (  # variables that may change the numbers of a run
    "JAX_DEFAULT_PRNG_IMPL",
    "JAX_THREEFRY_PARTITIONABLE",
    "JAX_DEFAULT_MATMUL_PRECISION",
    "NVIDIA_TF32_OVERRIDE",
)
LIBRARIES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy", "leanformer")


@contextlib.contextmanager
def lock_workdir(workdir: Path, patience: float = 120.0) -> Iterator[None]:
    """Context manager that locks a folder for one run, and creates it. Processes other than 0 do nothing.

    Args:
        workdir: folder of the run.
        patience: seconds to wait for the lock; file servers take up to 90 to release that of a lost host.

    Raises:
        ConfigError: another run uses the folder.
    """
    if not multihost.is_primary():
        yield
        return
    workdir.mkdir(parents=True, exist_ok=True)
    with (workdir / "lock").open("a") as file:
        begun = time.monotonic()
        while not _lock(file):
            if time.monotonic() - begun > patience:
                raise ConfigError(f"--workdir={workdir}: the folder is in use by another run. Use another folder.")
            time.sleep(0.2)
        yield


def _lock(file: IO[str]) -> bool:
    """Try to lock a file, and return whether it worked; True, with a warning, if the file system has no locks."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        print(f"WARNING: {file.name}: {error.strerror}. Start no other run in this folder.", file=sys.stderr)
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
    return {"git": commit, "versions": versions, "devices": devices, "environment": _numerics()}


def _numerics() -> dict[str, str]:
    return {name: os.environ[name] for name in NUMERICS if name in os.environ}


def config_changes(workdir: Path, config: ConfigDict) -> dict[str, tuple[Any, Any]]:
    """Return {key: (value in the config.json of `workdir`, value in `config`)} for the keys that differ.

    Keys are dotted; a missing one is None. Raises WorkdirError if config.json is broken.
    """
    before, after = (artifacts.flatten_keys(json.loads(c.to_json())) for c in (artifacts.load_config(workdir), config))
    keys = sorted(before.keys() | after.keys())
    return {key: (before.get(key), after.get(key)) for key in keys if before.get(key) != after.get(key)}


def warn_changes(workdir: Path, config: ConfigDict, examples: Mapping[str, int | None]) -> None:
    """Warn of config keys, environment variables and numbers of examples that differ from a run's config.json.

    Process 0 prints the warnings to stderr. Does nothing in a new folder.

    Args:
        workdir: folder of the run.
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
    for name, after in {"environment": _numerics(), "examples": examples}.items():
        before = content.get(name, {})
        names = sorted(before.keys() | after.keys())
        changes |= {f"{name} {x}": (before.get(x), after.get(x)) for x in names if before.get(x) != after.get(x)}
    for key, (was, now) in changes.items() if multihost.is_primary() else ():
        print(f"WARNING: changed since this run was started: {key}: {was} -> {now}", file=sys.stderr, flush=True)


def begin(workdir: Path, config: ConfigDict, examples: Mapping[str, int | None]) -> None:
    """Write config.json with the numbers of examples by split, and delete summary.json; only process 0 does so."""
    if multihost.is_primary():
        (workdir / "summary.json").unlink(missing_ok=True)
    write_config(workdir, config, examples=dict(examples))


def write_config(workdir: Path, config: ConfigDict, **more: Any) -> None:
    """Write config.json: {"config": config}, the keys of `provenance`, and `more`, values of JSON's types by key.

    Creates the folder. Only process 0 writes the file.
    """
    workdir.mkdir(parents=True, exist_ok=True)
    write_json(workdir / "config.json", {"config": json.loads(config.to_json()), **provenance(), **more})
