"""Refusal of configs before data are opened: types and sizes of all keys, names, and sizes that do not fit."""

from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from messages import refuses
from small_runs import abstract_eval_batch

from leanformer import config, models, tasks
from leanformer.config import declare
from leanformer.layers.stack import Stack
from leanformer.training import train_setup


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


TYPES = [  # annotation, valid values, invalid values
    (int, [1, 0, -7], [2.5, "many", True, None, (3, 3)]),
    (float, [0.5, 0, -1], ["high", np.nan, np.inf, True, None]),
    (bool, [True, False], [1, 0, "yes", None]),
    (str, ["a", ""], [1, None, ("a",)]),
    (Literal["a", 3], ["a", 3], ["b", None, ("a",)]),
    (tuple[int, ...], [(1,), [2, 3], ()], [3, (2.5,), "ab"]),
    (int | tuple[int, int], [3, (3, 5)], [(3, 3, 3), (3,), 2.5]),
    (int | None, [None, 1], [2.5]),
]


@pytest.mark.parametrize(("annotation", "good", "bad"), TYPES, ids=[str(kind) for kind, *_ in TYPES])
def test_values_are_compared_with_annotations(annotation, good, bad):
    assert [value for value in good if not declare.fits(value, annotation)] == []
    assert [value for value in bad if declare.fits(value, annotation)] == []


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_size_is_at_least_one(name):
    """In every stage or layer; and the message names the key."""
    arguments = config.load(ARCHITECTURES[name]).model.to_dict()
    sizes = {key: kind for key, kind in declare.types_of(models.find_class(name).keys).items() if "int" in str(kind)}
    assert len(sizes) > 5
    for key, kind in sizes.items():
        value = 0 if kind in (int, int | None) or "int |" in str(kind) else (0,) * 4
        with refuses(f"model.{key}={value!r}"):
            models.check(**arguments | {key: value})


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_stack_uses_the_configured_unroll(name):
    c = load_changed(ARCHITECTURES[name], {"model.unroll": 3})
    keys = c.model.to_dict() | {"backend": "xla"}
    model = nnx.eval_shape(lambda: models.build(**keys, dtype=jnp.float32, rngs=nnx.Rngs(0)))
    stacks = [part for _, part in nnx.iter_modules(model) if isinstance(part, Stack)]
    assert stacks and {stack.unroll for stack in stacks} == {3}


REFUSED = [  # one of each kind: the key, its type, its values, its length
    ("quickstart", {"model.name": "vti"}, ['model.name="vti"', "vit"]),
    ("tnt_b_8x16", {"model.num_heads": (4, 4, 4, 4, 4, 4, 4, 4)}, ["model.num_heads=(4, 4, 4, 4, 4, 4, 4, 4)"]),
    ("quickstart", {"model.distilled": 1}, ["model.distilled=1", "bool"]),
    ("quickstart", {"model.attention": "linear"}, ['model.attention="linear"', "nystrom"]),
    ("davit_b_lean", {"model.attention": "cross_covariance"}, ["cross_covariance", "softmax", "nystrom"]),
    ("quickstart", {"model.pool": "max"}, ["model.pool='max'", "token", "mean"]),
    ("quickstart", {"model.landmarks": 4}, ["model.landmarks=4", 'model.attention="softmax"']),
    ("quickstart", {"probe.measures": ("kappa",)}, ["kappa"]),
    ("quickstart", {"data.name": "tfds:"}, ['data.name="tfds:"', "tfds:<name>"]),
    ("quickstart", {"data.mean": ("grey",)}, ["data.mean=('grey',)", "tuple[float, ...]"]),
    ("nystromformer_listops", {"data.recipe": 3}, ["data.recipe=3", "ConfigDict"]),
    ("quickstart", {"task": "language"}, ["data.tokenizer"]),
    ("quickstart", {"optim.name": "adam"}, ["optim.name='adam'", "adamw", "muon", "sgd"]),
]


@pytest.mark.parametrize(("name", "changes", "parts"), REFUSED, ids=[f"{n} {[*c]}" for n, c, _ in REFUSED])
def test_invalid_configs_are_refused_before_data_are_opened(name, changes, parts):
    with refuses(*parts):
        train_setup.check(load_changed(name, changes))


LATENT = {"model.attention": "latent", "model.kv_rank": 8}
UNFITTING = [  # the rules of each architecture, attention, intervention and head
    ("davit_b_lean", {"model.depth": [1, 1]}, ["model.depth=(1, 1)"]),
    ("quickstart", {"model.attention": "nystrom", "model.landmarks": 18}, ["model.landmarks=18", 17]),
    ("nystromformer_listops", {"model.convolution": 4}, ["model.convolution=4", 0]),
    ("volo_d3_lean", {"model.stem_stride": 3}, ["model.patch_size=8", "model.stem_stride=3"]),
    ("volo_d3_lean", {"model.width": (256, 512, 512, 520)}, ["model.width=(256, 512, 512, 520)"]),
    ("xcit_m_12x16", {"model.patch_size": 14}, ["model.patch_size=14", 2]),
    ("tnt_b_8x16", {"model.pixel_stride": 5}, ["model.patch_size=16", "model.pixel_stride=5"]),
    ("quickstart", {"model.rotary": 100.0, "model.head_dim": 5}, ["model.head_dim=5"]),
    ("quickstart", {"model.rotary": 9.0, "model.rotary_width": 98}, ["model.rotary_width=98", "model.head_dim"]),
    ("quickstart", {"model.soft_cap": 0.0}, ["model.soft_cap=0.0"]),
    ("quickstart", {"model.qk_norm": "batch"}, ["batch", "rmsnorm"]),
    ("quickstart", LATENT | {"model.kv_rank": None}, ["model.kv_rank=None", "model.width=96"]),
    ("quickstart", LATENT | {"model.query_rank": 97}, ["model.query_rank=97", 96]),
    ("quickstart", LATENT | {"model.rotary": 100.0}, ["model.rotary=100.0", "model.rotary_width"]),
    ("quickstart", LATENT | {"model.attention": "softmax"}, ["model.kv_rank=8", 'model.attention="softmax"']),
    ("quickstart", {"model.levers_on": "q"}, ['model.levers_on="q"', "model.spectral", "model.qkv_init"]),
    ("quickstart", {"model.graying": 1.5}, ["model.graying=1.5", 0, 1]),
    ("quickstart", {"model.graying_by": "dct"}, ['model.graying_by="dct"', "model.graying"]),
    ("rank_nn", {"model.graying": 0.5, "model.causal": True}, ["model.graying=0.5", "model.causal=True"]),
    ("tnt_b_8x16", {"model.attention_dropout": 0.5}, ["model.attention_dropout=0.5", "TntBlock"]),
    ("nystromformer_listops", {"model.padding": "zeros", "model.landmarks": 7}, ['model.padding="zeros"', 7]),
    ("quickstart_gpt", {"model.head_bias": True}, ["model.head_bias=True", "model.tied=True"]),
    ("quickstart_gpt", {"model.attention": "nystrom"}, ['model.attention="nystrom"', "causal"]),
    ("quickstart_gpt", {"model.head_cap": 0.0}, ["model.head_cap=0.0", "positive"]),  # would train nothing
    ("quickstart_gpt", {"model.num_heads": (2, 4, 1)}, ["model.num_heads=(2, 4, 1)", "model.depth"]),
    ("quickstart_bert", {"model.pooler_dim": 5}, ["model.pooler_dim=5", "model.num_classes=None"]),
]


@pytest.mark.parametrize(("name", "changes", "parts"), UNFITTING, ids=[f"{n} {[*c]}" for n, c, _ in UNFITTING])
def test_unfitting_sizes_are_refused_before_training(name, changes, parts):
    c = load_changed(name, changes)
    with refuses(*parts):
        train_setup.check(c)
        setup = train_setup.set_up_training(c, examples=10_000)
        jax.eval_shape(setup.model.eval_step(setup.task.objective), setup.model.weights, abstract_eval_batch(setup))


@pytest.mark.parametrize("key", ["seed", "eval", "augment", "optim.lr"])
def test_missing_keys_are_refused(key):
    c = config.load("quickstart").unlock()
    section, _, last = key.rpartition(".")
    del (c[section] if section else c)[last]
    for check in (train_setup.check, tasks.resolve):
        with refuses(key):
            check(c)
