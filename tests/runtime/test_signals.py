"""Stop requests in the first seconds of a training command, before and while it imports and compiles."""

import os
import signal
import subprocess
import sys

import pytest
from commands import ROOT

from leanformer.runtime.interrupt import StopRequest


BLOCKS = {
    "in Python": "import time; time.sleep(60)",
    # Without the interpreter's lock, in one instruction, as a compilation: no handler in Python is called meanwhile.
    "in C": "import hashlib; hashlib.pbkdf2_hmac('sha256', b'', b'', 2**30)",
}


def stopped(words, number, **options):
    """Return the status of a process that got a signal as soon as it had written something."""
    environ = os.environ | {"PYTHONPATH": str(ROOT)}
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environ, **options) as process:
        try:
            assert process.stdout.readline()
            process.send_signal(number)
            return process.wait(timeout=30)
        finally:
            process.kill()


@pytest.mark.parametrize("block", BLOCKS.values(), ids=BLOCKS)
@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGTERM, 75), (signal.SIGUSR1, 75), (signal.SIGUSR2, 75), (signal.SIGINT, 130)]
)
def test_a_signal_ends_the_process_at_once(number, status, block):
    # A shell starts what runs in the background with SIGINT ignored, and the tests may run so.
    begin = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"
    begin += "; from leanformer.runtime import signals; signals.exit_on_stop(); print('up', flush=True)"
    assert stopped([sys.executable, "-c", f"{begin}; {block}"], number) == status


@pytest.mark.parametrize("name", ["train", "train_vmap"])
def test_a_training_command_takes_signals_before_it_imports_jax(name, tmp_path):
    (tmp_path / "jax.py").write_text(f"print('importing', flush=True); {BLOCKS['in Python']}")
    words = ["--config=quickstart", "--workdir=run"] if name == "train" else []
    assert stopped([sys.executable, "-m", f"leanformer.{name}", *words], signal.SIGTERM, cwd=tmp_path) == 75


def test_after_the_first_step_begins_the_handlers_decide():
    program = """
import os, signal, time
from leanformer.runtime import signals
signals.exit_on_stop()
signal.signal(signal.SIGTERM, lambda *_: print("asked", flush=True))
signals.install()
os.kill(os.getpid(), signal.SIGTERM)
time.sleep(0.2)
os._exit(3)
"""
    assert stopped([sys.executable, "-c", program], signal.SIGCONT) == 3


def test_a_stop_before_the_first_step_is_seen_there():
    with StopRequest() as stop:
        assert not stop.before_work()
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.before_work() and stop.status == 75
