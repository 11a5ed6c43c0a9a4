"""What every entry point shares: flags, config files, and errors as one clear message instead of a traceback."""

import sys
import warnings
from collections.abc import Callable
from pathlib import Path

from absl import app, flags, logging
from ml_collections import ConfigDict, config_flags

from leanformer import config as configs
from leanformer import determinism, distributed, malloc, peers
from leanformer.errors import USER_ERROR, ConfigError, LeanformerError


def config_flag(name: str = "config", *, required: bool = True, help: str = "Config file.") -> None:
    """A flag that takes a config file, its argument and overrides: --config=FILE[:ARGUMENT] --config.KEY=VALUE."""
    config_flags.DEFINE_config_file(name, help_string=help, lock_config=True)
    if required:
        flags.mark_flag_as_required(name)


def run(main: Callable[..., int | None], verbs: tuple[str, ...] = (), *, spread: bool = False) -> None:
    """Parses flags and runs `main()`, or `main(verb)` for a command that takes one of `verbs`.

    A LeanformerError becomes its message and exit status 2.

    Args:
        spread: whether the command runs in several processes at once, if the flags or the environment say so.
    """
    malloc.keep_freed()
    warnings.formatwarning = lambda message, *_, **__: f"Warning: {message}\n"

    def guarded(argv: list[str]) -> None:
        # orbax tells every step of a save, and prints the traceback of errors that we report ourselves
        logging.set_verbosity(logging.FATAL)
        words = argv[1:]
        try:
            if (words and not verbs) or (verbs and (len(words) != 1 or words[0] not in verbs)):
                wanted = f"one of: {', '.join(verbs)}" if verbs else "flags alone, as --name=value"
                raise ConfigError(f"This command takes {wanted}; found {' '.join(words) or 'nothing'}.")
            if spread:
                distributed.start()
            status = main(*words)
        except LeanformerError as error:
            status = _report(error)
            if peers.count() > 1:
                distributed.fail(status, str(error))
        except BaseException as error:
            if peers.count() > 1:
                distributed.crash(error)
            raise
        distributed.leave()
        sys.exit(status)

    app.run(guarded, flags_parser=_parse)


def _report(error: Exception) -> int:
    print(f"\nError: {error}", file=sys.stderr, flush=True)
    return USER_ERROR


def _parse(argv: list[str]) -> list[str]:
    try:
        return flags.FLAGS(argv)
    except flags.Error as error:
        sys.exit(_report(error))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        # What ConfigDict raises for keys it does not know and values of another type; KeyError quotes its message.
        message = " ".join(str(error.args[0]).split()) if error.args else str(error)
        message = message.strip("\"'").replace("\\n", " ").replace("\\'", "'")
        sys.exit(_report(ConfigError(f"{message}\nEvery key is listed and explained in leanformer/config.py.")))


def config(name: str = "config") -> ConfigDict | None:
    """The config of a flag, after `leanformer.config.check`; None if the flag was not given.

    Raises:
        ConfigError: the file cannot be loaded, or the config breaks a rule.
    """
    if flags.FLAGS[name].value is None:
        return None
    try:
        found = flags.FLAGS[name].value.copy_and_resolve_references()
    except OSError as error:
        raise ConfigError(f"--{name}={flags.FLAGS[name].config_filename} cannot be loaded: {error}") from error
    configs.check(found)
    determinism.require(found.deterministic)
    return found


def existing(workdir: str) -> Path:
    """The folder of an earlier run. Raises ConfigError where none is."""
    path = Path(workdir).expanduser()
    if not (path / "config.json").is_file():
        raise ConfigError(f"--workdir={workdir} holds no run: {path / 'config.json'} is not there.")
    return path
