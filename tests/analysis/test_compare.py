"""Compare command: groups, pairs, Pareto fronts and pages, and refusal of runs that cannot be compared."""

import html
import json
import re
import time
import types

import fake_runs
import numpy as np
import pytest
from commands import check_refused, run_in_process
from golden import check_page
from messages import mentions, refuses
from scipy import stats

from leanformer import quantities
from leanformer.analysis import comparison, frontier, runs
from leanformer.conditioning import measures
from leanformer.errors import WorkdirError
from leanformer.reports import comparison as reports
from leanformer.reports.comparison import charts, tables


def run_compare(*words):
    return run_in_process(["", "", "leanformer.compare", *map(str, words)])


def extract_text(page):
    """Return the text of a page as a reader sees it, a line per element, without that in plots."""
    page = re.sub(r"<(style|title|svg|script)\b.*?</\1>", "", page, flags=re.DOTALL)
    return "\n".join(line for line in re.sub(r"<[^>]*>", "\n", page).splitlines() if line.strip())


@pytest.fixture(autouse=True)
def few_pages(monkeypatch):
    """Write no pages of runs, each of which takes a second. Tests of links set MOST_PAGES themselves."""
    monkeypatch.setattr(reports, "MOST_PAGES", 0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return fake_runs.write_sweep(tmp_path_factory.mktemp("sweep") / "s")


@pytest.fixture(scope="module")
def sweep_result(folder):
    return comparison.compare(runs.read([str(folder)]))


def test_runs_are_grouped_by_differing_keys_except_the_seed(sweep_result):
    assert {shape.name for shape in sweep_result.shapes} == {f"depth={d},num_heads={n}" for d in (2, 3) for n in (2, 4)}
    assert all(set(shape.keys) == {"model.depth", "model.num_heads"} for shape in sweep_result.shapes)
    assert [shape.mean for shape in sweep_result.shapes] == sorted(
        (shape.mean for shape in sweep_result.shapes), reverse=True
    )
    best = sweep_result.shapes[0]
    assert best.mean == pytest.approx(np.mean([run.summary["final"]["top1"] for run in best.runs]))


def test_pairs_are_matched_by_seed_and_name_the_better(sweep_result):
    assert len(sweep_result.pairs) == 6 and {pair.difference.method for pair in sweep_result.pairs} == {"paired"}
    for pair in sweep_result.pairs:
        differs = ("num_heads=4" in pair.first) != ("num_heads=4" in pair.second)
        assert pair.better is None or (differs and "num_heads=4" in pair.better)
        assert (pair.difference.value > 0) and pair.interval.low < pair.difference.value < pair.interval.high
        assert pair.simultaneous_interval.low < pair.interval.low and pair.p <= pair.p_holm


def test_groups_by_one_key_are_paired_by_all_others(folder):
    result = comparison.compare(runs.read([str(folder)]), by=["model.num_heads"])
    assert [shape.name for shape in result.shapes] == ["num_heads=4", "num_heads=2"]
    (pair,) = result.pairs
    assert (pair.difference.method, pair.difference.count, pair.better, pair.same) == ("paired", 6, "num_heads=4", "no")
    (unpaired,) = comparison.compare(runs.read([str(folder)]), by=["model.num_heads"], test="welch").pairs
    assert unpaired.difference.method == "Welch" and unpaired.difference.value == pytest.approx(pair.difference.value)
    assert any(mentions(note, "--by", "model.depth") for note in result.notes)
    assert tables.shapes(result)[0][1] == "runs" and tables.shapes(result)[1][0][1] == "6"


def test_keys_that_differ_only_between_groups_do_not_prevent_pairing(tmp_path):
    """Heads at fixed total width: the value dimension follows from the heads, and is not named in --by."""
    for heads in (2, 4):
        for seed in range(3):
            value, changes = 0.5 + 0.01 * heads + 0.1 * seed, {"model.num_heads": heads, "model.value_dim": 16 // heads}
            fake_runs.write_run(tmp_path / f"{heads}-{seed}", value, seed=seed, changes=changes)
    (pair,) = comparison.compare(runs.read([str(tmp_path)]), by=["model.num_heads"]).pairs
    assert pair.difference.method == "paired" and pair.difference.value == pytest.approx(0.02)


def test_only_keys_that_differ_within_a_configuration_are_reported_as_pooled(folder):
    for by in ((), ["model.depth", "model.num_heads"]):
        assert comparison.compare(runs.read([str(folder)]), by=by).notes == []


def test_equal_condition_numbers_are_plotted_without_warnings(tmp_path):
    """Warnings are errors in the tests; Matplotlib warns of an axis without extent."""
    for depth, steps in ((2, (3, 6)), (3, (3, 6, 9, 12))):
        fake_runs.write_run(tmp_path / str(depth), changes={"model.depth": depth}, steps=steps)
    result = comparison.compare(runs.read([str(tmp_path)]))
    ((low, high),) = (axes.get_xlim() for axes in charts.conditioned(result, frontier.score_correlations(result)).axes)
    assert low < 100 < high


def test_pooled_variance_needs_fewer_seeds(folder):
    data = runs.read([str(folder)])
    welch, pooled = (comparison.compare(data, test=test).pairs for test in ("welch", "pooled"))
    assert {pair.difference.df for pair in pooled} == {8.0}  # 12 runs of 4 shapes
    assert sum(pair.better is not None for pair in pooled) >= sum(pair.better is not None for pair in welch)
    for a, b in zip(welch, pooled, strict=True):
        assert a.difference.value == pytest.approx(b.difference.value) and a.difference.df <= 4


def test_one_seed_is_inconclusive(tmp_path):
    fake_runs.write_sweep(tmp_path / "s", depths=(2,), seeds=1, effect=0.0)
    status, out, _ = run_compare(tmp_path / "s")
    assert status == 0
    check_page("compare_one_seed", out, [tmp_path])
    content = json.loads((tmp_path / "s" / "compare" / "compare.json").read_text())
    (pair,) = content["pairs"]
    assert (pair["within_margin"], pair["better"], pair["seeds_needed"]) == ("inconclusive", None, None)


def test_equal_shapes_with_enough_seeds_are_within_the_margin(tmp_path):
    fake_runs.write_sweep(tmp_path / "s", depths=(2,), seeds=8, effect=0.0, spread=0.001)
    (pair,) = comparison.compare(runs.read([str(tmp_path / "s")]), margin=0.01).pairs
    assert (pair.same, pair.better) == ("yes", None)
    (wide,) = comparison.compare(runs.read([str(tmp_path / "s")]), margin=1e-4).pairs
    assert wide.same == "inconclusive" and wide.needed > 8 and mentions(wide.verdict, wide.needed)


def test_pareto_fronts_hold_undominated_shapes(sweep_result):
    """A shape is on a front if no other costs as little and scores as high."""
    for metric in frontier.COST_METRICS:
        front = frontier.pareto_front(sweep_result.shapes, True, metric)
        points = {s.name: (frontier.median_cost(s, metric), s.mean) for s in sweep_result.shapes}
        dominated = {
            a
            for a, (cost, mean) in points.items()
            for b, (c, m) in points.items()
            if b != a and c <= cost and m >= mean
        }
        assert set(front) == points.keys() - dominated and front == sorted(front, key=lambda name: points[name][0])
    shape = sweep_result.shapes[0]
    run = shape.runs[0]
    assert frontier.median_cost(shape, "flops") == run.summary["train_flops"] * 100 * run.keys["batch_size"]


@pytest.mark.parametrize("higher", [True, False])
def test_front_omits_shapes_that_a_cheaper_one_equals(higher, no_shape_checks):
    points = {"a": (1, 3), "b": (2, 3), "c": (2, 2), "d": (4, 5), "e": (4, 4), "f": (7, 5), "g": (8, 6)}

    def make_shape(name, price, score):
        run = types.SimpleNamespace(cost=lambda name: {"params": price}.get(name))
        return types.SimpleNamespace(name=name, mean=score if higher else -score, runs=[run])

    shapes = [make_shape(name, *point) for name, point in points.items()]
    for order in (shapes, shapes[::-1]):
        assert frontier.pareto_front(order, higher, "params") == ["a", "d", "g"]


def test_means_are_shown_with_half_of_students_interval(sweep_result):
    for shape in sweep_result.shapes:
        scores = np.array([run.summary["final"]["top1"] for run in shape.runs])
        half = stats.t.ppf(0.975, len(scores) - 1) * scores.std(ddof=1) / np.sqrt(len(scores))
        mean, shown_half = map(float, tables.with_interval(shape, "{:.12f}".format).split(" ± "))
        assert mean == pytest.approx(scores.mean(), abs=1e-9) and shown_half == pytest.approx(half, rel=1e-6)


def test_lower_is_better_for_error_scores(tmp_path):
    for n, value in ((2, 0.3), (4, 0.2)):
        for seed in range(3):
            changes = {"model.num_heads": n}
            fake_runs.write_run(
                tmp_path / f"{n}_seed{seed}", value + seed / 1000, seed=seed, changes=changes, score="error"
            )
    result = comparison.compare(runs.read([str(tmp_path)]))
    assert [shape.name for shape in result.shapes] == ["4", "2"] and not result.score.higher
    loss = comparison.compare(runs.read([str(tmp_path)], "loss"))
    assert loss.score.name == "loss" and [shape.name for shape in loss.shapes] == ["2", "4"]


@pytest.mark.parametrize(
    ("task", "key", "metric", "parts"),
    [
        ("language", "data.tokenizer", "loss", ["data.tokenizer", "first", "second", "--metric=bits_per_byte:lower"]),
        ("language", "data.train_split", "loss", ["data.tokenizer", "first", "second", "--metric=bits_per_byte:lower"]),
        ("language", "model.vocabulary", "loss", None),
        ("masked", "data.separator", "loss", ["data.separator", "first", "second"]),
        ("language", "data.tokenizer", "bits_per_byte:lower", None),
        ("points", "data.dim", "loss", ["data.dim", "first", "second"]),
        ("images", "loss", "loss", ["loss", "first", "second"]),
        ("images", "loss", None, None),
    ],
)
def test_incomparable_metrics_are_refused(task, key, metric, parts, tmp_path):
    """Nats per token depend on the tokenizer, errors on the size of sets, and losses on the loss function."""
    score = "bits_per_byte" if metric == "bits_per_byte:lower" else "top1"
    for seed, value in enumerate(("first", "second")):
        workdir = fake_runs.write_run(tmp_path / f"run{seed}", 0.5, seed=seed, score=score)
        content = json.loads((workdir / "config.json").read_text())
        content["config"]["task"] = task
        content["config"]["data"]["tokenizer"] = "bpe:9"
        section, _, name = key.rpartition(".")
        (content["config"][section] if section else content["config"])[name] = value
        (workdir / "config.json").write_text(json.dumps(content))
    if parts is None:
        assert len(runs.read([str(tmp_path)], metric).runs) == 2
    else:
        with refuses(*parts, "run0", "run1"):
            runs.read([str(tmp_path)], metric)


def test_condition_numbers_are_correlated_with_the_score(tmp_path):
    folder = fake_runs.write_sweep(tmp_path / "s", depths=(2,), heads=(1, 2, 4, 8, 16), seeds=2)
    (correlation,) = frontier.score_correlations(comparison.compare(runs.read([str(folder)])))
    assert correlation.measure == "attention_output" and correlation.rho == pytest.approx(-1)
    assert (
        correlation.numbers["num_heads=8"] == pytest.approx(1e4 / 8)
        and correlation.interval.low == -1
        and -0.5 < correlation.interval.high < 0  # five configurations say little
    )


def test_all_files_are_written_and_need_no_network(folder, tmp_path):
    status, out, err = run_compare(folder, f"--out={tmp_path / 'out'}", "--margin=0.02")
    assert (status, err) == (0, "") and mentions(out, tmp_path / "out" / "compare.html")
    check_page("compare", out, [folder, tmp_path])
    page = (tmp_path / "out" / "compare.html").read_text()
    check_page("compare_html", extract_text(page), [folder, tmp_path])
    # 4 costs, and one of scores, differences, curves, conditioning
    assert page.count("<svg") == 8 and "prefers-color-scheme: dark" in page
    assert "http" not in page and not re.findall(r"src=\"(?!data:)", page)
    assert len(re.findall(r"<title>depth=\d,num_heads=\d: [\d.]+ ± [\d.]+", page)) >= 4  # shown on hover
    ids = re.findall(r"\bid=\"([^\"]*)\"", page)
    assert len(ids) == len(set(ids)) and set(re.findall(r"href=\"#([^\"]*)", page)) <= set(ids)
    content = json.loads((tmp_path / "out" / "compare.json").read_text())
    assert content["margin"] == 0.02 and len(content["pairs"]) == 6
    assert content["fronts"].keys() == frontier.COST_METRICS.keys()
    plots = {path.stem for path in (tmp_path / "out").glob("*.png")}
    assert plots == {"scores", "differences", "fronts", "curves", "conditioning"}


def test_configurations_have_links_to_the_pages_of_their_runs(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(reports, "MOST_PAGES", 4)  # the best configuration; a second would make 6 pages
    assert run_compare(folder, f"--out={tmp_path / 'out'}")[0] == 0
    page = (tmp_path / "out" / "compare.html").read_text()
    links = re.findall(r"href=\"([^#\"][^\"]*)\">seed (\d): [\d.]+<", page)
    assert [seed for _, seed in links] == ["0", "1", "2"]
    for link, seed in links:
        assert f"<h1>made,depth=3,num_heads=4,seed={seed}</h1>" in (tmp_path / "out" / link).read_text()


def test_headline_has_gain_interval_and_cost_in_words(sweep_result):
    text = tables.headline(sweep_result)
    pair = next(p for p in sweep_result.pairs if (p.first, p.second) == ("depth=3,num_heads=4", "depth=2,num_heads=2"))
    gain, low, high = (f"{100 * x:.2f}" for x in (pair.difference.value, pair.interval.low, pair.interval.high))
    assert mentions(text, f"{pair.first} beats {pair.second}", f"{gain} points", f"{low} to {high}", "3 times")
    head, rows = tables.pairs(sweep_result)
    for row, compared in zip(rows, sweep_result.pairs, strict=True):
        undecided = compared.better is None and compared.same == "inconclusive"
        assert row[head.index("verdict")].startswith("inconclusive") == undecided


def test_headline_shows_a_gain_of_the_lower_score_as_positive(tmp_path):
    for depth, value in ((2, 0.2), (3, 0.5)):
        for seed in range(3):
            noise = 0.001 * (seed + depth * seed)
            run = tmp_path / f"depth={depth},seed={seed}"
            fake_runs.write_run(run, value + noise, seed=seed, changes={"model.depth": depth}, score="error")
    result = comparison.compare(runs.read([str(tmp_path)]))
    (pair,) = result.pairs
    text = tables.describe_pair(result, pair)
    assert text.startswith("depth=2 beats depth=3 by 0.3") and "-" not in text and mentions(text, "0.67 times")


def test_other_evaluation_data_are_noted(tmp_path):
    for seed, examples in enumerate((64, 19, 64)):
        workdir = fake_runs.write_run(tmp_path / f"g{seed}", 0.5 + seed / 10, seed=seed)
        header = json.loads((workdir / "config.json").read_text())
        header["examples"] = {"t10k": examples, "train": 100 + seed}
        (workdir / "config.json").write_text(json.dumps(header))
    assert comparison.compare(runs.read([str(tmp_path / name) for name in ("g0", "g2")])).notes == []
    (note,) = comparison.compare(runs.read([str(tmp_path)])).notes
    assert mentions(note, "g0", "g1", "t10k")


@pytest.mark.parametrize("of_seed", [",seed=", "_seed", "-seed="])
def test_names_of_configurations_do_not_end_in_the_seed(of_seed, tmp_path):
    for name, depth in (("a", 1), ("b", 2)):
        for seed in range(2):
            fake_runs.write_run(tmp_path / f"{name}{of_seed}{seed}", seed=seed, changes={"model.depth": depth})
    result = comparison.compare(runs.read([str(tmp_path)]))
    assert {shape.name for shape in result.shapes} == {"a", "b"}


def test_names_of_sizes_by_layer_are_whole(tmp_path):
    for heads in ("(4,8)", "(4,12)", "(4,16)"):
        changes = {"model.depth": 2, "model.num_heads": tuple(map(int, heads[1:-1].split(",")))}
        fake_runs.write_run(tmp_path / f"q,num_heads={heads},seed=0", changes=changes)
    result = comparison.compare(runs.read([str(tmp_path)]))
    assert {shape.name for shape in result.shapes} == {"num_heads=(4,8)", "num_heads=(4,12)", "num_heads=(4,16)"}


@pytest.mark.parametrize("depth", [2, 3])
def test_page_of_a_run_has_shapes_by_layer(depth, tmp_path):
    workdir = fake_runs.write_run(tmp_path / "run", changes={"model.depth": depth})
    shapes = [[17, 16 * (i + 2)] for i in range(depth)]
    path = workdir / "metrics.jsonl"
    path.write_text(path.read_text().replace(json.dumps([[17, 96]] * depth), json.dumps(shapes)))
    run_compare(workdir, f"--out={tmp_path}")
    assert f"Here 17 x 32 to 17 x {16 * (depth + 1)}: rows" in (tmp_path / "run.html").read_text()


def test_names_are_escaped(tmp_path):
    for seed in range(2):
        fake_runs.write_run(tmp_path / f"a<b>&_seed{seed}", 0.5 + seed / 10, seed=seed)
        fake_runs.write_run(tmp_path / f"c_seed{seed}", 0.5 + seed / 10, seed=seed, changes={"model.depth": 2})
    result = comparison.compare(runs.read([str(tmp_path)]))
    reports.write(result, [], tmp_path / "out")
    page = (tmp_path / "out" / "compare.html").read_text()
    assert "a&lt;b&gt;&amp;" in page and "<b>" not in page


@pytest.mark.parametrize("name", ["a$x^$b", "_base", "$5", r"a\$b"])
def test_names_are_drawn_as_they_are(name, tmp_path):
    """A name is neither a formula, which may be invalid, nor left out of the legend."""
    for seed in range(2):
        fake_runs.write_run(tmp_path / f"{name},seed={seed}", 0.5 + seed / 10, seed=seed)
        fake_runs.write_run(tmp_path / f"other,seed={seed}", 0.5 + seed / 10, seed=seed, changes={"model.depth": 2})
    figure = charts.curves(comparison.compare(runs.read([str(tmp_path)])))
    figure.draw_without_rendering()
    (legend,) = figure.legends
    shown = [text._preprocess_math(text.get_text()) for text in legend.get_texts()]
    assert sorted((words.strip(), formula) for words, formula in shown) == sorted([(name, False), ("other", False)])


def test_page_of_a_single_run(folder, tmp_path):
    workdir = sorted(folder.iterdir())[0]
    (workdir / "confusion.csv").write_text("label \\ taken for,cat,dog\ncat,5,1\ndog,2,3\n")
    (workdir / "evaluation.json").write_text('{"step": 7, "split": "pets, train"}')
    status, out, _ = run_compare(workdir, f"--out={tmp_path}")
    page = (tmp_path / "run.html").read_text()
    for name in ("confusion.csv", "evaluation.json"):
        (workdir / name).unlink()
    assert status == 0
    check_page("compare_run", out, [folder, tmp_path])
    check_page("compare_run_html", extract_text(page).partition("\nkey\n")[0], [folder, tmp_path])  # not every key
    assert mentions(page, "pets, train", 7, f"--workdir={workdir}", "model.num_heads")
    assert page.count("<svg") == 6  # loss, accuracy, rate, confusion, layers, steps
    explained = (quantities.CONDITION.what, measures.quantity("attention_output").what, quantities.find("top1").what)
    assert all(html.escape(words) in page for words in explained)


@pytest.mark.parametrize("flag", ["--by=nonsense", "--margin=-1", "--against=nobody"])
def test_flags_are_checked_for_a_single_run(folder, flag, tmp_path):
    words = ["", "", "leanformer.compare", str(sorted(folder.iterdir())[0]), f"--out={tmp_path}", flag]
    check_refused(words, flag)


def test_slash_at_the_end_of_a_folder_is_no_other_data(tmp_path):
    folder = fake_runs.write_sweep(tmp_path / "s")
    for number, workdir in enumerate(sorted(folder.iterdir())):
        header = json.loads((workdir / "config.json").read_text())
        header["config"]["data"]["name"] = "folder:data/pets" + "/" * (number % 2)
        (workdir / "config.json").write_text(json.dumps(header))
    result = comparison.compare(runs.read([str(folder)]))
    assert all("data.name" not in shape.keys for shape in result.shapes)


def test_table_of_forty_shapes_is_shortened(tmp_path):
    fake_runs.write_sweep(tmp_path / "s", depths=(1, 2, 3, 4, 5), heads=(1, 2, 3, 4, 6, 8, 12, 16), seeds=2)
    start = time.process_time()
    result = comparison.compare(runs.read([str(tmp_path / "s")]))
    text = tables.format_text(result, [])
    assert len(result.pairs) == 40 * 39 // 2 and mentions(text, 80, 40, 20, "compare.json")
    assert time.process_time() - start < 20  # 780 pairs; a second or two


@pytest.mark.parametrize(
    ("given", "parts"),
    [
        ({"task": "sequences"}, ["task", "images", "sequences", "run_a", "run_b"]),
        ({"score": "error"}, ["top1", "run_a", "error", "run_b", "--metric=NAME"]),
        ({"changes": {"data.name": "synthetic"}}, ["data.name", "bundled:fashion_mnist", "synthetic", "run_a"]),
        ({"ended": False}, ["run_b", "summary.json"]),
        ({"seed": 0}, ["run_a", "run_b", "seed"]),
    ],
)
def test_incomparable_runs_are_refused(given, parts, tmp_path):
    words = [fake_runs.write_run(tmp_path / "run_a"), fake_runs.write_run(tmp_path / "run_b", **{"seed": 1, **given})]
    check_refused(["", "", "leanformer.compare", *words, f"--out={tmp_path / 'out'}"], *parts)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("name", "text", "parts"),
    [
        ("summary.json", "{", []),
        ("summary.json", '{"final": 3}', ["final", "params"]),
        ("metrics.jsonl", "x\n", [1]),
        ("metrics.jsonl", "", []),
        ("config.json", "[]", []),
    ],
)
def test_broken_files_are_refused(name, text, parts, tmp_path):
    (fake_runs.write_run(tmp_path / "run") / name).write_text(text)
    with refuses(tmp_path / "run" / name, *parts, error=WorkdirError):
        runs.read([str(tmp_path / "run")])


def test_excluded_runs_of_one_name_are_all_named(tmp_path):
    for depth, sweep in enumerate("st", 1):
        fake_runs.write_run(tmp_path / sweep / "a", changes={"model.depth": depth}, seed=0)
        fake_runs.write_run(tmp_path / sweep / "b", changes={"model.depth": depth}, seed=1, ended=False)
    left_out = comparison.compare(runs.read([str(tmp_path / sweep) for sweep in "st"])).left_out
    assert left_out.keys() == {str(tmp_path / sweep / "b") for sweep in "st"}


def test_excluded_runs_of_a_sweep_are_named(tmp_path):
    fake_runs.write_run(tmp_path / "s" / "a", seed=0)
    fake_runs.write_run(tmp_path / "s" / "b", seed=1, ended=False)
    fake_runs.write_run(tmp_path / "s" / "c", None, seed=2)
    status, out, _ = run_compare(tmp_path / "s")
    assert status == 0
    check_page("compare_left_out", out, [tmp_path])
    content = json.loads((tmp_path / "s" / "compare" / "compare.json").read_text())
    assert content["left_out"].keys() == {"b", "c"}
    check_page(
        "compare_left_out_html", extract_text((tmp_path / "s" / "compare" / "compare.html").read_text()), [tmp_path]
    )


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["S", "S"], ["--out=DIR", 2]),
        (["S", "S", "--out=O"], ["S"]),
        (["S", "--by=num_heads"], ["--by=num_heads", "model.num_heads"]),
        (["S", "--by=seed"], ["--by=seed"]),
        (["F"], ["F"]),
        (["S", "--metric=top9:higher"], ["--metric=top9", "S", "top1", "loss"]),
        (["S", "--metric=examples"], ["--metric=examples:higher"]),
        (["S", "--margin=0"], ["--margin=0", 0]),
        (["S", "--against=x"], ["--against=x", "depth=2,num_heads=4"]),
        (["O"], ["O"]),
        (["E"], ["E", "config.json"]),
    ],
)
def test_invalid_arguments_are_refused(words, parts, folder, tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "file.png").touch()
    paths = {"F": tmp_path / "file.png"}
    paths |= {"S": folder, "O": tmp_path / "out", "E": tmp_path / "empty", "--out=O": f"--out={tmp_path}"}
    arguments, expected = ([paths.get(item, item) for item in items] for items in (words, parts))
    check_refused(["", "", "leanformer.compare", *arguments], *expected)


def test_folders_that_are_no_runs_are_skipped(folder, tmp_path, capfd):
    """SWEEP/* has the sweep's own page, folder and files besides its runs."""
    (tmp_path / "compare").mkdir()
    (tmp_path / "log.txt").write_text("")
    given = [*map(str, sorted(folder.iterdir())), str(tmp_path / "compare"), str(tmp_path / "log.txt")]
    result = runs.read([path for path in given if "/compare" not in path or path.startswith(str(tmp_path))])
    assert len(result.runs) == len(runs.read([str(folder)]).runs)
    err = capfd.readouterr().err
    assert err.count("\n") == 1 and mentions(err, tmp_path / "compare", tmp_path / "log.txt")
    for alone in ("compare", "log.txt"):
        with refuses(tmp_path / alone):
            runs.read([str(tmp_path / alone)])
    with refuses(tmp_path / "nowhere"):
        runs.read([str(tmp_path / "nowhere"), str(folder)])
