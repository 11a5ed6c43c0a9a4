"""Command-line interface: flags, configs, help pages and error messages of a command.

A command is a function of the values of its flags, decorated with `command`, in a module whose docstring is its help
page. Such a module imports JAX inside its functions, so that the help page is fast, and spawned data workers, which run
the main module again, do not load JAX.
"""

import ctypes
import dataclasses
import faulthandler
import gc
import os
import shlex
import sys
import traceback
import warnings
from collections.abc import Callable, Sequence
from importlib import metadata
from types import SimpleNamespace
from typing import Any, NoReturn

from absl import flags as absl
from absl import logging
from ml_collections import ConfigDict, config_flags

from leanformer import config as configs
from leanformer.errors import USER_ERROR, ConfigError, LeanformerError


# Values of a command's flags by name, and `argv` (all words as one text), `words` (a list of those that are no flags)
# and `files` (names of config files by flag).
Values = SimpleNamespace
Body = Callable[[Values], int | None]

DEFINE: dict[Any, Any] = {
    str: absl.DEFINE_string,
    int: absl.DEFINE_integer,
    float: absl.DEFINE_float,
    bool: absl.DEFINE_bool,
    list: absl.DEFINE_list,
    ConfigDict: absl.DEFINE_string,
}
DETERMINISTIC = "--xla_gpu_deterministic_ops"
M_TRIM_THRESHOLD, M_MMAP_MAX, M_ARENA_MAX = -1, -4, -8  # malloc.h of glibc
PLACEHOLDERS = {str: "TEXT", int: "N", float: "X", list: "A,B,...", ConfigDict: "FILE[:ARGUMENT]"}
PATHS = ("workdir", "out", "weights", "tokenizer", "texts", "prompts", "reference")  # flags that name a file or folder
COMMON_KEYS = {"model.num_heads": 16, "batch_size": 256, "optim.lr": 1e-3, "total_epochs": 10.0, "seed": 1}


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

    @property
    def explanation(self) -> str:
        """Help text with the default."""
        default = "" if self.default in (None, False, ()) else f" Default: {self.default}."
        return f"{self.help}{default}{' Required.' if self.required else ''}"

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

    Raises ConfigError for a wrong, unknown or missing flag, a URL, or a config that cannot be loaded.
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
        cause = error.args[0]
        hint = "`python -m leanformer.keys WORD` lists the keys that have a word in their names or help."
        raise ConfigError(f"Key {cause.args[0] if isinstance(cause, KeyError) else cause}\n{hint}") from error
    values: dict[str, Any] = {flag.name: defined[flag.name].value for flag in flags}
    for path in (*words, *(values[name] for name in PATHS if values.get(name) is not None)):
        if not path:  # it would be the current folder
            raise ConfigError("A path is empty. Is a variable of the shell unset?")
        if "://" in path:
            raise ConfigError(f"{path} is a URL. Mount the bucket with gcsfuse or mount-s3 (launch/README.md).")
    values |= {name: values[name].copy_and_resolve_references() for name in files}
    return Values(**values, files=files, words=words, argv=shlex.join(argv))


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
        """Parse the words, connect the processes, validate the configs, call the body, and return the exit status."""
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
                from leanformer.runtime import multihost

                multihost.start(**{flag.name: getattr(values, flag.name) for flag in MULTIHOST_FLAGS})
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
        lines += [f"  {flag!s:<24} {flag.explanation}" for flag in self.flags]
        if any(flag.kind is ConfigDict for flag in self.flags):
            from leanformer.config import key_docs

            texts = key_docs.help_texts(configs.base())
            lines += ["", "Every key of a config can be set. Common ones:", ""]
            lines += [f"  {f'--config.{key}={value}':<29} {texts[key]}" for key, value in COMMON_KEYS.items()]
            lines += ["", "All keys, with values and help: python -m leanformer.keys [WORD] [--config=FILE]"]
        return "\n".join(lines)


def command(*flags: Flag, **attributes: Any) -> Callable[[Body], Command]:
    """Return a decorator that turns a function into a `Command` with these flags and attributes."""
    flags = (*flags, *MULTIHOST_FLAGS) if attributes.get("multi_process") else flags
    return lambda body: Command(body, flags, **attributes)


def validate(config: ConfigDict) -> None:
    """Fill in what a config derives from its data, and raise ConfigError if it is invalid."""
    from leanformer import tasks
    from leanformer.training import train_setup

    tasks.resolve(config)
    train_setup.check(config)
    require_deterministic(config.deterministic)


def run(main: Command) -> NoReturn:
    """Run a command as the only task of this process; the status is 130 after Ctrl-C, 1 for an unexpected error."""
    keep_freed_memory()
    # On a CPU, XLA passes a batch to SciPy's LAPACK one matrix at a time, and a pool of threads only slows such small
    # ones: 1.6 times on an idle machine, over ten times on a busy one. SciPy reads this at the first SVD.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    os.environ["MPLBACKEND"] = "agg"  # one inherited from a notebook does not exist here
    faulthandler.enable()
    warnings.formatwarning = lambda message, *_, **__: f"WARNING: {message}\n"  # ty: ignore[invalid-assignment]
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
        from leanformer.runtime import multihost

        multihost.finish(status, failed=failed)
    gc.freeze()  # so that the exit does not look for garbage among the imported objects
    sys.exit(status)


def keep_freed_memory() -> None:
    """Make malloc reuse freed memory, which on a CPU is the device's memory too. Call this before JAX starts.

    glibc returns large blocks to the system at once: a step of vit_b_7x16 at batch 8 allocates 600 MB again, with
    150,000 page faults. The process then holds its peak memory until it ends.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt and not metadata.entry_points(group="jax_plugins"):
        for option, value in ((M_MMAP_MAX, 0), (M_TRIM_THRESHOLD, -1), (M_ARENA_MAX, 1)):
            mallopt(option, value)


def require_deterministic(wanted: bool) -> None:
    """Add the flag of deterministic kernels to XLA_FLAGS if it is wanted. Raises ConfigError if that is too late.

    XLA times several kernels during compilation and picks the fastest, and some kernels (scatter, cuDNN's backward pass
    of attention) add in the order in which their threads arrive. The flag excludes both, at a cost that depends on the
    model: no Triton kernels, and slower ones of those named. CPUs are always deterministic. The number of devices and
    processes, the GPU type and the library versions must still be the same.
    """
    flags = os.environ.get("XLA_FLAGS", "").split()
    current = next((flag for flag in reversed(flags) if flag.partition("=")[0] == DETERMINISTIC), None)
    if not wanted or current in (DETERMINISTIC, f"{DETERMINISTIC}=true", f"{DETERMINISTIC}=1"):
        return
    if current:
        raise ConfigError(f"deterministic=True contradicts XLA_FLAGS={current}. Remove one of them.")
    from jax._src import xla_bridge  # has no public name; XLA's flags have no effect once devices are in use

    if xla_bridge.backends_are_initialized():
        raise ConfigError(
            f"deterministic=True cannot be set: devices are already in use. Start with XLA_FLAGS={DETERMINISTIC}=true."
        )
    os.environ["XLA_FLAGS"] = " ".join([*flags, f"{DETERMINISTIC}=true"])
