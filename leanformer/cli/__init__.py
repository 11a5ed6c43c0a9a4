"""Command-line interface: flags, configs, help pages and error messages of a command.

A command is a function of the values of its flags, decorated with `command`, in a module whose docstring is its help
page. Such a module imports JAX inside its functions, so that the help page is fast, and spawned data workers, which run
the main module again, do not load JAX.
"""

import dataclasses
import faulthandler
import gc
import os
import sys
import traceback
import warnings
from collections.abc import Callable, Sequence
from typing import NoReturn

from absl import logging
from ml_collections import ConfigDict

from leanformer import config as configs
from leanformer.cli.flags import CONFIG, OPTIONAL_CONFIG, Flag, Values, parse
from leanformer.errors import USER_ERROR, ConfigError, LeanformerError


__all__ = ["CONFIG", "OPTIONAL_CONFIG", "Command", "ConfigDict", "Flag", "Values", "command", "parse", "run"]

Body = Callable[[Values], int | None]

COMMON_KEYS = {"model.num_heads": 16, "batch_size": 256, "optim.lr": 1e-3, "total_epochs": 10.0, "seed": 1}
MULTIHOST_FLAGS = (  # flags of commands that may run in several processes
    Flag("coordinator", "Address host:port of process 0 of a multi-process run."),
    Flag("processes", "Number of processes of a multi-process run.", int),
    Flag("process", "Index of this process in a multi-process run, from 0.", int),
    Flag("connect_seconds", "Time limit for all processes to connect, in seconds.", int, default=300, minimum=1),
)


@dataclasses.dataclass(frozen=True)
class Command:
    """Command line of a function: call it with the words after its name to get the exit status."""

    body: Body
    flags: tuple[Flag, ...] = ()
    words: str = ""  # description of words other than flags, as `values.words`; empty if the command takes none
    optional_words: bool = False
    multi_process: bool = False  # may run in several processes, as given by flags or the environment
    validated: bool = True  # False if configs are not validated; the command then does not import JAX

    def __call__(self, argv: Sequence[str] | None = None) -> int:
        """Parse the words (of this process if None), connect the processes, validate the configs, and call the body.

        With --help, print the help page. A LeanformerError is printed to stderr as a message, with exit status 2.
        """
        argv = sys.argv[1:] if argv is None else argv
        if {"--help", "-h"} & set(argv):
            print(self.help_page())
            return 0
        try:
            values = parse(self.flags, argv)
            if bool(values.words) != bool(self.words) and not self.optional_words:
                found = " ".join(values.words) or "nothing"
                raise ConfigError(f"This command takes {self.words or 'only flags, as --name=value'}. Found: {found}.")
            if self.validated and "jax" not in sys.modules:
                print("Loading JAX.", file=sys.stderr, flush=True)  # takes seconds
            if self.multi_process:
                from leanformer.runtime import distributed

                distributed.start(**{flag.name: getattr(values, flag.name) for flag in MULTIHOST_FLAGS})
            if self.validated:
                for name in values.files:
                    validate(getattr(values, name))
            return self.body(values) or 0
        except LeanformerError as error:
            print(f"\nError: {error}", file=sys.stderr, flush=True)
            return USER_ERROR

    def help_page(self) -> str:
        """Return the help page: docstring of the module, flags, and how to set and to list the keys of a config."""
        lines = [(sys.modules[self.body.__module__].__doc__ or "").rstrip(), "", "Flags:"]
        for flag in self.flags:
            default = "" if flag.default in (None, False, ()) else f" Default: {flag.default}."
            required = " Required." if flag.required else ""
            lines.append(f"  {flag!s:<24} {flag.help}{default}{required}")
        if any(flag.kind is ConfigDict for flag in self.flags):
            from leanformer.config import key_docs

            texts = key_docs.help_texts(configs.base())
            lines += ["", "Every key of a config can be set. Common ones:", ""]
            lines += [f"  {f'--config.{key}={value}':<29} {texts[key]}" for key, value in COMMON_KEYS.items()]
            lines += ["", "All keys, with values and help: python -m leanformer.keys [SECTION] [--config=FILE]"]
        return "\n".join(lines)


def command(
    *flags: Flag, words: str = "", optional_words: bool = False, multi_process: bool = False, validated: bool = True
) -> Callable[[Body], Command]:
    """Return a decorator that turns a function into a `Command` with these attributes."""
    flags = (*flags, *MULTIHOST_FLAGS) if multi_process else flags
    return lambda body: Command(body, flags, words, optional_words, multi_process, validated)


def validate(config: ConfigDict) -> None:
    """Fill in what a config derives from its data, and raise ConfigError if it is invalid."""
    from leanformer import tasks
    from leanformer.runtime import startup
    from leanformer.training import train_setup

    tasks.resolve(config)
    train_setup.check(config)
    startup.require_deterministic(config.deterministic)


def run(main: Command) -> NoReturn:
    """Run a command as the only task of this process, and exit with its status.

    The status is 130 after Ctrl-C, and 1 for an error that is no LeanformerError.
    """
    from leanformer.runtime import startup

    startup.keep_freed_memory()
    # On a CPU, XLA passes a batch to SciPy's LAPACK one matrix at a time, and a pool of threads only slows such small
    # ones: 1.6 times on an idle machine, over ten times on a busy one. SciPy reads this at the first SVD.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    os.environ["MPLBACKEND"] = "agg"  # one inherited from a notebook does not exist here
    faulthandler.enable()
    warnings.formatwarning = _format_warning  # ty: ignore[invalid-assignment] - a function of fewer arguments
    logging.set_verbosity(logging.FATAL)  # Orbax logs every step of a save
    gc.freeze()  # collecting garbage among the imported objects takes 5 % of the tracing time
    try:
        status = main()
        failed = status == USER_ERROR
    except KeyboardInterrupt:
        status, failed = 130, True
    except Exception:
        traceback.print_exc()
        status, failed = 1, True
    if "jax" in sys.modules:
        from leanformer.runtime import distributed

        distributed.finish(status, failed=failed)
    gc.freeze()  # so that the exit does not look for garbage among the imported objects
    sys.exit(status)


def _format_warning(message: Warning | str, *_: object, **__: object) -> str:
    return f"WARNING: {message}\n"
