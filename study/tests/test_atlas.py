"""Effects in published tables: against independent calculations, the packaged table, and the page about them."""

import csv
import dataclasses
import itertools
import math
import statistics as plain
from collections import defaultdict

import numpy as np
import pytest
from commands import ROOT
from PIL import Image
from scipy import stats

from study.published import atlas, atlas_page, atlas_picture, published, published_scaling, regression, small_vits
from study.published import effects as estimates
from study.published import published_effects as library
from study.published.effects import BY_DEPTH, DEPTH, HEADS, MLP, STEP


@pytest.fixture(scope="module")
def effects():
    return atlas.effects()


@pytest.fixture(scope="module")
def small():
    return small_vits.estimate()


def find(effects, **values):
    (effect,) = [e for e in effects if all(getattr(e, name) == value for name, value in values.items())]
    return effect


def recompute_pairs():
    """Return (head dimension before, after, change per doubling) of open_lm's pairs, from the file alone."""
    lowest = defaultdict(lambda: math.inf)
    with (ROOT / "study" / "data" / "openlm_grid.csv").open() as file:
        for row in csv.DictReader(file):
            shape = int(row["width"]), int(row["depth"]), int(row["num_heads"])
            lowest[shape] = min(lowest[shape], float(row["loss"]))
    for (width, depth, few), (other, same, many) in itertools.pairwise(sorted(lowest)):
        if (width, depth) == (other, same):
            change = (lowest[width, depth, many] - lowest[width, depth, few]) / math.log2(many / few)
            yield width / few, width / many, change


@pytest.mark.parametrize(
    ("low", "high", "reading", "pairs", "worse"),  # a reading of the same file by another program
    [
        (0, 16, 0.135, 10, 10),
        (16, 32, 0.075, 15, 15),
        (32, 48, 0.035, 20, 20),
        (48, 64, 0.012, 15, 14),
        (64, 96, 0.000, 15, 7),
        (96, 128, -0.013, 5, 0),
    ],
)
def test_heads_in_openlm(low, high, reading, pairs, worse, effects):
    changes = [change for _, after, change in recompute_pairs() if low < after <= high]
    effect = next(
        e for e in effects if (e.table, e.question, e.form) == ("open_lm", HEADS, "pairs") and e.dims[1] == high
    )
    assert effect.value == pytest.approx(plain.mean(changes)) and round(effect.value, 3) == reading
    assert (effect.models, effect.worse) == (len(changes), sum(x > 0 for x in changes)) == (pairs, worse)
    # every pair of a range is from another (width, depth), so the clustered interval is Student's
    ends = stats.t.interval(0.95, pairs - 1, plain.mean(changes), plain.stdev(changes) / pairs**0.5)
    assert (effect.low, effect.high) == pytest.approx(ends)


def test_single_steps_in_openlm(effects):
    for dims in ((64, 32), (128, 64)):
        effect = find(effects, question=STEP, dims=dims)
        changes = [change for before, after, change in recompute_pairs() if (before, after) == dims]
        assert effect.value == pytest.approx(plain.mean(changes)) and effect.models == len(changes)


def test_jackknife_over_clusters():
    """Closed form against fits without each cluster."""
    rng = np.random.default_rng(0)
    x, clusters = rng.normal(size=(40, 2)), np.repeat(np.arange(10), 4)
    y = x @ [1.0, -2.0] + rng.normal(size=40) + rng.normal(size=10)[clusters]
    result = regression.fit(y, {"a": x[:, 0], "b": x[:, 1]}, clusters)
    design = np.column_stack([np.ones(40), x])
    solutions = [np.linalg.lstsq(design[c], y[c], rcond=None)[0] for c in (clusters != i for i in range(10))]
    full = np.linalg.lstsq(design, y, rcond=None)[0]
    errors = np.sqrt(0.9 * np.square(np.array(solutions) - full).sum(axis=0))
    assert [d.value for d in result.values()] == pytest.approx(full[1:])
    assert [d.error for d in result.values()] == pytest.approx(errors[1:]) and result["a"].df == 9
    with pytest.raises(ValueError):
        regression.fit(y, {"a": x[:, 0], "b": 2 * x[:, 0]}, clusters)
    with pytest.raises(ValueError):  # only one cluster determines the second coefficient
        regression.fit(y, {"a": x[:, 0], "b": (clusters == 3).astype(float)}, clusters)


def test_effects_are_recovered_from_computed_losses():
    """A loss with known effects: heads 0.02, depth at equal parameters 0.05, MLP -0.03 per doubling."""
    rng = np.random.default_rng(0)
    width, depth, heads, mlp = (rng.uniform(low, high, 300) for low, high in ((6, 9), (1, 4), (1, 3), (0, 3)))
    size = 2 * width + depth + np.log2(4 + 2 * 2**mlp)
    sizes = {published.BLOCKS: size}
    dim = width - heads
    flat = published.Table(
        "flat", "decoder", "nats", 5 - size + 0.02 * heads, width, depth, heads, mlp, sizes, size, "", ""
    )
    for effect in estimates.estimate_heads(flat):
        assert effect.value == pytest.approx(0.02, abs=1e-6)
    score = 5 - size + 0.05 * depth - 0.03 * mlp + 0.3 * dim
    table = dataclasses.replace(flat, score=score)
    for question, value in ((DEPTH, 0.05), (MLP, -0.03)):
        results = [*estimates.estimate_trade(table, question)]
        assert len(results) == 2 and all(effect.value == pytest.approx(value, abs=1e-6) for effect in results)


def test_units_are_shapes_and_cells(effects):
    """Not checkpoints of a shape, nor warm-ups of a (width, depth)."""
    assert {e.units for e in effects if e.table.startswith("Gemstones")} == {22}
    assert {e.models for e in effects if e.form.endswith("all checkpoints")} == {770}
    warm = [e for e in effects if e.form == "pairs at equal warm-up"]
    assert all(e.units < e.models for e in warm) and sum(e.models for e in warm if e.dims[1] <= 48) == 138
    assert [e.worse for e in warm if e.dims[1] <= 48] == [20, 45, 73]


def test_every_question_has_two_forms_and_one_correction(effects):
    groups = defaultdict(list)
    for effect in effects:
        if effect.question not in (STEP, BY_DEPTH):
            groups[effect.table, effect.question, effect.at, effect.dims].append(effect)
    assert all(len({e.form for e in group}) >= 2 and sum(e.main for e in group) == 1 for group in groups.values())
    main = [e for e in effects if e.main]
    assert all(e.p <= e.p_corrected <= 1 for e in main) and {e.main for e in effects if e.p_corrected >= 0} == {True}
    smallest = min(main, key=lambda e: e.p)
    assert smallest.p_corrected == pytest.approx(len(main) * smallest.p)


def test_parameters_of_openlm_fit_its_architecture():
    """Tokens are 20 x parameters; with 488 = 12 x 40 + 8 the heads are narrower than the width."""
    table = published_scaling.openlm_cells(published_scaling.openlm())
    for width, depth, params in zip(2**table.width, 2**table.depth, table.params, strict=True):
        hidden, inner = 256 * math.ceil(int(8 * width / 3) / 256), 480 if round(width) == 488 else width
        layer = 4 * width * inner + 3 * width * hidden + 2 * width
        assert params == pytest.approx(2 * 50_432 * width + width + depth * layer, abs=0.5)


def test_small_vits_of_this_project(small):
    surface = [e for e in small if e.form == "response surface"]
    values = [tuple(round(x, 1) for x in (e.value, e.low, e.high)) for e in surface]
    assert values == [(-6.3, -7.9, -4.8), (-4.8, -5.6, -3.9)]
    rows = [row for row in published.read("heads") if row["trade"] == "fixed total width"]
    errors = {n: [math.log(1 - float(r["top1"]) / 100) for r in rows if r["num_heads"] == n] for n in ("2", "4")}
    expected = 100 * math.expm1(plain.mean(errors["4"]) - plain.mean(errors["2"]))
    assert find(small, form="pairs", dims=(24, 24)).value == pytest.approx(expected)


def test_packaged_table_equals_the_evidence(effects):
    """Numbers may differ in the last digit between processors."""
    rows, packaged = atlas.select_rows(effects), library.read()
    assert len(rows) == len(packaged) > 30
    for row, other in zip(rows, packaged, strict=True):
        numbers = [(row.value, row.low, row.high), (other.value, other.low, other.high)]
        assert numbers[0] == pytest.approx(numbers[1], abs=2e-5)
        zero = dict.fromkeys(("value", "low", "high"), 0.0)
        assert dataclasses.replace(row, **zero) == dataclasses.replace(other, **zero)


def test_written_table_is_read_again(effects, tmp_path, monkeypatch):
    rows = atlas.select_rows(effects)
    atlas.write(tmp_path / "effects.csv", rows)
    monkeypatch.setattr(library, "PATH", tmp_path / "effects.csv")
    assert [*library.read.__wrapped__()] == rows


def test_tables_of_effects(effects, small):
    heads, trade = atlas_page.head_table([*effects, *small]), atlas_page.trade_table(effects)
    assert "| open_lm | 17 to 32 | +0.075 (+0.060 to +0.090) | +0.059 (+0.039 to +0.078) | 15, 15 worse |" in heads
    assert "| Gemstones DCLM | -0.031 (-0.038 to -0.024) | +0.006 (-0.016 to +0.029) |" in trade


def test_what_the_page_marks_as_clear_is_so_in_the_second_form(effects):
    marked = [e for e in effects if e.question == HEADS and e.main and not e.at and e.p_corrected < 0.05]
    second = {(e.table, e.dims, e.form): e for e in effects if e.question == HEADS and not e.at}
    for effect in marked:
        other = second[effect.table, effect.dims, atlas_page._second(effect)]
        assert other.low * other.high > 0 and other.value * effect.value > 0
    assert len(marked) == 6


def test_picture_is_drawn(effects, small, tmp_path):
    atlas_picture.draw(tmp_path, [*effects, *small])
    for name in ("published_models.png", "published_models_dark.png"):
        for path in (tmp_path / name, ROOT / "docs" / name):
            with Image.open(path) as image:
                assert image.size == (780, 960)
