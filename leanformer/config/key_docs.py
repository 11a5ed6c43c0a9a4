"""Help texts of config keys, and help pages."""

import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from ml_collections import ConfigDict

from leanformer import config
from leanformer.config import architectures, common, declare
from leanformer.errors import ConfigError


WIDTH = 46
NO_HELP = "key of the config file, without a help text"
SYNONYMS = {  # words of other libraries, and parts of the names that the keys have here
    "bs": ("batch_size",),
    "dropout": ("dropout", "drop_path"),
    "embed_dim": ("model.width",),
    "epochs": ("total_epochs", "every_epochs"),
    "fp16": ("dtype",),
    "grad_accum": ("accumulate",),
    "gradient_accumulation": ("accumulate",),
    "hidden_size": ("model.width",),
    "learning_rate": ("optim.lr",),
    "n_head": ("num_heads",),
    "n_layer": ("model.depth",),
    "precision": ("dtype",),
    "wd": ("weight_decay",),
}


def help_texts(c: Any) -> dict[str, str]:
    """Return {dotted key: meaning} of the keys of a config."""
    keys = config.KINDS[c.task].keys if c.task in config.KINDS else common.Common
    return declare.meanings(keys) | (architectures.model_meanings(c.model.name) if "model" in c else {})


def help_page(c: ConfigDict | None = None, section: str = "") -> str:
    """Return the help page of a config's keys, or of all; only of a section, or with a word in their name or help.

    A word may be another library's, such as wd.
    """
    groups = [*defaults()] if c is None else [("", c)]
    page = _page(groups, lambda key, _: not section or key == section or key.startswith(f"{section}."))
    word = section.rpartition(".")[2].lower()
    parts = SYNONYMS.get(word, (word,))
    page = page or _page(groups, lambda key, text: any(part in f"{key} {text}".lower() for part in parts))
    if not page:
        raise ConfigError(f"{section}: no section or key of the config, and no key has the word in its name or help.")
    return page


def _page(groups: Iterable[tuple[str, ConfigDict]], shown: Callable[[str, str], bool]) -> str:
    """Return the keys of titled configs for which shown(key, help) is true."""
    parts: list[str] = []
    seen: set[str] = set()  # keys of an earlier group with the same value are not repeated
    for title, values in groups:
        texts = help_texts(values)
        lines = [
            f"  {f'{key}={format_value(value)}':<{WIDTH}} {meaning(texts, key)}"
            for key, value in config.iterate_keys(values)
            if shown(key, meaning(texts, key))
        ]
        new = [line for line in lines if line not in seen]
        seen.update(new)
        parts += ["\n".join([title, "", *new] if title else new)] if new else []
    return "\n\n".join(parts)


def defaults() -> Iterator[tuple[str, ConfigDict]]:
    """Yield a title and the default config of each task, and of each architecture of images."""
    for task, kind in config.KINDS.items():
        function: Any = kind.defaults
        yield f'task="{task}" ({kind.name}), with the defaults of config.{function.__name__}():', kind.defaults()
    for name, keys in architectures.ARCHITECTURES.items():
        if issubclass(keys, architectures.ImageKeys):
            c = ConfigDict({"task": "images"})
            c.model = config.model(name)
            yield f'model.name="{name}":', c


def meaning(texts: dict[str, str], key: str) -> str:
    """Return the help text of a dotted key, or of the section that contains it; NO_HELP if neither has one."""
    while key not in texts and key:
        key = key.rpartition(".")[0]
    return texts.get(key, NO_HELP)


def format_value(value: Any) -> str:
    """Format the value of a key as typed on the command line: a tuple as (1,2); an empty section as {}."""
    if isinstance(value, ConfigDict):
        return "{}"
    return f"({','.join(map(str, value))})" if isinstance(value, tuple) else str(value)


def split_values(text: str) -> list[str]:
    """Return values, separated by commas outside of parentheses: "4,(4,8)" are two."""
    return re.split(r",(?![^(]*\))", text)
