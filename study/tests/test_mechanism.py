"""Tests of the plan of rates and of the estimates of part E1."""

import numpy as np
import pytest
from scipy import stats

from study.heads import mechanism, mechanism_verdict, trainer


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
    np.testing.assert_allclose(estimate.interval(), [expected.low, expected.high])


def test_pooled_contrast_has_the_residual_of_least_squares():
    losses = table(np.random.default_rng(2))
    arms, seeds = [*losses], range(5)
    design = [[*(a == arm for a in arms), *(s == seed for s in seeds[1:])] for arm in arms for seed in seeds]
    values = [losses[arm][seed] for arm in arms for seed in seeds]
    fit, residual, *_ = np.linalg.lstsq(np.array(design, float), np.array(values), rcond=None)
    estimate = mechanism_verdict.pooled(losses, {"a": 1.0, "c": -1.0}, arms)
    assert estimate.freedom == len(values) - len(design[0])
    np.testing.assert_allclose(estimate.value, fit[0] - fit[2])
    np.testing.assert_allclose(estimate.error, np.sqrt(residual[0] / estimate.freedom * 2 / 5))


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
