"""Checks of fine-tuning: model settings and tokenizer must match those of the run that weights come from."""

from pathlib import Path
from typing import Any

from leanformer.data.text import Tokenizer
from leanformer.errors import ConfigError, DataError
from leanformer.tasks import artifacts


# Keys of a model that affect no weight, or only weights above the blocks.
FREE = {"num_classes", "pool", "pooler_dim", "transform", "head_bias", "packed", "dropout", "drop_path", "remat"}
FREE |= {"unroll", "backend", "max_length"}


def source_run(path: str | None) -> Path | None:
    """Return the folder of the run in `init_from.path`; None if it is a file or unset."""
    folder = path and Path(path).expanduser()
    return folder if folder and (folder / "config.json").is_file() else None


def required_model_keys(workdir: Path) -> dict[str, Any]:
    """Return the model keys of a run that a model started from its weights must share."""
    model = artifacts.load_config(workdir).model.to_dict()
    return {key: value for key, value in model.items() if key not in FREE}


def check_model(workdir: Path, model: Any) -> None:
    """Raise ConfigError if a model differs from the one that the weights of a run were trained with."""
    differ = {key: value for key, value in required_model_keys(workdir).items() if model.get(key) != value}
    if differ:
        flags = " ".join(f"--config.model.{key}={value}" for key, value in differ.items())
        values = ", ".join(f"model.{key}={model.get(key)}" for key in differ)
        raise ConfigError(f"init_from.path={workdir}: the run has another model than {values}. Set {flags}.")


def check_tokenizer(workdir: Path, words: str, chosen: Tokenizer) -> None:
    """Raise DataError if the chosen tokenizer differs from that of the run."""
    trained = artifacts.load_tokenizer(workdir)
    if trained.json() != chosen.json():
        raise DataError(
            f'data.tokenizer="{words}" ({chosen.vocabulary:,} tokens) differs from the tokenizer of init_from.path='
            f"{workdir} ({trained.vocabulary:,} tokens). Leave data.tokenizer unset."
        )
