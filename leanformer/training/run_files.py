"""Files of a run: lock, config.json, classes.json and tokenizer.json, which describe its model, and metrics.jsonl.

metrics.jsonl has one object per record: `{"step", "kind": "train" | "eval" | "eval NAME" | "probe" | "abort", ...}`.
Everything except the keys in TIMING is a function of config and seed. A resumed run truncates the file to the restored
step and appends.
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
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import jax
from flax.traverse_util import flatten_dict
from ml_collections import ConfigDict

from leanformer.data import Source
from leanformer.errors import ConfigError, DataError, WorkdirError
from leanformer.runtime import files, multihost
from leanformer.training.loggers import LoggerGroup, Progress


NUMERICS = (  # variables that may change the numbers of a run
    "JAX_DEFAULT_MATMUL_PRECISION",
    "JAX_DEFAULT_PRNG_IMPL",
    "JAX_THREEFRY_PARTITIONABLE",
    "NVIDIA_TF32_OVERRIDE",
)
LIBRARIES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy", "leanformer")
KEPT = ("task", "model.name", "data.eval_split", "eval.examples", "data.crop_fraction")  # of a run, to its end
CLASSES, TOKENIZER, METRICS = "classes.json", "tokenizer.json", "metrics.jsonl"
EXPORTED = "exported"  # key of config.json in a folder of `export`
TIMING = ("examples_per_s", "data_wait", "mfu", "wall_s")  # keys of records that differ between equal runs


def load_config(workdir: Path) -> ConfigDict:
    """Return the config of a run, from the config.json in its folder. Lists of JSON become tuples."""
    return ConfigDict(_tuples(files.read_json(workdir / "config.json")["config"]), convert_dict=True)


def _tuples(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {name: _tuples(item) for name, item in tree.items()}
    return tuple(map(_tuples, tree)) if isinstance(tree, list) else tree


def export(workdir: Path, folder: Path, *, step: int, averaged: bool) -> None:
    """Describe a run's model in a folder with its weights of a step, which `leanformer.load` can then open."""
    content = files.read_json(workdir / "config.json")
    files.write_json(folder / "config.json", content | {EXPORTED: {"step": step, "averaged": averaged}})
    for name in (CLASSES, TOKENIZER):
        if (workdir / name).is_file():
            files.write_text(folder / name, (workdir / name).read_text(encoding="utf-8"))


def exported_weights(folder: Path) -> dict[str, Any] | None:
    """Return {"step": step of the weights, "averaged": True for EMA weights} of a folder of `export`, else None."""
    path = folder / "config.json"
    content = files.read_json(path) if path.is_file() else None
    return content.get(EXPORTED) if isinstance(content, dict) else None


def save_classes_and_tokenizer(workdir: Path, source: Source) -> None:
    """Write the class names and the tokenizer of a training split, if it has them; only process 0 writes."""
    if not multihost.is_primary():
        return
    if (classes := getattr(source, "classes", None)) is not None:
        files.write_json(workdir / CLASSES, list(classes))
    if (tokenizer := getattr(source, "tokenizer", None)) is not None:
        files.write_text(workdir / TOKENIZER, tokenizer.json())


def load_tokenizer(workdir: Path) -> Any:
    """Return the tokenizer of a run, a `data.text.tokenizer.Tokenizer`."""
    from leanformer.data.text import tokenizer  # needed only for texts

    return tokenizer.read(workdir / TOKENIZER)


def use_saved_tokenizer(workdir: Path, c: Any) -> None:
    """Set `data.tokenizer` to the tokenizer.json of a run: the one that it named would be trained on texts of today."""
    if "tokenizer" in c.data and (workdir / TOKENIZER).is_file():
        c.data.tokenizer = str((workdir / TOKENIZER).absolute())  # no folder is taken for "bpe:..."


def check_tokenizer(folder: Path, tokenizer: Any) -> None:
    """Raise DataError if the tokenizer of the data, if any, is not the one in a folder of a run or of weights."""
    if tokenizer is None or not (folder / TOKENIZER).is_file():
        return
    saved = load_tokenizer(folder)
    if saved.tokens != tokenizer.tokens:
        raise DataError(
            f"{folder / TOKENIZER}, with {saved.vocabulary:,} tokens, belongs to these weights; data.tokenizer names "
            f"another one, with {tokenizer.vocabulary:,}. Set --config.data.tokenizer={folder / TOKENIZER}."
        )


def output_names(classes: Sequence[str] | None, number: int) -> list[str]:
    """Return a name for each of `number` outputs of a model: the class, or the index of an output without a class."""
    return [*(classes or ()), *map(str, range(len(classes or ()), number))]


def load_classes(workdir: Path) -> tuple[str, ...] | None:
    """Return the class names of a run in the order of its outputs, from classes.json; None if there is no such file."""
    return tuple(files.read_json(workdir / CLASSES)) if (workdir / CLASSES).is_file() else None


def check_classes(folder: Path, classes: Sequence[str] | None) -> None:
    """Raise DataError if a folder of a run or of weights has the same classes in another order."""
    theirs = load_classes(folder) or ()
    if classes and tuple(classes) != theirs and sorted(classes) == sorted(theirs):
        order = ", ".join(theirs[:3])
        raise DataError(
            f"{folder / CLASSES} has the data's classes in another order: {order}, ... Name the data's classes in that "
            "order, or set --config.init_from.new_head=True."
        )


@contextlib.contextmanager
def lock_workdir(workdir: Path, patience: float = 120.0) -> Iterator[None]:
    """Lock a folder for one run, in process 0; a file server takes up to 90 s to release the lock of a lost host."""
    if not multihost.is_primary():
        yield
        return
    workdir.mkdir(parents=True, exist_ok=True)
    with (workdir / "lock").open("a") as file:
        deadline = time.monotonic() + patience
        while not _lock(file):
            if time.monotonic() > deadline:
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
    """Return the git commit, library versions, devices and environment variables that change numbers, for JSON."""
    git = subprocess.run(
        ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=12"],
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
    return {"git": commit, "versions": versions, "devices": devices, "environment": _environment()}


def _environment() -> dict[str, str]:
    return {name: os.environ[name] for name in NUMERICS if name in os.environ}


def config_changes(workdir: Path, config: ConfigDict) -> dict[str, tuple[Any, Any]]:
    """Return {dotted key: (value in the config.json of `workdir`, value in `config`)} for the keys that differ."""
    before, after = (flatten_dict(json.loads(c.to_json()), sep=".") for c in (load_config(workdir), config))
    return _differences(before, after)


def _differences(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    keys = sorted(before.keys() | after.keys())
    return {key: (before.get(key), after.get(key)) for key in keys if before.get(key) != after.get(key)}


def warn_changes(workdir: Path, config: ConfigDict, examples: Mapping[str, int | None]) -> None:
    """Warn of changes since a run's config.json was written. Raises ConfigError for others in KEPT."""
    if not (workdir / "config.json").is_file():
        return
    changes = config_changes(workdir, config)
    for key in (key for key in KEPT if key in changes):
        was, now = changes[key]
        raise ConfigError(
            f'{key}="{now}": the run in {workdir} has {key}="{was}". Choose another folder for --workdir, or keep it; '
            "eval.more adds evaluations, but the best checkpoint is the best in one."
        )
    before = files.read_json(workdir / "config.json")
    for name, after in {"environment": _environment(), "examples": examples}.items():
        changes |= {f"{name} {key}": values for key, values in _differences(before.get(name, {}), after).items()}
    for key, (was, now) in changes.items() if multihost.is_primary() else ():
        print(f"WARNING: changed since this run was started: {key}: {was} -> {now}", file=sys.stderr, flush=True)


def begin(workdir: Path, config: ConfigDict, examples: Mapping[str, int | None], first_step: int) -> None:
    """Write config.json with the examples by split and the keys changed since step 0; delete summary.json."""
    if not multihost.is_primary():
        return
    changed: set[str] = set()
    if first_step and (workdir / "config.json").is_file():
        changed = {*files.read_json(workdir / "config.json").get("changed", ()), *config_changes(workdir, config)}
    (workdir / "summary.json").unlink(missing_ok=True)
    write_config(workdir, config, examples=dict(examples), changed=sorted(changed))


def write_config(workdir: Path, config: ConfigDict, **more: Any) -> None:
    """Write config.json with the config, its `provenance`, and `more`; only process 0 does so."""
    write_json(workdir / "config.json", {"config": json.loads(config.to_json()), **provenance(), **more})


def read_records(workdir: Path, kind: str | None = None) -> list[dict[str, Any]]:
    """Return the records of a run, of one kind or all, without an unterminated last line; [] without a file."""
    path, records = workdir / METRICS, []
    text = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
    for number, line in enumerate(text.split("\n")[:-1], 1):
        try:
            records += [json.loads(line)] if line else []
        except ValueError as error:
            message = f"{path}, line {number} is not a JSON object: {line[:60]!r}. Fix or delete this line."
            raise WorkdirError(message) from error
    return [record for record in records if kind in (None, record["kind"])]


def read_scores(workdir: Path, name: str) -> dict[int, float]:
    """Return {step: value} of a metric in the records of kind "eval" of a run; NaN for a value that was not finite."""
    scores = {record["step"]: record[name] for record in read_records(workdir, "eval") if name in record}
    return {step: math.nan if value is None else value for step, value in scores.items()}


class Recorder:
    """Writer of a run's records to metrics.jsonl, to a logger and to the progress output; only process 0 writes.

    Records after `start`, of an earlier attempt, are removed from the file; at 0 all are, since that attempt may have
    had another config. Nothing is written, and no logger made, before `begin` or the first record. A context manager.
    """

    def __init__(self, workdir: Path, *, start: int, total: int, make_logger: Callable[[], LoggerGroup] = LoggerGroup):
        self.path = workdir / METRICS
        self.records: list[dict[str, Any]] = []  # of the run so far, in process 0
        self._make_logger = make_logger
        self._file: IO[bytes] | None = None
        self._logger = LoggerGroup()
        self._progress: Progress | None = None
        if not multihost.is_primary():
            return
        if start:
            if not self.path.is_file():  # the best checkpoint would be unknown, and deleted
                raise WorkdirError(
                    f"{self.path} is missing: it has the run's records, and the scores by which the best checkpoint is "
                    "kept. Restore it, or create an empty file to continue without them."
                )
            self.records += [record for record in read_records(workdir) if record["step"] <= start]
        elif (workdir / "summary.json").is_file():
            raise WorkdirError(
                f"{workdir} has results of a finished run without checkpoints. Choose another folder, or delete it."
            )
        self._progress = Progress(start=start, total=total)

    def __enter__(self) -> "Recorder":
        return self

    def __exit__(self, *_: object) -> None:
        self._logger.close()
        if self._file:
            self._file.close()
        if self._progress:
            self._progress.close()

    def begin(self) -> None:
        """Cut the file to the first step, and start the loggers. Call this before a checkpoint is saved."""
        if multihost.is_primary() and self._file is None:
            files.write_text(self.path, "".join(json.dumps(record) + "\n" for record in self.records))
            self._file = self.path.open("ab", buffering=0)  # so that nothing is pending after a failed write
            self._logger = self._make_logger()

    def write(self, step: int, kind: str, values: Mapping[str, Any]) -> None:
        """Write a record of values that `to_json` converts, and wait until it is on disk."""
        self.begin()
        if self._file is None or self._progress is None:
            return
        values = {name: to_json(value) for name, value in values.items()}
        record = {"step": step, "kind": kind, **values}
        self.records.append(record)
        line = memoryview(json.dumps(record).encode() + b"\n")
        while line:
            line = line[self._file.write(line) :]
        os.fsync(self._file.fileno())
        self._logger.log(step, kind, values)
        self._progress.print(step, kind, values)

    def advance(self, step: int) -> None:
        """Move the progress bar to `step`, without a record."""
        if self._progress:
            self._progress.advance(step)

    def has(self, step: int, kind: str) -> bool:
        """Return whether process 0 has a record of this kind at this step."""
        return any(record["step"] == step and record["kind"] == kind for record in self.records)


def to_json(value: Any) -> Any:
    """Return nested containers as JSON's types: numbers of NumPy and JAX as floats, not finite ones as None."""
    if isinstance(value, dict | ConfigDict):  # an empty section of a config
        return {name: to_json(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_json(item) for item in value]
    if isinstance(value, str | bool | int) or value is None:
        return value
    value = float(value)
    return value if math.isfinite(value) else None
