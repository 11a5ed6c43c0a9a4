"""Execution of a command whose command line is parsed: processes, validation of its configs, its body, and errors."""

import os
import sys
from collections.abc import Callable

from leanformer import tasks
from leanformer.cli.flags import MULTIHOST_FLAGS, CommandLine, Values
from leanformer.errors import USER_ERROR, user_message
from leanformer.runtime import determinism, distributed, environment, multihost
from leanformer.training import checks


def execute(line: CommandLine, values: Values, load: Callable[[], Callable[[Values], int | None]]) -> int:
    """Connect the processes, validate the configs of a command, call its body, and return the exit status.

    A user-fixable error is printed to stderr as a message, and the status is 2; other errors are raised. With several
    processes an error ends all of them.

    Args:
        line: flags and words of the command.
        values: values of its flags.
        load: function that imports and returns the body.
    """
    try:
        if line.multi_process:
            distributed.start(**{flag.name: getattr(values, flag.name) for flag in MULTIHOST_FLAGS})
        for name in values.files:
            tasks.resolve(getattr(values, name))
            checks.check(getattr(values, name))
            determinism.require(getattr(values, name).deterministic)
        status = load()(values) or 0
    except BaseException as error:
        text = user_message(error) or environment.explain_devices(error, os.environ)
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
