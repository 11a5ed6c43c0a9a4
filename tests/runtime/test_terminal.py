"""Standard streams that are closed, full, broken or blocked: a run outlives its terminal."""

import errno
import io
import os
import subprocess
import sys

import pytest
from commands import ROOT, subprocess_environment
from messages import mentions

from leanformer import __main__ as start
from leanformer import cli
from leanformer.runtime import terminal
from leanformer.runtime.terminal import Output


def open_stream(handle, **how):
    return io.TextIOWrapper(Output(handle, **how), encoding="utf-8", errors=terminal.ESCAPED)


@pytest.fixture
def full():
    handle = os.open("/dev/full", os.O_WRONLY)
    yield handle
    os.close(handle)


@pytest.fixture
def pipe():
    """Return a pipe with the least capacity."""
    import fcntl

    read, write = os.pipe()
    fcntl.fcntl(write, fcntl.F_SETPIPE_SZ, 4096)
    yield read, write
    os.close(write)


def test_full_output_is_dropped_or_an_error_of_the_result(full, monkeypatch):
    stream = open_stream(full, result=False)
    print("x" * 10_000, file=stream, flush=True)
    monkeypatch.setitem(terminal.NAMES, full, terminal.NAMES[1])
    stream = open_stream(full, result=True)
    with pytest.raises(OSError, match=terminal.NAMES[1]) as caught:
        print("x", file=stream, flush=True)
    assert caught.value.errno == errno.ENOSPC
    stream.flush()  # the error is raised once, so that the exit of the interpreter does not raise it again


def test_broken_pipe_is_dropped_or_an_error_of_the_result(pipe, monkeypatch):
    read, write = pipe
    os.close(read)
    print("x", file=open_stream(write, result=False), flush=True)
    monkeypatch.setitem(terminal.NAMES, write, terminal.NAMES[1])
    with pytest.raises(BrokenPipeError):
        print("x", file=open_stream(write, result=True), flush=True)


def test_blocked_output_is_dropped_and_counted(pipe, monkeypatch):
    """As of a terminal that was stopped with Ctrl-S, or a pager; the pipe may also be non-blocking."""
    monkeypatch.setattr(terminal, "PATIENCE", 0.01)
    read, write = pipe
    for blocking in (True, False):
        os.set_blocking(write, blocking)
        stream = open_stream(write, result=False)
        print("a" * 9_999, file=stream, flush=True)
        print("b" * 99, file=stream, flush=True)
        assert os.read(read, 99_999) == b"a" * 4096
        print("c", file=stream, flush=True)
        assert os.read(read, 99_999).endswith(b"[6004 bytes were not printed, because the terminal was blocked]\nc\n")
    os.close(read)


PROGRAM = r"""
import sys
from leanformer.runtime import terminal
terminal.open_streams(result=False)
file = open(sys.argv[1], "wb", buffering=0)
print("caf\udce9")  # a file name that is not UTF-8
print("caf\udce9", file=sys.stderr)
file.write(b"record")
"""


@pytest.mark.parametrize("closed", ["", ">&-", "2>&-", ">&- 2>&-", "<&- >&- 2>&-"])
def test_closed_streams_are_not_files_and_names_are_escaped(closed, tmp_path):
    words = ["sh", "-c", f'"$0" -c "$1" "$2" {closed}', sys.executable, PROGRAM, str(tmp_path / "x")]
    done = subprocess.run(words, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, check=False)
    assert done.returncode == 0 and (tmp_path / "x").read_bytes() == b"record"
    assert done.stdout == (b"" if " >&-" in f" {closed}" else b"caf\\udce9\n")


@pytest.mark.parametrize(("redirect", "status"), [(">/dev/full", 2), (">&-", 2), ("2>&-", 0), ("2>/dev/full", 0)])
def test_command_that_prints_its_result_reports_a_closed_or_full_output(redirect, status):
    words = ["sh", "-c", f'"$0" -m leanformer keys mesh {redirect}', sys.executable]
    done = subprocess.run(words, env=subprocess_environment(), cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == status and "Traceback" not in done.stderr
    assert status == 0 or mentions(done.stderr, "standard output")


def test_commands_whose_results_are_files_drop_output(monkeypatch):
    """A new command prints its result, unless it is named in FILES."""
    assert start.COMMANDS.keys() >= {*start.FILES} > {*start.TRAINING}
    given = {}
    monkeypatch.setattr(terminal, "open_streams", lambda result: given.update(result=result))
    monkeypatch.setattr(cli, "run", lambda _: sys.exit(0))
    for name, result in (("predict", True), ("keys", True), ("probe", False), ("evaluate", False)):
        with pytest.raises(SystemExit):
            start.run(name)
        assert given == {"result": result}
