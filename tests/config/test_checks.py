"""Config checks before data are opened: types and sizes of every architecture's arguments, names, unfitting shapes."""

from collections.abc import Sequence
from pathlib import Path
from typing import get_origin

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from messages import refuses

from leanformer import config, models, tasks
from leanformer.layers import model_base
from leanformer.layers.stack import Stack
from leanformer.training import checks


ARCHITECTURES = {
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


def load_changed(name, changes):
    c = config.load(name).unlock()
    for key, value in changes.items():
        section, _, last = key.rpartition(".")
        with c.ignore_type():
            (c[section] if section else c)[last] = value
    return c


def test_table_covers_every_architecture():
    modules = Path(models.__file__).parent.glob("*.py")
    assert {path.stem for path in modules} - {"__init__"} == ARCHITECTURES.keys()


Pair = tuple[int, int]
TYPES = [  # annotation, valid values, invalid values
    (int, [1, 7], [0, -3, 2.5, "many", True, None, (3, 3)]),
    (float, [0.5, 0, -1], ["high", np.nan, np.inf, True, None]),
    (bool, [True, False], [1, 0, "yes", None]),
    (str, ["a"], [1, None, ("a",)]),
    (Sequence[int], [(1,), [2, 3]], [3, (), (0, 1), (2.5,), "ab"]),
    (int | Pair, [3, (3, 5)], [(3, 3, 3), (3,), 0, (0, 3), 2.5]),
    (int | None, [None, 1], [0, 2.5]),
]


@pytest.mark.parametrize(("annotation", "good", "bad"), TYPES, ids=[str(kind) for kind, *_ in TYPES])
def test_argument_types_are_checked(annotation, good, bad):
    for value in good:
        model_base.check_type("size", value, annotation)
    for value in bad:
        with refuses(f"model.size={value!r}"):
            model_base.check_type("size", value, annotation)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_architecture_argument_has_a_checked_type(name):
    """The check covers every size: zero is refused, and the message names the key."""
    types = {key: model_base._alternatives(kind) for key, (kind, _) in models.find_class(name).keys().items()}
    assert all(
        (get_origin(kind) or kind) in model_base.WORDS for alternatives in types.values() for kind in alternatives
    )
    sizes = {key: (0,) * 4 if Sequence[int] in alternatives else 0 for key, alternatives in types.items()}
    sizes = {key: value for key, value in sizes.items() if {int, Sequence[int]} & {*types[key]}}
    assert len(sizes) > 5
    arguments = config.load(ARCHITECTURES[name]).model.to_dict()
    for key, value in sizes.items():
        with refuses(f"model.{key}={value!r}"):
            models.check(**arguments | {key: value})


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_stack_uses_the_configured_unroll(name):
    c = load_changed(ARCHITECTURES[name], {"model.unroll": 3})
    keys = c.model.to_dict() | {"backend": "xla"}
    model = nnx.eval_shape(lambda: models.build(**keys, dtype=jnp.float32, rngs=nnx.Rngs(0)))
    stacks = [part for _, part in nnx.iter_modules(model) if isinstance(part, Stack)]
    assert stacks and {stack.unroll for stack in stacks} == {3}


def test_integers_are_accepted_as_floats():
    c = load_changed("quickstart", {"data.mean": (0,), "data.std": (1,)})
    checks.check(c)
    assert tasks.build(c).objective.std == (1.0,)


REFUSED = [
    ("quickstart", {"model.name": "tnt"}, ['model.name="tnt"', "model.inner_width", "model.inner_heads"]),
    ("quickstart", {"model.name": "vti"}, ['model.name="vti"', "vit"]),
    ("quickstart", {"model.qkv_bias": False}, ["model.qkv_bias=False", "model.attention"]),
    ("tnt_b_8x16", {"model.qkv_bias": True}, ["model.qkv_bias=True"]),
    ("xcit_m_12x16", {"model.value_dim": 7}, ["model.value_dim=7"]),
    ("quickstart", {"model.value_dim": -3}, ["model.value_dim=-3", 1]),
    ("davit_b_lean", {"model.depth": [1, 1]}, ["model.depth=(1, 1)"]),
    ("quickstart", {"model.drop_path": "high"}, ["model.drop_path='high'"]),
    ("quickstart", {"model.distilled": 1}, ["model.distilled=1", "True", "False"]),
    ("quickstart", {"model.attention": "linear"}, ['model.attention="linear"', "nystrom"]),
    ("davit_b_lean", {"model.attention": "cross_covariance"}, ["cross_covariance", "softmax", "nystrom"]),
    ("quickstart", {"model.pool": "max"}, ['model.pool="max"']),
    ("quickstart", {"model.landmarks": 4}, ["model.landmarks=4", 'model.attention="softmax"']),
    ("quickstart", {"model.attention": "nystrom", "model.landmarks": 18}, ["model.landmarks=18", 17]),
    ("davit_b_lean", {"model.attention": "nystrom", "model.landmarks": 50}, ["model.landmarks=50", 49]),
    ("nystromformer_listops", {"model.scale": "row"}, ['model.scale="row"', "matrix"]),
    ("nystromformer_listops", {"model.convolution": 4}, ["model.convolution=4", 0]),
    ("tnt_b_8x16", {"model.layout": "new"}, ['model.layout="new"']),
    ("volo_d3_lean", {"model.stem_stride": 3}, ["model.patch_size=8", "model.stem_stride=3"]),
    ("volo_d3_lean", {"model.image_size": 8}, ["model.image_size=8", "model.patch_size=8"]),
    ("volo_d3_lean", {"model.width": (256, 512, 512, 520)}, ["model.width=(256, 512, 512, 520)"]),
    ("volo_d3_lean", {"model.depth": (2, 3)}, ["model.depth=(2, 3)", "model.width=(256, 512, 512, 512)"]),
    ("xcit_m_12x16", {"model.patch_size": 14}, ["model.patch_size=14", 2]),
    ("xcit_m_12x16", {"model.width": 511}, ["model.width=511", "model.patch_size=16", 8]),
    ("tnt_b_8x16", {"model.pixel_stride": 5}, ["model.patch_size=16", "model.pixel_stride=5"]),
    ("davit_b_lean", {"model.channel_head_dim": (4,)}, ["model.channel_head_dim=(4,)", 4]),
    ("vit_b", {"model.depth": 10_001}, ["model.depth=10001", 10_000]),
    ("quickstart", {"probe.measures": ("kappa",)}, ["kappa"]),
    ("quickstart", {"data.name": "tfds:"}, ['data.name="tfds:"', "tfds:<name>"]),
    ("quickstart", {"data.mean": ("grey",)}, ["data.mean=('grey',)", "float"]),
    ("quickstart", {"augment.crop_scale": 3}, ["augment.crop_scale=3", "tuple"]),
    ("quickstart", {"probe.every": None}, ["probe.every=None", "int"]),
    ("quickstart", {"augment.crop_scale": (0.1,)}, ["augment.crop_scale=(0.1,)"]),
    ("quickstart", {"augment.rand_layers": 101}, ["augment.rand_layers=101", 100]),
    ("quickstart", {"optim.b1_peak": (0.5,)}, ["optim.b1_peak=(0.5,)", "float", "optim.b1_peak=None"]),
    ("quickstart", {"optim.freeze": (2, 3)}, ["optim.freeze=(2, 3)", "str", "optim.freeze=()"]),
    ("nystromformer_listops", {"data.recipe": 3}, ["data.recipe=3", "ConfigDict"]),
    ("quickstart", {"optim.final_lr": -0.05}, ["optim.final_lr=-0.05"]),
    ("quickstart", {"optim.warmup_lr": -5.0}, ["optim.warmup_lr=-5.0"]),
    ("quickstart", {"model.epsilon": -1.0}, ["model.epsilon=-1.0"]),
    ("quickstart", {"task": "language"}, ['task="language"', "data.tokenizer", "leanformer.config.language()"]),
    ("quickstart_gpt", {"task": "images"}, ['task="images"', "augment", "more", "leanformer.config.base()"]),
    ("quickstart_bert", {"task": "sentences"}, ['task="sentences"', "score", "leanformer.config.sentences()"]),
    ("quickstart", {"model": 3}, ["model", "leanformer.config.base()"]),
    ("quickstart", {"dtype": "float16"}, ['dtype="float16"', "bfloat16", "float32"]),
    ("quickstart", {"loss": "hinge"}, ['loss="hinge"', "softmax", "sigmoid"]),
    ("quickstart", {"model.remat": "full"}, ['model.remat="full"', "none", "light", "block"]),
    ("quickstart", {"model.backend": "flash"}, ['model.backend="flash"', "auto", "xla", "cudnn", "naive"]),
    ("quickstart", {"init_from.layout": "torch"}, ['init_from.layout="torch"', "own", "timm", "huggingface"]),
    ("quickstart", {"optim.name": "adam"}, ['optim.name="adam"', "adamw", "muon", "sgd"]),
    ("quickstart", {"optim.schedule": "step"}, ['optim.schedule="step"', "cosine", "linear", "constant"]),
]


@pytest.mark.parametrize(("name", "changes", "parts"), REFUSED, ids=[f"{n} {c}" for n, c, _ in REFUSED])
def test_invalid_configs_are_refused_before_data_are_opened(name, changes, parts):
    with refuses(*parts):
        checks.check(load_changed(name, changes))


def test_schedules_over_layers_pass_before_they_are_resolved():
    config.check(load_changed("quickstart", {"model.num_heads": "linear:2-6"}))
    with refuses("model.num_heads=()", 1):
        config.check(load_changed("quickstart", {"model.num_heads": ()}))


@pytest.mark.parametrize("key", ["seed", "eval", "augment", "model", "optim.lr"])
def test_missing_keys_are_refused(key):
    c = config.load("quickstart").unlock()
    section, _, last = key.rpartition(".")
    del (c[section] if section else c)[last]
    for check in (checks.check, tasks.resolve):
        with refuses('task="images"', key, "leanformer.config.base()"):
            check(c)
    with refuses("task", "data", "more"):
        tasks.resolve(config.ConfigDict())


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("davit_b_lean", {"model.attention": "nystrom", "model.landmarks": 49, "probe.every": 0}),
        ("xcit_m_12x16", {"model.attention": "softmax", "probe.measures": ("attention_entropy",)}),
        ("nystromformer_listops", {"model.attention": "softmax", "model.landmarks": None, "model.convolution": None}),
    ],
)
def test_valid_configs_pass(name, changes):
    checks.check(load_changed(name, changes))


def test_model_built_from_python_has_the_same_checks():
    arguments = config.load("quickstart").model.to_dict()
    for change, parts in (
        ({"image_size": 33}, ["model.image_size=33"]),
        ({"image_size": (3, 3, 3)}, ["model.image_size=(3, 3, 3)", 224]),
        ({"qkv_bias": False}, ["model.qkv_bias=False"]),
        ({"width": 0}, ["model.width=0", 1]),
    ):
        with refuses(*parts):
            models.build(**arguments | {"backend": "xla"} | change, rngs=nnx.Rngs(0))
