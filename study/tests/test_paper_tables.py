"""Parameter counts of all models of the paper, and savings that add up."""

import re
from pathlib import Path

import pytest
from messages import refuses

from leanformer import config
from study.paper import paper_tables
from study.paper.paper import RANGES, READINGS, ROWS, Row


def make_row(params, truncated=False):
    return Row(3, "A", "lean", "vit_b", params, None, None, truncated)


def test_counts_are_compared_at_the_reported_precision():
    assert make_row("86.6 M").agrees(86_567_656) and not make_row("86.6 M").agrees(86_549_999)
    assert make_row("86 M").agrees(86_325_072) and not make_row("62.0 M").agrees(62_653_416)
    assert make_row("119 M", truncated=True).agrees(119_589_889) and not make_row("119 M").agrees(119_589_889)


@pytest.mark.slow
def test_counts_that_differ_from_the_paper():
    counts = {r: paper_tables.params(config.load(r.config)) for r in (*ROWS, *RANGES, *READINGS)}
    differing = {f"{r.model} {r.variant}" for r, number in counts.items() if not r.agrees(number)}
    table3 = {
        f"{name} {kind}" for name in ("Text", "Retrieval", "Image", "Pathfinder") for kind in ("original", "lean")
    }
    assert differing == table3 | {"DaViT-B lean"} | {f"{r.model} {r.variant}" for r in RANGES}
    assert counts[next(r for r in ROWS if r.config == "davit_b_lean")] == 62_653_416


def test_savings_add_up_and_follow_the_change(tiny):
    lean = tiny.copy_and_resolve_references().unlock()
    lean.model.update(depth=2, num_heads=4, mlp_dim=13)
    savings = paper_tables.split_savings(tiny, lean)
    assert sum(savings.values()) == pytest.approx(paper_tables.params(tiny) - paper_tables.params(lean), abs=2)
    assert savings["depth"] > 0 > savings["heads"] and savings["MLP"] > 0
    lean.model.width = 14
    with refuses("width"):
        paper_tables.split_savings(tiny, lean)


def test_table_cells_of_a_model(no_shape_checks):
    row = next(r for r in ROWS if (r.model, r.variant) == ("ListOps", "lean"))
    count = paper_tables.params(config.load(row.config))
    assert paper_tables.examine(row)[3:6] == ["192.9 k", f"{count:,}", "agrees"]


@pytest.mark.slow
def test_pairs_add_heads_in_one_of_two_ways():
    names = dict.fromkeys(row.model for row in ROWS)
    narrower = {name for name in names if paper_tables.describe_pair(name)[1] == "narrower"}
    assert narrower == {"Crammed BERT", "GPT-2", "TNT-B", "VOLO-d3", "VOLO-d4", "DaViT-B", "DaViT-L", "XCiT-L"}


def test_counts_of_the_other_way():
    counts = {name: paper_tables.describe_pair(name)[-1] for name in ("Crammed BERT", "ViT-B", "XCiT-Medium")}
    # By hand: 10 layers more x 4 projections of 768 x (24 x 64 - 768); timm's 16 heads of 48; XCiT not widened at all.
    assert counts["Crammed BERT"] == f"{84_182_017 + 10 * 4 * 768 * 768:,}"
    assert counts["ViT-B"] == "34,602,472" and counts["XCiT-Medium"] == "46,401,256"


@pytest.mark.slow
def test_the_page_has_the_table_of_the_command():
    page = (Path(__file__).parents[2] / "docs" / "paper_models.md").read_text()
    for name in dict.fromkeys(row.model for row in ROWS):
        assert f"| {' | '.join(map(str, paper_tables.describe_pair(name)))} |" in page


def test_fact_sheets_have_the_shapes_of_the_configs():
    page = (Path(__file__).parents[2] / "docs" / "paper_models.md").read_text()
    rows = re.findall(r"^\| (?!Nyström)\S.*? \| `(\w+)` → `(\w+)` \| ([^|]*) \| ([^|]*) \|", page, re.MULTILINE)
    assert len(rows) == 13
    for *names, depth, heads in rows:
        shapes = [config.load(name).model for name in names]
        heads_of = [
            [*zip(paper_tables.stages(m.num_heads), paper_tables.stages(m.head_dim), strict=True)] for m in shapes
        ]
        told = [tuple(map(int, side.split(" x "))) for side in heads.split(" → ")]
        assert all(pair in of_model for pair, of_model in zip(told, heads_of, strict=True)), names
        depths = [paper_tables.stages(m.depth) for m in shapes]
        expected = [d[2] if depth.startswith("third") else sum(d) for d in depths]
        assert [int(x) for x in depth.removeprefix("third stage ").split(" → ")] == expected, names
