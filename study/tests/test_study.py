"""The study's tuning rule, its table of runs and its rules of decision, on invented losses."""

import itertools
import json

import numpy as np
import pytest
from messages import refuses

from leanformer.errors import DataError
from study.heads import curves, gpt2, language, layers, verdicts, vision
from study.heads.language import BLOCKS, TUNING_SEED, Arm


def make_rows(losses, seeds=(0, 1, 2), noise=1e-4):
    """Return rows of runs with invented losses {block: {heads: loss}}; κ is least where the loss is."""
    rng = np.random.default_rng(0)
    return [
        {"block": block, "num_heads": heads, "seed": seed, "loss": loss + noise * rng.normal(), "log10_condition": loss}
        for block, by_heads in losses.items()
        for (heads, loss), seed in itertools.product(by_heads.items(), seeds)
    ]


def parabola(width, heads, best):
    """Return losses of a block whose best head dimension is `best`."""
    return {n: 3 + 0.05 * (np.log2(width / n) - np.log2(best)) ** 2 for n in heads}


def test_the_turn_is_the_minimum_and_a_missing_one_is_a_bound():
    loss = verdicts.read_values(make_rows({"A": parabola(128, (1, 2, 4, 8, 16, 32), 23)}), "A", "loss")
    turn = verdicts.find_turn(loss, 128)
    assert turn.value == pytest.approx(23, rel=0.02) and turn.low < turn.value < turn.high and not turn.bound
    assert turn.interval == f"{turn.low:.0f} to {turn.high:.0f}"


def test_a_turn_outside_the_range_is_a_bound():
    falling = {n: 3 - 0.01 * np.log2(n) for n in (1, 2, 4, 8)}
    turn = verdicts.find_turn(verdicts.read_values(make_rows({"A": falling}), "A", "loss"), 128)
    assert turn.value == pytest.approx(16) and turn.bound
    assert (turn.low, turn.high, turn.interval) == (0, pytest.approx(16), "at most 16")
    rising = {n: 3 + 0.01 * np.log2(n) for n in (1, 2, 4, 8)}
    turn = verdicts.find_turn(verdicts.read_values(make_rows({"A": rising}), "A", "loss"), 128)
    assert turn.bound and (turn.low, turn.high, turn.interval) == (pytest.approx(128), np.inf, "at least 128")
    hump = {1: 2.95, 2: 3.1, 4: 2.9, 8: 3.1, 16: 2.99}  # the parabola has no minimum, though an arm inside is lowest
    turn = verdicts.find_turn(verdicts.read_values(make_rows({"A": hump}), "A", "loss"), 16)
    assert turn.bound and turn.value == pytest.approx(16)


@pytest.mark.parametrize(
    ("large", "word"),
    [
        (parabola(256, (4, 8, 16, 32), 16), "holds"),
        ({n: 3 + 0.01 * np.log2(n) for n in (4, 8, 16, 32)}, "undecided"),  # at least 64, as at the smaller width
        ({n: 3 - 0.01 * np.log2(n) for n in (4, 8, 16, 32)}, "holds"),  # at most 8
    ],
)
def test_bounds_tell_widths_apart_only_where_they_do(large, word):
    small = {n: 3 + 0.01 * np.log2(n) for n in (1, 2, 4, 8, 16)}  # at least 64
    rows = make_rows({"F": small, "G": large})
    assert verdicts.width_moves_it({b: verdicts.read_values(rows, b, "loss") for b in "FG"}) == word


def test_turns_of_loss_and_conditioning_are_compared_as_far_as_bounds_allow():
    def turn(value, bound=False):
        return verdicts.Turn(value, value, value, bound)

    assert verdicts.coincide(turn(16.0), turn(24.0)) is True and verdicts.coincide(turn(16.0), turn(40.0)) is False
    assert verdicts.coincide(turn(128.0, True), turn(4.0, True)) is False
    assert verdicts.coincide(turn(64.0, True), turn(64.0, True)) is None
    assert verdicts.coincide(turn(64.0, True), turn(40.0)) is None


def test_conditioning_coincides_only_where_the_loss_turns():
    rising, heads = {n: 3 + 0.01 * np.log2(n) for n in (4, 8, 16, 32)}, (4, 8, 16, 32)
    dips = {block: parabola(BLOCKS[block].width, heads, BLOCKS[block].width / 11) for block in "AFG"}

    def judge(loss, kappa):
        values = ({b: verdicts.read_values(make_rows(x), b, "loss") for b in "AFG"} for x in (loss, kappa))
        return verdicts.conditioning_coincides(*values)

    assert judge(dips, dips) == "holds"
    assert judge(dips, dips | {"F": {n: -x for n, x in rising.items()}}) == "undecided"  # two of three
    falling = {b: {n: 4 - x for n, x in rising.items()} for b in "AFG"}
    assert judge(dips, falling) == "refuted" == judge(dict.fromkeys("AF", rising), falling)  # whatever G is
    assert judge({"A": dips["A"]}, dips) == "not run"


def test_doublings_are_judged_with_the_margin():
    rows = make_rows({"A": {1: 3.0, 2: 3.001, 4: 3.1, 8: 2.9}})
    judged = {pair: word for pair, (_, word) in verdicts.doublings(verdicts.read_values(rows, "A", "loss")).items()}
    assert judged[2, 4] == "worse" and judged[4, 8] == "better" and judged[1, 2] in ("equivalent", "worse")
    noisy = make_rows({"A": {1: 3.0, 2: 3.0}}, noise=0.05)
    assert verdicts.doublings(verdicts.read_values(noisy, "A", "loss"))[1, 2][1] == "inconclusive"


def test_rules_follow_the_runs():
    a = {1: 3.0, 2: 3.0, 4: 3.0, 8: 3.0, 16: 3.05, 32: 3.2}
    losses = {"A": a, "B": a, "C": {1: 3.0, 4: 3.0, 16: 3.0, 32: 3.0}, "D": {1: 3.0, 4: 3.0, 16: 3.0, 32: 3.2}}
    losses |= {"E": {8: 3.0, 16: 3.0, 32: 3.01}, "E2": {8: 2.98, 16: 3.0, 32: 3.15}}
    words = list(verdicts.verdicts(make_rows(losses)).values())
    assert words == ["holds", "holds", "refuted", "holds", "not run", "not run"]
    losses |= {"E": {8: 3.0, 16: 3.0, 32: 3.19}, "B": {8: 3.0, 32: 3.02}, "C": a, "A": a | {16: 3.0, 32: 3.0}}
    losses |= {"F": parabola(64, (1, 2, 4, 8, 16), 8), "G": parabola(256, (4, 8, 16, 32), 32)}
    words = list(verdicts.verdicts(make_rows(losses)).values())
    assert words[0] == "refuted" and words[4] == "holds" and "not run" not in words


def test_arms_are_named_by_block_and_heads():
    assert language.parse_arms("C") == [Arm("C", n) for n in (1, 4, 16, 32)]
    assert language.parse_arms("C:32") == [Arm("C", 32)]
    for text in ("Z", "C:8"):
        with refuses(f"--blocks={text}", "C with 1, 4, 16, 32 heads"):
            language.parse_arms(text)


def test_tuning_runs_are_in_no_estimate():
    rows = make_rows({"A": {1: 3.0}}) + make_rows({"A": {1: 9.0}}, seeds=(TUNING_SEED,))
    assert verdicts.read_values(rows, "A", "loss")[1].max() < 4
    assert not verdicts.read_values(rows[:2], "A", "loss")  # fewer than three seeds


def test_an_arm_in_progress_hides_no_other():
    rows = make_rows({"A": {1: 3.0, 2: 3.1}}) + make_rows({"A": {4: 3.2}}, seeds=(0,))
    assert set(verdicts.read_values(rows, "A", "loss")) == {1, 2}
    more = rows + make_rows({"A": {4: 3.2}}, seeds=(1, 2)) + make_rows({"A": {1: 3.3}}, seeds=(3,))
    assert {n: len(x) for n, x in verdicts.read_values(more, "A", "loss").items()} == {1: 3, 2: 3, 4: 3}


def test_tuning_tries_one_rate_beyond_an_edge():
    arm = Arm("A", 4)

    def rows(losses):
        return [
            {"block": "A", "num_heads": 4, "seed": TUNING_SEED, "lr": lr, "loss": loss} for lr, loss in losses.items()
        ]

    assert list(language.plan_tuning(arm, [])) == [2e-3, 4e-3, 8e-3]
    assert list(language.plan_tuning(arm, rows({2e-3: 3.0, 4e-3: 2.0}))) == [8e-3]
    assert list(language.plan_tuning(arm, rows({2e-3: 3.0, 4e-3: 2.0, 8e-3: 2.5}))) == []
    assert list(language.plan_tuning(arm, rows({2e-3: 3.0, 4e-3: 2.0, 8e-3: 1.5}))) == [16e-3]
    assert list(language.plan_tuning(arm, rows({2e-3: 3.0, 4e-3: 2.0, 8e-3: 1.5, 16e-3: 1.0}))) == []


def test_configs_keep_the_total_width_and_the_control_has_the_parameters_of_the_repair():
    for name in BLOCKS.keys() - {"E", "E2"}:
        for heads in BLOCKS[name].heads:
            m = language.get_config(Arm(name, heads), 1e-3, 0).model
            assert m.num_heads * m.head_dim == m.num_heads * m.value_dim == m.width == BLOCKS[name].width
    repaired, control = (language.get_config(Arm(name, 16), 1e-3, 0) for name in ("E", "E2"))
    assert (repaired.model.head_dim, repaired.model.value_dim) == (language.REPAIRED, 8)
    counts = [language.count_parameters(c) for c in (repaired, control)]
    assert abs(counts[0] - counts[1]) < language.DEPTH * (2 * control.model.width + 1)


def test_rows_are_read_as_written(tmp_path):
    row = dict.fromkeys(language.FIELDS, 1) | {"block": "A", "loss": "2.50000", "date": "2026-11-25T00:00Z"}
    for _ in range(2):
        language.append_row(row, tmp_path / "rows.csv")
    rows = language.read_rows(tmp_path / "rows.csv")
    assert len(rows) == 2 and rows[0]["loss"] == 2.5 and rows[0]["seed"] == 1 and rows[0]["date"].endswith("Z")


def test_curves_are_compared_at_one_rate_by_seed_and_step(tmp_path, monkeypatch):
    gap = {16: 0.2, 32: 0.3}
    rows = [
        {
            "num_heads": n,
            "lr": lr,
            "seed": seed,
            "step": step,
            "loss": 3 + seed - step / 1e3 + gap.get(n, 0) * seed + 9 * lr,
        }
        for n, seed, step in itertools.product((1, 16, 32), (0, 1, 2, TUNING_SEED), (100, 200))
        for lr in (curves.RATE, 2 * curves.RATE)
    ]
    rows += [row | {"num_heads": 4} for row in rows[:2]]  # one seed only
    behind = curves.behind(rows)
    assert {n: by_step[200].value for n, by_step in behind.items()} == pytest.approx(gap)
    assert list(behind[16]) == [100, 200] and behind[16][100].interval().contains(0.2)
    assert curves.behind(rows[-2:]) == {}

    run = {"block": "D", "num_heads": 32, "lr": 4e-3, "seed": 0, "steps": 100}
    monkeypatch.setattr(language, "read_rows", lambda: [run])
    with refuses(f"--runs={tmp_path}", "block D", error=DataError):
        curves.collect(tmp_path)
    workdir = tmp_path / "D-heads=32-lr=0.004-seed=0"
    workdir.mkdir()
    records = ({"kind": "train", "step": 100, "loss": 2.0}, {"kind": "eval", "step": 100, "loss": 1.0})
    (workdir / "metrics.jsonl").write_text("".join(f"{json.dumps(record)}\n" for record in records))
    (row,) = curves.collect(tmp_path)
    assert row == {"block": "D", "num_heads": 32, "lr": 4e-3, "seed": 0, "step": 100, "loss": "2.0000"}
    run["steps"] = 200  # begun again, and not finished
    with refuses(f"--runs={tmp_path}", error=DataError):
        curves.collect(tmp_path)


def make_layer_rows(losses, seeds=(0, 1, 2, 3, 4), noise=1e-4):
    rng = np.random.default_rng(0)
    by_layer = {"log10_condition": (1.0, 2.0), "attention_entropy": (3.0, 4.0)}
    return [
        {"block": name, "num_heads": 8, "seed": seed, "loss": loss + noise * rng.normal(), "lr": 4e-3} | by_layer
        for (name, loss), seed in itertools.product(losses.items(), seeds)
    ]


@pytest.mark.parametrize(
    ("losses", "word"),
    [
        ((2.9, 2.85, 2.95), "holds"),
        ((2.9, 2.9, 2.95), "refuted"),  # equivalent to uniform
        ((2.9, 2.95, 2.99), "refuted"),
        ((2.9, 2.85, 2.85), "undecided"),  # no better than decreasing
    ],
)
def test_heads_by_layer_are_judged_by_the_rule(losses, word):
    rows = make_layer_rows(dict(zip(layers.PRIMARY, losses, strict=True)))
    rows += make_layer_rows({"increasing": 9.0}, seeds=(TUNING_SEED,))
    judged = layers.compare(rows)
    assert layers.decide(judged) == word and len(judged) == 3
    difference, _ = judged["increasing", "uniform"]
    assert difference.value == pytest.approx(losses[1] - losses[0], abs=1e-3)
    assert layers.decide(layers.compare(rows[:10])) == "not run"
    text = "\n".join(layers.report(rows))
    assert word in text and "1.00  2.00" in text


def test_arms_by_layer_have_equal_parameters_and_mean_heads():
    for name, heads in layers.ARMS.items():
        c = layers.get_config(layers.make_arm(name), 4e-3, 1)
        total = {n * h for n, h in zip(heads, np.broadcast_to(c.model.head_dim, 6), strict=True)}
        assert total == {layers.WIDTH} and layers.make_arm(name).heads == 8
        assert language.count_parameters(c) == 1_271_808


def test_runs_by_layer_are_resumed_from_their_table(tmp_path):
    tried, path = [], tmp_path / "rows.csv"

    def run(arm, lr, seed, out):
        tried.append((lr, seed))
        about = {"block": arm.block, "num_heads": arm.heads, "heads": "4 8", "date": "today"}
        return dict.fromkeys(layers.FIELDS, 1) | about | {"lr": lr, "seed": seed, "loss": 3 + lr}

    study = language.Study(run, path, layers.FIELDS)
    for _ in range(2):
        language.finish_arm(layers.make_arm("increasing"), layers.SEEDS, tmp_path, study)
    assert tried == [(r, TUNING_SEED) for r in (2e-3, 4e-3, 8e-3, 1e-3)] + [(1e-3, seed) for seed in layers.SEEDS]
    rows = language.read_rows(path)
    assert rows[0]["heads"] == (4.0, 8.0)
    arm = layers.make_arm("increasing")
    language.record(arm, run(arm, 1e-3, 0, tmp_path), path, layers.FIELDS)  # as if another process had waited
    assert language.read_rows(path) == rows


def make_vision_rows(errors, width=48, epochs=5.0, seeds=(0, 1, 2, 3, 4), noise=1e-6):
    """Return rows of runs with invented errors {arm: error}."""
    rng = np.random.default_rng(0)
    arms = {name: vision.make_arm(name, width, epochs) for name in errors}
    return [
        {"block": arms[name].block, "num_heads": arms[name].heads, "width": width, "epochs": epochs, "seed": seed}
        | {"error": error + noise * rng.normal(), "log10_condition": 2.0, "params": 1000, "lr": 1e-3}
        for (name, error), seed in itertools.product(errors.items(), seeds)
    ]


@pytest.mark.parametrize(
    ("error", "noise", "word"),
    [
        (0.101, 1e-6, "holds"),
        (0.09, 1e-6, "holds"),  # better
        (0.104, 1e-6, "refuted"),
        (0.104, 0.01, "undecided"),
    ],
)
def test_the_trade_is_judged_by_the_margin(error, noise, word):
    errors = {"original": 0.1} | dict.fromkeys(list(vision.ARMS)[1:], error)
    rows = make_vision_rows(errors, noise=noise)
    judged = vision.compare(vision.read_errors(rows, 48, 5.0))
    assert {verdict for _, verdict in judged.values()} == {word} and len(judged) == 5
    if noise < 1e-3:
        assert judged["lean, MLP kept"][0].value == pytest.approx(1000 * error - 100, abs=0.01)  # percent of 0.1
    assert word in "\n".join(vision.report(rows))
    lean = [row for row in rows if not row["block"].startswith("layers")]
    assert list(vision.read_errors(rows[:-3], 48, 5.0)) == list(vision.ARMS)[:-1]  # the last control has two seeds
    assert not vision.read_errors(lean[:-3], 48, 5.0)  # the last lean arm has two seeds
    other = make_vision_rows(errors, epochs=15.0, seeds=(TUNING_SEED,))
    assert not vision.read_errors(other, 48, 15.0)


def test_added_heads_are_compared_with_the_same_layers_and_mlp():
    errors = dict(zip(vision.ARMS, (0.100, 0.098, 0.102, 0.101, 0.099, 0.104), strict=True))
    read = vision.read_errors(make_vision_rows(errors), 48, 5.0)
    changes = {name: change.value for name, change in vision.compare_heads(read).items()}
    expected = {"lean, MLP kept": -1.0, "lean, MLP halved": -2.0, "lean, fixed width": -3.0}
    assert changes == pytest.approx(expected, abs=0.01)
    assert set(vision.compare_heads({k: v for k, v in read.items() if k != "layers halved"})) == set(expected) - {
        "lean, MLP kept"
    }


def test_arms_of_the_trade_have_the_shapes_of_the_plan():
    shapes = {}
    for name in vision.ARMS:
        c = vision.get_config(name, 48, 5.0, 1e-3, 0, "bundled:fashion_mnist")
        m = c.model  # parameters counted by hand: 3,850 outside the layers
        shapes[name] = (m.depth, m.num_heads, m.head_dim, m.mlp_dim, language.count_parameters(c))
    assert shapes == {
        "original": (8, 3, 16, 192, 230_026),
        "lean, MLP kept": (4, 4, 16, 192, 129_418),
        "lean, MLP halved": (4, 4, 16, 96, 92_170),
        "lean, fixed width": (4, 6, 8, 96, 79_690),
        "layers halved": (4, 3, 16, 192, 116_938),
        "layers and MLP halved": (4, 3, 16, 96, 79_690),
    }


def test_prose_is_whole_lines_of_both_packages(tmp_path, monkeypatch):
    """Tags are removed, quotation marks restored, and every line is in the prose once, whatever the order."""
    brown, chapters = tmp_path / "package", [["Emma Woodhouse,", "handsome,"], ["clever, and rich"]]
    brown.mkdir()
    tagged = "\n\t``/`` Only/rb few/ap ''/'' ?/. ?/.\n\the/pps said/vbd (/( twice/rb )/) ./.\n\n\n\tand/or/cc ./.\n"
    (brown / "ca01").write_text(tagged)
    (brown / "CONTENTS").write_text("no text of the corpus")
    novels = tmp_path / gpt2.make_austen.RDATA
    novels.parent.mkdir(parents=True)
    novels.touch()
    monkeypatch.setattr(gpt2.make_austen, "read_lines", lambda path: [["a novel"]])
    monkeypatch.setattr(gpt2.make_austen, "split_chapters", lambda lines: ("\n".join(c) for c in chapters))
    pieces = gpt2.make_prose(tmp_path).split(gpt2.SEPARATOR)
    lines = ['"Only few"? he said (twice).', "and/or.", "Emma Woodhouse,", "handsome,", "clever, and rich"]
    assert sorted(line for piece in pieces for line in piece.split("\n")) == sorted(lines)
    novels.unlink()
    with refuses(f"--sources={tmp_path}", error=DataError):
        gpt2.make_prose(tmp_path)


def test_table_of_the_gpt2_pair_is_read(tmp_path):
    path = tmp_path / "rows.csv"
    row = dict.fromkeys(gpt2.FIELDS, 1) | {"texts": "prose", "arm": "4x16", "lr": 3e-4, "seed": 2, "loss": "4.92787"}
    language.append_row(row, path, gpt2.FIELDS)
    (read,) = language.read_rows(path)
    assert (read["arm"], read["seed"], read["loss"], read["lr"]) == ("4x16", 2, 4.92787, 3e-4)
    assert gpt2.is_recorded("prose", "4x16", 2, [path]) and len(list(gpt2.report([read]))) == 2 * len(gpt2.ARMS)
    assert not any(gpt2.is_recorded(*run, [path]) for run in (("prose", "12x12", 2), ("tinystories", "4x16", 2)))


def test_gpt2_pair_has_an_equal_parameter_control_and_a_margin(tmp_path):
    counts = {name: language.count_parameters(gpt2.get_config(name, 0, None, tmp_path)) for name in gpt2.ARMS}
    assert counts == {"12x12": 89_160_785, "4x16": 64_150_609, "4x16_wide": 89_160_609, "4x12": 64_085_073}
    losses = {"12x12": 4.9, "4x16": 4.85, "4x16_wide": 4.91}
    rows = [
        {"arm": arm, "seed": seed, "loss": loss + 0.1 * seed + 1e-4 * i * seed}
        for i, (arm, loss) in enumerate(losses.items())
        for seed in gpt2.SEEDS
    ]
    for arm, word in (("4x16", "better"), ("4x16_wide", "worse")):
        difference, verdict = gpt2.compare(rows, arm)
        assert difference.value == pytest.approx(losses[arm] - losses["12x12"], abs=1e-3) and verdict == word
    rows[-1]["loss"] += 0.02  # more scatter: no difference is shown, and it is not within the margin either
    assert gpt2.compare(rows, "4x16_wide")[1] == "inconclusive"
    assert gpt2.compare(rows[:-1], "4x16_wide") is None
