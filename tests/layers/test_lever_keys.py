"""Config keys of levers: families that take them, invalid values, and unset keys that change nothing."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from filled import filled
from flax import nnx
from messages import mentions, refuses

from leanformer import conditioning, config, models
from leanformer.errors import ConfigError
from leanformer.layers import interventions
from leanformer.layers.masks import Mask
from leanformer.pretrained import layouts
from leanformer.training import checks, state, train_setup
from tests.config.test_checks import changed
from tests.layers.test_attention_registry import softmax
from tests.layers.test_interventions import EVERYTHING, B, D, F, H, L, N, T, x


__all__ = ["x"]  # fixtures
CAUSAL = Mask(causal=True)


FITS = {
    "vit": {*EVERYTHING, "layer_scale", "levers_on"},
    "gpt": {*EVERYTHING, "layer_scale", "levers_on"} - {"graying", "graying_by"},
    "encoder": {*EVERYTHING, "layer_scale", "levers_on"},
    "nystromformer": {*EVERYTHING, "layer_scale", "levers_on"} - {"graying", "graying_by"},
    "xcit": {"spectral", "qkv_init", "sigma_reparam", "levers_on"},
    "tnt": {"spectral", "qkv_init", "sigma_reparam", "levers_on"},
    "davit": {"spectral", "qkv_init", "sigma_reparam", "levers_on"},
    "volo": {"spectral", "qkv_init", "sigma_reparam", "levers_on", "value_residual", "value_mix"},
}
CONFIGS = {
    **{"vit": "quickstart", "gpt": "quickstart_gpt", "encoder": "rank_nn", "nystromformer": "nystromformer_listops"},
    **{"xcit": "xcit_m_12x16", "tnt": "tnt_b_8x16", "davit": "davit_b_lean", "volo": "volo_d3_lean"},
}
NEEDS = {
    "graying_by": {"graying": 0.5},
    "value_mix": {"value_residual": 0.5},
    "levers_on": {"spectral": 1.0},
}
VALUES = EVERYTHING | {"layer_scale": 0.1, "levers_on": "qk"}


@pytest.mark.parametrize("family", CONFIGS)
def test_levers_by_family(family):
    for key, value in VALUES.items():
        asked = {f"model.{name}": v for name, v in ({key: value} | NEEDS.get(key, {})).items()}
        if family in ("nystromformer", "xcit"):
            asked |= {"model.attention": "softmax", "model.landmarks": None, "model.convolution": None}
        if key in FITS[family]:
            checks.check(changed(CONFIGS[family], asked))
        elif key != "layer_scale" or family != "xcit":  # XCiT's own
            with pytest.raises(ConfigError) as caught:
                checks.check(changed(CONFIGS[family], asked))
            assert any(mentions(str(caught.value), f"model.{name}") for name in {key, *NEEDS.get(key, {})}), (
                caught.value
            )


def test_bert_takes_the_levers_of_gpt(rng):
    sizes = {"width": D, "depth": L, "num_heads": N, "head_dim": H, "mlp_dim": F, "vocabulary": 11, "max_length": T}
    options = {key: value for key, value in EVERYTHING.items() if not key.startswith("graying")}
    options |= {"post_norm": False, "layer_scale": 0.1}
    made = filled(lambda: models.build("bert", **sizes, **options, rngs=nnx.Rngs(0)))
    tokens = jnp.asarray(rng.integers(11, size=(B, T)))
    assert np.isfinite(nnx.jit(lambda made, tokens: made(tokens)[0])(made, tokens)).all()


@pytest.mark.parametrize(
    ("name", "changes", "parts"),
    [
        ("quickstart", {"model.qkv_init": "unit"}, ('model.qkv_init="unit"', "orthogonal", "spectral")),
        ("quickstart", {"model.levers_on": "q"}, ('model.levers_on="q"', "model.spectral", "model.qkv_init")),
        ("quickstart", {"model.spectral": 1.0, "model.levers_on": "qo"}, ('model.levers_on="qo"', "q", "k", "v")),
        ("quickstart", {"model.graying": 1.5}, ("model.graying=1.5", 0, 1)),
        ("quickstart", {"model.graying_by": "dct"}, ('model.graying_by="dct"', "model.graying")),
        ("quickstart", {"model.graying": 0.5, "model.graying_by": "fft"}, ('model.graying_by="fft"', "svd", "dct")),
        ("rank_nn", {"model.graying": 0.5, "model.causal": True}, ("model.graying=0.5", "model.causal=True")),
        ("quickstart", {"model.value_residual": 1.5}, ("model.value_residual=1.5", 0, 1)),
        ("quickstart", {"model.value_mix": "learned"}, ('model.value_mix="learned"', "model.value_residual")),
        ("tnt_b_8x16", {"model.value_residual": 0.5}, ("model.value_residual=0.5", "TntBlock")),
        ("tnt_b_8x16", {"model.attention_dropout": 0.5}, ("model.attention_dropout=0.5", "TntBlock")),
        ("quickstart_gpt", {"model.graying": 0.5}, ("model.graying=0.5",)),
        (
            "quickstart",
            {"model.attention": "latent", "model.kv_rank": 8, "model.spectral": 1.0},
            ("model.spectral=1.0", 'model.attention="latent"'),
        ),
        (
            "quickstart",
            {"model.attention": "nystrom", "model.landmarks": 4, "model.value_residual": 0.5},
            ("model.value_residual=0.5", 'model.attention="nystrom"'),
        ),
    ],
)
def test_invalid_values_are_refused(name, changes, parts):
    with refuses(*parts):
        checks.check(changed(name, changes))


def test_unset_keys_change_nothing(x):
    """Keys that are unset, or set to what does nothing: the programs of start and model are the same."""
    arguments = config.load("quickstart").model.to_dict() | {"backend": "xla"}

    def lowered(**model):
        graphdef, make, shapes = state.split(lambda rngs: models.build(**arguments | model, rngs=rngs))
        images = jnp.zeros((2, 28, 28, 1))
        run = jax.jit(lambda weights, images: nnx.merge(graphdef, *weights)(images)[0])
        return run.lower(shapes, images).as_text(), jax.jit(make).lower(jax.random.key(0)).as_text()

    plain = lowered()
    for nothing in ({"spectral": 0.0}, {"sigma_reparam": False}, {"graying": 1.0}):
        assert lowered(**nothing) == plain
    assert lowered(spectral=0.1)[0] != plain[0] and lowered(qkv_init="spectral")[1] != plain[1]


def test_weights_are_measured_as_tokens_meet_them(tiny, meshes):
    c = tiny.copy_and_resolve_references().unlock()
    c.model.update(spectral=2.0, sigma_reparam=True)
    run = train_setup.build(c, examples=64, mesh=meshes(1, 1))
    weights = run.model.random_weights(0)  # whose directions of the largest singular values have converged
    raw, seen = (
        np.float64(model.measured()["blocks"]["attention"]["key"]["kernel"])
        for model in (
            nnx.merge(run.model.graphdef, *weights),
            interventions.with_effective_weights(run.model.graphdef, weights),
        )
    )
    for i in range(3):
        own = raw[i].reshape(12, -1) + 2 * np.eye(12, 24)
        np.testing.assert_allclose(seen[i].reshape(12, -1), own / np.linalg.svd(own, compute_uv=False)[0], atol=1e-6)


def test_other_layouts_cannot_hold_levers():
    arguments = config.load("vit_b_7x16").model.to_dict()
    assert layouts.layout("timm", arguments)
    with refuses("model.spectral=10.0", "timm"):
        layouts.layout("timm", arguments | {"spectral": 10.0})


@pytest.mark.parametrize("mask", [Mask(), CAUSAL, Mask(lengths=jnp.array([4, 7]))])
def test_self_weight(mask, rng, x):
    q, k = (rng.standard_normal((B, T, N, H)) for _ in range(2))
    logits = np.einsum("btnh,bsnh->bnts", q, k) / np.sqrt(H)
    seen = np.ones((B, 1, T, T), bool)
    if mask.causal:
        seen = seen & np.tril(np.ones((T, T), bool))
    real = np.ones((B, T), bool) if mask.lengths is None else np.arange(T)[None] < np.array([[4], [7]])
    seen = seen & real[:, None, None]
    own = np.diagonal(softmax(np.where(seen, logits, -np.inf)), axis1=-2, axis2=-1)
    expected = np.stack([[row[real[b]].mean() for row in own[b]] for b in range(B)])
    arrays = {"q": jnp.float32(q), "k": jnp.float32(k), "mask": mask}
    result = conditioning.tap(["self_weight"])(arrays)["self_weight"]
    np.testing.assert_allclose(result.value, expected, atol=1e-6)


def test_built_in_tasks_have_the_keys():
    for kind in config.KINDS.values():
        assert set(VALUES) <= set(kind.defaults().model)
