"""`check` refuses what cannot work with one message: what was asked, what was found, what to do."""

import pytest

from leanformer import config
from leanformer.errors import ConfigError


RAMP = {"batch_ramp_start": 256, "batch_ramp_steps": 9}
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
    ({"batch_ramp_steps": 7}, "batch_ramp_steps=7 says how a batch grows that has no batch_ramp_start"),
    ({"batch_ramp_start": -1}, "batch_ramp_start=-1 must not be negative"),
    (RAMP | {"batch_ramp_start": 1024}, "batch_ramp_start=1024 must be under batch_size=1024"),
    (RAMP | {"batch_ramp_increment": 100}, "From batch_ramp_start=256, 100 more .* nearest .* that does: 96 or 128"),
    (RAMP | {"batch_ramp_steps": 2}, "batch_ramp_steps=2 are too few for 3 batches smaller than batch_size=1024"),
    (RAMP | {"total_epochs": 0.0, "total_steps": 9, "optim.warmup_epochs": 0.0}, "steps=9 must be under total_steps=9"),
    (
        RAMP | {"accumulate": 2, "batch_ramp_increment": 384},
        "A batch of 640 in the ramp is no whole .* accumulate = 512",
    ),
    (
        RAMP | {"mesh.data": 3, "accumulate": 1, "batch_size": 768},
        "The batch of 256 in the ramp is 256, which 3 devices",
    ),
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
