"""Config files: found by path and by name, wherever leanformer is installed; what is wrong with one is one sentence."""

import os
import subprocess
import sys
import zipfile

import pytest
from commands import ROOT

from leanformer import config
from leanformer.config.loading import SHIPPED, find
from leanformer.errors import ConfigError


CONFIG = """
from leanformer import config

def get_config():
    c = config.base().unlock()
    c.seed = {}
    return c.lock()
"""


def test_a_name_is_found_anywhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert find("vit_b_7x16") == SHIPPED / "vit_b_7x16.py"
    assert config.load("vit_b").model.depth == 12
    assert config.load("vit_b:depth=8,heads=14").model.depth == 8


def test_what_is_here_comes_first_and_is_said(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "vit_b.py").write_text(CONFIG.format(1))
    assert config.load("vit_b").seed == 1
    assert capsys.readouterr().err == f"The config vit_b is configs/vit_b.py here, and not {SHIPPED / 'vit_b.py'}.\n"
    (tmp_path / "vit_b").write_text(CONFIG.format(2))
    assert config.load("vit_b").seed == 2  # a path is a path
    (tmp_path / "configs" / "mine.py").write_text(CONFIG.format(3))
    assert config.load("mine").seed == 3 and capsys.readouterr().err == ""
    monkeypatch.chdir(ROOT)
    assert config.load("vit_b").seed == 0 and capsys.readouterr().err == ""  # configs/ here is what ships


BROKEN = {
    "no get_config": ("seed = 1", "mine.py has no function get_config()."),
    "a number for it": ("get_config = 1", "mine.py has no function get_config()."),
    "a dict": ("def get_config():\n    return {}", "returned dict, wanted a ConfigDict"),
    "nothing": ("def get_config():\n    pass", "returned NoneType, wanted a ConfigDict"),
    "not Python": ("def get_config(:", "mine.py has an error in line 1. SyntaxError: "),
    "an error": ("def get_config():\n    return 1 / 0", "has an error in line 2. ZeroDivisionError: division by zero"),
    "an import": ("import no_such_thing", "in line 1. ModuleNotFoundError: No module named 'no_such_thing'"),
    "a key": (
        CONFIG.replace("c.seed = {}", "c = c.lock(); c.model.widht = 3"),
        'has an error in line 6. There is no key "widht". Did you mean "width"?',
    ),
    "another key": (CONFIG.replace("c.seed = {}", "c = c.lock(); c.zzzzzz = 3"), 'line 6. There is no key "zzzzzz".'),
    "another type": (
        CONFIG.replace("c.seed = {}", "c.seed = 2.5"),
        "line 6. TypeError: Could not override field 'seed'",
    ),
}


@pytest.mark.parametrize(("text", "message"), BROKEN.values(), ids=BROKEN)
def test_a_broken_file_is_one_sentence(text, message, tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        config.load(str(file))
    said = str(caught.value).replace(str(tmp_path), "")  # as long as it likes
    assert message in said and len(said) < 200


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("configs/nope.py", "configs/nope.py cannot be loaded: there is no such file in"),
        ("vit_b_7x61", "Ships with leanformer: --config=vit_b_7x16"),
        ("here/vit_b.py", "Ships with leanformer: --config=vit_b"),
        ("vit_b_7x16:depth=3", "vit_b_7x16.py takes no argument, found :depth=3"),
        ("vit_b:deep=3", "takes depth, heads, head_dim, mlp_ratio as arguments, found 'deep'"),
        ("", "there is no such file"),
    ],
)
def test_no_such_config(name, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as caught:
        config.load(name)
    assert message in str(caught.value)


@pytest.mark.slow
def test_the_wheel_has_them(tmp_path):
    """Built from this tree, unpacked, and used from an empty folder."""
    build = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-q", f"--wheel-dir={tmp_path}"]
    subprocess.run([*build, str(ROOT)], check=True, capture_output=True, timeout=200)
    (wheel,) = tmp_path.glob("leanformer-*.whl")
    installed, empty = tmp_path / "installed", tmp_path / "empty"
    empty.mkdir()
    zipfile.ZipFile(wheel).extractall(installed)
    shipped = {path.name for path in (installed / "leanformer" / "configs").iterdir()}
    assert shipped == {path.name for path in (ROOT / "configs").glob("*.py")}
    environ = os.environ | {"PYTHONPATH": str(installed)}
    words = [sys.executable, "-m", "leanformer.cost", "--config=quickstart", "--against=nystromformer_listops_1x4"]
    done = subprocess.run(words, cwd=empty, env=environ, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert "quickstart against nystromformer_listops_1x4, compiled for" in done.stdout and "269,194" in done.stdout
