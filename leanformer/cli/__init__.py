"""Command-line interface shared by all commands: flags, configs from the command line, and error messages.

A command is a function of the values of its flags, its body. `main(argv)` of its module parses the flags, calls the
body and returns the exit status. It keeps no state and may be called repeatedly in one process. `run(main)` is for a
process that only runs this command.

Modules that need JAX take a second to import, so the command line comes first: `cli.commands` has the flags of
leanformer's commands, and `main_of` imports the module of one only after its command line was parsed.
"""

import ast
import faulthandler
import gc
import importlib
import importlib.util
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from absl import logging
from ml_collections import ConfigDict

from leanformer import config
from leanformer.cli.commands import COMMANDS
from leanformer.cli.flags import CONFIG, CommandLine, Flag, Values, parse
from leanformer.config import key_docs
from leanformer.errors import USER_ERROR, user_message
from leanformer.runtime import environment, malloc, terminal


__all__ = ["COMMANDS", "CONFIG", "CommandLine", "ConfigDict", "Flag", "Values"]
__all__ += ["body", "command", "main_of", "parse", "run"]

Body = Callable[[Values], int | None]
Main = Callable[..., int]

HELP = {"--help", "-help", "-h", "-?", "--helpfull", "--helpshort"}
COMMON_KEYS = {"model.num_heads": 16, "batch_size": 256, "optim.lr": 1e-3, "total_epochs": 10.0, "seed": 1}


def command(*flags: Flag, **options: Any) -> Callable[[Body], Main]:
    """Return a decorator that turns a body into a command with these flags and options of `CommandLine`.

    A body takes the values of the flags and returns the exit status, or None for 0. The command takes argv, the words
    after its name (by default those of this process), and returns the exit status. With --help it prints the help page.
    Configs are validated (`leanformer.training.checks.check`) before the body is called. User-fixable errors, including
    errors of the file system (`errors.user_message`), are printed to stderr as a message, and the exit status is 2.
    """
    return lambda function: _make_main(CommandLine(flags, **options), function.__module__, lambda: function)


def body(name: str) -> Callable[[Body], Main]:
    """Return a decorator that turns a body into the command `name` of `COMMANDS`.

    A body takes the values of the flags and returns the exit status, or None for 0. The command is a function
    `main(argv)`, as from `command`; its attribute `body` is the body.
    """

    def decorate(function: Body) -> Main:
        main: Any = _make_main(COMMANDS[name], function.__module__, lambda: function)
        main.body = function
        return main

    return decorate


def main_of(name: str) -> Main:
    """Return the command `name` of `COMMANDS`, a function `main(argv)` that returns the exit status.

    The module `leanformer.NAME` is imported once the command line is parsed.
    """
    module = f"leanformer.{name}"

    def load() -> Body:
        function = importlib.import_module(module).main.body
        gc.freeze()  # collecting garbage among the imported objects takes 5 % of the tracing time
        return function

    return _make_main(COMMANDS[name], module, load)


def _make_main(line: CommandLine, module: str, load: Callable[[], Body]) -> Main:
    """Return `main(argv)` of a command.

    Args:
        line: flags and words of the command.
        module: module of the command; its docstring heads the help page.
        load: function that returns the body.
    """

    def main(argv: Sequence[str] | None = None) -> int:
        given = sys.argv[1:] if argv is None else argv
        if HELP & set(given):
            print(_format_help(_docstring(module), line.all_flags))
            return 0
        try:
            values = line.parse(given)
            if not line.checked:
                return load()(values) or 0
            execution = _import_execution()
        except Exception as error:
            if (text := user_message(error)) is None:
                raise
            print(f"\nError: {text}", file=sys.stderr, flush=True)
            return USER_ERROR
        return execution.execute(line, values, load)

    return main


def _import_execution() -> Any:
    """Return the module that executes commands, which imports JAX. Raises ConfigError if the environment is wrong."""
    if "jax" not in sys.modules:
        print("Loading JAX.", file=sys.stderr, flush=True)  # within a second; the import takes several
        environment.check(os.environ)
    try:
        return importlib.import_module("leanformer.cli.execution")
    except ValueError as error:
        if (explained := environment.explain_import(error, os.environ)) is None:
            raise
        raise explained from error


def run(main: Main) -> NoReturn:
    """Run a command as the only task of this process, and exit with its status.

    It sets up the streams, memory allocation, environment, warnings and logging of the process.

    Args:
        main: command, from `command`, `body` or `main_of`; it is called without arguments.
    """
    terminal.open_streams(result=True)  # unless the command did
    malloc.keep_freed()
    environment.prepare()
    gc.freeze()
    faulthandler.enable()
    warnings.formatwarning = _format_warning  # ty: ignore[invalid-assignment] - a function of fewer arguments
    # Orbax logs every step of a save, and the traceback of errors that are reported here
    logging.set_verbosity(logging.FATAL)
    status = main()
    try:
        sys.stdout.flush()  # here, so that an error of the output is an error of the command
    except OSError as error:
        if (text := user_message(error)) is None:
            raise
        print(f"\nError: {text}", file=sys.stderr, flush=True)
        status = USER_ERROR
    gc.freeze()  # so that the exit does not look for garbage among the imported objects
    sys.exit(status)


def _format_warning(message: Warning | str, *_: Any, **__: Any) -> str:
    return f"WARNING: {message}\n"


def _docstring(module: str) -> str:
    """Return the docstring of a module, without importing it."""
    if module in sys.modules:
        return sys.modules[module].__doc__ or ""
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None:
        return ""
    return ast.get_docstring(ast.parse(Path(spec.origin).read_text(encoding="utf-8"))) or ""


def _format_help(doc: str, flags: Sequence[Flag]) -> str:
    """Return the help page of a command: description, flags, and how to set and to list the keys of a config."""
    lines = [doc.rstrip(), "", "Flags:"]
    for flag in flags:
        default = "" if flag.default in (None, False, ()) else f" Default: {flag.default}."
        required = " Required." if flag.required else ""
        lines.append(f"  {flag.shown:<24} {flag.help}{default}{required}")
    if any(flag.kind is ConfigDict for flag in flags):
        texts = key_docs.help_texts(config.base())
        lines += ["", "Every key of a config can be set. Common ones:", ""]
        lines += [f"  {f'--config.{key}={value}':<29} {texts[key]}" for key, value in COMMON_KEYS.items()]
        lines += ["", "All keys, with values and help: python -m leanformer.keys [SECTION] [--config=FILE]"]
    return "\n".join(lines)
