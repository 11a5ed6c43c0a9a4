"""Commands in forked child processes: detects tracebacks, signals and hangs, and imports nothing twice."""

import os
import resource
import signal
import sys
import time
import traceback

from leanformer import cli
from leanformer.runtime import terminal


TRACEBACK = "Traceback (most recent call last)"
MEMORY = 12 * 2**30


class ForkedCommand:
    """Command that runs in a forked child process, with its output in a file.

    Args:
        main: a command's main function.
        words: its command line, without the name.
        log: file for its output and errors.
    """

    def __init__(self, main, words, log):
        self.main, self.words, self.log, self.start = main, words, log, time.monotonic()
        self.pid = os.fork()
        if not self.pid:
            self._run()

    def _run(self):
        os.setsid()
        out = os.open(self.log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(out, 1)
        os.dup2(out, 2)
        terminal.open_streams(result=False)
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
        """Return (exit status, output) after its end; a negative status is a signal, None a hang (killed)."""
        pid, status = os.waitpid(self.pid, os.WNOHANG)
        if pid:
            code = -os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.waitstatus_to_exitcode(status)
            return code, self._read_log()
        if time.monotonic() - self.start > seconds:
            os.killpg(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
            return None, self._read_log()
        return None

    def wait(self, seconds):
        """Return (exit status, output), as `poll`."""
        while (result := self.poll(seconds)) is None:
            time.sleep(0.01)
        return result

    def _read_log(self):
        return self.log.read_text(errors="replace") if self.log.exists() else ""


def find_failure(status, text, seconds, statuses=(0, 2)):
    """Return the reason why a command with this outcome is broken, or None."""
    if status is None:
        return f"no answer in {seconds} s"
    if status < 0:
        return f"signal {-status}"
    if TRACEBACK in text:
        return f"traceback, status {status}"
    if status not in statuses:
        return f"status {status}"
    return "status 2 without a message" if status == 2 and "Error: " not in text else None
