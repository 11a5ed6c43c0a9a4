"""Standard streams of a command, which may be closed, full, broken or blocked.

A command whose results are files (`train`, `sweep`) outlives its terminal: what cannot be printed is dropped. A command
that prints its result ends with an error if it cannot. Messages on the standard error are always dropped if they cannot
be printed.

This module imports nothing slow, because the streams are replaced before anything else runs.
"""

import errno
import io
import os
import select
import sys
from typing import Any


ESCAPED = "backslashreplace"  # for file names that are not UTF-8, which Python reads as surrogates
PATIENCE = 10.0  # seconds to wait for a blocked terminal, such as one stopped with Ctrl-S, before output is dropped
AT_ONCE = select.PIPE_BUF  # bytes that a pipe reported as ready takes without blocking
NAMES = {1: "The standard output", 2: "The standard error"}


class Output(io.RawIOBase):
    """Standard output or error by its file descriptor.

    Args:
        handle: 1 or 2.
        result: True if the output is the result of the command. An error is then raised, once, and a blocked reader,
            such as a pager, is waited for. Otherwise what cannot be written is dropped.
        closed: True if the descriptor was closed when the process started.
    """

    def __init__(self, handle: int, *, result: bool, closed: bool = False):
        self._handle, self._result, self._closed = handle, result, closed
        self._failed = False
        self._dropped = 0  # bytes since the terminal blocked

    def fileno(self) -> int:
        """Return the file descriptor."""
        return self._handle

    def isatty(self) -> bool:
        """Return whether the output is a terminal."""
        return os.isatty(self._handle)

    def writable(self) -> bool:
        """Return True."""
        return True

    def write(self, data: Any) -> int:
        """Write bytes, drop what cannot be written, and return the number of all bytes, dropped ones included.

        Raises OSError at the first error of a result, and never for other output.
        """
        left = memoryview(data).cast("B")
        size = len(left)
        try:
            if self._closed and self._result and not self._failed:
                raise OSError(errno.EBADF, os.strerror(errno.EBADF))
            while left and not self._failed and self._is_ready():
                left = left[self._write_some(left[:AT_ONCE]) :]
        except OSError as error:
            self._fail(error)
        self._dropped += 0 if self._failed else len(left)
        return size

    def _write_some(self, data: memoryview) -> int:
        try:
            if self._dropped:
                note = f"\n[{self._dropped} bytes were not printed, because the terminal was blocked]\n"
                os.write(self._handle, note.encode())
                self._dropped = 0
            return os.write(self._handle, data)
        except BlockingIOError:  # another process may have made the terminal non-blocking
            return 0

    def _is_ready(self) -> bool:
        """Wait until something can be written. Without a result, return False after PATIENCE, then at once."""
        poll = select.poll()
        poll.register(self._handle, select.POLLOUT)
        return bool(poll.poll(None if self._result else 0 if self._dropped else 1000 * PATIENCE))

    def _fail(self, error: OSError) -> None:
        """Raise the first error of a result; print a warning about the first error of another output."""
        first, self._failed = not self._failed, True
        if first and self._result:
            error.filename = NAMES[self._handle]
            raise error
        if first and self._handle == 1 and error.errno not in (errno.EPIPE, errno.EIO):  # the reader has ended
            warning = f"{NAMES[1]} cannot be written: {error.strerror}. The files of the command are complete"
            print(f"WARNING: {warning}; what it prints is lost.", file=sys.stderr, flush=True)


def open_streams(*, result: bool) -> None:
    """Replace the standard output and error of this process by streams on `Output`.

    Call this before any file is opened. A closed descriptor is opened on /dev/null; otherwise the next file would get
    its number, and messages would be written into that file. Streams that were replaced before, or that are captured,
    stay as they are.

    Args:
        result: True if the standard output is the result of the command.
    """
    closed = [handle for handle in range(3) if not _is_open(handle)]
    for _ in closed:
        os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # takes the lowest free number
    for name, handle in (("stdout", 1), ("stderr", 2)):
        stream = getattr(sys, name)
        if stream is not None and (_descriptor(stream) != handle or isinstance(stream.buffer, Output)):
            continue
        output = Output(handle, result=result and handle == 1, closed=handle in closed)
        how: dict[str, Any] = {"encoding": stream.encoding if stream is not None else "utf-8", "errors": ESCAPED}
        how |= {"line_buffering": handle == 2 or output.isatty()}
        if stream is not None:
            stream.flush()
        stream = io.TextIOWrapper(output, **how)  # ty: ignore[invalid-argument-type] - a raw stream: nothing is buffered
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def _is_open(handle: int) -> bool:
    try:
        os.fstat(handle)
    except OSError:
        return False
    return True


def _descriptor(stream: io.TextIOBase) -> int | None:
    """Return the file descriptor of a stream; None if it is captured."""
    try:
        return stream.fileno()
    except (AttributeError, OSError, ValueError):
        return None
