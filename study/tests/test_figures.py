"""Check of the figures on the pages, and the tables that they are computed from."""

import shutil

import fake_runs
import pytest
from commands import ROOT

from study import tables, tabulate
from study.figures import check_figures
from study.figures.registry import PAGES


FEWEST = {"README.md": 8, "docs/findings.md": 60, "docs/results.md": 150, "docs/gpus.md": 20}  # figures
FEWEST["docs/published_models.md"] = 100


@pytest.fixture
def pages(tmp_path):
    """Return a folder with copies of the pages."""
    for name in PAGES:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    return tmp_path


@pytest.fixture(scope="module")
def checked():
    return check_figures.check()


def test_pages_have_the_computed_figures(checked):
    figures, problems = checked
    assert problems == []
    assert all(len(figures[name]) >= FEWEST[name] for name in PAGES)


@pytest.mark.parametrize("name", PAGES)
def test_one_changed_digit_is_found(checked, pages, name):
    place, figure = checked[0][name][0]
    text = (pages / name).read_text().split("\n")
    line = int(place.rpartition(":")[2]) - 1
    digit = next(c for c in figure.text if c.isdigit())
    changed = figure.text.replace(digit, str((int(digit) + 1) % 10), 1)
    assert figure.text in text[line]
    text[line] = text[line].replace(figure.text, changed)
    (pages / name).write_text("\n".join(text))
    _, problems = check_figures.check(pages)
    assert any(problem.startswith(f"{name}:") and changed in problem for problem in problems)


CHANGES = (  # page, computed text, and what stands there instead
    ("docs/results.md", "+0.059 (0.005 to 0.113) |", "+0.06\n(0.005 to 0.2) |"),
    ("docs/results.md", "| holds, by", "| rejected, by"),
    ("docs/published_models.md", "(0.060 to 0.090) † |", "(0.060 to 0.091) |"),
    ("docs/published_models.md", "(-0.014 to 0.000) |", "(-0.014 to 0.000) † |"),
)


def test_computed_values_are_written(pages, capsys):
    for name, right, wrong in CHANGES:
        text = (pages / name).read_text()
        assert text.count(right) == 1
        (pages / name).write_text(text.replace(right, wrong))
    assert check_figures.main([f"--root={pages}"]) == 1
    assert check_figures.main([f"--root={pages}", "--write"]) == 0
    assert "Differences: 0" in capsys.readouterr().out
    for name in PAGES:
        written, page = ((folder / name).read_text() for folder in (pages, ROOT))
        assert written.split() == page.split()
    assert "+0.059\n(0.005 to 0.113)" in (pages / "docs" / "results.md").read_text()


def test_added_figure_is_found(pages, capsys):
    page = pages / "docs" / "results.md"
    page.write_text(f"{page.read_text()}\nThe loss is 12.34 nats with 16 heads.\n")
    assert check_figures.main([f"--root={pages}"]) == 1
    out, err = capsys.readouterr()
    assert ": 12.34 is not computed" in err and ": 16 is not computed" not in err and "docs/results.md:" in out


def test_removed_passage_is_found():
    page = check_figures.Page("x.md", "Loss: 3.1 (2.0 to 4.2)\n points, 3 seeds.")
    values = {"loss": tables.Estimate(3.1, 2.0, 4.2), "other": 1.0}
    (figure,), problems = check_figures.locate(page, "Loss: {loss:.1f}", values)
    assert (figure.text, problems) == ("3.1 (2.0 to 4.2)", [])
    figures, (problem,) = check_figures.locate(page, "Other loss: {other:.1f}", values)
    assert figures == [] and problem.startswith("x.md: ")
    changed = {"loss": tables.Estimate(3.2, 2.0, 4.2)}
    (figure,), (problem,) = check_figures.locate(page, "Loss: {loss:.1f}", changed)
    assert problem.startswith("x.md:1: loss=3.2") and page.text[figure.start : figure.end] == "3.1 (2.0 to 4.2)"


def test_estimates_are_formatted():
    x = tables.Estimate(-8.81, -10.9, 7.1)
    assert (f"{x:+.1f %}", f"{x:.1f}", f"{x:.1f ± %}") == (
        "-8.8 % (-10.9 to 7.1)",
        "-8.8 (-10.9 to 7.1)",
        "-8.8 ± 15.9 %",
    )
    assert f"{tables.Estimate(2.84999996, 0, 1):.1f}" == "2.9 (0.0 to 1.0)"  # a mean of float32
    assert tables.Estimate.mean(["1", "2", "3"]) == pytest.approx((2, -0.484, 4.484), abs=1e-3)


def test_runs_of_a_sweep_become_rows(tmp_path):
    fake_runs.write_sweep(tmp_path / "runs", depths=(2,), heads=(2, 4), seeds=3)
    words = ["--keys=model.num_heads,model.depth", "--metrics=top1,loss", f"--out={tmp_path / 'runs.csv'}"]
    assert tabulate.main([f"--runs={tmp_path / 'runs'}", *words]) == 0
    rows = tables.read(tmp_path / "runs.csv")
    assert [*rows[0]] == ["num_heads", "depth", "seed", "top1", "loss", "params", "commit"]
    assert sorted((int(row["num_heads"]), int(row["seed"])) for row in rows) == [
        (n, s) for n in (2, 4) for s in range(3)
    ]
    groups = tables.group(rows, "num_heads")
    assert {len(group) for group in groups.values()} == {3} and groups.keys() == {"2", "4"}
