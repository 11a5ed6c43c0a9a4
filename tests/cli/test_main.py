"""The command `leanformer`."""

import re
import subprocess
import sys

from commands import ROOT, environment
from messages import mentions

from leanformer.__main__ import COMMANDS


def run(*words):
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "leanformer", *words],
        env=environment(),
        capture_output=True,
        text=True,
    )
    imported = set(re.findall(r"\| +(\w+)$", done.stderr, re.MULTILINE))
    return done.returncode, done.stdout, done.stderr, imported


def test_it_lists_the_commands_without_importing_jax():
    modules = {path.stem for path in (ROOT / "leanformer").glob("*.py") if "@cli.command" in path.read_text()}
    assert COMMANDS.keys() == modules - {"train_vmap"}  # a process of sweep --vmap
    status, out, _, imported = run("--help")
    assert status == 0 and mentions(out, *COMMANDS) and "jax" not in imported and "leanformer" in imported


def test_it_runs_a_command_and_refuses_others():
    status, out, _, imported = run("cost", "--help")
    assert status == 0 and mentions(out, "--config", "--device") and "jax" in imported
    status, out, err, imported = run("nothing")
    assert (status, out) == (2, "") and mentions(err, "nothing", "train") and "jax" not in imported
