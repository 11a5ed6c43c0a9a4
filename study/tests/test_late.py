"""Tests of the measures of part E2 on a model whose attention is known, and of the steps that are read from rows."""

import numpy as np
import pytest
from scipy import stats

from study.heads import late


def test_masses_of_heads_are_the_diagonals_of_their_attention():
    attention = np.random.default_rng(0).dirichlet(np.ones(7), (2, 3, 7))  # B N T, of 7 keys
    for offset in (1, 4):
        expected = np.mean([attention[:, :, t, t - offset] for t in range(offset, 7)], 0)
        np.testing.assert_allclose(late.head_masses(offset)(attention), expected, rtol=1e-6)


def test_first_step_is_interpolated_in_both_directions():
    assert late.first_step([25, 50, 75], [0.0, 0.1, 0.5], 0.3) == pytest.approx(62.5)
    assert late.first_step([25, 50, 75], [4.0, 3.5, 3.0], 3.25) == pytest.approx(62.5)
    assert late.first_step([25, 50], [4.0, 3.5], 3.0) == float("inf")


def test_report_has_delays_and_correlations():
    """Rows of runs whose loss and masses pass their levels at known steps give these steps and their delays."""
    rows, starts = [], {"1": 100, "32": 200}
    for arm, start in starts.items():
        for seed in late.SEEDS:
            for step in range(25, 501, 25):
                rise = 1 / (1 + np.exp(-(step - start - 10 * seed) / 20))
                masses = {"previous": 0.8 * rise, "prefix": 0.05}
                rows.append({"arm": arm, "seed": seed, "step": step, "train_loss": 3.6 - 0.6 * rise} | masses)
    text = "\n".join(late.report(rows))
    assert "delay of 32 behind 1, previous: 100 (" in text and "prefix nan" in text
    pairs = [(x["previous"], x["loss"]) for x in late.lateness(rows).values()]
    assert f"loss, all positions, 6 runs: {stats.spearmanr(*zip(*pairs, strict=True)).statistic:.2f}" in text
