"""The figures that predictors are judged by, against what they say."""

import math
import runpy

import numpy as np
import pytest
from commands import ROOT


@pytest.fixture(scope="module")
def planner():
    return runpy.run_path(str(ROOT / "benchmarks" / "planner.py"))


def test_tau_counts_pairs_near_in_parameters(planner):
    params = np.array([100.0, 105.0, 109.0, 200.0, 205.0])
    errors = np.array([5.0, 4.0, 3.0, 1.0, 2.0])
    right = np.array([1.0, 2.0, 2.0, 9.0, 8.0])  # one tie among three pairs, and the last pair in order
    middle, low, high = planner["tau"](right, errors, params)
    assert middle == pytest.approx((1 + 1 + 0 + 1) / 4) and low <= middle <= high
    assert planner["tau"](-right, errors, params)[0] == pytest.approx(-3 / 4)
    assert math.isnan(planner["tau"](right[::2], errors[::2], np.array([1.0, 2.0, 4.0]))[0])


def test_regret_is_what_the_recommended_shape_loses(planner):
    params, errors = np.array([100.0, 98.0, 95.0]), np.array([2.0, 1.0, 1.5])
    assert planner["regret"](-errors, errors, params) == 0
    # at budget 100 it takes the worst of three (2 for 1), at 98 the better of two
    assert planner["regret"](np.array([3.0, 2.0, 1.0]), errors, params) == pytest.approx(50)


def test_tables_have_the_models_they_had(planner):
    tables = planner["language"](planner["EVIDENCE"] / "language_models.csv") | planner["bert"](
        planner["EVIDENCE"] / "bert.csv"
    )
    sizes = {name: len(shapes) for name, (shapes, _) in tables.items()}
    assert sum(sizes.values()) == 1381 and sizes["GPT2_lm1b"] == 200 and sizes["BERT GLUE"] == 500
    shape = tables["BERT GLUE"][0][0]
    assert (shape.depth, shape.heads, shape.head_dim, shape.mlp) == (
        4,
        (4, 2, 4, 4),
        (64, 128, 64, 64),
        (3072, 1536, 1536, 1024),
    )
