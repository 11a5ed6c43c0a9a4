"""Config files: lookup by path and by name, wherever leanformer is installed, and short errors for broken files."""

from messages import refuses

from leanformer import config
from leanformer.config import SHIPPED, find_file


CONFIG = """
from leanformer import config

def get_config():
    c = config.base().unlock()
    c.seed = {}
    return c.lock()
"""


def test_shipped_configs_load_by_name_from_any_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert find_file("vit_b_7x16") == SHIPPED / "vit_b_7x16.py"
    assert config.load("vit_b").model.depth == 12
    assert config.load("vit_b:depth=8,heads=14").model.depth == 8


def test_path_and_local_configs_come_before_shipped_ones(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "vit_b.py").write_text(CONFIG.format(1))
    assert config.load("vit_b").seed == 1
    (tmp_path / "vit_b").write_text(CONFIG.format(2))
    assert config.load("vit_b").seed == 2


def test_unknown_names_and_arguments_are_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, parts in {
        "configs/nope.py": ["configs/nope.py"],
        "vit_b_7x61": ["vit_b_7x61"],
        "vit_b:deep=3": ["depth", "heads", "head_dim", "mlp_ratio", "'deep'"],
    }.items():
        with refuses(*parts):
            config.load(name)
