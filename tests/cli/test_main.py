"""The command `leanformer`: what is imported before the command line is parsed, and by data workers."""

import re
import sys

import commands
import pytest
from commands import ROOT, run_python
from messages import mentions

from leanformer.__main__ import COMMANDS


def run(*words):
    """Run Python; return its status, its outputs, and the names of the modules that it imports."""
    status, out, err = commands.run([sys.executable, "-X", "importtime", *words])
    return status, out, err, set(re.findall(r"\| +(\w+)$", err, re.MULTILINE))


def test_help_lists_the_commands():
    modules = {path.stem for path in (ROOT / "leanformer").glob("*.py") if "@cli.command(" in path.read_text()}
    assert COMMANDS.keys() == modules
    status, out, _, imported = run("-m", "leanformer", "--help")
    assert status == 0 and mentions(out, *COMMANDS) and "jax" not in imported and "leanformer" in imported


def test_public_names_are_imported_on_first_access():
    code = "import leanformer, sys; assert 'jax' not in sys.modules; print(leanformer.conditioning.condition.__name__)"
    assert run_python("-c", code) == "condition\n"


@pytest.mark.parametrize(
    ("words", "status", "parts"),
    [
        (["leanformer", "train", "--help"], 0, ["--workdir", "leanformer.keys"]),
        (["leanformer.train", "--help"], 0, ["--workdir"]),
        (["leanformer", "keys", "mesh"], 0, ["mesh.fsdp=1"]),
        (["leanformer", "train", "--config=quickstart", "--config.model.num_head=3", "--workdir=x"], 2, ["num_head"]),
        (["leanformer.train", "--workdir=x"], 2, ["--config"]),
        (["leanformer", "nothing"], 2, ["nothing", "train"]),
    ],
)
def test_command_line_is_parsed_before_jax_is_imported(words, status, parts):
    code, out, err, imported = run("-m", *words)
    assert code == status and mentions(out + err, *parts)
    assert not imported & {"jax", "flax", "numpy"}


def test_data_workers_of_a_run_import_no_jax_with_the_main_module():
    """multiprocessing runs the module of `python -m leanformer.train` again in each worker, as __mp_main__."""
    status, _, err, imported = run("-c", "import runpy; runpy.run_module('leanformer.train', run_name='__mp_main__')")
    assert status == 0 and "ml_collections" in imported and not imported & {"jax", "flax", "orbax"}, err


@pytest.mark.slow
def test_interrupted_command_ends_with_130():
    code = "from leanformer import cli; cli.run(cli.command()(lambda flags: (_ for _ in ()).throw(KeyboardInterrupt)))"
    assert run("-c", code)[0] == 130
