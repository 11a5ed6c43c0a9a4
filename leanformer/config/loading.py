"""Loading of config files: Python files that return a config, by path or by name, with an optional argument.

The files of `configs/` ship with leanformer: `--config=vit_b_7x16` works in any installation.
"""

import difflib
import inspect
import re
import runpy
import sys
import traceback
from pathlib import Path

from ml_collections import ConfigDict

from leanformer.errors import ConfigError, LeanformerError


PACKAGE = Path(__file__).parents[1]
SHIPPED = next(filter(Path.is_dir, (PACKAGE / "configs", PACKAGE.parent / "configs")), PACKAGE / "configs")


def find(name: str, flag: str = "config") -> Path:
    """Return the file of a config: the path `name`, or NAME.py in the current folder, in configs/, or in leanformer.

    If several of these folders have NAME.py, the first is used, with a warning on the standard error.

    Args:
        name: name or path of the config.
        flag: command-line flag whose value is `name`, for messages.

    Raises:
        ConfigError: there is no such file.
    """
    path = Path(name).expanduser()
    if path.is_file():
        return path
    files = []
    for folder in (Path(), Path("configs"), SHIPPED) if path.name == name and not path.suffix else ():
        file = folder / f"{name}.py"
        if file.is_file() and not any(file.samefile(other) for other in files):
            files.append(file)
    if not files:
        near = difflib.get_close_matches(path.stem, [file.stem for file in SHIPPED.glob("*.py")])
        hint = f" Similar configs of leanformer: --{flag}={', '.join(near)}." if near else ""
        raise ConfigError(f"--{flag}={name}: no such file in {Path.cwd()}.{hint}")
    if len(files) > 1:
        others = ", ".join(map(str, files[1:]))
        print(f"WARNING: --{flag}={name} is read from {files[0]}, not from {others}.", file=sys.stderr, flush=True)
    return files[0]


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
    file, colon, argument = name.partition(":")
    file = str(find(file, flag))
    try:
        get_config = runpy.run_path(file).get("get_config")
        if not callable(get_config):
            raise ConfigError(f"The config {file} has no function get_config().")
        if colon and not inspect.signature(get_config).parameters:
            raise ConfigError(f"The config {file} accepts no argument, found :{argument}")
        config = get_config(argument) if colon else get_config()
    except LeanformerError:
        raise
    except Exception as error:  # the code of a config file can raise anything
        raise ConfigError(f"The config {file} has an error{_line(error, file)}. {format_error(error)}") from error
    if not isinstance(config, ConfigDict):
        raise ConfigError(f"get_config() of {file} returned {type(config).__name__}, expected a ConfigDict.")
    return config


def _line(error: Exception, file: str) -> str:
    """Return " in line N", the last line of the file in the traceback of an error; "" if there is none."""
    numbers = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
    numbers += [error.lineno] if isinstance(error, SyntaxError) else []
    return f" in line {numbers[-1]}" if numbers else ""


def format_error(error: BaseException) -> str:
    """Return an error of ConfigDict, such as a missing key, or of a config file, as one line of text."""
    while error.args and isinstance(error.args[0], BaseException):
        error = error.args[0]
    # str() of a KeyError quotes its message.
    text = str(error.args[0] if isinstance(error, KeyError) and error.args else error)
    typo = re.search(r'Did you mean "(.+)" instead of "(.+)"\?', text)
    key = re.match(r'Key "(.+?)" does not exist and cannot be added', text)
    if typo:
        return f'There is no key "{typo[2]}". Did you mean "{typo[1]}"?'
    if key:
        return f'There is no key "{key[1]}".'
    if inside := re.search(r"Attempting to lookup: (\S+)", text):
        return f'There is no key "{inside[1]}".'
    if flag := re.fullmatch(r"--(?:no)?(\S+?)=.* does not take an argument", text, re.DOTALL):
        return f"{text.removesuffix(' does not take an argument')}: takes no value. Write --{flag[1]}=false."
    if isinstance(error, KeyError) and error.args:  # raised by a plain dict: the text is only the key
        return f'There is no key "{str(error.args[0]).strip("'")}".'
    return f"{type(error).__name__}: {' '.join(text.split())}"


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
