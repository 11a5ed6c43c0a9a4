"""What a run's folder keeps of its data, so that the model can be used without them: names of classes, a tokenizer."""

from pathlib import Path
from typing import Any

from leanformer.data import Source
from leanformer.data.text import tokenizer as tokenizers
from leanformer.errors import ConfigError, DataError
from leanformer.runtime import files, peers
from leanformer.tasks import labels


def write(workdir: Path, source: Source) -> None:
    """Writes down what the outputs of a model that learns from a source stand for, where the source says it."""
    labels.write(workdir, getattr(source, "classes", None))
    found = getattr(source, "tokenizer", None)
    if found is not None and peers.first():
        files.write_text(workdir / tokenizers.FILE, found.json())


def tokenizer(workdir: Path) -> Any:
    """The tokenizer of a run, `data.text.Tokenizer`. Raises ConfigError where it kept none, DataError for a broken
    one."""
    path = workdir / tokenizers.FILE
    if not path.is_file():
        raise ConfigError(
            f"{workdir} has no {tokenizers.FILE}: it is of no language model, or has not been trained for a step. Put "
            "back the tokenizer that its texts were read with."
        )
    return tokenizers.read(path)


def fill(workdir: Path, c: Any) -> None:
    """Names the run's own tokenizer in its config where that names none: the run that it began from may be gone."""
    if "tokenizer" in c.data and c.data.tokenizer is None and (workdir / tokenizers.FILE).is_file():
        c.data.tokenizer = str(workdir / tokenizers.FILE)


def check(workdir: Path, source: Source) -> None:
    """Raises DataError where a run that was begun read its texts with another tokenizer than a source does."""
    path, found = workdir / tokenizers.FILE, getattr(source, "tokenizer", None)
    if found is not None and path.is_file() and (own := tokenizers.read(path)).json() != found.json():
        raise DataError(
            f"{path} is the tokenizer of this run, of {own.vocabulary:,} tokens, and data.tokenizer names another one, "
            f"of {found.vocabulary:,}. Set --config.data.tokenizer={path}, or begin in a new folder."
        )
