"""Stop requests in the first seconds of a training command, before and while it imports and compiles."""

import os
import signal
import subprocess
import sys

import pytest
from commands import ROOT
from messages import mentions
from processes import find_free_port, make_environment, wait_for_processes

from leanformer.runtime import signals
from leanformer.runtime.stopping import StopRequest


pytestmark = pytest.mark.usefixtures("not_under_nohup")


BLOCKS = {
    "in Python": "import time; time.sleep(60)",
    # One C call that releases the GIL, like a compilation: no Python signal handler runs during it.
    "in C": "import hashlib; hashlib.pbkdf2_hmac('sha256', b'', b'', 2**30)",
}


def run_and_signal(words, number, **options):
    """Start a process, send it a signal after its first line of output, and return its exit status."""
    environ = os.environ | {"PYTHONPATH": str(ROOT)}
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environ, **options) as process:
        try:
            assert process.stdout.readline()
            process.send_signal(number)
            return process.wait(timeout=30)
        finally:
            process.kill()


@pytest.mark.parametrize("block", BLOCKS.values(), ids=BLOCKS)
@pytest.mark.parametrize(("number", "status"), [*signals.STATUS.items()])
def test_signal_ends_the_process_at_once(number, status, block):
    # A shell starts background jobs with SIGINT ignored, and the tests may be such a job.
    program = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"
    program += "; from leanformer.runtime import signals; signals.exit_on_stop(); print('up', flush=True)"
    assert run_and_signal([sys.executable, "-c", f"{program}; {block}"], number) == status


@pytest.mark.parametrize("name", ["train", "sweep"])
def test_training_commands_handle_signals_before_importing_jax(name, tmp_path):
    (tmp_path / "jax.py").write_text(f"print('importing', flush=True); {BLOCKS['in Python']}")
    words = ["--config=quickstart", "--workdir=run"]
    assert run_and_signal([sys.executable, "-m", f"leanformer.{name}", *words], signal.SIGTERM, cwd=tmp_path) == 75


@pytest.mark.parametrize("signalled", [pytest.param(0, marks=pytest.mark.slow), 1])
@pytest.mark.parametrize("block", BLOCKS.values(), ids=BLOCKS)
def test_signal_ends_all_connected_processes_with_its_status(block, signalled):
    program = "import sys; from leanformer.runtime import signals; signals.exit_on_stop()"
    program += "; from leanformer.runtime import distributed; distributed.start(sys.argv[1], 2, int(sys.argv[2]))"
    program += f"; print('up', file=sys.stderr, flush=True); {block}"
    words = [sys.executable, "-c", program, f"localhost:{find_free_port()}"]
    environ = make_environment("") | {"PYTHONPATH": str(ROOT)}
    running = [subprocess.Popen([*words, str(i)], stderr=subprocess.PIPE, text=True, env=environ) for i in range(2)]
    for process in running:
        while (line := process.stderr.readline()) != "up\n":
            assert line, "ended before it was connected"
    running[signalled].send_signal(signal.SIGTERM)
    statuses, _, err = wait_for_processes(running, timeout=60)
    assert statuses == [75, 75] and all(mentions(text, "SIGTERM") for text in err)


def test_python_handlers_replace_the_early_exit():
    program = """
import os, signal, time
from leanformer.runtime import signals
signals.exit_on_stop()
signal.signal(signal.SIGTERM, lambda *_: print("received", flush=True))
signals.install()
os.kill(os.getpid(), signal.SIGTERM)
time.sleep(0.2)
os._exit(3)
"""
    assert run_and_signal([sys.executable, "-c", program], signal.SIGCONT) == 3


def test_stop_before_the_first_step_is_detected():
    with StopRequest() as stop:
        assert not stop.before_work()
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.before_work() and stop.status == 75
