"""Files that describe the model of a workdir: config.json, classes.json, tokenizer.json, data.json."""

import json
import sys
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from ml_collections import ConfigDict

from leanformer.config import KINDS, base
from leanformer.data import Source, fingerprints
from leanformer.data.generated import sha256
from leanformer.errors import ConfigError, DataError, WorkdirError
from leanformer.runtime import files, multihost


CLASSES, TOKENIZER = "classes.json", "tokenizer.json"
RECORD = "data.json"  # checksums of the class names and the tokenizer, and fingerprints of the splits
EXPORTED = "exported"  # key of config.json in a folder of `export`
SECTIONS = ("model", "data", "optim")  # sections of every config
# Sections shared by all tasks, including user-defined ones.
SHARED = ("optim", "eval", "checkpoint", "probe", "mesh", "init_from")
# Keys and sections removed from configs, and those of them that enabled a feature.
REMOVED = ("total_seconds", "teacher", "batch_ramp_start", "batch_ramp_increment", "batch_ramp_steps")
SWITCHED = ("total_seconds", "teacher.path", "batch_ramp_start")


def load_config(workdir: Path) -> ConfigDict:
    """Return the config of a run, from the config.json in its folder.

    Lists of JSON become tuples. Sections and keys that are younger than the run get their
    defaults, except those of the model. Keys in REMOVED are dropped, with a warning if they had an effect.

    Raises:
        WorkdirError: config.json is broken, or holds no config.
        OSError: config.json cannot be read.
    """
    path = workdir / "config.json"
    content = files.read_json(path)
    tree = content.get("config") if isinstance(content, dict) else None
    if not isinstance(tree, dict) or not all(isinstance(tree.get(name), dict) for name in SECTIONS):
        raise WorkdirError(
            f"{path} is not the config of a run: it lacks {', '.join(SECTIONS)} or others. Restore a copy."
        )
    _drop_removed(tree, workdir)
    c = ConfigDict(_tuples(tree), convert_dict=True)
    if "task" not in c:  # runs older than this key
        c.task = "sequences" if "max_length" in c.model else "images"
    builtin = c.task in KINDS
    for name, value in (KINDS[c.task].defaults() if builtin else base()).items():
        section = isinstance(value, ConfigDict)
        if section and not (builtin or name in SHARED):
            continue
        if name not in c:
            c[name] = value
        elif section and name != "model":
            c[name].update({key: item for key, item in value.items() if key not in c[name]})
    return c


def _drop_removed(tree: dict[str, Any], workdir: Path) -> None:
    """Drop the keys in REMOVED. A run that was measured in seconds is as long as its steps so far."""
    removed = flatten_keys({key: tree.pop(key) for key in REMOVED if key in tree})
    if used := [f"{key}={removed[key]}" for key in SWITCHED if removed.get(key)]:
        path = workdir / "config.json"
        warnings.warn(f"{path}: ignored since it was removed from leanformer: {', '.join(used)}.", stacklevel=3)
    if removed.get("total_seconds"):
        steps = (record.get("step", 1) for record in files.read_lines(workdir / "metrics.jsonl"))
        tree["total_steps"] = max(steps, default=1)


def flatten_keys(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the values of nested dicts by dotted keys, each after `prefix`: {"a": {"b": 1}} becomes {"a.b": 1}."""
    values = {}
    for key, value in tree.items():
        values |= flatten_keys(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return values


def _tuples(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {name: _tuples(item) for name, item in tree.items()}
    return tuple(map(_tuples, tree)) if isinstance(tree, list) else tree


def export(workdir: Path, folder: Path, *, step: int, averaged: bool) -> None:
    """Write the files that describe a run's model to a folder with its weights, which `leanformer.load` can then open.

    They are config.json with the further key "exported", see `exported_weights`, classes.json and tokenizer.json if the
    run has them, and data.json with their checksums and the fingerprints of the splits.

    Args:
        workdir: folder of the run.
        folder: folder with the weights, to write to.
        step: step of the weights.
        averaged: True for EMA weights.

    Raises:
        WorkdirError: config.json or data.json of the run is broken.
    """
    content = files.read_json(workdir / "config.json")
    files.write_json(folder / "config.json", content | {EXPORTED: {"step": step, "averaged": averaged}})
    for name in (CLASSES, TOKENIZER):
        if (workdir / name).is_file():
            files.write_text(folder / name, (workdir / name).read_text(encoding="utf-8"))
    _write_record(folder, _read_record(workdir).get("splits", {}))


def exported_weights(folder: Path) -> dict[str, Any] | None:
    """Return {"step": step of the weights, "averaged": True for EMA weights} of a folder that `export` completed.

    None for any other folder. Raises WorkdirError if config.json is not valid JSON.
    """
    path = folder / "config.json"
    content = files.read_json(path) if path.is_file() else None
    return content.get(EXPORTED) if isinstance(content, dict) else None


def check_not_exported(workdir: Path) -> None:
    """Raise ConfigError if the folder of a run to train has exported weights, that is, files written by `export`."""
    if exported_weights(workdir) is not None:
        raise ConfigError(
            f"--workdir={workdir} holds weights that convert has exported. Choose another folder. To start from these "
            f"weights, set --config.init_from.path={workdir}."
        )


def save(workdir: Path, source: Source, splits: Mapping[str, Any] = MappingProxyType({})) -> None:
    """Write the class names, the tokenizer and the data fingerprints of a run to its folder, in process 0.

    The files are classes.json, the class names, and tokenizer.json, if the training split has them; and data.json,
    their checksums and the fingerprints of the splits.

    Args:
        workdir: folder of the run.
        source: training split.
        splits: fingerprints of the splits by name, from `tasks.fingerprint`.
    """
    if not multihost.is_primary():
        return
    if (classes := getattr(source, "classes", None)) is not None:
        files.write_json(workdir / CLASSES, list(classes))
    if (tokenizer := getattr(source, "tokenizer", None)) is not None:
        files.write_text(workdir / TOKENIZER, tokenizer.json())
    _write_record(workdir, splits)


def _write_record(folder: Path, splits: Mapping[str, Any]) -> None:
    """Write the checksums of the class names and the tokenizer in a folder, and the fingerprints of its splits."""
    sums = {name: sha256(folder / name) for name in (CLASSES, TOKENIZER) if (folder / name).is_file()}
    files.write_json(folder / RECORD, {"sha256": sums, "splits": dict(splits)})


def _read_record(folder: Path) -> dict[str, Any]:
    """Return the content of data.json; empty for runs that older versions started. Raises WorkdirError if broken."""
    content = files.read_json(folder / RECORD) if (folder / RECORD).is_file() else {}
    parts = [content.get(key, {}) for key in ("sha256", "splits")] if isinstance(content, dict) else [None]
    valid = all(isinstance(part, dict) for part in parts) and all(isinstance(x, dict) for x in parts[-1].values())
    if not valid:
        raise WorkdirError(f"{folder / RECORD} is not the record of a run's data. Restore a copy, or delete it.")
    return content


def read_fingerprint(folder: Path, split: str) -> dict[str, Any]:
    """Return the fingerprint of a split that a run recorded when it started; empty if it is not recorded.

    Raises WorkdirError if the record, data.json, is broken.
    """
    return _read_record(folder).get("splits", {}).get(split, {})


def count_examples(folder: Path, split: str) -> int | None:
    """Return the number of examples of a split that a run recorded when it started.

    None if it is not recorded, or the split is endless.

    Args:
        folder: folder of the run or of an export.
        split: name of the split in the data, such as "train".

    Raises:
        WorkdirError: the record, data.json, is broken.
    """
    return read_fingerprint(folder, split).get("examples")


def _check_unchanged(path: Path) -> None:
    """Raise WorkdirError if a file of a run differs from what the run wrote, as far as that is recorded."""
    expected = _read_record(path.parent).get("sha256", {}).get(path.name)
    if expected is not None and sha256(path) != expected:
        raise WorkdirError(
            f"{path} has changed since the run wrote it (SHA-256), so outputs could get wrong names. Restore a copy. "
            f"If you changed it on purpose, delete {path.parent / RECORD}."
        )


def warn_changed_data(workdir: Path, splits: Mapping[str, Mapping[str, Any]]) -> None:
    """Warn, on the standard error of process 0, of each split whose data differ from those that a run recorded.

    Splits that are not recorded are not compared.

    Args:
        workdir: folder of the run.
        splits: result of `tasks.fingerprint` for the present data.

    Raises:
        WorkdirError: the record, data.json, is broken.
    """
    before = _read_record(workdir).get("splits", {}) if multihost.is_primary() else {}
    for split in before.keys() & splits.keys():
        if change := fingerprints.describe_changes(before[split], splits[split]):
            print(
                f"WARNING: the data of split {split} have changed since {workdir} was started: {change}. Order and "
                "number of examples, and scores, differ from those of a run without the change. Restore the data, or "
                "choose another --workdir; else the run resumes with the new data.",
                file=sys.stderr,
                flush=True,
            )


def load_tokenizer(workdir: Path) -> Any:
    """Return the tokenizer of a run, an instance of `data.text.Tokenizer`, from the tokenizer.json in its folder.

    Raises:
        ConfigError: there is no tokenizer.json.
        DataError: tokenizer.json is not a valid tokenizer.
        WorkdirError: the file has changed since the run wrote it.
    """
    path = workdir / TOKENIZER
    if not path.is_file():
        raise ConfigError(
            f"{workdir} has no {TOKENIZER}: not a language-model run, or it never trained a step. "
            "Restore the tokenizer that it was trained with."
        )
    _check_unchanged(path)
    from leanformer.data.text import tokenizer  # needed only for texts

    return tokenizer.read(path)


def use_saved_tokenizer(workdir: Path, c: Any) -> None:
    """Set `data.tokenizer` of a config, in place, to the path of the tokenizer.json of a run that is read.

    The tokenizer that the config names would be trained again if the texts have changed, and that of the run in
    `init_from.path` may no longer exist. Nothing changes if `workdir` has no tokenizer.json.

    Args:
        workdir: folder of the run.
        c: config of this run.

    Raises:
        WorkdirError: the file has changed since the run wrote it.
    """
    if "tokenizer" in c.data and (workdir / TOKENIZER).is_file():
        _check_unchanged(workdir / TOKENIZER)
        c.data.tokenizer = str((workdir / TOKENIZER).absolute())  # no folder is taken for "bpe:..."


def check_tokenizer(workdir: Path, source: Source) -> None:
    """Raise DataError if a run in `workdir` was trained with another tokenizer than that of the data.

    Without a saved tokenizer.json, nothing is compared.

    Args:
        workdir: folder of the run.
        source: split of the data; one without a tokenizer is accepted.

    Raises:
        WorkdirError: the saved tokenizer has changed since the run wrote it.
    """
    path, other = workdir / TOKENIZER, getattr(source, "tokenizer", None)
    if path.is_file():
        _check_unchanged(path)
    if other is not None and path.is_file() and (saved := load_tokenizer(workdir)).json() != other.json():
        raise DataError(
            f"{path} is the tokenizer of this run, with {saved.vocabulary:,} tokens; data.tokenizer names another one, "
            f"with {other.vocabulary:,}. Set --config.data.tokenizer={path}, or train in a new folder."
        )


def output_names(classes: Sequence[str] | None, number: int) -> list[str]:
    """Return a name for each of `number` outputs of a model: the class, or the index of an output without a class."""
    return [*(classes or ()), *map(str, range(len(classes or ()), number))]


def load_classes(workdir: Path) -> tuple[str, ...] | None:
    """Return the class names of a run in the order of its outputs, from classes.json; None if there is no such file.

    Raises:
        ConfigError: classes.json is not a list of names.
        WorkdirError: the file has changed since the run wrote it.
    """
    path = workdir / CLASSES
    if not path.is_file():
        return None
    _check_unchanged(path)
    try:
        classes = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        classes = None
    if not isinstance(classes, list) or not all(isinstance(name, str) for name in classes):
        raise ConfigError(
            f"{path} is not a JSON list of names, one per output of the model. Fix it, or delete it to take the "
            "classes of the training split as it is now."
        )
    return tuple(classes)


def warn_missing_classes(workdir: Path, classes: Sequence[str] | None) -> None:
    """Warn, on the standard error of process 0, if a run has a config.json but no classes.json.

    Its outputs are then assumed to be the classes of the present training split.

    Args:
        workdir: folder of the run.
        classes: class names of the training split; no warning for None.
    """
    begun = (workdir / "config.json").is_file() and not (workdir / CLASSES).is_file()
    if multihost.is_primary() and begun and classes is not None:
        print(
            f"WARNING: {workdir} has no {CLASSES}. Its outputs are assumed to be the classes of the training split as "
            f"it is now: {', '.join(classes)}.",
            file=sys.stderr,
            flush=True,
        )
