"""What all commands share: flags as values, configs from the command line, and errors as one clear message.

A command is a function of the values of its flags. `command` makes it `main(argv)`, which parses, runs and returns the
exit status, and leaves nothing behind: it may be called again and again in one process. `run(main)` is for a process
that has nothing else to do.
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
from leanformer.config.loading import words_of
from leanformer.errors import USER_ERROR, ConfigError, LeanformerError, message
from leanformer.runtime import determinism, distributed, files, malloc, peers
from leanformer.training import checks, loggers


Values = (
    SimpleNamespace  # of a command's flags by name; `argv`; `verb`; `words`; `files`, names of config files by flag
)
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
RENAMED = {"together": "vmap"}  # flags of the last release, by their names now
HELP = {"--help", "-help", "-h", "-?", "--helpfull", "--helpshort"}


@dataclasses.dataclass(frozen=True)
class Flag:
    """A flag of a command: --name=VALUE.

    Attributes:
        kind: str; int; float; bool, given as --name or --noname; list, given as VALUE,VALUE; a tuple of words to choose
            from; or ConfigDict, a config file with its argument and overrides: --name=FILE[:ARGUMENT] --name.KEY=VALUE.
        many: whether it may be given several times. Its value is then the list of all.
        writes: whether it names a folder that the command writes to, which is tried before anything else is done.
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
        """As it is typed."""
        if self.kind is bool:
            return f"--[no]{self.name}"
        value = "|".join(self.kind) if isinstance(self.kind, tuple) else SHOWN[self.kind]
        return f"--{self.name}={value}"

    def define(self, found: absl.FlagValues) -> None:
        """Adds it to the flags of a call; a config as its file's name."""
        if self.many:
            absl.DEFINE_multi_string(self.name, self.default, self.help, flag_values=found)
        elif isinstance(self.kind, tuple):
            absl.DEFINE_enum(self.name, self.default, self.kind, self.help, flag_values=found)
        else:
            DEFINE[self.kind](self.name, self.default, self.help, flag_values=found)


CONFIG = Flag("config", "Config file.", ConfigDict, required=True)
MEETING = (  # of commands that may run in several processes
    Flag("coordinator", "Where several processes meet: host:port, of process 0."),
    Flag("processes", "How many processes there are.", int),
    Flag("process", "Which of them this is, from 0.", int),
    Flag("connect_seconds", "How long the processes may take to meet.", int, default=300),
)


def command(
    *flags: Flag, verbs: tuple[str, ...] = (), words: str = "", spread: bool = False
) -> Callable[[Callable[..., Any]], Main]:
    """Makes a function of the values of `flags` a command: `main(argv)`, which returns the exit status.

    argv are the words after the command's name, those of this process if not given. A config has been checked
    (`leanformer.training.checks.check`) when the function gets it. What the user can mend, an error of the file system
    included (`errors.message`), becomes one sentence and exit status 2.

    Args:
        verbs: of which the command takes one, as `values.verb`; none, and it takes flags alone.
        words: what other words it takes, at least one, as `values.words`, in words.
        spread: whether the command runs in several processes at once, if the flags or the environment say so.
    """
    known = (*flags, *MEETING) if spread else flags

    def make(body: Callable[[Values], int | None]) -> Main:
        def main(argv: Sequence[str] | None = None) -> int:
            given = sys.argv[1:] if argv is None else argv
            try:
                if HELP & set(given):
                    print(_help(sys.modules[body.__module__].__doc__ or "", known, given))
                    return 0
                values = parse(known, given)
                _check_words(values.words, verbs, words)
                for folder in (getattr(values, flag.name) for flag in known if flag.writes):
                    if folder is not None:
                        files.check_writable(Path(folder).expanduser())
                if spread:
                    distributed.start(**{flag.name: getattr(values, flag.name) for flag in MEETING})
                for name in values.files:
                    checks.check(getattr(values, name))
                    determinism.require(getattr(values, name).deterministic)
                status = body(values) or 0
            except BaseException as error:
                said = message(error)
                if said is None and peers.count() > 1:
                    distributed.crash(error)
                if said is None:
                    raise
                print(f"\nError: {said}", file=sys.stderr, flush=True)
                if peers.count() > 1:
                    distributed.fail(USER_ERROR, said)
                return USER_ERROR
            distributed.leave()
            return status

        return main

    return make


def run(main: Main) -> None:
    """Runs a command as all that this process does."""
    malloc.keep_freed()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=files.ESCAPED)  # a name that is not UTF-8 is no reason to end
    gc.freeze()  # what was imported stays: looking through it while programs are traced is a 20th of that time
    faulthandler.enable()
    warnings.formatwarning = lambda message, *_, **__: f"Warning: {message}\n"
    # orbax tells every step of a save, and prints the traceback of errors that we report ourselves
    logging.set_verbosity(logging.FATAL)
    status = main()
    if loggers.stuck():  # hooks of their packages at exit would wait for them
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    sys.exit(status)


def _help(doc: str, flags: Sequence[Flag], argv: Sequence[str]) -> str:
    """What the command is, its flags, and every key of a config: of the one that is asked about, if there is one."""
    lines = [doc, "Flags:"]
    for flag in flags:
        default = "" if flag.default in (None, False, ()) else f" Default: {flag.default}."
        needed = " Required." if flag.required else ""
        lines.append(f"  {flag.shown:<24} {flag.help}{default}{needed}")
    if any(flag.kind is ConfigDict for flag in flags):
        optional = [dataclasses.replace(flag, required=False) for flag in flags]
        found = parse(optional, [word for word in argv if word not in HELP])
        for name, file in found.files.items() or (("config", ""),):
            lines += [f"\nKeys of --{name}={file}, each set by --{name}.KEY=VALUE:\n"] if file else [""]
            lines.append(key_docs.page(getattr(found, name)))
    return "\n".join(lines)


def _renamed(word: str, known: absl.FlagValues) -> str:
    """Return a word of the command line with the new name of a flag in RENAMED, with a warning."""
    flag, equals, value = word.partition("=")
    new = RENAMED.get(flag.removeprefix("--")) if flag.startswith("--") else None
    if new is None or new not in known:
        return word
    print(f"WARNING: {flag} is now --{new}; the old name goes with the next release.", file=sys.stderr)
    return f"--{new}{equals}{value}"


def parse(flags: Sequence[Flag], argv: Sequence[str]) -> Values:
    """The values of flags, from words. Configs are not checked yet.

    Raises:
        ConfigError: whatever is wrong with the flags; a config file that cannot be loaded.
    """
    found = absl.FlagValues()
    for flag in flags:
        flag.define(found)
    argv = [_renamed(word, found) for word in argv]
    try:
        _, *rest = found(["", *argv], known_only=True)
        for flag in flags:
            if flag.required and found[flag.name].value is None:
                raise ConfigError(f"--{flag.name}=... is missing. {flag.help}")
        files = {f.name: found[f.name].value for f in flags if f.kind is ConfigDict and found[f.name].value is not None}
        for name, file in files.items():
            delattr(found, name)
            config_flags.DEFINE_config_dict(name, configs.load(file), flag_values=found, sys_argv=rest)
        _, *words = found(["", *rest])
    except LeanformerError:
        raise
    except absl.Error as error:
        raise ConfigError(_explain(error, found)) from error
    except (AttributeError, KeyError, TypeError, ValueError) as error:  # of ConfigDict: an unknown key, another type
        raise ConfigError(f"{words_of(error)}\nEvery key is listed and explained in leanformer/config.") from error
    values = {flag.name: found[flag.name].value for flag in flags}
    values |= {name: values[name].copy_and_resolve_references() for name in files}
    return Values(**values, files=files, verb="".join(words), words=words, argv=shlex.join(argv))


EXPECTED = {  # by the type of a flag: in words, and an example
    "int": ("a whole number", "8"),
    "float": ("a number", "0.1"),
    "bool": ("true or false", "true"),
}


def _explain(error: absl.Error, found: absl.FlagValues) -> str:
    """Return the message of an error of absl; of a value of another type than its flag, in words for users."""
    text = str(error)
    match = re.match(r"flag --([^=]+)=", text)
    reason = f": {error.__context__}"
    if match is None or match[1] not in found or not text.endswith(reason):
        return text.removeprefix("flag ")
    name, value = match[1], text[match.end() : -len(reason)]
    flag = found[name]
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
    """Raises ConfigError for words besides flags that a command does not take, or lacks."""
    fit = len(words) == 1 and words[0] in verbs if verbs else bool(words) == bool(takes)
    if not fit:
        wanted = takes or (f"one of: {', '.join(verbs)}" if verbs else "flags alone, as --name=value")
        raise ConfigError(f"This command takes {wanted}; found {' '.join(words) or 'nothing'}.")
