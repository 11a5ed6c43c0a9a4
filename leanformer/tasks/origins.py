"""Checks of the weights that a model starts from: settings and tokenizer that they were trained with."""

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from leanformer.data.text import Tokenizer
from leanformer.data.text import tokenizer as tokenizers
from leanformer.errors import ConfigError, DataError
from leanformer.runtime import files, multihost
from leanformer.tasks import artifacts


# Keys of a model that affect no weight, or only weights above the blocks.
FREE = {"num_classes", "pool", "pooler_dim", "transform", "head_bias", "packed", "dropout", "drop_path", "remat"}
FREE |= {"unroll", "backend", "max_length"}
# Keys of a model that change only its initial weights or its training, or that new weights may change.
INITIAL = {"qkv_init", "levers_on", "attention_dropout", "kernel_init", "dtype", "image_size", "layer_scale"}


def source_run(path: str | None) -> Path | None:
    """Return the folder in `path`, the value of `init_from.path`, if it has a config.json; None otherwise."""
    folder = Path(path).expanduser() if path else None
    return folder if folder is not None and (folder / "config.json").is_file() else None


def required_model_keys(workdir: Path) -> dict[str, Any]:
    """Return {key of config.model: value in a run} for the keys that a model started from the run's weights must share.

    They are all keys of the run's section config.model except those in FREE, which affect no weight, or only weights
    above the blocks: num_classes, pool, pooler_dim, transform, head_bias, packed, dropout, drop_path, remat, unroll,
    backend and max_length.

    Args:
        workdir: folder of the run whose weights are used.

    Raises:
        WorkdirError: the config.json of the run is broken.
    """
    model = artifacts.load_config(workdir).model.to_dict()
    return {key: value for key, value in model.items() if key not in FREE}


def check_source_model(workdir: Path, model: Any) -> None:
    """Raise ConfigError if a model differs from that of the run whose weights it starts from, in `required_model_keys`.

    Keys that only `model` has are not compared.

    Args:
        workdir: folder of the run whose weights are used, not of the new run.
        model: section config.model of the new run.

    Raises:
        WorkdirError: the config.json in `workdir` is broken.
    """
    differ = {key: value for key, value in required_model_keys(workdir).items() if model.get(key) != value}
    if differ:
        flags = " ".join(f"--config.model.{key}={value}" for key, value in differ.items())
        values = ", ".join(f"model.{key}={model.get(key)}" for key in differ)
        raise ConfigError(f"init_from.path={workdir}: the run has another model than {values}. Set {flags}.")


def check_source_tokenizer(workdir: Path, words: str, chosen: Tokenizer) -> None:
    """Raise DataError if the tokenizer of a new run differs from that of the run whose weights it starts from.

    Args:
        workdir: folder of the run whose weights are used, with its tokenizer.json.
        words: value of data.tokenizer of the new run, for the message.
        chosen: tokenizer of the new run.

    Raises:
        ConfigError: `workdir` has no tokenizer.json.
        WorkdirError: that file has changed since the run wrote it.
    """
    trained = artifacts.load_tokenizer(workdir)
    if trained.json() != chosen.json():
        raise DataError(
            f'data.tokenizer="{words}" ({chosen.vocabulary:,} tokens) differs from the tokenizer of init_from.path='
            f"{workdir} ({trained.vocabulary:,} tokens). Set --config.data.tokenizer={workdir}."
        )


def read_config(path: Path) -> Any:
    """Return the config of the run or export that weights are from; None without a config.json of a run beside them.

    Args:
        path: folder of a run or of an export, or a file in one.

    Raises:
        WorkdirError: the config.json is broken.
    """
    folder = path if path.is_dir() else path.parent
    content = files.read_json(folder / "config.json") if (folder / "config.json").is_file() else None
    return artifacts.load_config(folder) if isinstance(content, dict) and "config" in content else None


def warn_other_model(path: Path, c: Any, settings: Callable[[Mapping[str, Any]], Any]) -> None:
    """Warn, on the standard error of process 0, if weights in our own format were trained with other model settings,
    or with images of another normalisation.

    Shapes do not show another epsilon, activation or base of rotary positions, for example. Not compared are the keys
    in FREE, see `required_model_keys`, and those in INITIAL, which matter only for new weights and training: qkv_init,
    levers_on, attention_dropout, kernel_init, dtype, image_size and layer_scale.

    Args:
        path: folder of a run or of an export, or a file in one; nothing is compared without a config.json of a run.
        c: config of the new run.
        settings: function from a section config.model to the settings that are compared, `model_base.Family.settings`.

    Raises:
        WorkdirError: the config.json is broken.
    """
    source = read_config(path) if multihost.is_primary() else None
    if source is None:
        return
    theirs, ours = settings(source.model.to_dict()), settings(c.model.to_dict())
    differ = [key for key in ours if key not in FREE | INITIAL and (theirs.get(key) or None) != (ours[key] or None)]
    pairs = {f"model.{key}": (theirs.get(key), ours[key]) for key in differ}
    images = [key for key in ("mean", "std") if key in c.data and source.data.get(key, c.data[key]) != c.data[key]]
    pairs |= {f"data.{key}": (source.data[key], c.data[key]) for key in images}
    if pairs:
        shown = ", ".join(f"{key}={before}, now {now}" for key, (before, now) in pairs.items())
        print(
            f"WARNING: {path if path.is_dir() else path.parent}: these weights were trained with {shown}.",
            file=sys.stderr,
            flush=True,
        )


def warn_other_class_order(path: Path, theirs: Sequence[str] | None, classes: Sequence[str] | None) -> None:
    """Warn, on the standard error of process 0, if weights with a classifier have the data's classes in another order.

    Nothing is compared if the classes of either are unknown, or if weights and data have different sets of classes.

    Args:
        path: file or folder of the weights, for the message.
        theirs, classes: class names of the weights and of the data in the order of the outputs; None if unknown.
    """
    if not (multihost.is_primary() and theirs and classes) or sorted(theirs) != sorted(classes):
        return
    for number, (name, other) in enumerate(zip(theirs, classes, strict=True)):
        if name != other:
            print(
                f"WARNING: {path}: output {number} of these weights is the class {name}, but in the data it is "
                f"{other}: the classifier starts with its classes in another order. Rename the class folders so that "
                "they sort as there, or set init_from.new_head=True.",
                file=sys.stderr,
                flush=True,
            )
            return


def warn_other_tokenizer(path: Path, words: str | None) -> None:
    """Warn, on the standard error of process 0, if `data.tokenizer` is not the tokenizer.json beside published weights.

    The vocabularies are compared. The warning is also printed if `data.tokenizer` is unset or not an existing path.

    Args:
        path: file or folder of the weights; nothing is compared without a tokenizer.json there.
        words: value of `data.tokenizer`, None if unset.

    Raises:
        DataError: one of the tokenizers is invalid.
    """
    folder = path if path.is_dir() else path.parent
    if not multihost.is_primary() or not (folder / tokenizers.FILE).is_file():
        return
    chosen = Path(words or "").expanduser()
    if words and chosen.exists() and tokenizers.read(chosen).tokens == tokenizers.read(folder).tokens:
        return
    print(
        f"WARNING: {folder / tokenizers.FILE} belongs to these weights, but data.tokenizer={words}. Set "
        f"--config.data.tokenizer={folder}.",
        file=sys.stderr,
        flush=True,
    )
