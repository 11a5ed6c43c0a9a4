"""Command-line interface shared by all commands: flags, configs from the command line, and error messages.

A command is a function of the values of its flags. The decorator `command` turns it into `main(argv)`, which parses the
flags, calls the function and returns the exit status. It keeps no state and may be called repeatedly in one process.
`run(main)` is for a process that only runs this command.
"""

import dataclasses
import faulthandler
import gc
import io
import os
import re
import shlex
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from absl import flags as absl
from absl import logging
from ml_collections import ConfigDict, config_flags

from leanformer import config as configs
from leanformer.config import key_docs
from leanformer.config.loading import format_error
from leanformer.errors import USER_ERROR, ConfigError, LeanformerError, user_message
from leanformer.runtime import determinism, distributed, files, malloc, multihost
from leanformer.training import checks, loggers


# Values of a command's flags by name, and `argv`, `verb`, `words` and `files` (names of config files by flag).
Values = SimpleNamespace
Main = Callable[..., int]

DEFINE = {
    str: absl.DEFINE_string,
    int: absl.DEFINE_integer,
    float: absl.DEFINE_float,
    bool: absl.DEFINE_bool,
    list: absl.DEFINE_list,
    ConfigDict: absl.DEFINE_string,
}
SHOWN = {str: "TEXT", int: "N", float: "X", list: "A,B,...", ConfigDict: "FILE[:ARGUMENT]"}
RENAMED = {"together": "vmap"}  # new names of the flags that the last release renamed
HELP = {"--help", "-help", "-h", "-?", "--helpfull", "--helpshort"}


@dataclasses.dataclass(frozen=True)
class Flag:
    """Flag of a command, --name=VALUE.

    Attributes:
        name: name of the flag.
        help: help text.
        kind: type of the value: str; int; float; bool, given as --name or --noname; list, given as VALUE,VALUE; a tuple
            of allowed words; or ConfigDict, a config file with its argument and overrides, given as
            --name=FILE[:ARGUMENT] --name.KEY=VALUE.
        default: default value.
        required: True if the flag must be given.
        many: True if the flag may be given several times; its value is then the list of all values.
        writes: True if it names a folder that the command writes to; the command checks first that it is writable.
    """

    name: str
    help: str
    kind: Any = str
    default: Any = None
    required: bool = False
    many: bool = False
    writes: bool = False

    @property
    def shown(self) -> str:
        """Flag as it is typed on the command line."""
        if self.kind is bool:
            return f"--[no]{self.name}"
        value = "|".join(self.kind) if isinstance(self.kind, tuple) else SHOWN[self.kind]
        return f"--{self.name}={value}"

    def define(self, flags: absl.FlagValues) -> None:
        """Add the flag to absl's flags; a config as the name of its file."""
        if self.many:
            absl.DEFINE_multi_string(self.name, self.default, self.help, flag_values=flags)
        elif isinstance(self.kind, tuple):
            absl.DEFINE_enum(self.name, self.default, self.kind, self.help, flag_values=flags)
        else:
            DEFINE[self.kind](self.name, self.default, self.help, flag_values=flags)


CONFIG = Flag("config", "Config file.", ConfigDict, required=True)
MULTIHOST_FLAGS = (  # flags of commands that may run in several processes
    Flag("coordinator", "Address host:port of process 0 of a multi-process run."),
    Flag("processes", "Number of processes of a multi-process run.", int),
    Flag("process", "Index of this process in a multi-process run, from 0.", int),
    Flag("connect_seconds", "Time limit for all processes to connect, in seconds.", int, default=300),
)


def command(
    *flags: Flag, verbs: tuple[str, ...] = (), words: str = "", multi_process: bool = False
) -> Callable[[Callable[..., Any]], Main]:
    """Return a decorator that turns a function of flag values into a command, `main(argv)` with an exit status.

    argv are the words after the command's name, by default those of this process. Configs are validated
    (`leanformer.training.checks.check`) before the function is called. User-fixable errors, including errors of the
    file system (`errors.user_message`), are printed as a message, and the exit status is 2.

    Args:
        *flags: flags of the command.
        verbs: words of which the command takes exactly one, as `values.verb`.
        words: description of other words that the command takes, as `values.words`; empty if it takes none, in
            brackets if they may be left out.
        multi_process: True if the command may run in several processes, as given by flags or the environment.
    """
    all_flags = (*flags, *MULTIHOST_FLAGS) if multi_process else flags

    def make(body: Callable[[Values], int | None]) -> Main:
        def main(argv: Sequence[str] | None = None) -> int:
            given = sys.argv[1:] if argv is None else argv
            try:
                if HELP & set(given):
                    print(_format_help(sys.modules[body.__module__].__doc__ or "", all_flags, given))
                    return 0
                values = parse(all_flags, given)
                _check_words(values.words, verbs, words)
                for folder in (getattr(values, flag.name) for flag in all_flags if flag.writes):
                    if folder is not None:
                        files.check_writable(Path(folder).expanduser())
                if multi_process:
                    distributed.start(**{flag.name: getattr(values, flag.name) for flag in MULTIHOST_FLAGS})
                for name in values.files:
                    checks.check(getattr(values, name))
                    determinism.require(getattr(values, name).deterministic)
                status = body(values) or 0
            except BaseException as error:
                text = user_message(error)
                if text is None and multihost.count() > 1:
                    distributed.crash(error)
                if text is None:
                    raise
                print(f"\nError: {text}", file=sys.stderr, flush=True)
                if multihost.count() > 1:
                    distributed.fail(USER_ERROR, text)
                return USER_ERROR
            distributed.leave()
            return status

        return main

    return make


def run(main: Main) -> None:
    """Run a command as the only task of this process, and exit with its status."""
    malloc.keep_freed()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=files.ESCAPED)  # so that a file name that is not UTF-8 can be printed
    gc.freeze()  # collecting garbage among the imported objects takes 5 % of the tracing time
    faulthandler.enable()
    warnings.formatwarning = lambda message, *_, **__: f"WARNING: {message}\n"
    # Orbax logs every step of a save, and the traceback of errors that are reported here
    logging.set_verbosity(logging.FATAL)
    status = main()
    if loggers.stuck():  # exit hooks of their packages would wait for them
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    sys.exit(status)


def _format_help(doc: str, flags: Sequence[Flag], argv: Sequence[str]) -> str:
    """Return the help page of a command: description, flags, and all keys of a config, of the given one if any."""
    lines = [doc, "Flags:"]
    for flag in flags:
        default = "" if flag.default in (None, False, ()) else f" Default: {flag.default}."
        required = " Required." if flag.required else ""
        lines.append(f"  {flag.shown:<24} {flag.help}{default}{required}")
    if any(flag.kind is ConfigDict for flag in flags):
        optional = [dataclasses.replace(flag, required=False) for flag in flags]
        values = parse(optional, [word for word in argv if word not in HELP])
        for name, file in values.files.items() or (("config", ""),):
            lines += [f"\nKeys of --{name}={file}, each set by --{name}.KEY=VALUE:\n"] if file else [""]
            lines.append(key_docs.help_page(getattr(values, name)))
    return "\n".join(lines)


def _replace_old_name(word: str, flags: absl.FlagValues) -> str:
    """Return a word of the command line with the new name of a flag in RENAMED, and print a warning."""
    flag, equals, value = word.partition("=")
    new = RENAMED.get(flag.removeprefix("--")) if flag.startswith("--") else None
    if new is None or new not in flags:
        return word
    print(f"WARNING: {flag} is now --{new}. The next release removes the old name.", file=sys.stderr)
    return f"--{new}{equals}{value}"


def parse(flags: Sequence[Flag], argv: Sequence[str]) -> Values:
    """Return the values of flags from the words of a command line. Configs are not validated yet.

    Raises:
        ConfigError: a flag is wrong, or a config file cannot be loaded.
    """
    defined = absl.FlagValues()
    for flag in flags:
        flag.define(defined)
    argv = [_replace_old_name(word, defined) for word in argv]
    try:
        _, *rest = defined(["", *argv], known_only=True)
        for flag in flags:
            if flag.required and defined[flag.name].value is None:
                raise ConfigError(f"--{flag.name}=... is missing. {flag.help}")
        files = {
            f.name: defined[f.name].value for f in flags if f.kind is ConfigDict and defined[f.name].value is not None
        }
        for name, file in files.items():
            delattr(defined, name)
            config_flags.DEFINE_config_dict(name, configs.load(file), flag_values=defined, sys_argv=rest)
        _, *words = defined(["", *rest])
    except LeanformerError:
        raise
    except absl.Error as error:
        raise ConfigError(_explain(error, defined)) from error
    except (AttributeError, KeyError, TypeError, ValueError) as error:  # from ConfigDict: unknown key or wrong type
        raise ConfigError(f"{format_error(error)}\nleanformer/config lists and explains all keys.") from error
    values = {flag.name: defined[flag.name].value for flag in flags}
    values |= {name: values[name].copy_and_resolve_references() for name in files}
    return Values(**values, files=files, verb="".join(words), words=words, argv=shlex.join(argv))


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


def _check_words(words: Sequence[str], verbs: tuple[str, ...], takes: str) -> None:
    """Raise ConfigError if words other than flags are missing, or given to a command that does not take them."""
    fit = len(words) == 1 and words[0] in verbs if verbs else bool(words) == bool(takes) or takes[:1] == "["
    if not fit:
        expected = takes or (f"one of: {', '.join(verbs)}" if verbs else "only flags, as --name=value")
        raise ConfigError(f"This command takes {expected}. Found: {' '.join(words) or 'nothing'}.")
