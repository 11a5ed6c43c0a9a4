"""Frozen parameters, bit for bit, by pattern and by layer of a stack."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from messages import refuses
from rounding import global_norm
from small_runs import make_image_batch, make_initial_state

from leanformer.runtime import mesh as sharding
from leanformer.runtime.mesh import flatten_names, leaf_names
from leanformer.training import model_setup, optimizers, train_setup


@pytest.fixture
def params(tiny):
    *_, (params, _) = model_setup.abstract_model(tiny)
    return params


def run_steps(c, mesh, numbers=1):
    """Return the run, its states beginning with the initial one, and the metrics of each step."""
    run = train_setup.set_up_training(c, examples=64, mesh=mesh)
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
    result = flatten_names(train_setup.select_frozen(params, patterns).trained)
    all_names = result.keys()
    names = names or {
        n for n in all_names if not n.startswith("head") or (n == "head.bias" and "head.bias" in patterns)
    }
    assert {name for name, share in result.items() if not share.any()} == names
    assert all(share.all() for name, share in result.items() if name not in names)


def test_layers_of_a_stack_are_frozen_individually(params):
    result = train_setup.select_frozen(params, ("blocks.layers.[01]", "!blocks.layers.1.mlp"))
    shares = flatten_names(result.trained)
    assert shares["blocks.layers.attention.query.kernel"].tolist() == [0, 0, 1]
    assert shares["blocks.layers.mlp.up.kernel"].tolist() == [0, 1, 1]
    assert shares["patch_embed.kernel"].tolist() == 1
    sizes = {name: leaf.size for name, leaf in flatten_names(params).items()}
    layers = sum(size for name, size in sizes.items() if "layers" in name)
    mlp = sum(size for name, size in sizes.items() if "mlp" in name)
    assert result.count(params) == sum(sizes.values()) - 2 * layers // 3 + mlp // 3


@pytest.mark.parametrize(
    ("pattern", "suggestions"),
    [
        ("patch_embd", ["patch_embed"]),
        ("blocks.layers.9", ["blocks"]),
        ("zzz", ["blocks", "cls_token", "head", "norm", "patch_embed", "pos_embed"]),
    ],
)
def test_invalid_freeze_patterns_are_refused(params, pattern, suggestions):
    with refuses("optim.freeze", pattern, *suggestions):
        train_setup.select_frozen(params, (pattern,))


def test_frozen_parameters_have_no_moments_or_gradient_norm(plain, meshes):
    """The second layer, `patch_embed` and `pos_embed` are frozen, with weight decay and EMA on."""
    plain.optim.update(freeze=("patch_embed", "pos_embed", "blocks.layers.1"), lr=0.1, clip_norm=0.0)
    run, (before, first, after), (metrics, _) = run_steps(plain, meshes(1, 1), 2)
    old, new = flatten_names(before.params), flatten_names(after.params)
    for name in ("patch_embed.kernel", "patch_embed.bias", "pos_embed"):
        np.testing.assert_array_equal(new[name], old[name])
        np.testing.assert_array_equal(flatten_names(after.ema[0])[name], old[name])
        assert not [moment for moment in leaf_names(after.moments) if moment.endswith(name)]
    for name in (n for n in old if "layers" in n):
        np.testing.assert_array_equal(new[name][1], old[name][1], err_msg=name)
        if not name.endswith("key.bias"):  # its gradient is zero up to rounding
            assert all((np.asarray(new[name][i]) != old[name][i]).any() for i in (0, 2)), name
    total = sum(x.size for x in old.values())
    trained = run.freezing.count(run.state.params)
    assert 0 < trained < total
    # After one step the first moment is (1 - b1) times the gradient, which gives the norm of the gradient.
    moments = {name: x for name, x in flatten_names(first.moments).items() if ".mu." in name}
    grad_norm = global_norm(moments) / (1 - plain.optim.b1)
    np.testing.assert_allclose(metrics["grad_norm"], grad_norm, rtol=1e-5)


@pytest.mark.parametrize("name", optimizers.OPTIMIZERS)
def test_every_optimizer_leaves_frozen_parameters_unchanged(name):
    """Weight decay is on and every gradient is nonzero: neither changes a frozen parameter."""
    mlp = {"up": {"kernel": jnp.ones((2, 3, 5)), "bias": jnp.ones((2, 5))}, "down": {"kernel": jnp.ones((2, 5, 3))}}
    params = {"blocks": {"layers": {"mlp": mlp}}, "head": {"kernel": jnp.ones((3, 7))}}
    freeze = ("blocks.layers.mlp.down", "blocks.layers.1")
    frozen = train_setup.select_frozen(params, freeze)
    mask = jax.tree.map(lambda x: True, params)
    rule = optimizers.OPTIMIZERS[name](b1=0.9, b2=0.99, eps=1e-8, weight_decay=0.5, mask=mask)
    scaled = frozen.freeze(rule)
    state = scaled.init(params)
    assert not [leaf for leaf in leaf_names(state) if "down" in leaf]
    grads = jax.tree.map(lambda x: jnp.arange(1.0, x.size + 1).reshape(x.shape), params)
    direction, new_state = jax.jit(scaled.update)(grads, state, params, b1=0.9)
    unscaled, _ = jax.jit(rule.update)(grads, rule.init(params), params, b1=0.9)
    updates, expected = flatten_names(direction), flatten_names(unscaled)
    assert not updates["blocks.layers.mlp.down.kernel"].any()
    assert jax.tree.structure(new_state) == jax.tree.structure(state)
    for leaf in ("blocks.layers.mlp.up.kernel", "blocks.layers.mlp.up.bias"):
        np.testing.assert_allclose(updates[leaf][0], expected[leaf][0], rtol=1e-6)
        assert expected[leaf][0].any() and not updates[leaf][1].any()
    np.testing.assert_allclose(updates["head.kernel"], expected["head.kernel"], rtol=1e-6)
