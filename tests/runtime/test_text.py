"""Text for a terminal: nothing is wider than its columns, nothing is lost, and no escape sequences."""

import pytest

from leanformer.runtime import text


HEAD = ["configuration", "runs", "top-1 accuracy (%)", "parameters", "verdict"]
ROWS = [
    ["num_heads=8", "3", "77.15 ± 1.02", "99,904", "num_heads=8 beats num_heads=2, num_heads=4"],
    ["num_heads=2", "3", "71.40 ± 0.80", "58,000", ""],
]


@pytest.mark.parametrize("columns", [30, 60, 80, 100])
@pytest.mark.parametrize("name", ["num_heads=8", "num_heads=8,width=96,depth=3,mlp_dim=192,seed=0"])
def test_table_fits_and_keeps_every_cell(monkeypatch, columns, name):
    monkeypatch.setenv("COLUMNS", str(columns))
    rows = [[name, *ROWS[0][1:]], ROWS[1]]
    shown = text.table(HEAD, rows)
    words = {word for row in (HEAD, *rows) for cell in row for word in cell.split()}
    assert words <= set(shown.replace(":", " ").split())
    longest = max(map(len, words))
    assert max(map(len, shown.splitlines())) <= max(columns, longest + 6)
    assert "\033" not in shown and not any(line.endswith(" ") for line in shown.splitlines())


def test_wide_terminal_gets_one_table_and_a_narrow_one_several(monkeypatch):
    lines = {}
    for columns in (30, 80, 200):
        monkeypatch.setenv("COLUMNS", str(columns))
        lines[columns] = text.table(HEAD, ROWS).splitlines()
    assert len(lines[200]) == 3  # head and rows
    assert len(lines[80]) == 2 * 3 + 1 and sum(line.startswith("  configuration  ") for line in lines[80]) == 2
    assert lines[30][0] == "  configuration: num_heads=8"  # a cell per line


def test_page_continues_values_below_their_beginning(monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    shown = text.page("Title", {"model": "vit " + "depth 3, " * 8, "path": "/a/long/path/" + 40 * "x"}.items())
    title, first, second, *_ = shown.splitlines()
    assert title == "Title" and first.index("vit") == second.index("depth") + 0
    assert "/a/long/path/" + 40 * "x" in shown  # can be copied


@pytest.mark.parametrize(("value", "expected"), [("100", 100), ("10", text.LEAST), ("nonsense", text.UNKNOWN)])
def test_width_is_that_of_the_terminal(monkeypatch, value, expected):
    monkeypatch.setenv("COLUMNS", value)
    assert text.columns() == expected
