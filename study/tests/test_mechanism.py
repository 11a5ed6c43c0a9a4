"""Tests of the plan of rates, of the estimates of part E1, and of the data and rules of part E4."""

import functools
import gzip

import fake_runs
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from leanformer.analysis import comparison, runs
from leanformer.data.images.sources import Idx
from leanformer.layers.masks import Mask
from leanformer.layers.positions import rotate
from leanformer.training import train_setup
from study.heads import growth, language, mechanism, mechanism_verdict, trainer, vision_length


def tuning_rows(losses):
    return [{"arm": "32", "lr": lr, "seed": mechanism.TUNING_SEED, "tuning_loss": x} for lr, x in losses.items()]


@pytest.mark.parametrize(
    ("losses", "following"),
    [
        ({}, (0.002, 100)),
        ({0.002: 3.1, 0.004: 3.0, 0.008: 3.2}, (0.004, 0)),  # worse on both sides
        ({0.002: 3.1, 0.004: 3.0, 0.008: 2.9}, (0.016, 100)),
        ({0.002: 2.9, 0.004: 3.0, 0.008: 3.1}, (0.001, 100)),
        ({0.002: 3.1, 0.004: 3.0, 0.008: 3.0}, (0.016, 100)),  # of equal losses the larger rate, which is at an edge
    ],
)
def test_rates_are_bracketed(losses, following):
    assert mechanism.plan("32", tuning_rows(losses))[0] == following


def table(rng):
    return {arm: {seed: float(rng.normal(3, 0.1)) for seed in range(5)} for arm in ("a", "b", "c")}


def test_paired_contrast_is_scipys_paired_t_test():
    losses = table(np.random.default_rng(1))
    estimate = mechanism_verdict.paired(losses, {"a": 1.0, "b": -1.0})
    expected = stats.ttest_rel([*losses["a"].values()], [*losses["b"].values()]).confidence_interval()
    interval = estimate.interval()
    np.testing.assert_allclose([interval.low, interval.high], [expected.low, expected.high])


def test_pooled_contrast_has_the_residual_of_least_squares():
    losses = table(np.random.default_rng(2))
    arms, seeds = [*losses], range(5)
    design = [[*(a == arm for a in arms), *(s == seed for s in seeds[1:])] for arm in arms for seed in seeds]
    values = [losses[arm][seed] for arm in arms for seed in seeds]
    fit, residual, *_ = np.linalg.lstsq(np.array(design, float), np.array(values), rcond=None)
    estimate = mechanism_verdict.pooled(losses, {"a": 1.0, "c": -1.0}, arms)
    assert estimate.df == len(values) - len(design[0])
    np.testing.assert_allclose(estimate.value, fit[0] - fit[2])
    np.testing.assert_allclose(estimate.error, np.sqrt(residual[0] / estimate.df * 2 / 5))


def noisy(means):
    rng = np.random.default_rng(6)
    return {arm: {seed: mean + rng.normal(0, 1e-4) for seed in range(5)} for arm, mean in means.items()}


@pytest.mark.parametrize(("rate", "verdict"), [(2.93, "holds"), (2.97, "refuted"), (2.94, "undecided")])
def test_verdict_on_the_rate(rate, verdict):
    """The factor gains 0.1: the rate alone falls behind it by less than the margin, by over half, or by in between."""
    losses = noisy({"32": 3.0, "32 fast": 2.9, "32 rate": rate - 0.005})
    assert mechanism_verdict.rate_rule(losses, [*losses])[0].endswith(f": {verdict}")


@pytest.mark.parametrize(("rank", "verdict"), [(2.9, "holds"), (2.99, "refuted")])
def test_verdict_on_the_shape_of_heads(rank, verdict):
    losses = noisy({"32": 3.0, "4": 2.85, "32 rank": rank})
    fall = {"32": 1.0, "32 rank": -1.0}
    lines = mechanism_verdict.explains(losses, "Rank explains it", mechanism_verdict.GAP, fall, None, [*losses])
    assert lines[0].endswith(verdict) and lines[-1].startswith(
        f"  share of the gap, paired: {100 * (3 - rank) / 0.15:.0f} % ("
    )


@pytest.mark.parametrize(("gap", "verdict"), [(0.024, "holds"), (0.036, "refuted"), (0.03, "undecided")])
def test_verdict_on_long_runs(gap, verdict):
    losses = noisy({"long 128: 32": 2.5 + gap, "long 128: 4": 2.5})
    lines = mechanism_verdict.long_rule(losses, 128, 32)
    assert lines[0].endswith(f"width 128: {verdict}") and lines[-1].endswith("√w/d: not run")


def test_the_interval_of_a_share_inverts_the_paired_t_test():
    """The ends are the ratios r at which x - r y is just rejected at 5 %."""
    losses = table(np.random.default_rng(4))
    for seed in range(5):
        losses["c"][seed] -= 1.0
    found = mechanism_verdict.share(losses, {"a": 1.0, "b": -1.0}, {"b": 1.0, "c": -1.0})
    for end in (found.low, found.high):
        values = [losses["a"][s] - losses["b"][s] - end / 100 * (losses["b"][s] - losses["c"][s]) for s in range(5)]
        assert stats.ttest_1samp(values, 0).pvalue == pytest.approx(0.05)
    assert found.low < found.value < found.high


@pytest.mark.parametrize("contrast", [("32", "4"), ("32 start", "32 fast")])
def test_compare_finds_the_intervals_of_the_rows(contrast, tmp_path):
    losses = mechanism_verdict.losses_of(language.read_rows(mechanism.ROWS))
    for i, arm in enumerate(contrast):
        for seed, loss in losses[arm].items():
            folder = tmp_path / f"arm{i},seed={seed}"
            fake_runs.write_run(folder, loss, seed=seed, changes={"model.num_heads": 2**i}, score="error")
    pair = comparison.compare(runs.read([str(tmp_path)])).pairs[0]
    sign = -1 if pair.first.startswith("arm1") else 1
    expected = mechanism_verdict.paired(losses, {contrast[0]: sign, contrast[1]: -sign}).interval()
    np.testing.assert_allclose([pair.interval.low, pair.interval.high], [expected.low, expected.high], rtol=1e-9)


def test_the_step_of_a_loss_is_interpolated():
    assert mechanism_verdict.step_of([4.0, 3.5, 3.0], 3.25) == 50.0
    assert mechanism_verdict.step_of([4.0, 3.5], 3.0) == float("inf")


def test_runs_trained_together_are_those_trained_alone():
    """Runs with other seeds and rates in one program have the losses of single runs, up to rounding."""
    members = [(2e-3, 100), (8e-3, 100), (4e-3, 0)]
    together = trainer.train_together(mechanism.get_config(mechanism.ARMS["32 fast"], *members[0], tiny=True), members)
    for (lr, seed), result in zip(members, together, strict=True):
        alone = trainer.train(mechanism.get_config(mechanism.ARMS["32 fast"], lr, seed, tiny=True))
        np.testing.assert_allclose(result.curve, alone.curve, rtol=1e-4)
        np.testing.assert_allclose(result.loss, alone.loss, rtol=1e-4)
    assert len({round(result.loss, 4) for result in together}) == 3  # seeds and rates matter at this tolerance


def test_spread_is_that_of_the_keys_seen():
    q, k = np.random.default_rng(5).normal(0, 3, (2, 2, 7, 3, 5))  # B T N H, twice
    logits = np.einsum("btnh,bsnh->bnts", q, k)
    expected = np.mean([logits[..., t, : t + 1].std(-1) for t in range(1, 7)], 0)
    np.testing.assert_allclose(growth.spread(q, k), expected, rtol=1e-5)


@pytest.mark.parametrize(("power", "verdict"), [(1.0, "holds"), (0.5, "refuted"), (0.75, "undecided")])
def test_slope_of_logits_on_the_head_dimension(power, verdict):
    rows = [
        {"arm": arm, "seed": seed, "step": 100, "spread": (128 / int(arm)) ** (power + 0.01 * seed - 0.01)}
        for arm in growth.BASELINES
        for seed in growth.SEEDS
    ]
    assert growth.slope(rows, 100).value == pytest.approx(power)
    assert growth.ratio(rows, 100) == pytest.approx(32 ** (power - 0.5), rel=1e-3)
    assert [*growth.report(rows)][-1] == f"The premise: {verdict}"


def test_training_images_are_split_into_two_parts(tmp_path, monkeypatch):
    monkeypatch.setattr(vision_length, "HELD_OUT", 2)
    images, labels = np.arange(5 * 28 * 28, dtype=np.uint32).astype(np.uint8).reshape(5, 28, 28), np.arange(5)
    for split in ("train", "t10k"):
        for stem, x, axes in (("images-idx3-ubyte", images, 3), ("labels-idx1-ubyte", labels, 1)):
            head = bytes((0, 0, 8, axes)) + np.array(x.shape, ">u4").tobytes()
            (tmp_path / f"{split}-{stem}.gz").write_bytes(gzip.compress(head + x.astype(np.uint8).tobytes()))
    vision_length.split_images(tmp_path, tmp_path / "parts")
    read = {name: Idx(tmp_path / "parts", name) for name in ("fit", "tune", "t10k")}
    assert {name: [x[i]["label"] for i in range(len(x))] for name, x in read.items()} == {
        "fit": [0, 1, 2],
        "tune": [3, 4],
        "t10k": [0, 1, 2, 3, 4],
    }


@pytest.mark.parametrize(
    ("late", "lasts", "early"),
    [((10.0, 9.0), "holds", "not shown"), ((10.0, 10.0), "refuted", "holds"), ((10.0, 11.0), "undecided", "not shown")],
)
def test_verdict_on_the_length_of_training(late, lasts, early):
    """Errors of 2 and 16 heads after the longest training; after the shortest 16 heads are better."""
    rng, rows = np.random.default_rng(3), []
    for steps, errors in ((390, (20.0, 18.0)), (14060, late)):
        for heads, error in zip((2, 16), errors, strict=True):
            rows += [
                {"steps": steps, "num_heads": heads, "seed": seed, "error": error / 100 + rng.normal(0, 1e-4)}
                for seed in mechanism.SEEDS
            ]
    assert [*vision_length.report(rows)][-2:] == [f"The gain outlasts: {lasts}", f"It is only early: {early}"]


@pytest.mark.parametrize(("heads", "own", "dims"), [(4, 6, 2), (6, 2, 6)])
def test_what_teaches_a_pattern_changes_gradients_alone(heads, own, dims, rng):
    """The outputs and the values' gradients stay; a pattern's are those of the first values, or of a group's values."""
    q, k = (jnp.asarray(rng.normal(size=(2, 7, heads, 4)), jnp.float32) for _ in range(2))
    v, g = (jnp.asarray(rng.normal(size=(2, 7, heads, own)), jnp.float32) for _ in range(2))
    seen = np.float32(np.arange(own) < dims)[None, None, None]  # of the head's own values
    group = max(dims // own, 1)  # heads that teach each other
    linked = np.kron(np.eye(heads // group), np.ones((group, group)))

    def attend(q, k, v):
        logits = jnp.einsum("btnh,bsnh->bnts", q, k) / 2
        return jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(logits), v)

    def expected(q, k):
        weights = jax.nn.softmax(jnp.einsum("btnh,bsnh->bnts", q, k) / 2)
        return jnp.einsum("bnts,bsmh,btmh,nm->", weights, v, g * seen, linked)

    taught = functools.partial(mechanism.teach, attend, dims)
    np.testing.assert_allclose(taught(q, k, v), attend(q, k, v), atol=1e-6)
    found = jax.grad(lambda *a: (taught(*a) * g).sum(), (0, 1, 2))(q, k, v)
    values = jax.grad(lambda v: (attend(q, k, v) * g).sum())(v)
    for one, other in zip(found, (*jax.grad(expected, (0, 1))(q, k), values), strict=True):
        np.testing.assert_allclose(one, other, atol=3e-6)


def test_heads_that_begin_alike_are_few_heads():
    """32 heads in 4 groups compute what 4 heads with larger values do, from the same values and outputs."""
    few, many = (mechanism.get_config(mechanism.ARMS[name], 1e-3, 0) for name in ("4 low rank", "32 alike"))
    wide, narrow = (train_setup.set_up_training(c, examples=None).model for c in (few, many))
    params, statistics = narrow.random_weights(0)
    params = mechanism.begin_alike(params, 4)
    joined = jax.tree.map(jnp.copy, params)
    attention = joined["blocks"]["layers"]["attention"]
    for name in ("query", "key"):
        attention[name] = {part: x[..., ::8, :] for part, x in attention[name].items()}
    attention["value"] = {part: x.reshape(*x.shape[:-2], 4, 32) for part, x in attention["value"].items()}
    attention["out"]["kernel"] = attention["out"]["kernel"].reshape(4, 4, 32, 128)
    tokens = np.arange(2 * 16, dtype=np.int32).reshape(2, 16) * 7 % 512
    outputs = [m.merge((p, statistics))(tokens)[0] for m, p in ((narrow, params), (wide, joined))]
    np.testing.assert_allclose(*outputs, atol=1e-5)


def test_tied_heads_that_began_alike_have_equal_gradients(rng):
    """They are that of one head with all values, divided by the heads of the group."""
    q, k, v, g = (jnp.asarray(rng.normal(size=(2, 7, 6, 3)), jnp.float32) for _ in range(4))
    q, k = (jnp.repeat(x[:, :, ::3], 3, axis=2) for x in (q, k))

    def attend(q, k, v):
        return jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(jnp.einsum("btnh,bsnh->bnts", q, k)), v)

    def one_head_per_group(q, k):
        return (attend(q[:, :, ::3], k[:, :, ::3], v.reshape(2, 7, 2, 9)).reshape(g.shape) * g).sum()

    np.testing.assert_allclose(mechanism.tie(attend, 2, q, k, v), attend(q, k, v), atol=1e-6)
    found = jax.grad(lambda q, k: (mechanism.tie(attend, 2, q, k, v) * g).sum(), (0, 1))(q, k)
    for tied, single in zip(found, jax.grad(one_head_per_group, (0, 1))(q, k), strict=True):
        np.testing.assert_allclose(tied, jnp.repeat(single[:, :, ::3], 3, axis=2) / 3, atol=1e-6)


def test_half_of_the_heads_are_given_the_previous_token(rng):
    """With equal logits and 7 tokens it has e⁶ times the weight of any other key; the other heads average."""
    q, v = jnp.zeros((2, 7, 4, 3)), jnp.asarray(rng.normal(size=(2, 7, 4, 5)), jnp.float32)
    out = mechanism.give(1, 6.0, q, q, v, mask=Mask(causal=True))
    v = np.asarray(v)
    helped, usual, count = v[:, :, :2], np.cumsum(v, 1) / np.arange(1, 8)[:, None, None], np.arange(1, 7)[:, None, None]
    weights = np.exp(6.0) / (np.exp(6.0) + count)
    others = (np.cumsum(helped, 1)[:, 1:] - helped[:, :-1]) / count
    np.testing.assert_allclose(out[:, 1:, :2], weights * helped[:, :-1] + (1 - weights) * others, atol=1e-5)
    np.testing.assert_allclose(out[..., 2:, :], usual[..., 2:, :], atol=1e-5)


def test_a_wide_head_is_rotated_by_the_frequencies_of_a_narrow_one(rng):
    """Each group of 4 channels is turned like a head of 4; a rotation by the usual frequencies differs."""
    x, positions = jnp.asarray(rng.normal(size=(2, 7, 3, 12)), jnp.float32), jnp.arange(7)[None]
    turned = mechanism.rotate_in_groups(rotate, 4, x, positions, base=10.0)
    for i in range(0, 12, 4):
        np.testing.assert_allclose(turned[..., i : i + 4], rotate(x[..., i : i + 4], positions, base=10.0), atol=1e-6)
    assert jnp.abs(turned - rotate(x, positions, base=10.0)).max() > 0.1
