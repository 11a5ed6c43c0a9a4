"""`check` refuses what cannot work with one message: what was asked, what was found, what to do."""

import pytest
from messages import refuses

from leanformer import config
from leanformer.errors import ConfigError


WRONG = [
    ({"batch_size": 0}, "batch_size=0 must be at least 1"),
    ({"accumulate": 3}, "batch_size=1024 cannot be split into accumulate=3.*2 or 4"),
    ({"total_steps": 7}, "exactly one of total_steps=7 and total_epochs=300.0, and 0 for the o"),
    ({"total_epochs": 0.0}, "exactly one of total_steps=0 and total_epochs=0.0"),
    ({"total_epochs": 10.0}, "warmup_epochs=20.0 must be under total_epochs=10.0"),
    ({"total_epochs": float("inf")}, "total_epochs=inf must be finite"),
    ({"optim.warmup_share": 1.0}, "optim.warmup_share=1.0 is a share of the whole run: at least 0, under 1"),
    (
        {"optim.warmup_epochs": 0.0, "optim.warmup_share": 0.9, "optim.schedule": "wsd"},
        "optim.warmup_share=0.9 and optim.decay_share=0.2 are more than the whole run",
    ),
    ({"optim.warmup_share": 0.1}, "warmup_epochs=20.0 and optim.warmup_share=0.1 say the same in different ways"),
    ({"mesh.data": 3, "accumulate": 2}, "batch_size / accumulate is 512, which 3 devices"),
    ({"seed": -1}, "seed=-1 must not be negative"),
    ({"seed": 2**31}, "seed=2147483648 must be at most 2,147,483,647 in size"),
    ({"model.patch_size": 15}, "image_size=224 is not a whole number of patches.*14 or 16"),
    ({"model.num_heads": 0}, "model.num_heads=0 must be at least 1"),
    ({"model.channels": 4}, "grey .1. or RGB .3."),
    ({"model.backend": "cudnn", "model.head_dim": 42}, "multiples of 8 up to 256, found 42. Take head_dim=48"),
    ({"model.drop_path": 1.0}, "drop_path=1.0 must be in"),
    ({"data.mean": (0.5,)}, "has 1 numbers, model.channels=3"),
    ({"data.crop_fraction": 0.0}, "crop_fraction=0.0 must be in"),
    ({"data.crop_fraction": 1e-9}, "crop_fraction=1e-09 cuts 224 pixels out of 2.2e.11, 32,767 at most"),
    ({"augment.rand_layers": -1}, "augment.rand_layers=-1 must not be negative"),
    ({"augment.rand_std": -1.0}, "augment.rand_std=-1.0 must not be negative"),
    ({"augment.crop_scale": (0.5, 1.5)}, "shares of the area"),
    ({"augment.rand_magnitude": 11.0}, "must be in 0..10"),
    ({"augment.flip": 2.0}, "augment.flip=2.0 is a probability"),
    ({"augment.mixup": -1.0}, "augment.mixup=-1.0 must not be negative"),
    ({"loss": "sigmoid"}, "label_smoothing=0.1.*has no meaning"),
    ({"optim.ema": 1.0}, "optim.ema=1.0 must be in"),
    ({"optim.max_skipped": 0}, "optim.max_skipped=0 must be at least 1"),
    ({"mesh.data": 0}, "mesh.data=0 must be positive, or -1"),
    ({"mesh.fsdp": -1}, "Only one mesh axis can be -1"),
]


def test_the_base_keeps_every_rule():
    config.check(config.base())


@pytest.mark.parametrize(("changes", "message"), WRONG, ids=[str(list(w[0])) for w in WRONG])
def test_refused(changes, message):
    c = config.base()
    c.update_from_flattened_dict(changes)
    with pytest.raises(ConfigError, match=message):
        config.check(c)


def test_a_typo_names_the_nearest_key():
    with pytest.raises(AttributeError, match='Did you mean "width"'):
        config.base().model.widht = 3


def test_sigmoid_without_smoothing_is_allowed():
    c = config.base()
    c.update_from_flattened_dict({"loss": "sigmoid", "augment.label_smoothing": 0.0})
    config.check(c)


def test_length_of_a_run():
    c = config.base()
    assert config.total_steps(c, 1_281_167) == round(300 * 1_281_167 / 1024)
    c.total_epochs = 1e12
    with pytest.raises(ConfigError, match="total_epochs=1000000000000.0 of 1,281,167 examples are 1.3e[+]15 steps"):
        config.total_steps(c, 1_281_167)
    c.update(total_epochs=0.0, total_steps=11)
    assert config.total_steps(c, 1_281_167) == 11


def test_length_by_tokens():
    c = config.language()
    c.update(total_steps=0, total_tokens=c.batch_size * c.model.max_length * 50.0)
    config.check(c)
    assert config.total_steps(c, None) == 50
    c.total_tokens = 1e20
    with refuses("total_tokens", 1e20, error=ConfigError):
        config.total_steps(c, 7)
    c.total_steps = 7
    with refuses("total_tokens", 1e20, error=ConfigError):
        config.check(c)
