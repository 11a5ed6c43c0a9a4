"""Refused before data are opened: kinds and sizes of every family's arguments, names, shapes that do not fit."""

import inspect
from pathlib import Path

import jax.numpy as jnp
import pytest
from flax import nnx

from leanformer import config, models, tasks
from leanformer.errors import ConfigError
from leanformer.layers.blocks import Stack
from leanformer.training import checks


FAMILIES = {
    "vit": "quickstart",
    "xcit": "xcit_m_12x16",
    "tnt": "tnt_b_8x16",
    "volo": "volo_d3_lean",
    "davit": "davit_b_lean",
    "nystromformer": "nystromformer_listops",
    "gpt": "quickstart_gpt",
    "bert": "quickstart_bert",
    "encoder": "rank_nn",
}


def changed(name, changes):
    c = config.load(name).unlock()
    for key, value in changes.items():
        section, _, last = key.rpartition(".")
        with c.ignore_type():
            (c[section] if section else c)[last] = value
    return c


def refused(name, changes):
    with pytest.raises(ConfigError) as caught:
        checks.check(changed(name, changes))
    return str(caught.value)


def test_every_family_is_here():
    modules = Path(models.__file__).parent.glob("*.py")
    assert {path.stem for path in modules} - {"__init__"} == FAMILIES.keys()


def sizes():
    for name in FAMILIES:
        for key, p in inspect.signature(models.family(name).__init__).parameters.items():
            if "int" in str(p.annotation):
                yield name, key, "Sequence[int]" in str(p.annotation) and key != "image_size"


@pytest.mark.parametrize(("name", "key", "several"), list(sizes()))
def test_sizes_are_at_least_1_and_of_their_kind(name, key, several):
    for wrong in (0, -3):
        value = (wrong,) * 4 if several else wrong
        assert f"model.{key}={value!r}" in refused(FAMILIES[name], {f"model.{key}": value})
    for value in (2.5, "many", True, 3 if several else (3, 3, 3)):
        said = "give the side" if key == "image_size" and value == (3, 3, 3) else "wanted "
        assert f"model.{key}={value!r}: {said}" in refused(FAMILIES[name], {f"model.{key}": value})


@pytest.mark.parametrize("name", FAMILIES)
def test_every_stack_of_a_family_turns_as_told(name):
    c = changed(FAMILIES[name], {"model.unroll": 3})
    arguments = c.model.to_dict() | {"backend": "xla"}
    model = nnx.eval_shape(lambda: models.build(**arguments, dtype=jnp.float32, rngs=nnx.Rngs(0)))
    stacks = [part for _, part in nnx.iter_modules(model) if isinstance(part, Stack)]
    assert stacks and {stack.unroll for stack in stacks} == {3}


def test_whole_numbers_are_numbers():
    c = changed("quickstart", {"data.mean": (0,), "data.std": (1,)})
    checks.check(c)
    assert tasks.of(c).std == (1.0,)


REFUSED = [
    ("quickstart", {"model.name": "tnt"}, 'model.name="tnt" needs model.inner_width, model.inner_heads,'),
    ("quickstart", {"model.name": "vti"}, "is not a family here. Known: "),
    ("quickstart", {"model.qkv_bias": False}, "model.qkv_bias=False: neither the model nor model.attention"),
    ("tnt_b_8x16", {"model.qkv_bias": True}, "model.qkv_bias=True: neither the model"),
    ("volo_d3_lean", {"model.qkv_bias": True}, "model.qkv_bias=True: neither the model"),
    ("xcit_m_12x16", {"model.qkv_bias": False}, "model.qkv_bias=False: neither the model"),
    ("xcit_m_12x16", {"model.value_dim": 7}, "model.value_dim=7: neither the model"),
    ("quickstart", {"model.value_dim": -3}, "model.value_dim=-3 must be at least 1."),
    ("davit_b_lean", {"model.depth": [1, 1]}, "model.depth=[1, 1]|DaViT's sizes are one number a stage"),
    ("quickstart", {"model.head_dim": (16, 16)}, "model.head_dim=(16, 16): wanted a whole number from 1."),
    ("quickstart", {"model.drop_path": "high"}, "model.drop_path='high': wanted a finite number."),
    ("quickstart", {"model.distilled": 1}, "model.distilled=1: wanted True or False."),
    ("quickstart", {"model.attention": "linear"}, 'model.attention="linear" is not a kind of attention here.'),
    ("davit_b_lean", {"model.attention": "cross_covariance"}, "Known: softmax, nystrom."),
    ("quickstart", {"model.pool": "max"}, 'model.pool="max"'),
    ("quickstart", {"model.landmarks": 4}, 'model.attention="softmax" takes it'),
    ("quickstart", {"model.attention": "nystrom", "model.landmarks": 18}, "of which there are 17. Take at most 17"),
    ("quickstart", {"model.attention": "nystrom", "model.landmarks": 0}, "model.landmarks=0 must be at least 1"),
    ("davit_b_lean", {"model.attention": "nystrom", "model.landmarks": 50}, "of which there are 49. Take at most 49"),
    ("nystromformer_listops", {"model.scale": "row"}, 'model.scale="row": choose'),
    ("nystromformer_listops", {"model.convolution": 4}, "take an odd number, or 0"),
    ("nystromformer_listops", {"model.iterations": 0}, "model.iterations=0 must be at least 1."),
    (
        "nystromformer_listops",
        {"data.name": "lisops:here"},
        'data.name="lisops:here" is not known: choose one of',
    ),
    ("tnt_b_8x16", {"model.layout": "new"}, 'model.layout="new" is not one of'),
    ("volo_d3_lean", {"model.stem_stride": 3}, "model.patch_size=8 is no multiple of model.stem_stride=3"),
    ("quickstart", {"probe.measures": ("kappa",)}, "kappa"),
    ("volo_d3_lean", {"probe.measures": ("landmark_probabilities",)}, "landmark_probabilities"),
    ("quickstart", {"data.name": "tfds:"}, 'data.name="tfds:" is not whole: give tfds:<name>.'),
    ("quickstart", {"data.name": "bundled:mnist"}, "is not whole: give bundled:fashion_mnist."),
    ("quickstart", {"data.mean": ("grey",)}, "data.mean=('grey',): wanted tuple of float, as in"),
    ("quickstart", {"augment.crop_scale": 3}, "augment.crop_scale=3: wanted tuple"),
    ("quickstart", {"probe.measures": (0,)}, "probe.measures=(0,): wanted tuple of str, as in"),
    ("quickstart", {"probe.every": None}, "probe.every=None: wanted int"),
    ("quickstart", {"augment.rand_prob": "high"}, "augment.rand_prob='high': wanted float"),
    ("quickstart", {"augment.crop_scale": (0.1,)}, "augment.crop_scale=(0.1,) must be two numbers"),
    ("quickstart", {"augment.crop_ratio": (0.1, 0.2, 0.3)}, "must be two numbers"),
    ("quickstart", {"optim.b1_peak": (0.5,)}, "optim.b1_peak=(0.5,): wanted float or None, as in optim.b1_peak=None."),
    ("quickstart", {"optim.head_lr": "high"}, "optim.head_lr='high': wanted float or None"),
    ("quickstart", {"optim.freeze": (2, 3)}, "optim.freeze=(2, 3): wanted tuple of str, as in optim.freeze=()"),
    ("quickstart", {"data.dir": 3}, "data.dir=3: wanted str or None"),
    ("nystromformer_listops", {"data.recipe": 3}, "data.recipe=3: wanted ConfigDict"),
    ("quickstart", {"dtype": "float16"}, 'dtype="float16": choose one of bfloat16, float32.'),
    ("quickstart", {"loss": "hinge"}, 'loss="hinge": choose one of softmax, sigmoid.'),
    ("quickstart", {"model.remat": "full"}, 'model.remat="full": choose one of none, light, block.'),
    ("quickstart", {"model.backend": "flash"}, 'model.backend="flash": choose one of auto, xla, cudnn, naive.'),
    ("quickstart", {"init_from.layout": "torch"}, 'init_from.layout="torch": choose one of own, timm, huggingface.'),
    ("quickstart", {"optim.name": "adam"}, 'optim.name="adam": choose one of adamw, lion, muon, adafactor, sgd.'),
    ("quickstart", {"optim.schedule": "step"}, "choose one of cosine, linear, wsd, constant."),
    ("quickstart", {"model.channels": 5}, "model.channels=5: images are grey (1) or RGB (3)."),
]


@pytest.mark.parametrize(("name", "changes", "message"), REFUSED, ids=[f"{n} {c}" for n, c, _ in REFUSED])
def test_refused_before_data_are_opened(name, changes, message):
    said = refused(name, changes)
    assert any(part in said for part in message.split("|"))


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("quickstart", {"model.attention": "nystrom", "model.landmarks": 17, "probe.every": 0}),
        ("quickstart", {"model.value_dim": 3}),
        ("davit_b_lean", {"model.attention": "nystrom", "model.landmarks": 49, "probe.every": 0}),
        ("xcit_m_12x16", {"model.attention": "softmax", "probe.measures": ("attention_entropy",)}),
        ("nystromformer_listops", {"model.attention": "softmax", "model.landmarks": None, "model.convolution": None}),
    ],
)
def test_what_fits_passes(name, changes):
    checks.check(changed(name, changes))


def test_a_model_built_from_python_keeps_the_same_rules():
    arguments = config.load("quickstart").model.to_dict()
    for change, message in (
        ({"image_size": 33}, "model.image_size=33 is not a whole number of patches"),
        ({"image_size": (3, 3, 3)}, r"model.image_size=\(3, 3, 3\): give the side in pixels, 224, or height and width"),
        ({"qkv_bias": False}, "model.qkv_bias=False: neither the model"),
        ({"width": 0}, "model.width=0 must be at least 1."),
    ):
        with pytest.raises(ConfigError, match=message):
            models.build(**arguments | {"backend": "xla"} | change, rngs=nnx.Rngs(0))
