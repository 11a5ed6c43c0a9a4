"""Flags of a command, and their values from the words of a command line."""

import dataclasses
import shlex
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from absl import flags as absl
from ml_collections import ConfigDict, config_flags

from leanformer import config as configs
from leanformer.config import format_error
from leanformer.errors import ConfigError


# Values of a command's flags by name, and `argv` (all words as one text), `words` (a list of those that are no flags)
# and `files` (names of config files by flag).
Values = SimpleNamespace

DEFINE: dict[Any, Any] = {
    str: absl.DEFINE_string,
    int: absl.DEFINE_integer,
    float: absl.DEFINE_float,
    bool: absl.DEFINE_bool,
    list: absl.DEFINE_list,
    ConfigDict: absl.DEFINE_string,
}
PLACEHOLDERS = {str: "TEXT", int: "N", float: "X", list: "A,B,...", ConfigDict: "FILE[:ARGUMENT]"}
PATHS = ("workdir", "out", "weights", "tokenizer", "texts", "prompts", "reference")  # flags that name a file or folder


@dataclasses.dataclass(frozen=True)
class Flag:
    """Flag of a command, --name=VALUE."""

    name: str
    help: str
    # str; int; float; bool, given as --name or --noname; list, given as VALUE,VALUE; a tuple of allowed words; or
    # ConfigDict, a config file with its argument and overrides, given as --name=FILE[:ARGUMENT] --name.KEY=VALUE.
    kind: Any = str
    default: Any = None
    required: bool = False
    many: bool = False  # may be given several times; the value is then the list of all values, as texts
    minimum: int | float | None = None
    maximum: int | float | None = None

    def __str__(self) -> str:
        if self.kind is bool:
            return f"--[no]{self.name}"
        value = "|".join(self.kind) if isinstance(self.kind, tuple) else PLACEHOLDERS[self.kind]
        return f"--{self.name}={value}"

    def define(self, flags: absl.FlagValues) -> None:
        """Define the flag in absl's `flags`; a config is a text until its file is loaded."""
        if self.many:
            absl.DEFINE_multi_string(self.name, self.default, self.help, flag_values=flags)
        elif isinstance(self.kind, tuple):
            absl.DEFINE_enum(self.name, self.default, self.kind, self.help, flag_values=flags)
        else:
            limits: Any = (
                {"lower_bound": self.minimum, "upper_bound": self.maximum} if self.kind in (int, float) else {}
            )
            DEFINE[self.kind](self.name, self.default, self.help, flag_values=flags, **limits)


CONFIG = Flag("config", "Config file.", ConfigDict, required=True)
OPTIONAL_CONFIG = Flag("config", "Config file.", ConfigDict)


def parse(flags: Sequence[Flag], argv: Sequence[str]) -> Values:
    """Return the values of flags from the words of a command line. Configs are loaded, but not validated yet.

    Raises ConfigError for a wrong, unknown or missing flag, an empty path, a URL, or a config that cannot be loaded.
    """
    defined = absl.FlagValues()
    for flag in flags:
        flag.define(defined)
    try:
        _, *rest = defined(["", *argv], known_only=True)
        for flag in flags:
            if flag.required and defined[flag.name].value is None:
                raise ConfigError(f"--{flag.name}=... is missing. {flag.help}")
    except absl.Error as error:
        raise ConfigError(str(error)) from error
    files: dict[str, Any] = {
        f.name: defined[f.name].value for f in flags if f.kind is ConfigDict and defined[f.name].value is not None
    }
    loaded = {name: configs.load(file) for name, file in files.items()}
    try:
        for name, config in loaded.items():
            delattr(defined, name)
            config_flags.DEFINE_config_dict(name, config, flag_values=defined, sys_argv=rest)
        _, *words = defined(["", *rest])
    except absl.Error as error:
        raise ConfigError(str(error)) from error
    except (AttributeError, KeyError, TypeError, ValueError) as error:  # from ConfigDict: unknown key or wrong type
        raise ConfigError(f"{format_error(error)}\n`python -m leanformer.keys` lists and explains all keys.") from error
    values: dict[str, Any] = {flag.name: defined[flag.name].value for flag in flags}
    for name in PATHS:
        _check_path(values.get(name), f"--{name}=")
    for word in words:
        _check_path(word, "")
    values |= {name: values[name].copy_and_resolve_references() for name in files}
    return Values(**values, files=files, words=words, argv=shlex.join(argv))


def _check_path(path: str | None, flag: str) -> None:
    """Raise ConfigError for an empty path, which is the current folder, and for a URL."""
    if path == "":
        raise ConfigError(f"{flag} is empty. Pass a path.")
    if path is not None and "://" in path:
        raise ConfigError(
            f"{flag}{path}: a URL is not a folder. Mount the bucket with gcsfuse or mount-s3 (launch/README.md), and "
            "pass a path in it."
        )
