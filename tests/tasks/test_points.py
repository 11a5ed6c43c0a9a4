"""Point-set tasks: draws against their definitions, model inputs, curriculum and scores."""

import dataclasses
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from messages import refuses
from random_weights import fill_weights

from leanformer import config, tasks
from leanformer.data import points as point_tasks
from leanformer.layers.attention import fan_in
from leanformer.layers.multihead import AveragedAttention, MultiHeadAttention
from leanformer.tasks.points import Curriculum, PointData, PointRegression, sizes_at
from leanformer.training import train_setup


N, DIM, D, SEED = 7, 11, 3, 5
SIZES = point_tasks.Sizes(points=N, dim=DIM, num_items=D, bias=0.5)
NO_CURRICULUM = {"every": 0, "dim": 5, "dim_step": 1, "points": 3, "points_step": 2}


def make_data(name, curriculum=None, **sizes):
    options = {"examples": 13, "seed": SEED, "curriculum": Curriculum(**(curriculum or NO_CURRICULUM))}
    return PointData(name=name, sizes=dataclasses.replace(SIZES, **sizes), **options)


def draw_examples(name, number=50):
    source = make_data(name).open("train")
    return [source[i] for i in range(number)]


def test_draws_are_normal_and_independent():
    """Batches of any length give the same draws as single examples."""
    source = point_tasks.Points("regression", point_tasks.Sizes(points=6, dim=5), "train", 3)
    batch = source.get_batch(0, 4000)
    x = batch["x"].reshape(4000, -1)
    np.testing.assert_allclose(x.mean(axis=0), 0, atol=5 / 4000**0.5)
    np.testing.assert_allclose(np.cov(x.T), np.eye(x.shape[1]), atol=7 / 4000**0.5)
    np.testing.assert_allclose((x**4).mean(), 3, rtol=0.03)
    np.testing.assert_allclose(np.mean(np.abs(x) < 1), 0.6827, atol=0.005)
    assert abs(np.corrcoef(x[:-1, 0], x[1:, 0])[0, 1]) < 5 / 4000**0.5
    for name, whole in batch.items():
        np.testing.assert_array_equal(source.get_batch(2990, 7)[name], whole[2990:2997])
        np.testing.assert_array_equal(source[17][name], whole[17])


def test_nearest_targets_equal_a_full_search():
    """Compare with a search over all distances."""
    for example in draw_examples("nearest"):
        x, result = example["points"], example["targets"]
        np.testing.assert_allclose((x**2).sum(axis=1), 1, atol=1e-12)
        for point, target in zip(x, result, strict=True):
            np.testing.assert_array_equal(target, min(x, key=lambda other, p=point: np.linalg.norm(other + p)))


@pytest.mark.parametrize("name", ["nearest_query", "nearest_orthonormal", "nearest_biased"])
def test_nearest_to_a_query_equals_a_full_search(name):
    source, first = make_data(name, bias=0.5 if name == "nearest_biased" else 0.0).open("train"), 0
    lengths = []
    for i in range(200):
        example = source[i]
        *x, token = example["points"]
        y, scores = -token, []
        for place, point in enumerate(x):
            # |y − x|² = |y|² + 1 − 2 x·y, minus twice the bias that favours the first point
            scores.append(np.sum((y - point) ** 2) - 2 * source.sizes.bias * (place == 0))
        assert example["targets"].shape == (1, DIM)
        np.testing.assert_array_equal(example["targets"][0], x[int(np.argmin(scores))])
        first += np.argmin(scores) == 0
        lengths.append(np.linalg.norm(y))
        if name != "nearest_query":
            np.testing.assert_allclose(np.stack(x) @ np.stack(x).T, np.eye(N), atol=1e-12)
    expected = DIM**0.5 if name == "nearest_biased" else 1
    np.testing.assert_allclose(np.mean(lengths), expected, rtol=0.05)
    assert (first > 200 / N * 1.5) == (name == "nearest_biased")


def test_regression_targets_are_linear():
    """Least squares on as many pairs as dimensions predicts all targets."""
    source = make_data("regression", points=DIM + 4).open("train")
    for i in range(5):
        example = source[i]
        tokens, targets = example["points"], example["targets"]
        x, y = tokens[::2], tokens[1::2, 0]
        np.testing.assert_array_equal(tokens[1::2, 1:], 0)
        w = np.linalg.lstsq(x[:DIM], y[:DIM], rcond=None)[0]
        np.testing.assert_allclose(targets[:, 0], x @ w, atol=1e-7)
        np.testing.assert_array_equal(targets[:, 0], y)
    examples = [source[i] for i in range(400)]
    np.testing.assert_allclose(np.var([e["points"][::2] for e in examples]), 1, rtol=0.02)
    np.testing.assert_allclose(np.var([e["targets"] for e in examples]), DIM, rtol=0.1)


def test_retrieval_targets_are_sums_of_maxima():
    a = point_tasks.directions(SIZES)  # D d
    np.testing.assert_allclose(a @ a.T, np.eye(D), atol=1e-12)
    for example in draw_examples("retrieval"):
        best = [max(float(sum(u * v for u, v in zip(x, row, strict=True))) for x in example["points"]) for row in a]
        np.testing.assert_allclose(example["targets"], [[sum(best)]], atol=1e-12)


@pytest.mark.parametrize("name", point_tasks.KINDS)
def test_no_example_is_drawn_twice(name):
    """Steps, seeds and splits have different draws; processes read parts of the same batch."""
    data = make_data(name)
    whole = data.train_batches(data.open("train"), batch_size=8, seed=SEED)
    whole = pickle.loads(pickle.dumps(whole))  # as sent to workers
    parts = [data.train_batches(data.open("train"), batch_size=8, seed=SEED, process=i, processes=2) for i in range(2)]
    seen = set()
    for step in (0, 1, 7, 10**9):
        batch = whole[step]
        for key, expected in batch.items():
            np.testing.assert_array_equal(np.concatenate([part[step][key] for part in parts]), expected)
        seen |= {row.tobytes() for row in batch["points"]}
    other = point_tasks.Points(name, data.sizes, "train", SEED + 1)
    seen |= {data.open("held_out")[i]["points"].astype(np.float32).tobytes() for i in range(13)}
    seen |= {other[i]["points"].astype(np.float32).tobytes() for i in range(13)}
    assert len(seen) == 4 * 8 + 13 + 13
    batch = data.eval_batches(data.open("held_out"), batch_size=8)[1]
    assert batch["mask"].sum() == 5 and len(data.open("held_out")) == 13
    for leaf, (shape, dtype) in (data.input_specs() | data.target_specs(train=True)).items():
        assert batch[leaf].shape == (8, *shape) and batch[leaf].dtype == dtype


def test_regression_curriculum():
    """Inactive coordinates are zero and do not affect the targets; later pairs are not scored."""
    curriculum = {"every": 10, "dim": 2, "dim_step": 4, "points": 3, "points_step": 2}
    growing, plain = make_data("regression", curriculum), make_data("regression")
    for step, dim, pairs in ((0, 2, 3), (9, 2, 3), (10, 6, 5), (20, 10, 7), (999, 11, 7)):
        assert sizes_at(step, growing.curriculum, SIZES) == (dim, pairs)
        batch, whole = (t.train_batches(t.open("train"), batch_size=4, seed=0)[step] for t in (growing, plain))
        x = np.where(np.arange(DIM) < dim, whole["points"][:, ::2], 0)
        np.testing.assert_array_equal(batch["points"][:, ::2], x)
        w = np.stack([plain.open("train")[step * 4 + i]["w"] for i in range(4)])
        np.testing.assert_allclose(batch["targets"][..., 0], np.einsum("bnd,bd->bn", x, w), atol=1e-5)
        np.testing.assert_array_equal(batch["points"][:, 1::2, 0], batch["targets"][..., 0])
        np.testing.assert_array_equal(batch["scored"], np.broadcast_to(np.arange(N) < pairs, (4, N)))
    evaluated = growing.eval_batches(growing.open("held_out"), batch_size=4)[0]
    assert evaluated["scored"].all() and np.abs(evaluated["points"][:, ::2]).min() > 0


def test_retrieval_curriculum():
    """Few points are repeated to fill the set, and the target is computed from them alone."""
    curriculum = {"every": 10, "dim": 1, "dim_step": 1, "points": 3, "points_step": 2}
    growing, plain = make_data("retrieval", curriculum), make_data("retrieval")
    for step, points in ((0, 3), (9, 3), (10, 5), (20, 7), (999, 7)):
        batch, whole = (t.train_batches(t.open("train"), batch_size=4, seed=0)[step] for t in (growing, plain))
        subset = whole["points"][:, :points]
        np.testing.assert_array_equal(batch["points"], subset[:, [i % points for i in range(N)]])
        best = np.einsum("btd,id->bti", subset, point_tasks.directions(SIZES)).max(axis=1)
        np.testing.assert_allclose(batch["targets"][:, 0, 0], best.sum(axis=1), atol=1e-6)
    np.testing.assert_array_equal(batch["targets"], whole["targets"])
    held_out = (t.eval_batches(t.open("held_out"), batch_size=4)[0] for t in (growing, plain))
    np.testing.assert_array_equal(*(batch["points"] for batch in held_out))


@pytest.mark.parametrize("name", point_tasks.KINDS)
def test_zero_and_mean_predictions_score_one(name):
    data, kind = make_data(name), point_tasks.find(name)
    objective = PointRegression(name=name, sizes=SIZES)
    batches = data.eval_batches(data.open("held_out"), batch_size=8)
    targets = np.concatenate([b["targets"][b["mask"]] for b in (batches[0], batches[1])])

    def score_constant(value):
        """Return the metrics of a model that always predicts `value`."""
        result = []
        for i in range(2):
            batch = {key: jnp.asarray(array) for key, array in batches[i].items()}
            outputs = jnp.broadcast_to(jnp.asarray(value, jnp.float32), (8, N * 2 + 1, kind.outputs(SIZES)))
            aligned = outputs if kind.targets(SIZES) > 1 else outputs[:, -1:]
            length = kind.tokens(SIZES) if kind.targets(SIZES) > 1 else 1
            result.append(objective.statistics(lambda *_, out=aligned[:, :length], **__: (out, None), batch))
        return objective.metrics({name: np.float64(total) + result[1][name] for name, total in result[0].items()})

    zero, mean = score_constant(0.0), score_constant(targets.reshape(-1, targets.shape[-1]).mean(axis=0))
    assert zero["error"] == pytest.approx(1, rel=1e-6)
    assert zero["loss"] == pytest.approx((targets**2).sum() / targets[..., 0].size, rel=1e-5)
    assert mean["unexplained"] == pytest.approx(1, rel=1e-3)
    assert ("error_by_place" in zero) == (name == "regression")


@pytest.fixture
def small_config():
    c = config.points()
    c.update(batch_size=16, total_steps=8, log_every=4)
    c.data.update(points=N, dim=DIM, examples=16)
    c.model.update(width=DIM, head_dim=5, num_heads=2, modules=3, mlp_dim=13)
    c.optim.warmup_steps = 2
    c.eval.update(every=4, batch_size=16)
    c.checkpoint.every = 4
    c.probe.update(every=8, examples=8)
    return c


@pytest.mark.parametrize(
    "name, change, parts",
    [
        ("nearest_orthonormal", {"data.points": 12}, ("data.points=12", "data.dim=11")),
        ("nearest", {"data.dim": 13}, ("model.width=11", "data.dim=13")),
        ("nearest", {"data.train_split": "held_out"}, ("data.train_split", "held_out")),
        ("nearest", {"data.curriculum.every": 5}, ("data.curriculum.every=5", "regression, retrieval", 0)),
        ("farthest", {}, ("farthest", *point_tasks.KINDS)),
        ("retrieval", {}, ("1 vectors", "7 of 11", "model.outputs=1", 'model.pool="token"')),
        ("nearest", {"model.causal": True, "model.attention": "nystrom", "model.modules": None}, ("causal",)),
        ("nearest", {"model.pool": "token", "model.causal": True}, ("model.causal=True", 'model.pool="token"')),
        ("nearest", {"model.max_length": 5}, ("7 tokens", 5, "model.max_length")),
    ],
)
def test_invalid_configs_are_refused(small_config, name, change, parts):
    small_config.data.name = name
    small_config.update_from_flattened_dict(change)
    with refuses(*parts) as error:
        train_setup.check(small_config)
        train_setup.set_up_training(small_config, examples=None, mesh=None)
    assert ("model.pool" in str(error.value)) == ('model.pool="token"' in parts)


def test_all_seeds_share_the_held_out_examples(small_config):
    splits = []
    for seed in (0, 1):
        small_config.seed = seed
        splits.append([tasks.build_task(small_config).data.open(split)[0]["points"] for split in ("train", "held_out")])
    np.testing.assert_array_equal(splits[0][1], splits[1][1])
    assert not np.allclose(splits[0][0], splits[1][0])


def test_averaged_attention_equals_the_mean_of_modules(rng):
    """The output is the mean over independent modules; each is initialised as a single module would be."""
    modules, heads, rank, value = 3, 2, 5, 4
    x = jnp.asarray(rng.standard_normal((2, N, DIM)), jnp.float32)
    sizes = (DIM, heads, rank, value)
    averaged = fill_weights(lambda: AveragedAttention(*sizes, modules=modules, kernel_init=fan_in, rngs=nnx.Rngs(0)))
    single = fill_weights(lambda: MultiHeadAttention(*sizes, rngs=nnx.Rngs(0)))
    expected, graphdef = [], nnx.split(single)[0]
    forward = jax.jit(lambda weights: nnx.merge(graphdef, weights)(x)[0])
    for i in range(modules):
        copy, part = nnx.clone(single), slice(i * heads, (i + 1) * heads)
        for name in ("query", "key", "value"):
            getattr(copy, name).kernel[...] = getattr(averaged, name).kernel[...][:, part]
            getattr(copy, name).bias[...] = getattr(averaged, name).bias[...][part]
        copy.out.kernel[...], copy.out.bias[...] = averaged.out.kernel[...][part], averaged.bias[...][i]
        expected.append(forward(nnx.state(copy)))
    # Values of about one, after three matmuls of ten terms each: some ten roundings of float32.
    result = nnx.jit(lambda module, x: module(x)[0])(averaged, x)
    np.testing.assert_allclose(result, np.mean(expected, axis=0), rtol=0, atol=5e-6)
    assert np.abs(np.diff(expected, axis=0)).max() > 0.1

    def find_largest_weight(module_class, **more):
        """Return the largest weight of the output projection at initialisation."""
        module = module_class(*sizes, **more, kernel_init=fan_in, rngs=nnx.Rngs(0))
        return jnp.abs(module.out.kernel[...]).max()

    bounds = jax.jit(
        lambda: (find_largest_weight(AveragedAttention, modules=modules), find_largest_weight(MultiHeadAttention))
    )()
    np.testing.assert_allclose(bounds, (heads * value) ** -0.5, rtol=0.05)
