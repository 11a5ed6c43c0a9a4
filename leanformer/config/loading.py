"""Config files: Python that returns a config, by path or by name, and with an argument.

Those of `configs/` ship with leanformer: `--config=vit_b_7x16` is found wherever it is installed.
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


def find(name: str) -> Path:
    """The file of a config: the path `name`; or else NAME.py here, in configs/ here, or among those that ship.

    Raises:
        ConfigError: there is none.
    """
    path = Path(name).expanduser()
    if path.is_file():
        return path
    found = []
    for folder in (Path(), Path("configs"), SHIPPED) if path.name == name and not path.suffix else ():
        file = folder / f"{name}.py"
        if file.is_file() and not any(file.samefile(other) for other in found):
            found.append(file)
    if not found:
        near = difflib.get_close_matches(path.stem, [file.stem for file in SHIPPED.glob("*.py")])
        hint = f" Ships with leanformer: --config={', '.join(near)}." if near else ""
        raise ConfigError(f"The config {name} cannot be loaded: there is no such file in {Path.cwd()}.{hint}")
    if len(found) > 1:
        others = ", ".join(map(str, found[1:]))
        print(f"The config {name} is {found[0]} here, and not {others}.", file=sys.stderr, flush=True)
    return found[0]


def load(name: str) -> ConfigDict:
    """The config of "FILE", or of "FILE:ARGUMENT", which `get_config` gets.

    Raises:
        ConfigError: no such file, an error in it, or no config comes out of it.
    """
    file, colon, argument = name.partition(":")
    file = str(find(file))
    try:
        get_config = runpy.run_path(file).get("get_config")
        if not callable(get_config):
            raise ConfigError(f"The config {file} has no function get_config().")
        if colon and not inspect.signature(get_config).parameters:
            raise ConfigError(f"The config {file} takes no argument, found :{argument}")
        config = get_config(argument) if colon else get_config()
    except LeanformerError:
        raise
    except Exception as error:  # whatever the file's own code raises
        raise ConfigError(f"The config {file} has an error{_line(error, file)}. {words_of(error)}") from error
    if not isinstance(config, ConfigDict):
        raise ConfigError(f"get_config() of {file} returned {type(config).__name__}, wanted a ConfigDict.")
    return config


def _line(error: Exception, file: str) -> str:
    """The last place in the file that an error came through."""
    numbers = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
    numbers += [error.lineno] if isinstance(error, SyntaxError) else []
    return f" in line {numbers[-1]}" if numbers else ""


def words_of(error: BaseException) -> str:
    """An error of ConfigDict, or of a config's own code, in a line of words: a key that is not there above all."""
    while error.args and isinstance(error.args[0], BaseException):
        error = error.args[0]
    text = str(error.args[0] if isinstance(error, KeyError) and error.args else error)  # a KeyError quotes its message
    found = re.search(r'Did you mean "(.+)" instead of "(.+)"\?', text)
    key = re.match(r'Key "(.+?)" does not exist and cannot be added', text)
    if found:
        return f'There is no key "{found[2]}". Did you mean "{found[1]}"?'
    if key:
        return f'There is no key "{key[1]}".'
    if inside := re.search(r"Attempting to lookup: (\S+)", text):
        return f'There is no key "{inside[1]}".'
    if flag := re.fullmatch(r"--(?:no)?(\S+?)=.* does not take an argument", text, re.DOTALL):
        return f"{text.removesuffix(' does not take an argument')}: takes no value. Write --{flag[1]}=false."
    if isinstance(error, KeyError) and error.args:  # a plain one, whose text is the key alone
        return f'There is no key "{str(error.args[0]).strip("'")}".'
    return f"{type(error).__name__}: {' '.join(text.split())}"


def beside(file: str, name: str, *arguments: str) -> ConfigDict:
    """The config `<name>.py` in the folder of `file`, for a config that is a difference against another."""
    return load(":".join([str(Path(file).with_name(f"{name}.py")), *arguments]))
