"""Configs: rules on their values, lengths of runs, and config files by path and by name."""

import pytest
from messages import refuses

from leanformer import config
from leanformer.config import SHIPPED, find_file


WRONG = [  # one for each rule
    ({"batch_size": 0}, ["batch_size=0"]),
    ({"seed": -1}, ["seed=-1"]),
    ({"accumulate": 3}, ["batch_size=1024", "accumulate=3"]),
    ({"total_steps": 7}, ["total_steps=7", "total_epochs=300.0"]),
    ({"total_epochs": 0.0}, ["total_steps=0", "total_epochs=0.0"]),
    ({"eval.every_epochs": 1.0}, ["eval.every=5000", "eval.every_epochs=1.0"]),
    ({"optim.warmup_share": 0.1}, ["optim.warmup_epochs=20.0", "optim.warmup_share=0.1"]),
    ({"optim.schedule": "constant", "optim.final_lr": 0.1}, ["optim.final_lr=0.1"]),
    ({"optim.lr": 1e-6}, ["optim.lr=1e-06", "optim.warmup_lr=1e-05"]),
    ({"optim.name": "muon", "optim.b1_peak": 0.8}, ["optim.b1_peak=0.8", "adamw"]),
    ({"model.drop_path": 1.0}, ["model.drop_path=1.0"]),
    ({"data.mean": (0.5,)}, ["data.mean", "model.channels=3"]),
    ({"data.std": (127.5,) * 3}, ["data.std", "255"]),
    ({"augment.crop_scale": (0.5, 1.5)}, ["augment.crop_scale", 1.5]),
    ({"augment.flip": 2.0}, ["augment.flip=2.0"]),
    ({"loss": "sigmoid"}, ["augment.label_smoothing=0.1", 'loss="sigmoid"']),
]


@pytest.mark.parametrize(("changes", "parts"), WRONG, ids=[str(list(w[0])) for w in WRONG])
def test_invalid_configs_are_refused(changes, parts):
    c = config.base()
    c.update_from_flattened_dict(changes)
    with refuses(*parts):
        config.check(c)


def test_total_steps_from_epochs_and_tokens():
    c = config.base()
    assert config.total_steps(c, 1_281_167) == round(300 * 1_281_167 / 1024)
    c.update(total_epochs=0.0, total_steps=11)
    assert config.total_steps(c, 1_281_167) == 11
    c = config.language()
    c.update(total_steps=0, total_tokens=c.batch_size * c.model.max_length * 50.0)
    config.check(c)
    assert config.total_steps(c, None) == 50


def test_arguments_of_config_files():
    read = config.arguments
    defaults = {"depth": 2, "rate": 0.5, "tied": True, "name": "a", "path": None}
    expected = {"depth": 3, "rate": 2.0, "tied": False, "name": "7", "path": "data"}
    assert read("depth=3,rate=2,tied=False,name=7,path=data", **defaults) == expected
    assert read("", **defaults) == defaults
    for text in ("deep=3", "depth=x", "depth=2.5", "tied=no", "tied=0"):
        with refuses(text.partition("=")[0]):
            read(text, **defaults)


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
