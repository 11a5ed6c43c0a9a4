"""Config keys of interventions: architectures that accept them, invalid values, and unset keys without effect."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from messages import refuses

from leanformer import config, models
from leanformer.config import declare
from leanformer.layers import interventions
from leanformer.pretrained import layouts
from leanformer.training import state, train_setup
from tests.config.test_checks import load_changed
from tests.layers.test_interventions import ALL_INTERVENTIONS


SUPPORTED_KEYS = {
    "vit": {*ALL_INTERVENTIONS, "layer_scale", "levers_on"},
    "gpt": {*ALL_INTERVENTIONS, "layer_scale", "levers_on"} - {"graying", "graying_by"},
    "bert": {*ALL_INTERVENTIONS, "layer_scale", "levers_on"} - {"graying", "graying_by"},
    "encoder": {*ALL_INTERVENTIONS, "layer_scale", "levers_on"},
    "nystromformer": {*ALL_INTERVENTIONS, "layer_scale", "levers_on"} - {"graying", "graying_by"},
    "xcit": {"spectral", "qkv_init", "sigma_reparam", "levers_on", "layer_scale"},
    "tnt": {"spectral", "qkv_init", "sigma_reparam", "levers_on"},
    "davit": {"spectral", "qkv_init", "sigma_reparam", "levers_on"},
    "volo": {"spectral", "qkv_init", "sigma_reparam", "levers_on"},
}
VALUES = ALL_INTERVENTIONS | {"layer_scale": 0.1, "levers_on": "qk"}


@pytest.mark.parametrize("architecture", SUPPORTED_KEYS)
def test_architectures_accept_only_supported_keys(architecture):
    family = models.find_class(architecture)
    kind = family.attentions["softmax"]
    accepted = {*declare.types_of(family.keys), *kind.options}
    assert accepted & VALUES.keys() == SUPPORTED_KEYS[architecture]


@pytest.mark.parametrize(
    ("name", "changes", "parts"),
    [
        ("quickstart", {"model.qkv_init": "unit"}, ("model.qkv_init='unit'", "orthogonal", "spectral")),
        ("quickstart", {"model.levers_on": "q"}, ('model.levers_on="q"', "model.spectral", "model.qkv_init")),
        ("quickstart", {"model.spectral": 1.0, "model.levers_on": "qo"}, ('model.levers_on="qo"', "q", "k", "v")),
        ("quickstart", {"model.graying": 1.5}, ("model.graying=1.5", 0, 1)),
        ("quickstart", {"model.graying_by": "dct"}, ('model.graying_by="dct"', "model.graying")),
        ("quickstart", {"model.graying": 0.5, "model.graying_by": "fft"}, ("model.graying_by='fft'", "svd", "dct")),
        ("rank_nn", {"model.graying": 0.5, "model.causal": True}, ("model.graying=0.5", "model.causal=True")),
        ("tnt_b_8x16", {"model.attention_dropout": 0.5}, ("model.attention_dropout=0.5", "TntBlock")),
        ("quickstart_gpt", {"model.graying": 0.5}, ("model.graying=0.5",)),
        (
            "quickstart",
            {"model.attention": "latent", "model.kv_rank": 8, "model.spectral": 1.0},
            ("model.spectral=1.0", 'model.attention="latent"'),
        ),
    ],
)
def test_invalid_values_are_refused(name, changes, parts):
    c = load_changed(name, changes)
    with refuses(*parts):
        train_setup.build(c, examples=10_000)


def test_unset_keys_change_nothing():
    """Unset keys, and values without effect, leave the programs of initialisation and model unchanged."""
    arguments = config.load("quickstart").model.to_dict() | {"backend": "xla"}

    def lower_programs(**model):
        graphdef, make, shapes = state.split(lambda rngs: models.build(**arguments | model, rngs=rngs))
        images = jnp.zeros((2, 28, 28, 1))
        run = jax.jit(lambda weights, images: nnx.merge(graphdef, *weights)(images)[0])
        return run.lower(shapes, images).as_text(), jax.jit(make).lower(jax.random.key(0)).as_text()

    plain = lower_programs()
    for neutral in ({"spectral": 0.0}, {"sigma_reparam": False}, {"graying": 1.0}):
        assert lower_programs(**neutral) == plain
    assert lower_programs(spectral=0.1)[0] != plain[0] and lower_programs(qkv_init="spectral")[1] != plain[1]


def test_effective_weights_are_measured(tiny, meshes):
    c = tiny.copy_and_resolve_references().unlock()
    c.model.update(spectral=2.0, sigma_reparam=True)
    run = train_setup.build(c, examples=64, mesh=meshes(1, 1))
    weights = run.model.random_weights(0)  # their directions of the largest singular values have converged
    raw, effective = (
        np.float64(model.measured()["blocks"]["attention"]["key"]["kernel"])
        for model in (
            nnx.merge(run.model.graphdef, *weights),
            interventions.with_effective_weights(run.model.graphdef, weights),
        )
    )
    for i in range(3):
        expected = raw[i].reshape(12, -1) + 2 * np.eye(12, 24)
        np.testing.assert_allclose(
            effective[i].reshape(12, -1), expected / np.linalg.svd(expected, compute_uv=False)[0], atol=1e-6
        )


def test_other_checkpoint_formats_refuse_interventions():
    arguments = config.load("vit_b_7x16").model.to_dict()
    assert layouts.layout("timm", arguments)
    with refuses("model.spectral=10.0", "timm"):
        layouts.layout("timm", arguments | {"spectral": 10.0})
