"""`config.check`: one message per invalid config, with the configured value, the problem and the fix."""

import pytest
from messages import refuses

from leanformer import config


WRONG = [
    ({"batch_size": 0}, ["batch_size=0", 1]),
    ({"accumulate": 3}, ["batch_size=1024", "accumulate=3", 2, 4]),
    ({"total_steps": 7}, ["total_steps=7", "total_epochs=300.0"]),
    ({"total_epochs": 0.0}, ["total_steps=0", "total_epochs=0.0"]),
    ({"total_epochs": 10.0}, ["optim.warmup_epochs=20.0", "total_epochs=10.0"]),
    ({"total_epochs": float("inf")}, ["total_epochs=inf"]),
    ({"optim.warmup_share": 1.0}, ["optim.warmup_share=1.0"]),
    ({"optim.warmup_share": 0.1}, ["optim.warmup_epochs=20.0", "optim.warmup_share=0.1"]),
    ({"mesh.data": 3, "accumulate": 2}, ["batch_size", "accumulate", 512, 3]),
    ({"seed": -1}, ["seed=-1"]),
    ({"seed": 2**31}, ["seed=2147483648", 2**31 - 1]),
    ({"model.patch_size": 15}, ["model.image_size=224", "model.patch_size=15", 14, 16]),
    ({"model.num_heads": 0}, ["model.num_heads=0", 1]),
    ({"model.channels": 4}, ["model.channels=4", 1, 3]),
    ({"model.backend": "cudnn", "model.head_dim": 42}, [8, 256, 42, "head_dim=48"]),
    ({"model.drop_path": 1.0}, ["model.drop_path=1.0"]),
    ({"data.mean": (0.5,)}, ["data.mean", 1, "model.channels=3"]),
    ({"data.crop_fraction": 0.0}, ["data.crop_fraction=0.0"]),
    ({"data.crop_fraction": 1e-9}, ["data.crop_fraction=1e-09", 224, 32_767]),
    ({"augment.crop_scale": (0.5, 1.5)}, ["augment.crop_scale", 1.5]),
    ({"augment.rand_magnitude": 11.0}, ["augment.rand_magnitude=11.0", "0..10"]),
    ({"augment.flip": 2.0}, ["augment.flip=2.0"]),
    ({"augment.mixup": -1.0}, ["augment.mixup=-1.0"]),
    ({"loss": "sigmoid"}, ["augment.label_smoothing=0.1", 'loss="sigmoid"']),
    ({"optim.ema": 1.0}, ["optim.ema=1.0"]),
    ({"optim.eps": 0.0}, ["optim.eps=0.0"]),
    ({"optim.max_skipped": 0}, ["optim.max_skipped=0", 1]),
    ({"mesh.data": 0}, ["mesh.data=0", -1]),
    ({"mesh.fsdp": -1}, [-1]),
]


@pytest.mark.parametrize(("changes", "parts"), WRONG, ids=[str(list(w[0])) for w in WRONG])
def test_invalid_configs_are_refused(changes, parts):
    c = config.base()
    c.update_from_flattened_dict(changes)
    with refuses(*parts):
        config.check(c)


def test_sigmoid_without_smoothing_is_allowed():
    c = config.base()
    c.update_from_flattened_dict({"loss": "sigmoid", "augment.label_smoothing": 0.0})
    config.check(c)


def test_total_steps_from_epochs():
    c = config.base()
    assert config.total_steps(c, 1_281_167) == round(300 * 1_281_167 / 1024)
    c.total_epochs = 1e12
    with refuses("total_epochs=1000000000000.0", 1_281_167, "1.3e+15"):
        config.total_steps(c, 1_281_167)
    c.update(total_epochs=0.0, total_steps=11)
    assert config.total_steps(c, 1_281_167) == 11


def test_total_steps_from_tokens():
    c = config.language()
    c.update(total_steps=0, total_tokens=c.batch_size * c.model.max_length * 50.0)
    config.check(c)
    assert config.total_steps(c, None) == 50
    c.total_tokens = 1e20
    with refuses("total_tokens", 1e20):
        config.total_steps(c, 7)
    c.total_steps = 7
    with refuses("total_tokens", 1e20):
        config.check(c)
