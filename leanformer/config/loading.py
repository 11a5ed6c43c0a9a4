"""Loading of config files: Python files that return a config, by path or by name, with an optional argument.

The files of `configs/` ship with leanformer: `--config=vit_b_7x16` works in any installation.
"""

import re
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from leanformer.errors import ConfigError, LeanformerError


PACKAGE = Path(__file__).parents[1]
SHIPPED = next(filter(Path.is_dir, (PACKAGE / "configs", PACKAGE.parent / "configs")), PACKAGE / "configs")


def find(name: str, flag: str = "config") -> Path:
    """Return the file of a config: the path `name`, or NAME.py in the current folder, in configs/, or in leanformer.

    Args:
        name: name or path of the config.
        flag: command-line flag whose value is `name`, for messages.

    Raises:
        ConfigError: there is no such file.
    """
    path = Path(name).expanduser()
    for file in (path, *(folder / f"{name}.py" for folder in (Path(), Path("configs"), SHIPPED))):
        if file.is_file():
            return file
    raise ConfigError(f"--{flag}={name}: no such file in {Path.cwd()}, and no config of leanformer has this name.")


def load(name: str, flag: str = "config") -> ConfigDict:
    """Return the config that the function `get_config` of a config file returns.

    Args:
        name: name or path of the file, see `find`; or `FILE:ARGUMENT`, with the argument of `get_config`.
        flag: command-line flag whose value is `name`, for messages.

    Raises:
        ConfigError: the file is missing, raises an error, or returns no config.

    >>> c = load("vit_b:depth=7,heads=16")
    >>> c.model.depth, c.model.num_heads
    (7, 16)
    """
    name, colon, argument = name.partition(":")
    file = str(find(name, flag))
    try:
        config = runpy.run_path(file)["get_config"](*([argument] if colon else []))
    except LeanformerError:
        raise
    except Exception as error:  # the code of a config file can raise anything
        raise ConfigError(f"The config {file} has an error. {format_error(error)}") from error
    if not isinstance(config, ConfigDict):
        raise ConfigError(f"get_config() of {file} returned {type(config).__name__}, expected a ConfigDict.")
    return config


def load_function(name: str, function: str) -> Callable[..., Any] | None:
    """Return a function of a config file beside `get_config`, such as `make_loggers`; None if it has none.

    Args:
        name: name or path of the file, see `find`; or `FILE:ARGUMENT`.
        function: name of the function.
    """
    return runpy.run_path(str(find(name.partition(":")[0]))).get(function)


def format_error(error: BaseException) -> str:
    """Return an error of ConfigDict, such as an unknown key, or of a config file, as one line of text."""
    while error.args and isinstance(error.args[0], BaseException):
        error = error.args[0]
    text = " ".join(str(error.args[0] if isinstance(error, KeyError) and error.args else error).split())
    if typo := re.search(r'Did you mean "(.+)" instead of "(.+)"\?', text):
        return f'There is no key "{typo[2]}". Did you mean "{typo[1]}"?'
    if key := re.match(r'Key "(.+?)" does not exist|.*Attempting to lookup: (\S+)', text):
        return f'There is no key "{key[1] or key[2]}".'
    if isinstance(error, KeyError):
        return f"There is no key {text}."
    return f"{type(error).__name__}: {text}"


def load_sibling(file: str, name: str, *arguments: str) -> ConfigDict:
    """Return the config of another file in the same folder, for config files that override it.

    Args:
        file: path of the calling config file, `__file__`.
        name: name of the other file without .py.
        arguments: argument of its `get_config`; at most one.

    Raises:
        ConfigError: the file is missing, raises an error, or returns no config.
    """
    return load(":".join([str(Path(file).with_name(f"{name}.py")), *arguments]))
