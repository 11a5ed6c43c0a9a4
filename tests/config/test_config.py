"""`config.check`: one message per invalid config, with the configured value, the problem and the fix."""

import pytest
from messages import refuses

from leanformer import config


WRONG = [  # one for each rule
    ({"batch_size": 0}, ["batch_size=0"]),
    ({"seed": -1}, ["seed=-1"]),
    ({"accumulate": 3}, ["batch_size=1024", "accumulate=3", 2, 4]),
    ({"total_steps": 7}, ["total_steps=7", "total_epochs=300.0"]),
    ({"total_epochs": 0.0}, ["total_steps=0", "total_epochs=0.0"]),
    ({"eval.every_epochs": 1.0}, ["eval.every=5000", "eval.every_epochs=1.0"]),
    ({"optim.warmup_share": 0.1}, ["optim.warmup_epochs=20.0", "optim.warmup_share=0.1"]),
    ({"optim.schedule": "constant", "optim.final_lr": 0.1}, ["optim.final_lr=0.1"]),
    ({"optim.name": "muon", "optim.b1_peak": 0.8}, ["optim.b1_peak=0.8", "adamw"]),
    ({"mesh.data": 3, "accumulate": 2}, ["batch_size", "accumulate", 512, 3]),
    ({"mesh.fsdp": -1}, [-1]),
    ({"model.drop_path": 1.0}, ["model.drop_path=1.0"]),
    ({"data.mean": (0.5,)}, ["data.mean", "model.channels=3"]),
    ({"augment.crop_scale": (0.5, 1.5)}, ["augment.crop_scale", 1.5]),
    ({"augment.rand_magnitude": 11.0}, ["augment.rand_magnitude=11.0", "0..10"]),
    ({"augment.flip": 2.0}, ["augment.flip=2.0"]),
    ({"loss": "sigmoid"}, ["augment.label_smoothing=0.1", 'loss="sigmoid"']),
]


@pytest.mark.parametrize(("changes", "parts"), WRONG, ids=[str(list(w[0])) for w in WRONG])
def test_invalid_configs_are_refused(changes, parts):
    c = config.base()
    c.update_from_flattened_dict(changes)
    with refuses(*parts):
        config.check(c)


def test_total_steps_from_epochs():
    c = config.base()
    assert config.total_steps(c, 1_281_167) == round(300 * 1_281_167 / 1024)
    c.update(total_epochs=0.0, total_steps=11)
    assert config.total_steps(c, 1_281_167) == 11


def test_total_steps_from_tokens():
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
