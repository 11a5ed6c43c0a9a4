"""Files that describe the model of a workdir: config.json, classes.json, tokenizer.json."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from leanformer.data import Source
from leanformer.errors import ConfigError, DataError, WorkdirError
from leanformer.runtime import files, multihost


CLASSES, TOKENIZER = "classes.json", "tokenizer.json"
EXPORTED = "exported"  # key of config.json in a folder of `export`


def load_config(workdir: Path) -> ConfigDict:
    """Return the config of a run, from the config.json in its folder. Lists of JSON become tuples."""
    path = workdir / "config.json"
    content = files.read_json(path)
    if not isinstance(content, dict) or not {"model", "data", "optim"} <= {*content.get("config", ())}:
        raise WorkdirError(f"{path} is not the config of a run. Restore a copy.")
    return ConfigDict(_tuples(content["config"]), convert_dict=True)


def _tuples(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {name: _tuples(item) for name, item in tree.items()}
    return tuple(map(_tuples, tree)) if isinstance(tree, list) else tree


def flatten_keys(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the values of nested dicts by dotted keys, each after `prefix`: {"a": {"b": 1}} becomes {"a.b": 1}."""
    values = {}
    for key, value in tree.items():
        values |= flatten_keys(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return values


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


def save(workdir: Path, source: Source) -> None:
    """Write the class names and the tokenizer of a training split, if it has them; only process 0 writes."""
    if not multihost.is_primary():
        return
    if (classes := getattr(source, "classes", None)) is not None:
        files.write_json(workdir / CLASSES, list(classes))
    if (tokenizer := getattr(source, "tokenizer", None)) is not None:
        files.write_text(workdir / TOKENIZER, tokenizer.json())


def load_tokenizer(workdir: Path) -> Any:
    """Return the tokenizer of a run, a `data.text.Tokenizer`."""
    if not (workdir / TOKENIZER).is_file():
        raise ConfigError(
            f"{workdir} has no {TOKENIZER}: not a language-model run, or it never trained a step. "
            "Restore the tokenizer that it was trained with."
        )
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
