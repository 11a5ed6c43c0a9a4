"""Measures of patterns by step, and the rule on when heads find one."""

import numpy as np
import pytest

from study.heads import patterns


def test_cosines_are_those_of_the_products(rng):
    query, key = rng.normal(size=(2, 3, 7, 8, 5))  # layers D N H
    found = patterns.cosines(query, key)
    products = np.einsum("ldnh,lenh->lnde", query, key).reshape(3, 8, -1)
    products /= np.linalg.norm(products, axis=-1, keepdims=True)
    cosines = (products @ products.mT).mean(0)
    within = [cosines[n, m] for n in range(8) for m in range(8) if n != m and n // 2 == m // 2]
    between = [cosines[n, m] for n in range(8) for m in range(8) if n // 2 != m // 2]
    assert found == pytest.approx({"within": np.mean(within), "between": np.mean(between)})
    assert np.isnan(patterns.cosines(query[:, :, :4], key[:, :, :4])["within"])


@pytest.mark.parametrize(("later", "expected"), [(100, "holds"), (0, "refuted"), (None, "not run")])
def test_verdict_on_heads_one_after_the_other(later, expected):
    """The first head passes half of its mass at step 300, the mean over heads at 400, in a split `later` still."""
    rows = []
    for arm, shift in (("32", later), ("4 low rank", 0)):
        for seed in patterns.SEEDS if shift is not None else ():
            for step in range(25, 1001, 25):
                first, mean = (1 / (1 + np.exp(-(step - at) / 5)) for at in (300, 400 + shift + (seed - 1) * len(arm)))
                about = {"train_loss": 3.0, "within": 0.0, "between": 0.0}
                rows.append({"arm": arm, "seed": seed, "step": step, "first": first, "mean": mean} | about)
    assert [*patterns.report(rows)][-1].endswith(f": {expected}")
