"""What is frozen stays as it is to the bit; layer-wise decay and the head's rate by hand; families say their order."""

import re
import runpy
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from leanformer import config, models
from leanformer.errors import ConfigError
from leanformer.reports import pages
from leanformer.runtime import mesh as sharding
from leanformer.training import experiment, optimizers, rates
from leanformer.training.optim import leaf_names


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


def by_name(tree):
    return dict(zip(leaf_names(tree), jax.tree.leaves(tree), strict=True))


def params_of(name):
    c = runpy.run_path(str(CONFIGS / f"{name}.py"))["get_config"]()
    return experiment.build(c, examples=10**6, mesh=None).like.params, models.family(c.model.name).bottom_up


@pytest.fixture
def params(tiny):
    return experiment.build(tiny, examples=64, mesh=None).like.params


def batch(c):
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (c.batch_size, 14, 14, 1), dtype=np.uint8)
    return {"image": images, "label": rng.integers(0, 5, c.batch_size).astype(np.int32)}


def step(c, mesh, numbers=1):
    """The run, its state before and after so many steps, and the last metrics."""
    run = experiment.build(c, examples=64, mesh=mesh)
    state = before = run.initial_state()
    train = jax.jit(run.train_step)
    for _ in range(numbers):
        state, metrics = train(state, sharding.put_batch(mesh, batch(c)), run.run_key())
    return run, before, state, metrics


FROZEN = [
    (("patch_embed",), {"patch_embed.kernel", "patch_embed.bias"}),
    (("*", "!head"), None),
    (("*", "!head", "head.bias"), None),
    (("*.norm?",), {f"blocks.layers.norm{i}.{leaf}" for i in (1, 2) for leaf in ("scale", "bias")}),
]


@pytest.mark.parametrize(("patterns", "names"), FROZEN, ids=["prefix", "all but the head", "its bias too", "wildcard"])
def test_patterns_name_parameters_and_modules(params, patterns, names):
    found = by_name(rates.of(params, freeze=patterns).shares)
    every = found.keys()
    names = names or {n for n in every if not n.startswith("head") or (n == "head.bias" and "head.bias" in patterns)}
    assert {name for name, share in found.items() if not share.any()} == names
    assert all(share.all() for name, share in found.items() if name not in names)


def test_layers_of_a_stack_are_frozen_one_by_one(params):
    found = rates.of(params, freeze=("blocks.layers.[01]", "!blocks.layers.1.mlp"))
    shares = by_name(found.shares)
    assert shares["blocks.layers.attention.query.kernel"].tolist() == [0, 0, 1]
    assert shares["blocks.layers.mlp.up.kernel"].tolist() == [0, 1, 1]
    assert shares["patch_embed.kernel"].tolist() == 1
    sizes = {name: leaf.size for name, leaf in by_name(params).items()}
    layers = sum(size for name, size in sizes.items() if "layers" in name)
    mlp = sum(size for name, size in sizes.items() if "mlp" in name)
    assert found.trained(params) == sum(sizes.values()) - 2 * layers // 3 + mlp // 3


@pytest.mark.parametrize(
    ("patterns", "message"),
    [
        (("patch_embd",), r'optim.freeze has "patch_embd", which fits no parameter and no module. Near: patch_embed'),
        (("blocks.layers.9",), "Near: .*blocks.layers.[012]"),
        (("zzz",), "Near: blocks, cls_token, head, norm, patch_embed, pos_embed"),
        (("*",), "leaves nothing to train"),
    ],
)
def test_patterns_that_cannot_be_meant_are_refused(params, patterns, message):
    with pytest.raises(ConfigError, match=message):
        rates.of(params, freeze=patterns)


def test_what_is_frozen_stays_holds_no_moments_and_is_no_part_of_the_norm(plain, meshes):
    """Weight decay and averaging on. Of the second layer alone, and of whole leaves."""
    plain.optim.freeze = ("patch_embed", "pos_embed", "blocks.layers.1")
    run, before, after, metrics = step(plain, meshes(1, 1), 2)
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
    assert 0 < run.trained < total and pages._parameters(run) == f"{total:,}, of which {run.trained:,} are trained"
    # After one step the first moment is (1 − b1) times the clipped gradient: with nothing clipped its norm is the norm.
    plain.optim.clip_norm = 0.0
    _, _, after, metrics = step(plain, meshes(1, 1))
    mu = [x for name, x in by_name(after.moments).items() if ".mu." in name]
    norm = np.sqrt(sum(float(np.square(x, dtype=np.float64).sum()) for x in mu)) / (1 - plain.optim.b1)
    np.testing.assert_allclose(metrics["grad_norm"], norm, rtol=1e-5)
    plain.optim.freeze = ()
    _, _, _, free = step(plain, meshes(1, 1))
    assert free["grad_norm"] > 1.05 * norm and free["loss"] == metrics["loss"]


def test_a_layers_share_is_that_of_the_one_above_it(params):
    found = by_name(
        rates.of(params, layer_decay=0.5, head=3.0, heads=("head",), bottom_up=models.family("vit").bottom_up).shares
    )
    assert found["blocks.layers.mlp.up.kernel"].tolist() == [0.125, 0.25, 0.5]
    assert {float(found[name]) for name in ("patch_embed.kernel", "cls_token", "pos_embed")} == {0.0625}
    assert float(found["norm.scale"]) == 1 and float(found["head.kernel"]) == 3


@pytest.mark.parametrize("name", TOP)
def test_every_family_says_what_is_below_what(name):
    params, bottom_up = params_of(name)
    found = by_name(rates.of(params, layer_decay=0.5, bottom_up=bottom_up).shares)
    assert {leaf.split(".")[0] for leaf, share in found.items() if share.max() == 1} == TOP[name]
    levels = sorted({-float(np.log2(x)) for share in found.values() for x in share.reshape(-1)})
    assert levels == [*map(float, range(len(levels)))]  # none is left out
    lowest = {leaf.split(".")[0] for leaf, share in found.items() if -np.log2(share.min()) == levels[-1]}
    assert lowest & {"patch_embed", "stem", "embed"}
    stacks = {leaf.split(".")[0]: share for leaf, share in found.items() if "layers" in leaf}
    assert all((np.diff(share) > 0).all() for share in stacks.values())
    depth = sum(len(share) for share in stacks.values())
    assert len(levels) >= depth + 2


def test_a_decay_by_level_wants_levels(tiny):
    params = {"blocks": {"kernel": np.zeros(3)}}
    assert rates.of(params).trained(params) == 3
    with pytest.raises(ConfigError, match="does not say what comes before what. Declare its bottom_up"):
        rates.of(params, layer_decay=0.5)


def test_a_step_moves_each_layer_by_its_share(plain, meshes):
    """Adam's first direction does not depend on the rate: a layer's way is its share of the way without decay."""
    mesh = meshes(1, 1)
    plain.optim.update(ema=0.0)
    _, before, without, _ = step(plain, mesh)
    plain.optim.update(layer_decay=0.5, head_lr=2 * plain.optim.lr)
    _, _, after, _ = step(plain, mesh)
    asked = {"blocks.layers.mlp.up.kernel": [0.125, 0.25, 0.5], "head.kernel": 2.0, "patch_embed.kernel": 0.0625}
    old, way, mine = by_name(before.params), by_name(without.params), by_name(after.params)
    for name, share in asked.items():
        share = np.reshape(share, np.shape(share) + (1,) * (old[name].ndim - np.ndim(share)))
        expected = share * np.asarray(way[name] - old[name], np.float64)
        np.testing.assert_allclose(mine[name] - old[name], expected, rtol=2e-3, atol=1e-8, err_msg=name)


def test_defaults_leave_the_optimizer_as_it_is(params):
    rule = optimizers.make("adamw", b1=0.9, b2=0.9, eps=1e-8, weight_decay=0.0, mask=True)
    assert rates.of(params, bottom_up=models.family("vit").bottom_up).applied(rule) is rule


REFUSED = [
    ({"optim.layer_decay": 0.0}, "optim.layer_decay=0.0 must be above 0"),
    ({"optim.decay_share": 0.0}, "optim.decay_share=0.0 is a share"),
    ({"optim.schedule": "constant", "optim.final_lr": 1e-4}, "optim.final_lr=0.0001 says where it should end"),
    ({"optim.head_lr": -1.0}, "optim.head_lr=-1.0 must not be negative"),
    ({"optim.head_lr": 0.1, "optim.lr": 0.0}, "is a multiple of optim.lr=0.0"),
    ({"optim.name": "muon", "optim.b1_peak": 0.8}, "optim.b1_peak=0.8 is AdamW's alone"),
]


@pytest.mark.parametrize(("changes", "message"), REFUSED)
def test_check_refuses(changes, message):
    c = config.base()
    c.update_from_flattened_dict(changes)
    with pytest.raises(ConfigError, match=re.escape(message)):
        config.check(c)


@pytest.mark.parametrize("name", optimizers.OPTIMIZERS)
def test_every_optimizer_moves_what_is_not_frozen_and_nothing_else(name):
    """Decay is on, and a gradient arrives everywhere: neither gets through."""
    mlp = {"up": {"kernel": jnp.ones((2, 3, 5)), "bias": jnp.ones((2, 5))}, "down": {"kernel": jnp.ones((2, 5, 3))}}
    params = {"blocks": {"layers": {"mlp": mlp}}, "head": {"kernel": jnp.ones((3, 7))}}
    own = rates.of(params, freeze=("blocks.layers.mlp.down", "blocks.layers.1"))
    mask = jax.tree.map(lambda x: True, params)
    rule = own.applied(optimizers.make(name, b1=0.9, b2=0.99, eps=1e-8, weight_decay=0.5, mask=mask))
    state = rule.init(params)
    assert not [leaf for leaf in leaf_names(state) if "down" in leaf]
    grads = jax.tree.map(lambda x: jnp.arange(1.0, x.size + 1).reshape(x.shape), params)
    direction, after = rule.update(grads, state, params, finite=True, b1=0.9)
    moved = by_name(direction)
    assert not moved["blocks.layers.mlp.down.kernel"].any() and jax.tree.structure(after) == jax.tree.structure(state)
    for leaf in ("blocks.layers.mlp.up.kernel", "blocks.layers.mlp.up.bias"):
        assert moved[leaf][0].any() and not moved[leaf][1].any()
    assert moved["head.kernel"].all()
