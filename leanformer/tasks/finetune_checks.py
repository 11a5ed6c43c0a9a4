"""What a run that starts from another one's weights must share with it, besides shapes: habits, and a tokenizer."""

from pathlib import Path
from typing import Any

from leanformer.data.text import Tokenizer
from leanformer.errors import ConfigError, DataError
from leanformer.tasks import artifacts


# Keys of a model that no weight depends on, or that those above the blocks alone do.
FREE = {"num_classes", "pool", "pooler_dim", "transform", "head_bias", "packed", "dropout", "drop_path", "remat"}
FREE |= {"unroll", "backend", "max_length"}


def source_run(path: str | None) -> Path | None:
    """The folder of the run that `init_from.path` names; None where it names a file, or nothing."""
    folder = path and Path(path).expanduser()
    return folder if folder and (folder / "config.json").is_file() else None


def required_model_keys(workdir: Path) -> dict[str, Any]:
    """The keys of a run's model that another one, which starts from its weights, must have too."""
    found = artifacts.load_config(workdir).model.to_dict()
    return {key: value for key, value in found.items() if key not in FREE}


def check_model(workdir: Path, model: Any) -> None:
    """Raises ConfigError where a model would read a run's weights otherwise than the run's own did."""
    differ = {key: value for key, value in required_model_keys(workdir).items() if model.get(key) != value}
    if differ:
        said = " ".join(f"--config.model.{key}={value}" for key, value in differ.items())
        own = ", ".join(f"model.{key}={model.get(key)}" for key in differ)
        raise ConfigError(f"init_from.path={workdir} is a run of another model than {own}. Set {said}.")


def check_tokenizer(workdir: Path, words: str, chosen: Tokenizer) -> None:
    """Raises DataError where texts would be read by another tokenizer than the run's."""
    own = artifacts.load_tokenizer(workdir)
    if own.json() != chosen.json():
        raise DataError(
            f'data.tokenizer="{words}", of {chosen.vocabulary:,} tokens, is not the tokenizer of init_from.path='
            f"{workdir}, of {own.vocabulary:,}, so its weights would mean other tokens. Leave data.tokenizer unset."
        )
