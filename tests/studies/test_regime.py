"""`regime`: rivals of the same parameters, poles that can be trained, and sentences that say no more than was found."""

import re

import numpy as np
import pytest
from commands import inside

from leanformer.errors import TrainingError
from leanformer.reports import regime as reports
from leanformer.studies import regime
from leanformer.studies.regime import Shape, Trained


START = [
    {"attention_output": condition, "relative_attention_entropy": entropy, "capacity": capacity}
    | {"gaussian": 5.0, "largest_logit": 2.0, "bound": condition > 8}
    for condition, entropy, capacity in ((9.0, 0.5, 3.0), (7.0, 0.6, 2.0), (5.0, 0.7, 1.0))
]
SHAPES = [Shape(3, 8, 8), Shape(6, 4, 4), Shape(12, 2, 2)]


def test_rivals_are_cut_from_the_same_width():
    assert [str(s) for s in regime.rivals(Shape(12, 64, 64))] == ["3x256", "6x128", "12x64", "24x32", "48x16"]
    assert [str(s) for s in regime.rivals(Shape(1, 7, 7))] == ["1x7"]  # 7 heads are too many for a fourfold
    assert [str(s) for s in regime.rivals(Shape(6, 4, 10))] == ["2x12/30", "3x8/20", "6x4/10", "12x2/5"]
    for shape in regime.rivals(Shape(15, 14, 28)):
        assert (shape.heads * shape.head_dim, shape.heads * shape.value_dim) == (210, 420)
    assert [str(s) for s in regime.rivals(Shape(16, 16, 16), 48 / 1024)] == ["8x32", "16x16"]  # 32x8 would be 32x1
    assert Shape(12, 64, 128).scaled(1 / 16) == Shape(12, 4, 8) and Shape(48, 4, 4).scaled(1 / 16) == Shape(48, 1, 1)


def trained(*middles, spread=0.01, pole="rank"):
    noise = spread * np.array([-1.0, 0.1, 0.9])
    return Trained(pole, SHAPES, np.array([10 ** (np.log10(m) + noise * (i + 1)) for i, m in enumerate(middles)]))


def test_sentences_say_what_the_evidence_supports():
    said = reports.sentences(SHAPES, 1, [trained(0.1, 1.0, 0.9)], START)
    assert "fewer, wider heads help: 3x8 has 90 % less error than 6x4 (95% interval 89" in said
    assert "best first by conditioning before training: 12x2, 6x4, 3x8\n" in said
    assert "best first by spectral capacity before training: 3x8, 6x4, 12x2\n" in said and "not one" in said
    said = reports.sentences(SHAPES, 2, [trained(0.5, 0.3, 0.1, pole="count")], START)
    assert "where the number of heads must show, 12x2 is the best of these; worse: 3x8, 6x4." in said
    said = reports.sentences(SHAPES, 0, [trained(0.5, 0.5, 0.5, spread=0.3)], START)
    assert "none is shown to be better than 3x8; not to be told from it with 3 seeds, which does not make them" in said


def test_the_table_has_intervals_and_all_that_was_measured():
    lines = reports.table(SHAPES, [trained(0.1, 1.0, 0.9)], START).splitlines()
    assert lines[0].split("  ")[0] == "shape" and len(lines) == 4
    assert "  at least 9  " in lines[1] and "at least" not in lines[2]
    assert lines[1].startswith("3x8") and "0.1 (0.09" in lines[1] and lines[1].endswith(" 3")
    figure = reports.draw(SHAPES, 1, [trained(0.1, 1.0, 0.9)], START)
    assert len(figure.axes) == 2 and "farthest" in figure.axes[0].get_title()


@pytest.mark.parametrize("pole", regime.POLES)
def test_every_pole_can_be_trained(pole, monkeypatch):
    monkeypatch.setattr(regime, "WIDTH", 8)
    errors = regime.trained(pole, Shape(2, 8, 8), Shape(4, 4, 4), 16, total=20, seeds=2)
    assert errors.shape == (2,) and np.isfinite(errors).all() and errors[0] != errors[1]


def test_an_error_that_is_none_is_not_averaged(monkeypatch):
    monkeypatch.setattr(regime, "WIDTH", 8)
    monkeypatch.setattr(regime.steps, "evaluate", lambda *_: {"error": float("nan")})
    with pytest.raises(TrainingError, match="rank: 2x8, seed 0, ended with an error of nan"):
        regime.trained("rank", Shape(2, 8, 8), Shape(2, 8, 8), 16, total=20, seeds=2)


def test_a_command_that_was_killed_goes_on(tmp_path, monkeypatch):
    words = ["--tokens=8", "--width=16", "--heads=2", "--head_dim=8", "--steps=20", "--seeds=2"]
    folder = tmp_path / "new" / "folder"
    words, told = ["", "", "leanformer.regime", *words, f"--out={folder}"], []

    def trained(pole, shape, *_, **__):
        told.append((pole, str(shape)))
        if len(told) == 6:
            raise KeyboardInterrupt
        return np.array([0.5, 0.25]) / len(told)

    monkeypatch.setattr(regime, "trained", trained)
    with pytest.raises(KeyboardInterrupt):
        inside(words)
    before = [*told]
    status, out, _ = inside(words)
    assert status in (None, 0) and (folder / "regime.json").is_file() and told[5] == told[6]
    assert len(set(told)) == len(told) - 1 == out.count(" s)")  # each once, but for the one that did not end
    assert [*told[:6]] == before and f"{np.exp(np.log([0.5, 0.25]).mean()):.3g} (" in out  # the first, read back
    status, _, err = inside([*words[:-2], "--seeds=3", words[-1]])
    assert status == 2 and "trained.json is of another command: seeds=2, asked is 3. Take another folder" in err


def test_what_is_known_before_training():
    found = regime.at_start(Shape(3, 4, 4), tokens=17, width=12, seeds=2)
    assert 0 < found["relative_attention_entropy"] <= 1 and found["largest_logit"] > 0
    assert found["bound"] is False
    assert found["capacity"] == regime.capacity(Shape(3, 4, 4), 12)
    assert 1 < found["gaussian"] < found["attention_output"]  # tokens are alike once they are averaged
    more, fewer = (regime.capacity(Shape(n, 24 // n, 24 // n), 24) for n in (8, 1))
    assert more > fewer and regime.capacity(Shape(2, 4, 6), 24) is None
    said = reports.sentences(SHAPES, 0, [trained(0.5, 0.4, 0.3)], [known | {"capacity": None} for known in START])
    assert "capacity" not in said and "These 2 orders" in said


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--heads=0"], "--heads=0 must be at least 1"),
        (["--head_dim=65"], "--head_dim=65 is over --width=64: the product .* has rank 64 at most"),
        (["--seeds=1"], "--seeds=1: an interval wants 2 at least"),
        (["--steps=3"], "--steps=3: take 20 at least"),
        (["--width=1280", "--heads=12"], "12x16 has no rival: .* at --width=1280 and at 48 channels too"),
    ],
)
def test_refused(words, said):
    plain = ["--tokens=16", "--width=64", "--heads=4", "--head_dim=16"]
    status, _, err = inside(["", "", "leanformer.regime", *plain, *words])
    assert status == 2
    assert re.search(said, err)
