"""Learning-rate scales: bit-exact freezing, layer-wise decay, learning rate of the head, and layer orders."""

import runpy
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from messages import mentions, refuses
from rounding import global_norm, leaves_by_name
from small_runs import make_image_batch, make_initial_state

from leanformer import config, models
from leanformer.reports import pages
from leanformer.runtime import mesh as sharding
from leanformer.runtime.trees import leaf_names
from leanformer.training import lr_scales, model_setup, optimizers, train_setup


CONFIGS = Path(__file__).parents[2] / "configs"
# Top-level modules above all layers, which have the full learning rate, for a config of each architecture.
TOP = {
    "vit_b_7x16": {"norm", "head"},
    "xcit_m_12x16": {"norm", "head"},
    "tnt_b_8x16": {"norm", "head"},
    "volo_d3_lean": {"norm", "head", "aux_head"},
    "davit_b_lean": {"norm", "head"},
    "nystromformer_text": {"norm", "hidden", "head"},
}


def load_params(name):
    c = runpy.run_path(str(CONFIGS / f"{name}.py"))["get_config"]()
    *_, (params, _) = model_setup.abstract_model(c)
    return params, models.find_class(c.model.name).bottom_up


@pytest.fixture
def params(tiny):
    *_, (params, _) = model_setup.abstract_model(tiny)
    return params


def run_steps(c, mesh, numbers=1):
    """Return the run, its states beginning with the initial one, and the metrics of each step."""
    run = train_setup.build(c, examples=64, mesh=mesh)
    states, metrics = [make_initial_state(run)], []
    train = jax.jit(run.train_step)
    batch = sharding.put_batch(mesh, make_image_batch(np.random.default_rng(0), c))
    for _ in range(numbers):
        state, values = train(states[-1], batch, run.run_key())
        states.append(state)
        metrics.append(values)
    return run, states, metrics


FROZEN = [
    (("patch_embed",), {"patch_embed.kernel", "patch_embed.bias"}),
    (("*", "!head"), None),
    (("*", "!head", "head.bias"), None),
    (("*.norm?",), {f"blocks.layers.norm{i}.{leaf}" for i in (1, 2) for leaf in ("scale", "bias")}),
]


@pytest.mark.parametrize(("patterns", "names"), FROZEN, ids=["prefix", "all but the head", "its bias too", "wildcard"])
def test_freeze_patterns_match_parameters_and_modules(params, patterns, names):
    result = leaves_by_name(lr_scales.make(params, freeze=patterns).shares)
    all_names = result.keys()
    names = names or {
        n for n in all_names if not n.startswith("head") or (n == "head.bias" and "head.bias" in patterns)
    }
    assert {name for name, share in result.items() if not share.any()} == names
    assert all(share.all() for name, share in result.items() if name not in names)


def test_layers_of_a_stack_are_frozen_individually(params):
    result = lr_scales.make(params, freeze=("blocks.layers.[01]", "!blocks.layers.1.mlp"))
    shares = leaves_by_name(result.shares)
    assert shares["blocks.layers.attention.query.kernel"].tolist() == [0, 0, 1]
    assert shares["blocks.layers.mlp.up.kernel"].tolist() == [0, 1, 1]
    assert shares["patch_embed.kernel"].tolist() == 1
    sizes = {name: leaf.size for name, leaf in leaves_by_name(params).items()}
    layers = sum(size for name, size in sizes.items() if "layers" in name)
    mlp = sum(size for name, size in sizes.items() if "mlp" in name)
    assert result.trained(params) == sum(sizes.values()) - 2 * layers // 3 + mlp // 3


@pytest.mark.parametrize(
    ("pattern", "suggestions"),
    [
        ("patch_embd", ["patch_embed"]),
        ("blocks.layers.9", ["blocks.layers.2"]),
        ("zzz", ["blocks", "cls_token", "head", "norm", "patch_embed", "pos_embed"]),
        ("*", []),
    ],
)
def test_invalid_freeze_patterns_are_refused(params, pattern, suggestions):
    with refuses("optim.freeze", pattern, *suggestions):
        lr_scales.make(params, freeze=(pattern,))


def test_frozen_parameters_have_no_moments_or_gradient_norm(plain, meshes):
    """The second layer, `patch_embed` and `pos_embed` are frozen, with weight decay and EMA on."""
    plain.optim.update(freeze=("patch_embed", "pos_embed", "blocks.layers.1"), lr=0.1, clip_norm=0.0)
    run, (before, first, after), (metrics, _) = run_steps(plain, meshes(1, 1), 2)
    old, new = leaves_by_name(before.params), leaves_by_name(after.params)
    for name in ("patch_embed.kernel", "patch_embed.bias", "pos_embed"):
        np.testing.assert_array_equal(new[name], old[name])
        np.testing.assert_array_equal(leaves_by_name(after.ema[0])[name], old[name])
        assert not [moment for moment in leaf_names(after.moments) if moment.endswith(name)]
    for name in (n for n in old if "layers" in n):
        np.testing.assert_array_equal(new[name][1], old[name][1], err_msg=name)
        if not name.endswith("key.bias"):  # its gradient is zero up to rounding
            assert all((np.asarray(new[name][i]) != old[name][i]).any() for i in (0, 2)), name
    total = sum(x.size for x in old.values())
    trained = run.lr_scales.trained(run.state.params)
    assert 0 < trained < total and mentions(pages._format_parameters(run), total, trained)
    # After one step the first moment is (1 - b1) times the gradient, which gives the norm of the gradient.
    moments = {name: x for name, x in leaves_by_name(first.moments).items() if ".mu." in name}
    grad_norm = global_norm(moments) / (1 - plain.optim.b1)
    np.testing.assert_allclose(metrics["grad_norm"], grad_norm, rtol=1e-5)


@pytest.mark.parametrize("name", TOP)
def test_layer_order_of_every_architecture(name):
    params, bottom_up = load_params(name)
    result = leaves_by_name(lr_scales.make(params, layer_decay=0.5, bottom_up=bottom_up).shares)
    assert {leaf.split(".")[0] for leaf, share in result.items() if share.max() == 1} == TOP[name]
    levels = sorted({-float(np.log2(x)) for share in result.values() for x in share.reshape(-1)})
    assert levels == [*map(float, range(len(levels)))]  # no level is skipped
    lowest = {leaf.split(".")[0] for leaf, share in result.items() if -np.log2(share.min()) == levels[-1]}
    assert lowest & {"patch_embed", "stem", "embed"}
    stacks = {leaf.split(".")[0]: share for leaf, share in result.items() if "layers" in leaf}
    assert all((np.diff(share) > 0).all() for share in stacks.values())
    depth = sum(len(share) for share in stacks.values())
    assert len(levels) >= depth + 2


def test_layer_decay_needs_a_layer_order():
    params = {"blocks": {"kernel": np.zeros(3)}}
    assert lr_scales.make(params).trained(params) == 3
    with refuses("optim.layer_decay", 0.5, "bottom_up"):
        lr_scales.make(params, layer_decay=0.5)


def test_setup_has_the_scales_of_its_config(tiny):
    tiny.optim.update(layer_decay=0.5, head_lr=3 * tiny.optim.lr)
    shares = leaves_by_name(train_setup.build(tiny, examples=64).lr_scales.shares)
    assert shares["blocks.layers.mlp.up.kernel"].tolist() == [0.125, 0.25, 0.5]
    assert {float(shares[name]) for name in ("patch_embed.kernel", "cls_token", "pos_embed")} == {0.0625}
    assert float(shares["norm.scale"]) == 1 and float(shares["head.kernel"]) == 3


def test_defaults_do_not_wrap_the_optimizer(params):
    rule = optimizers.OPTIMIZERS["adamw"](b1=0.9, b2=0.9, eps=1e-8, weight_decay=0.0, mask=True)
    assert lr_scales.make(params, bottom_up=models.find_class("vit").bottom_up).scale_updates(rule) is rule


REFUSED = [
    ({"optim.layer_decay": 0.0}, ["optim.layer_decay=0.0"]),
    ({"optim.decay_share": 0.0}, ["optim.decay_share=0.0"]),
    ({"optim.schedule": "constant", "optim.final_lr": 1e-4}, ['optim.schedule="constant"', "optim.final_lr=0.0001"]),
    ({"optim.head_lr": -1.0}, ["optim.head_lr=-1.0"]),
    ({"optim.head_lr": 0.1, "optim.lr": 0.0}, ["optim.head_lr=0.1", "optim.lr=0.0"]),
    ({"optim.name": "muon", "optim.b1_peak": 0.8}, ["optim.b1_peak=0.8", 'optim.name="muon"']),
]


@pytest.mark.parametrize(("changes", "parts"), REFUSED)
def test_invalid_settings_are_refused(changes, parts):
    c = config.base()
    c.update_from_flattened_dict(changes)
    with refuses(*parts):
        config.check(c)


@pytest.mark.parametrize("name", optimizers.OPTIMIZERS)
def test_every_optimizer_scales_updates_and_leaves_frozen_parameters_unchanged(name):
    """Weight decay is on and every gradient is nonzero: neither changes a frozen parameter."""
    mlp = {"up": {"kernel": jnp.ones((2, 3, 5)), "bias": jnp.ones((2, 5))}, "down": {"kernel": jnp.ones((2, 5, 3))}}
    params = {"blocks": {"layers": {"mlp": mlp}}, "head": {"kernel": jnp.ones((3, 7))}}
    freeze = ("blocks.layers.mlp.down", "blocks.layers.1")
    scales = lr_scales.make(params, freeze=freeze, layer_decay=0.5, bottom_up=(("blocks",),))
    mask = jax.tree.map(lambda x: True, params)
    rule = optimizers.OPTIMIZERS[name](b1=0.9, b2=0.99, eps=1e-8, weight_decay=0.5, mask=mask)
    scaled = scales.scale_updates(rule)
    state = scaled.init(params)
    assert not [leaf for leaf in leaf_names(state) if "down" in leaf]
    grads = jax.tree.map(lambda x: jnp.arange(1.0, x.size + 1).reshape(x.shape), params)
    direction, new_state = jax.jit(scaled.update)(grads, state, params, finite=True, b1=0.9)
    unscaled, _ = jax.jit(rule.update)(grads, rule.init(params), params, finite=True, b1=0.9)
    updates, expected = leaves_by_name(direction), leaves_by_name(unscaled)
    assert not updates["blocks.layers.mlp.down.kernel"].any()
    assert jax.tree.structure(new_state) == jax.tree.structure(state)
    for leaf in ("blocks.layers.mlp.up.kernel", "blocks.layers.mlp.up.bias"):
        np.testing.assert_allclose(updates[leaf][0], 0.25 * expected[leaf][0], rtol=1e-6)
        assert expected[leaf][0].any() and not updates[leaf][1].any()
    np.testing.assert_allclose(updates["head.kernel"], expected["head.kernel"], rtol=1e-6)
