"""Part 4 of the study: κ in float64, and the verdict on a peak at 3 heads, on invented values."""

import importlib.util
import itertools

import jax
import numpy as np
import pytest
from messages import refuses
from PIL import Image

from leanformer.errors import DataError
from study.heads import peak


def make_peak_rows(by_heads, seeds=range(5)):
    """Return rows of part 4 with invented log10 κ {heads: value}."""
    rng = np.random.default_rng(0)
    return [
        {"num_heads": n, "steps": 0, "seed": s, "log10_condition": value + 0.1 * rng.normal(), "bounds": 0.0}
        for (n, value), s in itertools.product(by_heads.items(), seeds)
    ]


@pytest.mark.parametrize(
    ("by_heads", "verdict"),
    [
        ({2: 5.9, 3: 7.2, 4: 6.2}, "holds"),
        ({2: 7.9, 3: 7.2, 4: 6.2}, "refuted"),
        ({2: 5.9, 3: 7.2, 4: 7.2}, "undecided"),
    ],
)
def test_the_peak_is_above_both_neighbours(by_heads, verdict):
    rows = make_peak_rows(by_heads | {8: 9.0})
    assert peak.decide(peak.compare(rows, 0)) == verdict and any(verdict in line for line in peak.report(rows))
    assert peak.decide(peak.compare(rows, 100)) == "not run" == peak.decide(peak.compare(rows[:2], 0))


def test_condition_number_of_the_peak_equals_float64(tmp_path, monkeypatch):
    """Head outputs of known κ above float32's bound are measured; as many tokens as ViT-B has at 224 pixels."""
    monkeypatch.setattr(peak, "PICTURES", ("a",))
    monkeypatch.setattr(peak, "IMAGES", 2)
    for split in ("train", "val"):
        (tmp_path / split / "a").mkdir(parents=True)
        for i in range(2):
            noise = np.random.default_rng(i).integers(0, 256, (224, 224, 3), np.uint8)
            Image.fromarray(noise).save(tmp_path / split / "a" / f"{i}.png")
    left, _ = np.linalg.qr(np.random.default_rng(0).normal(size=(peak.TOKENS, 64)))
    outputs = left * np.logspace(0, -9, 64)
    shapes = []

    def read(graphdef, weights, images):
        shapes.append((images.shape, {leaf.dtype.name for leaf in jax.tree.leaves(weights)}))
        return {"blocks": np.broadcast_to(outputs.reshape(1, 1, peak.TOKENS, 1, 64), (4, 2, peak.TOKENS, 1, 64))}

    monkeypatch.setattr(peak, "read_outputs", read)
    c = peak.get_config(1, 0, 0, tmp_path)
    c.model.update(width=24, head_dim=8, mlp_dim=16)
    row = peak.measure(c, None)
    assert row == {"log10_condition": "9.0000 9.0000 9.0000 9.0000", "bounds": "0.0000"}
    assert shapes == [((2, 224, 224, 3), {"float64"})]


def test_photographs_need_their_package(tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with refuses("scikit-image", "pip install", error=DataError):
        peak.cut_images(tmp_path)
