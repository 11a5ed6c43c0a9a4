"""Flags of a command, and their values from the words of a command line."""

import dataclasses
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from absl import flags as absl
from ml_collections import ConfigDict, config_flags

from leanformer import config as configs
from leanformer.config.loading import format_error
from leanformer.errors import ConfigError, LeanformerError
from leanformer.runtime import files


# Values of a command's flags by name, and `argv`, `verb`, `words` and `files` (names of config files by flag).
Values = SimpleNamespace

DEFINE = {
    str: absl.DEFINE_string,
    int: absl.DEFINE_integer,
    float: absl.DEFINE_float,
    bool: absl.DEFINE_bool,
    list: absl.DEFINE_list,
    ConfigDict: absl.DEFINE_string,
}
SHOWN = {str: "TEXT", int: "N", float: "X", list: "A,B,...", ConfigDict: "FILE[:ARGUMENT]"}
PATHS = ("workdir", "out", "weights", "tokenizer", "texts", "prompts", "reference")  # flags that name a file or folder


@dataclasses.dataclass(frozen=True)
class Flag:
    """Flag of a command, --name=VALUE.

    Attributes:
        name: name of the flag.
        help: help text.
        kind: type of the value: str; int; float; bool, given as --name or --noname; list, given as VALUE,VALUE; a tuple
            of allowed words; or ConfigDict, a config file with its argument and overrides, given as
            --name=FILE[:ARGUMENT] --name.KEY=VALUE.
        default: value if the flag is not given.
        required: True if the flag must be given.
        many: True if the flag may be given several times; its value is then the list of all values, as texts.
        writes: True if it names a folder that the command writes to; the command checks first that it is writable.
        new: True if the folder of `writes` must be empty or not exist.
        minimum: smallest allowed number; None without a limit.
        maximum: largest allowed number; None without a limit.
    """

    name: str
    help: str
    kind: Any = str
    default: Any = None
    required: bool = False
    many: bool = False
    writes: bool = False
    new: bool = False
    minimum: int | float | None = None
    maximum: int | float | None = None

    @property
    def shown(self) -> str:
        """Flag as typed on the command line, for the help page, such as "--step=N" or "--[no]best"."""
        if self.kind is bool:
            return f"--[no]{self.name}"
        value = "|".join(self.kind) if isinstance(self.kind, tuple) else SHOWN[self.kind]
        return f"--{self.name}={value}"

    def define(self, flags: absl.FlagValues) -> None:
        """Define the flag in absl's `flags`, which parse a command line.

        A config is defined as a text, the name of its file.
        """
        if self.many:
            absl.DEFINE_multi_string(self.name, self.default, self.help, flag_values=flags)
        elif isinstance(self.kind, tuple):
            absl.DEFINE_enum(self.name, self.default, self.kind, self.help, flag_values=flags)
        else:
            DEFINE[self.kind](self.name, self.default, self.help, flag_values=flags)

    def check(self, value: Any) -> None:
        """Raise ConfigError if a number is outside the limits of the flag, or the value of a flag for a path is empty.

        None, for a flag that was not given, is accepted.
        """
        if self.name in PATHS and value == "":
            raise ConfigError(f"--{self.name}= is empty. Pass a path.")
        low, high = self.minimum, self.maximum
        if value is None or ((low is None or value >= low) and (high is None or value <= high)):
            return
        limits = f"at least {low:,}" if high is None else f"between {low:,} and {high:,}"
        shown = f"{value:g}" if isinstance(value, float) else value
        raise ConfigError(f"--{self.name}={shown}: must be {limits}.")


CONFIG = Flag("config", "Config file.", ConfigDict, required=True)
MULTIHOST_FLAGS = (  # flags of commands that may run in several processes
    Flag("coordinator", "Address host:port of process 0 of a multi-process run."),
    Flag("processes", "Number of processes of a multi-process run.", int),
    Flag("process", "Index of this process in a multi-process run, from 0.", int),
    Flag("connect_seconds", "Time limit for all processes to connect, in seconds.", int, default=300, minimum=1),
)


@dataclasses.dataclass(frozen=True)
class CommandLine:
    """Flags and words that a command takes.

    Attributes:
        flags: flags of the command.
        verbs: words of which the command takes exactly one, as `values.verb`.
        words: description of other words that the command takes, as `values.words`; empty if it takes none.
        optional_words: True if the other words may be left out.
        multi_process: True if the command may run in several processes, as given by flags or the environment.
        checked: False if configs are not validated; the command then starts without importing JAX.
    """

    flags: tuple[Flag, ...] = ()
    verbs: tuple[str, ...] = ()
    words: str = ""
    optional_words: bool = False
    multi_process: bool = False
    checked: bool = True

    @property
    def all_flags(self) -> tuple[Flag, ...]:
        """Flags of the command, including those of multi-process runs."""
        return (*self.flags, *MULTIHOST_FLAGS) if self.multi_process else self.flags

    def parse(self, argv: Sequence[str]) -> Values:
        """Return the values of the flags and words of a command line, as the function `parse`.

        Configs are not validated yet.

        Raises:
            ConfigError: a flag or word is wrong, a config file cannot be loaded, or an output folder that must be empty
                is not.
            WorkdirError: an output folder is not writable.
        """
        values = parse(self.all_flags, argv)
        self._check_words(values.words)
        for flag in self.all_flags:
            folder = getattr(values, flag.name) if flag.writes else None
            if folder is not None:
                files.check_writable(Path(folder).expanduser())
                if flag.new:
                    files.check_empty(Path(folder).expanduser(), f"--{flag.name}")
        return values

    def _check_words(self, given: Sequence[str]) -> None:
        """Raise ConfigError if words other than flags are missing, or given to a command that does not take them."""
        fit = len(given) == 1 and given[0] in self.verbs if self.verbs else bool(given) == bool(self.words)
        if not fit and not (self.optional_words and not given):
            choice = f"one of: {', '.join(self.verbs)}" if self.verbs else "only flags, as --name=value"
            expected = self.words or choice
            raise ConfigError(f"This command takes {expected}. Found: {' '.join(given) or 'nothing'}.")


def parse(flags: Sequence[Flag], argv: Sequence[str]) -> Values:
    """Return the values of flags from the words of a command line, as attributes. Configs are not validated yet.

    Beside the flags, by name, the result has `argv` (the words as one text), `words` (list of the words that are not
    flags), `verb` (these joined) and `files` (names of the config files by flag). The value of a config flag is the
    loaded config with its overrides.

    Args:
        flags: flags of the command.
        argv: words of the command line, without the name of the command.

    Raises:
        ConfigError: a flag is wrong, unknown or missing, or a config file cannot be loaded.
    """
    defined = absl.FlagValues()
    for flag in flags:
        flag.define(defined)
    try:
        _, *rest = defined(["", *argv], known_only=True)
        for flag in flags:
            if flag.required and defined[flag.name].value is None:
                raise ConfigError(f"--{flag.name}=... is missing. {flag.help}")
        files: dict[str, Any] = {
            f.name: defined[f.name].value for f in flags if f.kind is ConfigDict and defined[f.name].value is not None
        }
        for name, file in files.items():
            delattr(defined, name)
            config_flags.DEFINE_config_dict(name, configs.load(file, flag=name), flag_values=defined, sys_argv=rest)
        _, *words = defined(["", *rest])
    except LeanformerError:
        raise
    except absl.Error as error:
        raise ConfigError(_explain(error, defined)) from error
    except (AttributeError, KeyError, TypeError, ValueError) as error:  # from ConfigDict: unknown key or wrong type
        raise ConfigError(f"{format_error(error)}\n`python -m leanformer.keys` lists and explains all keys.") from error
    values: dict[str, Any] = {flag.name: defined[flag.name].value for flag in flags}
    for flag in flags:
        flag.check(values[flag.name])
    _check_urls({name: [values[name]] for name in PATHS if values.get(name)} | {"words": words})
    values |= {name: values[name].copy_and_resolve_references() for name in files}
    return Values(**values, files=files, verb="".join(words), words=words, argv=shlex.join(argv))


def _check_urls(paths: Mapping[str, Sequence[str]]) -> None:
    """Raise ConfigError for a URL in place of a path, which would be made a folder named `gs:`."""
    for name, path in ((name, path) for name, several in paths.items() for path in several if "://" in path):
        shown = path if name == "words" else f"--{name}={path}"
        raise ConfigError(
            f"{shown}: a URL is not a folder. Mount the bucket with gcsfuse or mount-s3 (launch/README.md), and pass a "
            "path in it."
        )


EXPECTED = {  # description and example by type of a flag
    "int": ("a whole number", "8"),
    "float": ("a number", "0.1"),
    "bool": ("true or false", "true"),
}


def _explain(error: absl.Error, flags: absl.FlagValues) -> str:
    """Return the message of an error of absl; for a value of the wrong type, name the expected type."""
    text = str(error)
    match = re.match(r"flag --([^=]+)=", text)
    reason = f": {error.__context__}"
    if match is None or match[1] not in flags or not text.endswith(reason):
        return text.removeprefix("flag ")
    name, value = match[1], text[match.end() : -len(reason)]
    flag = flags[name]
    kind = flag.flag_type()
    if kind in EXPECTED:
        words, example = EXPECTED[kind]
        example = example if flag.default is None or isinstance(flag.default, bool) else flag.default
        return f"--{name}={value}: expected {words}. Write it as in --{name}={example}."
    if "as a ConfigDict" in reason:
        return f"--{name}={value}: expected a key of this section. Write --{name}.KEY=VALUE."
    if "as tuple" in reason:
        return f"--{name}={value}: expected a list. Write it in quotes, as --{name}=\"('a','b')\"."
    return f"--{name}={value}{reason}"
