"""Config files: lookup by path and by name, wherever leanformer is installed, and short errors for broken files."""

import pytest
from commands import ROOT
from messages import mentions, refuses

from leanformer import config
from leanformer.config.loading import SHIPPED, find


CONFIG = """
from leanformer import config

def get_config():
    c = config.base().unlock()
    c.seed = {}
    return c.lock()
"""


def test_shipped_configs_load_by_name_from_any_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert find("vit_b_7x16") == SHIPPED / "vit_b_7x16.py"
    assert config.load("vit_b").model.depth == 12
    assert config.load("vit_b:depth=8,heads=14").model.depth == 8


def test_local_config_takes_precedence_with_a_warning(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "vit_b.py").write_text(CONFIG.format(1))
    assert config.load("vit_b").seed == 1
    assert mentions(capsys.readouterr().err, "vit_b", "configs/vit_b.py", SHIPPED / "vit_b.py")
    (tmp_path / "vit_b").write_text(CONFIG.format(2))
    assert config.load("vit_b").seed == 2  # an existing path comes before names
    (tmp_path / "configs" / "mine.py").write_text(CONFIG.format(3))
    assert config.load("mine").seed == 3 and capsys.readouterr().err == ""
    monkeypatch.chdir(ROOT)
    assert config.load("vit_b").seed == 0 and capsys.readouterr().err == ""  # this configs/ is the shipped folder


BROKEN = {
    "missing": ("seed = 1", ["get_config()"]),
    "number": ("get_config = 1", ["get_config()"]),
    "dict": ("def get_config():\n    return {}", ["get_config()", "dict", "ConfigDict"]),
    "none": ("def get_config():\n    pass", ["get_config()", "NoneType", "ConfigDict"]),
    "syntax": ("def get_config(:", [1, "SyntaxError"]),
    "error": ("def get_config():\n    return 1 / 0", [2, "ZeroDivisionError"]),
    "import": ("import no_such_thing", [1, "ModuleNotFoundError", "no_such_thing"]),
    "typo": (CONFIG.replace("c.seed = {}", "c = c.lock(); c.model.widht = 3"), [6, '"widht"', '"width"']),
    "key": (CONFIG.replace("c.seed = {}", "c = c.lock(); c.zzzzzz = 3"), [6, '"zzzzzz"']),
    "type": (CONFIG.replace("c.seed = {}", "c.seed = 2.5"), [6, "TypeError", "'seed'"]),
}


@pytest.mark.parametrize(("text", "parts"), BROKEN.values(), ids=BROKEN)
def test_broken_file_is_one_short_message(text, parts, tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(text)
    with refuses(file, *parts) as caught:
        config.load(str(file))
    message = str(caught.value).replace(str(tmp_path), "")  # of any length
    assert len(message) < 200 and "\n" not in message


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("configs/nope.py", ["configs/nope.py"]),
        ("", ["--config=", "no such file"]),
        ("vit_b_7x61", ["vit_b_7x61", "--config=vit_b_7x16"]),
        ("here/vit_b.py", ["here/vit_b.py", "--config=vit_b"]),
        ("vit_b_7x16:depth=3", ["vit_b_7x16.py", ":depth=3"]),
        ("vit_b:deep=3", ["depth", "heads", "head_dim", "mlp_ratio", "'deep'"]),
    ],
)
def test_missing_config_error_suggests_the_nearest(name, parts, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with refuses(*parts):
        config.load(name)
