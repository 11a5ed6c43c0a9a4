"""The command `leanformer`."""

import re
import subprocess
import sys

import pytest
from commands import ROOT, subprocess_environment
from messages import mentions

from leanformer import cli
from leanformer.__main__ import COMMANDS
from leanformer.__main__ import run as run_command


def run(*words):
    process = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "leanformer", *words],
        env=subprocess_environment(),
        capture_output=True,
        text=True,
    )
    imported = set(re.findall(r"\| +(\w+)$", process.stderr, re.MULTILINE))
    return process.returncode, process.stdout, process.stderr, imported


def test_help_lists_the_commands_without_importing_jax():
    modules = {path.stem for path in (ROOT / "leanformer").glob("*.py") if "\ndef main(f" in path.read_text()}
    assert COMMANDS.keys() == modules
    status, out, _, imported = run("--help")
    assert status == 0 and mentions(out, *COMMANDS) and "jax" not in imported and "leanformer" in imported


def test_public_names_are_imported_on_first_access():
    code = "import leanformer, sys; assert 'jax' not in sys.modules; print(leanformer.conditioning.condition.__name__)"
    process = subprocess.run([sys.executable, "-c", code], env=subprocess_environment(), capture_output=True, text=True)
    assert (process.stdout, process.returncode) == ("condition\n", 0)


def test_command_runs_and_unknown_command_is_refused():
    status, _, err, imported = run("cost", "--config=quickstart", "--device=abacus")
    assert status == 2 and mentions(err, "--device=abacus", "h100") and "jax" in imported
    status, out, err, imported = run("nothing")
    assert (status, out) == (2, "") and mentions(err, "nothing", "train") and "jax" not in imported


@pytest.mark.parametrize(
    ("words", "status", "parts"),
    [
        (["train", "--help"], 0, ["--workdir", "leanformer.keys"]),
        (["keys", "mesh"], 0, ["mesh.fsdp=1"]),
        (["train", "--config=quickstart", "--config.model.num_head=3", "--workdir=unused"], 2, ["num_head"]),
        (["train", "--workdir=unused"], 2, ["--config"]),
    ],
)
def test_command_line_is_parsed_before_jax_is_imported(words, status, parts):
    code, out, err, imported = run(*words)
    assert code == status and mentions(out + err, *parts) and "ml_collections" in imported
    assert not imported & {"jax", "flax", "numpy"}
    assert not (ROOT / "unused").exists()


@pytest.mark.parametrize("name", COMMANDS)
def test_module_starts_its_command_before_its_imports(name):
    text = (ROOT / "leanformer" / f"{name}.py").read_text()
    assert f'    run("{name}")' in text.partition("\nimport ")[0].partition("\nfrom ")[0]
    assert text.count('if __name__ == "__main__":') == 1 and f'@cli.body("{name}")' in text


def test_closed_standard_output_ends_a_listing_without_a_traceback():
    words = [sys.executable, "-m", "leanformer", "keys"]
    with subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=subprocess_environment()
    ) as process:
        process.stdout.close()
        errors = process.stderr.read()
    assert process.returncode == 141 and errors == b""


def test_interrupted_command_prints_one_line(monkeypatch, capfd):
    def interrupt(_):
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "run", interrupt)
    with pytest.raises(SystemExit) as caught:
        run_command("cost")
    assert caught.value.code == 130 and capfd.readouterr().err == "\nInterrupted by Ctrl-C.\n"
