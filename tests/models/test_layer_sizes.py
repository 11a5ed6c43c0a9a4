"""Layers of different sizes: groups of equal layers, absolute layer indices, parity with a plain NumPy model, keys."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from messages import refuses
from random_weights import fill_weights

import leanformer
from leanformer import conditioning, config, models, pretrained
from leanformer.conditioning import charts, tables
from leanformer.layers.blocks import Block, BlockConfig, MlpConfig
from leanformer.layers.masks import Context
from leanformer.layers.multihead import MultiHeadAttention
from leanformer.layers.stack import Stack, list_groups
from leanformer.pretrained import layouts
from leanformer.runtime.mesh import flatten_names
from leanformer.training import model_setup, train_setup
from leanformer.training.step import probe_record


SIZES = {"width": 12, "depth": 4, "num_heads": (2, 2, 6, 4), "head_dim": (6, 6, 2, 5), "mlp_dim": (20, 20, 20, 9)}
GPT = SIZES | {"vocabulary": 13, "max_length": 11, "num_kv_heads": (1, 1, 3, 4), "value_dim": (3, 3, 2, 4)}
IMAGES = {"image_size": 16, "patch_size": 4, "channels": 1, "num_classes": 5}
XCIT = {"class_heads": 2, "class_head_dim": 6, "layer_scale": 0.5}
TEXTS = {"vocabulary": 13, "max_length": 11}
FAMILIES = {
    "vit": ("vit", IMAGES),
    "deit": ("vit", IMAGES | {"distilled": True}),
    "xcit": ("xcit", IMAGES | XCIT),
    "gpt": ("gpt", TEXTS),
    "bert": ("bert", TEXTS),
    "nystromformer": ("nystromformer", TEXTS | {"num_classes": 5, "landmarks": 3, "convolution": 3}),
    "encoder": ("encoder", {"modules": 2}),
}
FIRSTS = [0, 2, 3]  # first layers of the groups of SIZES


def build(name="gpt", **arguments):
    return fill_weights(lambda: models.build(name, **arguments, rngs=nnx.Rngs(0)))


def make_inputs(name, rng):
    if name in ("vit", "xcit"):
        return jnp.asarray(rng.standard_normal((2, 16, 16, 1)), jnp.float32)
    if name == "encoder":
        return jnp.asarray(rng.standard_normal((2, 7, SIZES["width"])), jnp.float32)
    return jnp.asarray(rng.integers(1, 13, (2, 11)))


@pytest.mark.parametrize("family", FAMILIES)
def test_layers_of_every_family_have_their_own_sizes(family, rng):
    name, more = FAMILIES[family]
    model, modules = build(name, **SIZES | more), more.get("modules", 1)
    shapes = [
        (heads // modules, head_dim, group.mlp.up.kernel.shape[-1])
        for group in list_groups(model.blocks.layers)
        for layers, _, heads, head_dim in [group.attention.query.kernel.shape]
        for _ in range(layers)
    ]
    expected = [*zip(*(SIZES[key] for key in ("num_heads", "head_dim", "mlp_dim")), strict=True)]
    assert shapes == expected
    run = lambda model, x: model(x, tap=lambda arrays: arrays["out"])[1]["blocks"]  # noqa: E731
    groups = nnx.eval_shape(run, model, make_inputs(name, rng))  # L B T N H each
    heads = [group.shape[3] for group in groups for _ in range(len(group))]
    assert heads == [modules * n for n in SIZES["num_heads"]]


def test_equal_layers_are_one_scan_and_others_one_per_group():
    def lower(**sizes):
        graphdef, params = nnx.split(nnx.eval_shape(lambda: models.build("gpt", **GPT | sizes, rngs=nnx.Rngs(0))))
        tokens = jax.ShapeDtypeStruct((2, 11), jnp.int32)
        return jax.jit(lambda params, x: nnx.merge(graphdef, params)(x)[0]).lower(params, tokens).as_text()

    plain = {"num_heads": 2, "head_dim": 6, "mlp_dim": 20, "num_kv_heads": 1, "value_dim": 3}
    text = lower(**plain)
    assert lower(**{key: (size,) * 4 for key, size in plain.items()}) == text
    assert [lower().count("stablehlo.while"), text.count("stablehlo.while")] == [len(FIRSTS), 1]


# A stack of equal blocks, and the same stack in three groups: one result, in training and in evaluation.
BLOCKS = BlockConfig(13, mlp=MlpConfig(17), dropout=0.3, graying=0.5, graying_by="dct")


def make_block(rngs):
    return Block(MultiHeadAttention(13, 3, 5, attention_dropout=0.2, rngs=rngs), BLOCKS, rngs=rngs)


@pytest.mark.slow
@pytest.mark.parametrize("remat", ["none", "light", "block"])
def test_groups_compute_what_one_stack_does(remat, rng):
    """Drop path and dropout take rates and random numbers by the layer's index in the whole stack."""
    whole = fill_weights(lambda: Stack(make_block, 4, drop_path=0.4, rngs=nnx.Rngs(3)))
    makers = dict.fromkeys(FIRSTS, make_block)
    parts = nnx.eval_shape(lambda: Stack(makers, 4, drop_path=0.4, remat=remat, rngs=nnx.Rngs(3)))
    (graph, weights), part_graph = nnx.split(whole), nnx.graphdef(parts)
    layers = nnx.to_pure_dict(weights)["layers"]
    cut = {
        f"from{i}": jax.tree.map(lambda x, i=i, j=j: x[i:j], layers)
        for i, j in zip(FIRSTS, [*FIRSTS[1:], 4], strict=True)
    }
    x, keys = jnp.asarray(rng.standard_normal((5, 7, 13)), jnp.float32), jax.random.split(jax.random.key(1), 5)

    def run(graphdef, weights, key):
        context = Context(key=key, tap=lambda arrays: arrays["hidden"].sum((1, 2)))
        output, taps = nnx.merge(graphdef, weights)(x, context)
        return jnp.sum(jnp.sin(output)), (output, taps)

    step = jax.jit(jax.value_and_grad(run, argnums=1, has_aux=True), static_argnums=0)
    for key in (None, keys):
        (_, (expected, taps)), grads = step(graph, {"layers": layers}, key)
        (_, (output, part_taps)), part_grads = step(part_graph, {"layers": cut}, key)
        np.testing.assert_allclose(output, expected, rtol=0, atol=1e-5 * np.abs(expected).max())
        np.testing.assert_allclose(np.concatenate(part_taps), taps, rtol=1e-4, atol=1e-4)
        joined = jax.tree.map(lambda *x: np.concatenate(x), *(part_grads["layers"][f"from{i}"] for i in FIRSTS))
        largest = max(np.abs(leaf).max() for leaf in jax.tree.leaves(grads))
        for a, b in zip(jax.tree.leaves(joined), jax.tree.leaves(grads["layers"]), strict=True):
            np.testing.assert_allclose(a, b, rtol=0, atol=1e-5 * largest)


def plain_loss(w, tokens, sizes):
    """Return the mean loss of the next token by a GPT in float64 NumPy with sizes per layer; `w` are parameters."""

    def norm(x, name):
        centred = x - x.mean(-1, keepdims=True)
        return centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5) * w[f"{name}.scale"] + w[f"{name}.bias"]

    x, t = w["embed"][tokens] + w["pos_embed"][: tokens.shape[1]], tokens.shape[1]
    for layer in range(sizes["depth"]):
        first = max(i for i in FIRSTS if i <= layer)
        name = f"blocks.layers.from{first}"
        p = {k.removeprefix(f"{name}."): v[layer - first] for k, v in w.items() if k.startswith(f"{name}.")}
        w |= {f"{n}.{part}": p[f"{n}.{part}"] for n in ("norm1", "norm2") for part in ("scale", "bias")}
        y, joined = norm(x, "norm1"), 0
        project = lambda part, n: y @ p[f"attention.{part}.kernel"][:, n] + p[f"attention.{part}.bias"][n]  # noqa: B023, E731
        for head in range(sizes["num_heads"][layer]):
            shared = head * sizes["num_kv_heads"][layer] // sizes["num_heads"][layer]
            q, k, v = project("query", head), project("key", shared), project("value", shared)
            logits = q @ k.swapaxes(1, 2) / math.sqrt(sizes["head_dim"][layer])
            logits = np.where(np.tril(np.ones((t, t), bool)), logits, -np.inf)
            weights = np.exp(logits - logits.max(-1, keepdims=True))
            joined = joined + weights / weights.sum(-1, keepdims=True) @ v @ p["attention.out.kernel"][head]
        x = x + joined + p["attention.out.bias"]
        hidden = norm(x, "norm2") @ p["mlp.up.kernel"] + p["mlp.up.bias"]
        hidden = 0.5 * hidden * (1 + np.tanh(math.sqrt(2 / math.pi) * (hidden + 0.044715 * hidden**3)))
        x = x + hidden @ p["mlp.down.kernel"] + p["mlp.down.bias"]
    logits = norm(x, "norm")[:, :-1] @ w["embed"].T
    logits -= logits.max(-1, keepdims=True)
    logits -= np.log(np.exp(logits).sum(-1, keepdims=True))
    return -np.take_along_axis(logits, tokens[:, 1:, None], -1).mean()


def test_gpt_with_unequal_layers_matches_a_plain_numpy_model(rng):
    """Loss, and for every parameter the derivative along a random direction, by central differences in float64."""
    tokens, model = rng.integers(13, size=(3, 11)), build(**GPT)
    graphdef, state = nnx.split(model)
    params = nnx.to_pure_dict(state)

    def loss(params):
        logits = jax.nn.log_softmax(nnx.merge(graphdef, params)(jnp.asarray(tokens))[0][:, :-1])
        return -jnp.take_along_axis(logits, jnp.asarray(tokens)[:, 1:, None], -1).mean()

    value, grads = jax.jit(jax.value_and_grad(loss))(params)
    plain = {name: np.asarray(x, np.float64) for name, x in flatten_names(params).items()}
    np.testing.assert_allclose(value, plain_loss(dict(plain), tokens, GPT), rtol=1e-5)
    for name, grad in flatten_names(grads).items():
        direction, step = rng.standard_normal(grad.shape), 1e-5
        moved = [plain_loss(plain | {name: plain[name] + s * direction}, tokens, GPT) for s in (step, -step)]
        expected, size = (moved[0] - moved[1]) / (2 * step), np.linalg.norm(grad) * np.linalg.norm(direction)
        assert abs(np.sum(np.asarray(grad, np.float64) * direction) - expected) < 1e-5 * size + 1e-7, name


def test_freezing_uses_the_index_in_the_whole_stack():
    c = config.language()
    with c.unlocked():
        c.model.update({**GPT, "dropout": 0.0})
    *_, (params, _) = model_setup.abstract_model(c)
    made = train_setup.select_frozen(params, ("blocks.layers.[13]", "blocks.layers.norm1"))
    trained = flatten_names(made.trained)
    up = np.concatenate([trained[f"blocks.layers.from{first}.mlp.up.kernel"] for first in FIRSTS])
    assert up.tolist() == [1, 0, 1, 0]
    assert trained["embed"] == 1 and not any(trained[f"blocks.layers.from{i}.norm1.scale"].any() for i in FIRSTS)


@pytest.mark.parametrize("name", [pytest.param("xcit", marks=pytest.mark.slow), "gpt"])
def test_statistics_of_every_group_are_updated(name, rng):
    """Batch normalisation's statistics, and the direction of each matrix of σReparam."""
    more = IMAGES | XCIT if name == "xcit" else TEXTS | {"sigma_reparam": True}
    model = build(name, **SIZES | more | {"drop_path": 0.2})
    before = nnx.to_pure_dict(nnx.state(model.blocks, nnx.BatchStat))
    graphdef, state = nnx.split(model)

    @jax.jit
    def train(state, x):
        model = nnx.merge(graphdef, state)
        model(x, key=jax.random.split(jax.random.key(0), 2))
        return nnx.to_pure_dict(nnx.state(model.blocks, nnx.BatchStat))

    after = train(state, make_inputs(name, rng))
    changed = jax.tree.leaves(jax.tree.map(lambda a, b: bool((a != b).any(axis=-1).all()), before, after))
    assert len(changed) == (2 if name == "xcit" else 4) * len(FIRSTS) and all(changed)


def test_cache_has_the_keys_of_each_layer():
    model = build(**GPT)
    cache = model.empty_cache(2, 7)
    shapes = [layer.shape for group in cache for layer in group["k"]]
    assert shapes == [(2, 7, kv, h) for kv, h in zip(GPT["num_kv_heads"], GPT["head_dim"], strict=True)]


def measure(names=("attention_output", "attention_entropy", "query_weights_per_head", "mlp_up_weights")):
    model, tokens = build(**GPT), jnp.arange(22).reshape(2, 11) % 13
    activations = [name for name in names if name in conditioning.ACTIVATIONS]
    weights = [name for name in names if name not in activations]
    reduce = conditioning.with_spectrum
    tap = conditioning.tap(activations, reduce)
    taps = nnx.jit(lambda model: model(tokens, tap=tap)[1])(model)
    measured = conditioning.weights(model.measured(), weights, reduce=reduce)
    return conditioning.by_name(taps, activations) | conditioning.by_name(measured, weights)


@pytest.mark.slow
def test_measures_of_unequal_layers_have_the_shape_of_each_layer():
    values = measure()
    entries, spectra = tables.describe(values)
    total = [n * h for n, h in zip(GPT["num_heads"], GPT["value_dim"], strict=True)]
    assert entries["attention_output"]["shape"] == [[11, width] for width in total]
    assert [layer["shape"] for layer in entries["mlp_up_weights"]["layers"]] == [[12, n] for n in GPT["mlp_dim"]]
    assert entries["query_weights_per_head"]["matrices_per_layer"] == [*GPT["num_heads"]]
    assert entries["attention_entropy"]["shape"] is None
    assert [s.shape[-1] for s in spectra["mlp_up_weights"]] == [min(12, n) for n in GPT["mlp_dim"]]
    head, rows = tables.layer_cells(entries)
    assert head.count("attention_output") == len({*total}) and "-" in next(row for row in rows if row[0] == "layer 2")
    summaries = {name: [g[1] if isinstance(g, tuple) else g for g in groups] for name, groups in values.items()}
    restored = tables.from_record(probe_record(summaries))
    for key in ("shape", "theory"):
        assert {name: e[key] for name, e in restored.items()} == {name: e[key] for name, e in entries.items()}
    figures = [charts.plot_by_layer(restored), charts.plot_over_steps([0, 1], [restored] * 2)]
    assert any("11 x 6 to 11 x 16" in axes.get_title() for axes in figures[0].axes) and charts.plot_spectra(spectra)


def test_watch_has_the_heads_of_each_layer(rng):
    model = build(**GPT)
    with leanformer.watch(model, measures=("attention_output", "head_output")) as w:
        model(make_inputs("gpt", rng))
    assert [layer.heads for layer in w.layers.values()] == [*GPT["num_heads"]]
    assert [*w.layers] == [f"blocks.{i}" for i in range(4)]
    assert all(layer.status() == "ok" for layer in w.layers.values())


@pytest.mark.parametrize(("name", "source"), [("vit", "timm"), ("gpt", "huggingface")])
def test_published_layouts_refuse_unequal_layers_and_ours_keeps_them(name, source):
    more = IMAGES if name == "vit" else TEXTS
    arguments = {"name": name, **SIZES, **more}
    with refuses("model.num_heads=(2, 2, 6, 4)", source):
        layouts.layout(source, arguments)
    _, state = nnx.split(build(name, **SIZES | more))
    weights = (nnx.to_pure_dict(state), {})
    layout = pretrained.native_layout(weights)
    zeros = jax.tree.map(np.zeros_like, weights)
    jax.tree.map(
        np.testing.assert_array_equal, pretrained.load(pretrained.export(weights, layout), layout, zeros), weights
    )
