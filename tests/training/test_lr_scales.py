"""What is frozen stays as it is to the bit; layer-wise decay and the head's rate by hand; families say their order."""

import runpy
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from messages import mentions, refuses
from rounding import LOSS, by_name, norm
from small_runs import fresh_state

from leanformer import config, models
from leanformer.reports import pages
from leanformer.runtime import mesh as sharding
from leanformer.runtime.trees import leaf_names
from leanformer.training import lr_scales, model_setup, optimizers, train_setup


CONFIGS = Path(__file__).parents[2] / "configs"
# Of a config of each family, what is above all layers and has the whole rate.
TOP = {
    "vit_b_7x16": {"norm", "head"},
    "xcit_m_12x16": {"norm", "head"},
    "tnt_b_8x16": {"norm", "head"},
    "volo_d3_lean": {"norm", "head", "aux_head"},
    "davit_b_lean": {"norm", "head"},
    "nystromformer_text": {"norm", "hidden", "head"},
}


def params_of(name):
    c = runpy.run_path(str(CONFIGS / f"{name}.py"))["get_config"]()
    *_, (params, _) = model_setup.abstract_model(c)
    return params, models.find_class(c.model.name).bottom_up


@pytest.fixture
def params(tiny):
    *_, (params, _) = model_setup.abstract_model(tiny)
    return params


def batch(c):
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (c.batch_size, 14, 14, 1), dtype=np.uint8)
    return {"image": images, "label": rng.integers(0, 5, c.batch_size).astype(np.int32)}


def step(c, mesh, numbers=1):
    """Return the run, its states from the one before step 0 on, and the metrics of each step."""
    run = train_setup.build(c, examples=64, mesh=mesh)
    states, metrics = [fresh_state(run)], []
    train = jax.jit(run.train_step)
    for _ in range(numbers):
        state, told = train(states[-1], sharding.put_batch(mesh, batch(c)), run.run_key())
        states.append(state)
        metrics.append(told)
    return run, states, metrics


FROZEN = [
    (("patch_embed",), {"patch_embed.kernel", "patch_embed.bias"}),
    (("*", "!head"), None),
    (("*", "!head", "head.bias"), None),
    (("*.norm?",), {f"blocks.layers.norm{i}.{leaf}" for i in (1, 2) for leaf in ("scale", "bias")}),
]


@pytest.mark.parametrize(("patterns", "names"), FROZEN, ids=["prefix", "all but the head", "its bias too", "wildcard"])
def test_patterns_name_parameters_and_modules(params, patterns, names):
    result = by_name(lr_scales.make(params, freeze=patterns).shares)
    every = result.keys()
    names = names or {n for n in every if not n.startswith("head") or (n == "head.bias" and "head.bias" in patterns)}
    assert {name for name, share in result.items() if not share.any()} == names
    assert all(share.all() for name, share in result.items() if name not in names)


def test_layers_of_a_stack_are_frozen_one_by_one(params):
    result = lr_scales.make(params, freeze=("blocks.layers.[01]", "!blocks.layers.1.mlp"))
    shares = by_name(result.shares)
    assert shares["blocks.layers.attention.query.kernel"].tolist() == [0, 0, 1]
    assert shares["blocks.layers.mlp.up.kernel"].tolist() == [0, 1, 1]
    assert shares["patch_embed.kernel"].tolist() == 1
    sizes = {name: leaf.size for name, leaf in by_name(params).items()}
    layers = sum(size for name, size in sizes.items() if "layers" in name)
    mlp = sum(size for name, size in sizes.items() if "mlp" in name)
    assert result.trained(params) == sum(sizes.values()) - 2 * layers // 3 + mlp // 3


@pytest.mark.parametrize(
    ("pattern", "near"),
    [
        ("patch_embd", ["patch_embed"]),
        ("blocks.layers.9", ["blocks.layers.2"]),
        ("zzz", ["blocks", "cls_token", "head", "norm", "patch_embed", "pos_embed"]),
        ("*", []),
    ],
)
def test_patterns_that_cannot_be_meant_are_refused(params, pattern, near):
    with refuses("optim.freeze", pattern, *near):
        lr_scales.make(params, freeze=(pattern,))


@pytest.fixture
def smooth(plain):
    """Without clipping, and with an epsilon under which Adam's first direction is nearly the gradient over it: smooth
    where a gradient is near zero, so that it may be compared between two programs."""
    plain.optim.update(lr=0.1, eps=1.0, clip_norm=0.0, weight_decay=0.05)
    return plain


@pytest.fixture(scope="module")
def kept():
    return {}


@pytest.fixture
def free(smooth, meshes, kept):
    """A step with nothing frozen and every rate that of the config: before, after, metrics."""
    if not kept:
        _, kept["states"], (kept["metrics"],) = step(smooth, meshes(1, 1))
    return *kept["states"], kept["metrics"]


def test_what_is_frozen_stays_holds_no_moments_and_is_no_part_of_the_norm(smooth, meshes, free):
    """Weight decay and averaging on. Of the second layer alone, and of whole leaves."""
    smooth.optim.freeze = ("patch_embed", "pos_embed", "blocks.layers.1")
    run, (before, first, after), (metrics, _) = step(smooth, meshes(1, 1), 2)
    old, new = by_name(before.params), by_name(after.params)
    for name in ("patch_embed.kernel", "patch_embed.bias", "pos_embed"):
        np.testing.assert_array_equal(new[name], old[name])
        np.testing.assert_array_equal(by_name(after.ema[0])[name], old[name])
        assert not [moment for moment in leaf_names(after.moments) if moment.endswith(name)]
    for name in (n for n in old if "layers" in n):
        np.testing.assert_array_equal(new[name][1], old[name][1], err_msg=name)
        if not name.endswith("key.bias"):  # whose gradient is zero but for rounding
            assert all((np.asarray(new[name][i]) != old[name][i]).any() for i in (0, 2)), name
    total = sum(x.size for x in old.values())
    assert 0 < run.trained_parameters < total and mentions(pages._format_parameters(run), total, run.trained_parameters)
    # After one step the first moment is (1 - b1) times the gradient: its norm is the norm.
    length = norm({name: x for name, x in by_name(first.moments).items() if ".mu." in name}) / (1 - smooth.optim.b1)
    np.testing.assert_allclose(metrics["grad_norm"], length, rtol=1e-5)
    *_, told = free
    assert told["grad_norm"] > 1.05 * length and float(told["loss"]) == pytest.approx(float(metrics["loss"]), rel=LOSS)


def test_a_layers_share_is_that_of_the_one_above_it(params):
    result = by_name(
        lr_scales.make(
            params, layer_decay=0.5, head=3.0, heads=("head",), bottom_up=models.find_class("vit").bottom_up
        ).shares
    )
    assert result["blocks.layers.mlp.up.kernel"].tolist() == [0.125, 0.25, 0.5]
    assert {float(result[name]) for name in ("patch_embed.kernel", "cls_token", "pos_embed")} == {0.0625}
    assert float(result["norm.scale"]) == 1 and float(result["head.kernel"]) == 3


@pytest.mark.parametrize("name", TOP)
def test_every_family_says_what_is_below_what(name):
    params, bottom_up = params_of(name)
    result = by_name(lr_scales.make(params, layer_decay=0.5, bottom_up=bottom_up).shares)
    assert {leaf.split(".")[0] for leaf, share in result.items() if share.max() == 1} == TOP[name]
    levels = sorted({-float(np.log2(x)) for share in result.values() for x in share.reshape(-1)})
    assert levels == [*map(float, range(len(levels)))]  # none is left out
    lowest = {leaf.split(".")[0] for leaf, share in result.items() if -np.log2(share.min()) == levels[-1]}
    assert lowest & {"patch_embed", "stem", "embed"}
    stacks = {leaf.split(".")[0]: share for leaf, share in result.items() if "layers" in leaf}
    assert all((np.diff(share) > 0).all() for share in stacks.values())
    depth = sum(len(share) for share in stacks.values())
    assert len(levels) >= depth + 2


def test_a_decay_by_level_wants_levels():
    params = {"blocks": {"kernel": np.zeros(3)}}
    assert lr_scales.make(params).trained(params) == 3
    with refuses("optim.layer_decay", 0.5, "bottom_up"):
        lr_scales.make(params, layer_decay=0.5)


def test_a_step_moves_each_layer_by_its_share(smooth, meshes, free):
    """Adam's first direction does not depend on the rate: a layer's way is its share of the way without decay.

    A way is a difference of weights of size 0.1 to 1, each rounded by 6e-8 of it, and gradients of two programs differ
    by `LEAF`: a way of 1e-4 is known to 1e-3 of its norm. A wrong share is off by a half at least.
    """
    smooth.optim.update(layer_decay=0.5, head_lr=2 * smooth.optim.lr)
    _, (before, after), _ = step(smooth, meshes(1, 1))
    asked = {"blocks.layers.mlp.up.kernel": [0.125, 0.25, 0.5], "head.kernel": 2.0, "patch_embed.kernel": 0.0625}
    start, without, _ = free
    old, way, mine = by_name(before.params), by_name(without.params), by_name(after.params)
    jax.tree.map(np.testing.assert_array_equal, start.params, before.params)
    for name, share in asked.items():
        share = np.reshape(share, np.shape(share) + (1,) * (old[name].ndim - np.ndim(share)))
        expected = share * np.subtract(way[name], old[name], dtype=np.float64)
        error = np.linalg.norm(np.subtract(mine[name], old[name], dtype=np.float64) - expected)
        assert error <= 2e-3 * np.linalg.norm(expected), name


def test_defaults_leave_the_optimizer_as_it_is(params):
    rule = optimizers.make("adamw", b1=0.9, b2=0.9, eps=1e-8, weight_decay=0.0, mask=True)
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
def test_check_refuses(changes, parts):
    c = config.base()
    c.update_from_flattened_dict(changes)
    with refuses(*parts):
        config.check(c)


@pytest.mark.parametrize("name", optimizers.OPTIMIZERS)
def test_every_optimizer_moves_what_is_not_frozen_and_nothing_else(name):
    """Decay is on, and a gradient arrives everywhere: neither gets through."""
    mlp = {"up": {"kernel": jnp.ones((2, 3, 5)), "bias": jnp.ones((2, 5))}, "down": {"kernel": jnp.ones((2, 5, 3))}}
    params = {"blocks": {"layers": {"mlp": mlp}}, "head": {"kernel": jnp.ones((3, 7))}}
    own = lr_scales.make(params, freeze=("blocks.layers.mlp.down", "blocks.layers.1"))
    mask = jax.tree.map(lambda x: True, params)
    rule = own.scale_updates(optimizers.make(name, b1=0.9, b2=0.99, eps=1e-8, weight_decay=0.5, mask=mask))
    state = rule.init(params)
    assert not [leaf for leaf in leaf_names(state) if "down" in leaf]
    grads = jax.tree.map(lambda x: jnp.arange(1.0, x.size + 1).reshape(x.shape), params)
    direction, after = jax.jit(rule.update)(grads, state, params, finite=True, b1=0.9)
    moved = by_name(direction)
    assert not moved["blocks.layers.mlp.down.kernel"].any() and jax.tree.structure(after) == jax.tree.structure(state)
    for leaf in ("blocks.layers.mlp.up.kernel", "blocks.layers.mlp.up.bias"):
        assert moved[leaf][0].any() and not moved[leaf][1].any()
    assert moved["head.kernel"].all()
