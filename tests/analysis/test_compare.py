"""Compare command: groups, pairs, trends, Pareto fronts and the page, and refusal of runs that cannot be compared."""

import dataclasses
import functools
import json
import re

import fake_runs
import numpy as np
import pytest
from commands import check_refused, run_in_process
from golden import check_page
from messages import mentions, refuses
from scipy import stats

from leanformer.analysis import comparison, frontier, runs
from leanformer.analysis.comparison import Configuration
from leanformer.reports import comparison as report
from leanformer.runtime import files


def run_compare(*words):
    return run_in_process(["", "", "leanformer.compare", *map(str, words)])


def extract_text(page):
    """Return the text of a page as a reader sees it, a line per element, without that in plots."""
    page = re.sub(r"<(style|title|svg)\b.*?</\1>", "", page, flags=re.DOTALL)
    return "\n".join(line for line in re.sub(r"<[^>]*>", "\n", page).splitlines() if line.strip())


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return fake_runs.write_sweep(tmp_path_factory.mktemp("sweep") / "s")


@pytest.fixture(scope="module")
def sweep_result(folder):
    return comparison.compare(runs.read([str(folder)]))


def test_runs_are_grouped_by_differing_keys_except_the_seed(sweep_result):
    found = sweep_result.configurations
    assert {one.name for one in found} == {f"depth={d},num_heads={n}" for d in (2, 3) for n in (2, 4)}
    assert all(set(one.keys) == {"model.depth", "model.num_heads"} for one in found)
    assert [one.mean for one in found] == sorted((one.mean for one in found), reverse=True)
    assert found[0].mean == pytest.approx(np.mean([run.summary["final"]["top1"] for run in found[0].runs]))
    assert sweep_result.notes == [] and sweep_result.trends == []  # two values are a pair
    assert len(sweep_result.pairs) == 6 and {pair.difference.method for pair in sweep_result.pairs} == {"paired"}
    for pair in sweep_result.pairs:
        differs = ("num_heads=4" in pair.first) != ("num_heads=4" in pair.second)
        assert pair.better is None or (differs and "num_heads=4" in pair.better)
        assert pair.interval.low < pair.difference.value < pair.interval.high and pair.p <= pair.p_holm


def test_groups_by_one_key_are_paired_by_all_others(folder):
    result = comparison.compare(runs.read([str(folder)]), by=["model.num_heads"])
    assert [one.name for one in result.configurations] == ["num_heads=4", "num_heads=2"]
    (pair,) = result.pairs
    assert (pair.difference.method, pair.difference.count, pair.better, pair.same) == ("paired", 6, "num_heads=4", "no")
    for test, df in (("welch", None), ("pooled", 10.0)):  # 12 runs of 2 configurations
        (unpaired,) = comparison.compare(runs.read([str(folder)]), by=["model.num_heads"], test=test).pairs
        assert unpaired.difference.method.lower() == test and df in (None, unpaired.difference.df)
        assert unpaired.difference.value == pytest.approx(pair.difference.value)
    assert any(mentions(note, "--by", "model.depth") for note in result.notes)


def test_keys_that_differ_only_between_groups_do_not_prevent_pairing(tmp_path):
    """Heads at fixed total width: the value dimension follows from the heads, and is not named in --by."""
    for heads in (2, 4):
        for seed in range(3):
            value, changes = 0.5 + 0.01 * heads + 0.1 * seed, {"model.num_heads": heads, "model.value_dim": 16 // heads}
            fake_runs.write_run(tmp_path / f"{heads}-{seed}", value, seed=seed, changes=changes)
    (pair,) = comparison.compare(runs.read([str(tmp_path)]), by=["model.num_heads"]).pairs
    assert pair.difference.method == "paired" and pair.difference.value == pytest.approx(0.02)


def test_equal_configurations_with_enough_seeds_are_within_the_margin(tmp_path):
    fake_runs.write_sweep(tmp_path / "s", depths=(2,), seeds=8, effect=0.0, spread=0.001)
    (pair,) = comparison.compare(runs.read([str(tmp_path / "s")]), margin=0.01).pairs
    assert (pair.same, pair.better) == ("yes", None)
    (wide,) = comparison.compare(runs.read([str(tmp_path / "s")]), margin=1e-4).pairs
    assert wide.same == "inconclusive" and wide.runs_to_equate > 8 and wide.runs_to_differ > 8


def write_trade(folder, noise):
    """Write runs of 2, 4 and 8 heads at one total width: 2 points per doubling, and 10 per seed; return the rows."""
    rows = []
    for heads in (2, 4, 8):
        for seed in range(2):
            value = 0.5 + 0.02 * np.log2(heads) + 0.1 * seed + noise * (-1) ** (heads // 4 + seed)
            changes = {"model.num_heads": heads, "model.head_dim": 64 // heads}
            fake_runs.write_run(folder / f"n={heads},seed={seed}", float(value), seed=seed, changes=changes)
            rows.append((np.log2(heads), value, seed))
    return np.array(rows).T


def test_trend_is_the_slope_per_doubling_with_a_level_for_each_seed(tmp_path):
    x, y, seed = write_trade(tmp_path, 0.003)
    result = comparison.compare(runs.read([str(tmp_path)]))
    (trend,) = result.trends
    assert (trend.key, trend.low, trend.high) == ("model.num_heads", 2, 8)
    assert trend.moving == {"model.head_dim": (32, 8)} and trend.params == 4
    design = np.stack([x, seed == 0, seed == 1], axis=1)
    slope, *_ = np.linalg.lstsq(design, y, rcond=None)[0]
    residual = y - design @ np.linalg.lstsq(design, y, rcond=None)[0]
    error = np.sqrt(residual @ residual / 3 * np.linalg.inv(design.T @ design)[0, 0])
    assert (trend.slope.value, trend.slope.error, trend.slope.df) == pytest.approx((slope, error, 3), rel=1e-9)
    half = error * stats.t.ppf(0.975, 3)
    line, low, high = report.headline(result)[0], 100 * (slope - half), 100 * (slope + half)
    assert mentions(line, "num_heads", f"+{100 * slope:.2f}", f"{low:.2f} to {high:.2f}")
    assert mentions(line, "head_dim goes from 32 to 8", "4 times the parameters")
    for i in range(2):  # then only 8 and 16 heads differ in nothing else
        fake_runs.write_run(tmp_path / f"n=16,seed={i}", seed=i, changes={"model.num_heads": 16, "model.head_dim": 8})
    assert comparison.compare(runs.read([str(tmp_path)])).trends == []


def test_trend_in_a_grid_compares_runs_that_are_equal_in_other_keys(tmp_path):
    """The better depth lacks 8 heads: parameters are compared at the other."""
    for depth, n in ((4, 2), (4, 4), (4, 8), (12, 2), (12, 4)):
        value, changes = 0.5 + 0.05 * np.log2(n) + 0.01 * depth, {"model.depth": depth, "model.num_heads": n}
        for seed in range(3):
            fake_runs.write_run(tmp_path / f"{depth},{n},{seed}", value, seed=seed, changes=changes)
    (trend,) = comparison.compare(runs.read([str(tmp_path)])).trends
    assert trend.key == "model.num_heads" and trend.slope.value == pytest.approx(0.05) and trend.params == 4


@pytest.mark.parametrize("higher", [True, False])
@pytest.mark.parametrize("reverse", [True, False])
def test_front_omits_configurations_that_a_cheaper_one_equals(higher, reverse, tmp_path):
    points = {"a": (1, 3), "b": (2, 3), "c": (2, 2), "d": (4, 5), "e": (4, 4), "f": (7, 5), "g": (8, 6)}
    run = runs.read([str(fake_runs.write_run(tmp_path / "run"))]).runs[0]
    made = []
    for name, (cost, score) in points.items():
        value = score if higher else -score
        made.append(Configuration(name, {}, [dataclasses.replace(run, value=value, summary={"params": cost})], {}))
    assert frontier.pareto_front(made[::-1] if reverse else made, higher, "params") == ["a", "d", "g"]


def test_means_are_shown_with_half_of_students_interval(sweep_result):
    for one in sweep_result.configurations:
        half = stats.t.ppf(0.975, len(one.scores) - 1) * one.scores.std(ddof=1) / np.sqrt(len(one.scores))
        mean, shown_half = map(float, report.with_interval(one, "{:.12f}".format).split(" ± "))
        assert mean == pytest.approx(one.scores.mean(), abs=1e-9) and shown_half == pytest.approx(half, rel=1e-6)
    one = sweep_result.configurations[0]
    run = one.runs[0]
    assert comparison.median_cost(one, "flops") == run.summary["train_flops"] * 100 * run.keys["batch_size"]


def test_lower_is_better_for_error_scores(tmp_path):
    for n, value in ((2, 0.5), (4, 0.2)):
        for seed in range(3):
            name, changes = f"{n}_seed{seed}", {"model.num_heads": n}
            fake_runs.write_run(tmp_path / name, value + seed * n / 1000, seed=seed, changes=changes, score="error")
    result = comparison.compare(runs.read([str(tmp_path)]))
    assert [one.name for one in result.configurations] == ["4", "2"] and not result.score.higher
    text = report.describe_pair(result, result.pairs[0])
    assert text.startswith("4 beats 2 by 0.2") and "-" not in text and mentions(text, "2 times")
    loss = comparison.compare(runs.read([str(tmp_path)], "loss"))
    assert loss.score.name == "loss" and [one.name for one in loss.configurations] == ["2", "4"]


@pytest.mark.parametrize(
    ("task", "key", "metric", "parts"),
    [
        ("language", "data.tokenizer", "loss", ["data.tokenizer", "first", "second", "--metric=bits_per_byte:lower"]),
        ("language", "data.tokenizer", "bits_per_byte:lower", None),
        ("language", "model.max_length", "bits_per_byte:lower", ["model.max_length", "first", "second"]),
        ("points", "data.dim", "loss", ["data.dim", "first", "second"]),
        ("sequences", "data.recipe.contour", None, ["data.recipe.contour", "first", "second"]),
        ("images", "loss", "loss", ["loss", "first", "second"]),
        ("images", "loss", None, None),
    ],
)
def test_incomparable_metrics_are_refused(task, key, metric, parts, tmp_path):
    """Nats per token depend on the tokenizer, errors on the size of sets, losses on the loss function, and 9
    rows on their length."""
    score = "bits_per_byte" if metric == "bits_per_byte:lower" else "top1"
    for seed, value in enumerate(("first", "second")):
        workdir = fake_runs.write_run(tmp_path / f"run{seed}", 0.5, seed=seed, score=score)
        content = json.loads((workdir / "config.json").read_text())
        content["config"]["task"] = task
        content["config"]["data"]["tokenizer"] = "bpe:9"
        content["config"]["eval"]["examples"] = 9 * (key == "model.max_length")
        *sections, name = key.split(".")
        functools.reduce(lambda part, section: part.setdefault(section, {}), sections, content["config"])[name] = value
        (workdir / "config.json").write_text(json.dumps(content))
    if parts is None:
        assert len(runs.read([str(tmp_path)], metric).runs) == 2
    else:
        with refuses(*parts, "run0", "run1"):
            runs.read([str(tmp_path)], metric)


def test_condition_numbers_are_correlated_with_the_score(tmp_path):
    folder = fake_runs.write_sweep(tmp_path / "s", depths=(2,), heads=(1, 2, 4, 8, 16), seeds=2)
    (measured,) = frontier.list_conditioning(comparison.compare(runs.read([str(folder)])))
    assert measured.measure == "attention_output" and measured.rho == pytest.approx(-1)
    assert measured.by_layer["num_heads=8"] == pytest.approx([1e4 / 8] * 2)
    assert measured.numbers["num_heads=8"] == pytest.approx(1e4 / 8)
    assert measured.interval.low == -1 and -0.5 < measured.interval.high < 0  # five configurations say little


def test_runs_that_differ_in_memory_and_further_splits_are_one_configuration(tmp_path):
    other = {"eval.more": {"own": {"split": "train", "every": 9}}, "model.remat": "block", "model.unroll": 2}
    for seed, changes in enumerate(({}, other)):
        fake_runs.write_run(tmp_path / f"{seed}", seed=seed, changes=changes)
    (one,) = comparison.compare(runs.read([str(tmp_path)])).configurations
    assert len(one.runs) == 2


def test_configurations_with_other_seeds_are_named(tmp_path):
    for seed in range(2):
        fake_runs.write_run(tmp_path / f"{seed}", seed=seed, changes={"model.depth": 2 + seed})
    assert mentions(" ".join(comparison.compare(runs.read([str(tmp_path)])).notes), "other seeds")


def test_keys_that_differ_are_named_beside_folders(tmp_path):
    for name, steps in (("short", 60), ("long", 300)):
        fake_runs.write_run(tmp_path / name, changes={"total_steps": steps})
    assert mentions(run_compare(tmp_path, f"--out={tmp_path / 'out'}")[1], "Configurations differ in total_steps.")


def test_run_that_was_extended_is_named(tmp_path):
    for seed in range(2):
        fake_runs.write_run(tmp_path / f"run{seed}", seed=seed)
    files.write_json(file := tmp_path / "run1" / "config.json", files.read_json(file) | {"changed": ["total_epochs"]})
    (note,) = comparison.compare(runs.read([str(tmp_path)])).notes
    assert mentions(note, "run1", "total_epochs") and "run0" not in note


def test_all_files_are_written_and_need_no_network(folder, tmp_path):
    status, out, err = run_compare(folder, f"--out={tmp_path / 'out'}", "--margin=0.02")
    assert (status, err) == (0, "") and mentions(out, tmp_path / "out" / "compare.html")
    check_page("compare", out, [folder, tmp_path])
    page = (tmp_path / "out" / "compare.html").read_text()
    check_page("compare_html", extract_text(page), [folder, tmp_path])
    # 4 costs, 2 curves, scores, differences, condition numbers by layer and against the score
    assert page.count("<svg") == 10 and "prefers-color-scheme: dark" in page and "$body" not in page
    assert "http" not in page and "<script" not in page and not re.findall(r"src=\"(?!data:)", page)
    ids = re.findall(r"\bid=\"([^\"]*)\"", page)
    assert len(ids) == len(set(ids)) and set(re.findall(r"href=\"#([^\"]*)", page)) <= set(ids)
    content = json.loads((tmp_path / "out" / "compare.json").read_text())
    assert content["margin"] == 0.02 and len(content["pairs"]) == 6
    assert content["fronts"].keys() == comparison.COST_METRICS.keys()
    assert len([*(tmp_path / "out").glob("*.png")]) == 10


def test_single_run_has_a_page_with_curves_and_conditioning(folder, tmp_path):
    workdir = sorted(folder.iterdir())[0]
    status, out, _ = run_compare(workdir, f"--out={tmp_path}")
    page = (tmp_path / "compare.html").read_text()
    assert status == 0 and mentions(out, "1 run ", "WARNING") and "<h2>Differences" not in page
    assert page.count("<svg") == 4 and "Conditioning" in page  # score, two curves, layers


def test_other_numbers_of_evaluation_examples_are_noted(tmp_path):
    for seed in range(2):
        path = fake_runs.write_run(tmp_path / f"g{seed}", 0.5 + seed / 10, seed=seed) / "summary.json"
        path.write_text(path.read_text().replace('"examples": 2000', f'"examples": {2000 - seed}'))
    (note,) = comparison.compare(runs.read([str(tmp_path)])).notes
    assert mentions(note, 2000, 1999)


@pytest.mark.parametrize("name", ["q{}_seed0", "made,n={},seed=0"])
def test_configurations_are_named_by_what_differs_in_their_folders(name, tmp_path):
    for heads in ((4, 8), (4, 12)):
        folder = tmp_path / name.format(str(heads).replace(" ", ""))
        fake_runs.write_run(folder, changes={"model.depth": 2, "model.num_heads": heads})
    result = comparison.compare(runs.read([str(tmp_path)]))
    expected = {"q{}_seed0": {"q(4,8)", "q(4,12)"}, "made,n={},seed=0": {"n=(4,8)", "n=(4,12)"}}[name]
    assert {one.name for one in result.configurations} == expected


def test_excluded_runs_of_a_sweep_are_named(tmp_path):
    fake_runs.write_run(tmp_path / "s" / "a", seed=0)
    fake_runs.write_run(tmp_path / "s" / "b", seed=1, ended=False)
    fake_runs.write_run(tmp_path / "s" / "c", None, seed=2)
    (tmp_path / "s" / "logs").mkdir()
    status, out, _ = run_compare(tmp_path / "s")
    assert status == 0
    check_page("compare_left_out", out, [tmp_path])
    content = json.loads((tmp_path / "s" / "compare" / "compare.json").read_text())
    assert mentions(" ".join(content["warnings"]), "s/b", "s/c")


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["S", "S"], ["--out=DIR", 2]),
        (["S", "--by=num_heads"], ["--by=num_heads"]),
        (["S", "--metric=top9:higher"], ["--metric=top9", "S", "top1", "loss"]),
        (["S", "--against=x"], ["--against=x", "depth=2,num_heads=4"]),
        (["S", "--margin=5"], ["--margin=5", "below 1", "0.01"]),  # of a fraction
        (["E"], ["E", "config.json"]),
        (["S", "other", "--out=E"], ["data.name", "synthetic"]),
        (["other", "copy", "--out=E"], ["other", "copy", "seed"]),
    ],
)
def test_arguments_and_runs_that_cannot_be_compared_are_refused(words, parts, folder, tmp_path):
    (tmp_path / "empty").mkdir()
    paths = {"S": folder, "E": tmp_path / "empty"} | {name: tmp_path / name for name in ("unfinished", "other", "copy")}
    fake_runs.write_run(paths["unfinished"], ended=False)
    for name in ("other", "copy"):
        fake_runs.write_run(paths[name], changes={"data.name": "synthetic"})
    arguments, expected = ([paths.get(item, item) for item in items] for items in (words, parts))
    check_refused(["", "", "leanformer.compare", *arguments], *expected)
    assert not [*paths["E"].iterdir()]
