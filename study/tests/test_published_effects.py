"""Effects of heads in published models: which steps they cover, and sums of effects."""

import dataclasses
import math

import pytest
from messages import mentions

from study.published import published_effects as published
from study.published.published_effects import Effect


def make_model(heads, head_dim, **changes):
    sizes = {"name": "gpt", "width": heads * head_dim, "depth": 12, "num_heads": heads, "head_dim": head_dim}
    return sizes | {"mlp_dim": 3072, "attention": "softmax", "num_kv_heads": None, "value_dim": None} | changes


def compare(before, after, params=124_000_000):
    return published.compare(before, after, (params, params))


def make_effect(source="A", **changes):
    values = {"kind": "decoder", "source": source, "unit": "nats", "value": 0.1, "low": 0.05, "high": 0.2}
    ranges = {"dims": (17, 32), "exact": False, "measured": (96, 512), "width": (96, 1024), "depth": (4, 24)}
    return Effect(**values | {"models": 9, "units": 9, "params": (10**7, 10**9)} | ranges | changes)


@pytest.fixture
def rows(monkeypatch):
    """Replace the table by two ranges of one source and an exact step."""
    table = [make_effect(), make_effect(dims=(33, 64), value=0.01, low=-0.01, high=0.02)]
    table.append(make_effect(dims=(128, 64), exact=True, value=0.5, low=0.4, high=0.6))
    monkeypatch.setattr(published, "read", lambda: tuple(table))
    return table


def test_step_inside_a_range(rows):
    (change,) = compare(make_model(12, 64), make_model(24, 32)).changes
    assert (change.value, change.low, change.high, change.dims) == (0.1, 0.05, 0.2, (17, 32))
    assert (change.models, change.widths, change.exact) == (9, (96, 512), False)


def test_step_of_part_of_a_doubling_and_its_reverse(rows):
    part = math.log2(4 / 3)
    (change,) = compare(make_model(12, 64), make_model(16, 48)).changes
    assert (change.value, change.low, change.high) == pytest.approx((0.01 * part, -0.01 * part, 0.02 * part))
    (change,) = compare(make_model(16, 48), make_model(12, 64)).changes
    assert (change.value, change.low, change.high) == pytest.approx((-0.01 * part, -0.02 * part, 0.01 * part))


def test_step_that_crosses_two_ranges_adds_their_effects(rows):
    """The first doubling, from 96 to 48, is in one range, the second in another."""
    (change,) = compare(make_model(8, 96), make_model(32, 24)).changes
    assert (change.value, change.low, change.high) == pytest.approx((0.11, 0.04, 0.22)) and change.dims == (17, 64)


def test_pairs_of_exactly_this_step_are_preferred(rows):
    (change,) = compare(make_model(6, 128), make_model(12, 64)).changes
    assert (change.value, change.exact, change.dims) == (0.5, True, (128, 64))
    (change,) = compare(make_model(12, 64), make_model(6, 128)).changes
    assert (change.value, change.low, change.high) == (-0.5, -0.6, -0.4)


def test_percent_is_added_as_logarithms(monkeypatch):
    effects = {"unit": "% of error", "value": -50.0, "low": -75.0, "high": 0.0, "dims": (8, 64)}
    monkeypatch.setattr(published, "read", lambda: (make_effect(**effects),))
    (change,) = compare(make_model(12, 64), make_model(48, 16)).changes
    assert (change.value, change.low, change.high) == pytest.approx((-75, -93.75, 0))
    (change,) = compare(make_model(24, 32), make_model(12, 64)).changes
    assert (change.value, change.low, change.high) == pytest.approx((100, 0, 300))


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"num_heads": 16, "head_dim": 64}, [768, 1024]),  # the total width changes
        ({"num_heads": 48, "head_dim": 16}, [64, 16]),  # the second doubling is in no range
        ({"depth": 25}, [12, 25]),
        ({"attention": "latent"}, ["model.attention=latent"]),
        ({"num_kv_heads": 4}, ["model.num_kv_heads=4"]),
        ({"value_dim": 64}, ["model.value_dim=64"]),
        ({"name": "xcit"}, ["xcit", "gpt"]),
        ({"name": "vit"}, ["vit", "gpt"]),
        ({"num_heads": (24, 12)}, ["(24, 12)"]),
    ],
)
def test_other_steps_are_not_covered(changes, parts, rows):
    step = compare(make_model(12, 64), make_model(24, 32) | changes)
    assert step.changes == () and step.reason and mentions(str(step), *parts)


def test_sizes_outside_a_table_are_not_covered(rows):
    heads = make_model(12, 64), make_model(24, 32)
    assert compare(*heads).changes and not compare(*heads, params=10**7 - 1).changes
    assert not compare(make_model(32, 64), make_model(64, 32)).changes  # width 2,048
    wide = [model | {"width": 512} for model in heads]  # the total width is not the embedding dimension
    assert mentions(str(compare(*wide)), 768) and not compare(*wide).changes


def test_remainder_of_the_width_is_allowed(rows):
    """12 heads of dimension 42 in a width of 512, as in GPT-2 of Leaner Transformers."""
    step = compare(make_model(12, 42, width=512), make_model(16, 32, width=512))
    assert step.changes and not compare(make_model(12, 42, width=504), make_model(16, 32, width=512)).changes


def test_another_number_of_equal_heads_is_no_split_of_the_width(rows):
    """5 and 6 heads of dimension 4 both fit a width of 24, with a remainder."""
    step = compare(make_model(6, 4, width=24), make_model(5, 4, width=24))
    assert not step.changes and mentions(step.reason, 24, 20)


def test_equal_heads_give_no_step(rows):
    assert compare(make_model(12, 64), make_model(12, 64, depth=6)) is None


def test_sources_that_disagree_are_named(monkeypatch):
    table = [make_effect(), make_effect("B", value=-0.3, low=-0.4, high=-0.2), make_effect("C", low=-0.1)]
    monkeypatch.setattr(published, "read", lambda: tuple(table))
    heads = make_model(12, 64), make_model(24, 32)
    text = str(compare(*heads))
    assert mentions(text, "+0.100", "-0.300", "A", "B", "C", "disagree", "12 x 64", "24 x 32")
    table[1] = dataclasses.replace(table[1], low=-0.4, high=0.1)
    assert not mentions(str(compare(*heads)), "disagree")


def test_packaged_table():
    effects = published.read()
    assert {effect.kind for effect in effects} == set(published.KINDS.values())
    assert all(effect.low <= effect.value <= effect.high for effect in effects)
    change, *others = compare(make_model(12, 64), make_model(24, 32)).changes
    assert (change.source, change.exact, others) == ("open_lm", True, []) and 0.028 < change.low < change.high < 0.066
