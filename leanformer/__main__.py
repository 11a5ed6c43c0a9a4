"""The command `leanformer`: `leanformer train --config=...` is `python -m leanformer.train --config=...`."""

import importlib
import sys

import leanformer


COMMANDS = {  # module of each command, and what it does
    "train": "train a model, or resume a run",
    "evaluate": "evaluate a checkpoint on a split",
    "predict": "classify files with a trained model",
    "generate": "complete texts with a trained language model",
    "probe": "measure the conditioning of every layer",
    "cost": "count parameters, FLOPs and memory",
    "plan": "list and rank the architectures that spend a budget",
    "sweep": "train a grid of configs, keys and seeds",
    "compare": "compare finished runs with confidence intervals",
    "prepare": "check or build the data of a config",
    "convert": "export a run for other libraries, or convert weights",
    "keys": "list the keys of a config, with values and help",
}


def main() -> None:
    """Run the command that the first word of the command line names, or print the list of commands."""
    name, *words = sys.argv[1:] or ["--help"]
    if name in COMMANDS:
        leanformer.require_training()
        from leanformer import cli

        sys.argv = [f"leanformer {name}", *words]
        cli.run(importlib.import_module(f"leanformer.{name}").main)
    print("Usage: leanformer COMMAND [flags]; leanformer COMMAND --help explains its flags.\n")
    for command, what in COMMANDS.items():
        print(f"  {command:<10} {what}")
    if name not in ("--help", "-h", "help"):
        print(f"\nError: {name} is not a command.", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
