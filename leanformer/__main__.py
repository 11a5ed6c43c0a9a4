"""The command `leanformer`: `leanformer train --config=...` is `python -m leanformer.train --config=...`.

Nothing slow is imported before the command is known.
"""

import signal
import sys
from typing import NoReturn

from leanformer.runtime import terminal


COMMANDS = {
    "train": "train a model, or resume a run",
    "evaluate": "evaluate a checkpoint on a split",
    "predict": "classify files with a trained model",
    "generate": "complete texts with a trained language model",
    "embed": "turn texts into vectors",
    "probe": "measure the conditioning of every layer",
    "cost": "count parameters, FLOPs, memory and communication",
    "plan": "list and rank the architectures that spend a budget",
    "sweep": "train a grid of configs, keys and seeds",
    "compare": "compare finished runs with confidence intervals",
    "prepare": "check, build or cache the data of a config",
    "convert": "export a run for other libraries, or convert weights",
    "keys": "list the keys of a config, with values and help",
}
TRAINING = ("train", "sweep")  # commands that save before they stop, so that an early signal must not be lost
FILES = (*TRAINING, "evaluate", "probe", "compare", "convert")  # commands whose results are files (`runtime.terminal`)


def usage() -> str:
    """Return the help page of `leanformer`: how to call it, and its commands."""
    lines = [f"  {name:<10} {what}" for name, what in COMMANDS.items()]
    return "\n".join(["Usage: leanformer COMMAND [flags]; leanformer COMMAND --help explains its flags.", "", *lines])


def main() -> None:
    """Run the command that the first word of the command line names, or print the help page.

    For an unknown command it prints a message to stderr, and exits with status 2.
    """
    name, *rest = sys.argv[1:] or ["--help"]
    if name in COMMANDS:
        sys.argv = [f"leanformer {name}", *rest]
        run(name)
    terminal.open_streams(result=False)
    if name not in ("--help", "-h", "help"):
        print(f"Error: {name} is not a command.\n\n{usage()}", file=sys.stderr)
        sys.exit(2)
    print(usage())


def run(name: str) -> NoReturn:
    """Run a command with the words of `sys.argv` as the only task of this process, and exit with its status.

    Args:
        name: name of the command, a key of COMMANDS.
    """
    terminal.open_streams(result=name not in FILES)
    if name in TRAINING:
        from leanformer.runtime import signals

        signals.exit_on_stop()
    try:
        from leanformer import cli

        cli.run(cli.main_of(name))
    except KeyboardInterrupt:
        print("\nInterrupted by Ctrl-C.", file=sys.stderr, flush=True)
        sys.exit(128 + signal.SIGINT)
    except BrokenPipeError as error:
        if error.filename != terminal.NAMES[1]:
            raise
        sys.exit(128 + signal.SIGPIPE)  # the reader of the output has ended, as in `leanformer keys | head`


if __name__ == "__main__":
    main()
