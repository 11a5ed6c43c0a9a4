"""Commands in forked children: a traceback, a signal or a hang is seen, and nothing is imported twice."""

import os
import resource
import signal
import sys
import time
import traceback

from leanformer import cli


TRACEBACK = "Traceback (most recent call last)"
MEMORY = 12 * 2**30


class Forked:
    """A command that runs in a forked child, its output in a file.

    Args:
        main: a command's main function.
        words: its command line, without the name.
        log: file of its output and errors.
    """

    def __init__(self, main, words, log):
        self.main, self.words, self.log, self.began = main, words, log, time.monotonic()
        self.pid = os.fork()
        if not self.pid:
            self._run()

    def _run(self):
        os.setsid()
        out = os.open(self.log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(out, 1)
        os.dup2(out, 2)
        # As Python opens them itself.
        sys.stdout = os.fdopen(1, "w", encoding="utf-8", closefd=False)
        sys.stderr = os.fdopen(2, "w", encoding="utf-8", errors="backslashreplace", closefd=False)
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        status = 70
        try:
            sys.argv = ["command", *self.words]
            cli.run(self.main)
        except SystemExit as end:
            status = end.code if isinstance(end.code, int) else 1 if end.code else 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)

    def poll(self, seconds):
        """Return (exit status, output) once it has ended; a negative status is a signal, None a hang (killed)."""
        pid, status = os.waitpid(self.pid, os.WNOHANG)
        if pid:
            code = -os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.waitstatus_to_exitcode(status)
            return code, self._text()
        if time.monotonic() - self.began > seconds:
            os.killpg(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
            return None, self._text()
        return None

    def wait(self, seconds):
        """Return (exit status, output), as `poll`."""
        while (result := self.poll(seconds)) is None:
            time.sleep(0.01)
        return result

    def _text(self):
        return self.log.read_text(errors="replace") if self.log.exists() else ""


def broken(status, text, seconds, statuses=(0, 2)):
    """Return why a command that ended so is broken, or None."""
    if status is None:
        return f"no answer in {seconds} s"
    if status < 0:
        return f"signal {-status}"
    if TRACEBACK in text:
        return f"traceback, status {status}"
    if status not in statuses:
        return f"status {status}"
    return "status 2 without a message" if status == 2 and "Error: " not in text else None
