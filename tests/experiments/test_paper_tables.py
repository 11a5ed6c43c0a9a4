"""The audit: printed counts compared at their precision, savings that add up, and all rows."""

import json
import sys
from pathlib import Path

import pytest
from commands import command, inside, refused
from messages import mentions, refuses

from experiments import paper_tables as audit
from experiments.paper import RANGES, READINGS, ROWS, Row


CONFIGS = Path(__file__).parents[2] / "configs"


def row(params, truncated=False):
    return Row(3, "A", "lean", "vit_b", params, None, None, truncated)


@pytest.mark.parametrize(
    ("printed", "computed", "expected"),
    [
        ("86.6 M", 86_567_656, True),
        ("86.6 M", 86_549_999, False),
        ("86 M", 86_325_072, True),
        ("62.0 M", 62_653_416, False),
    ],
)
def test_rounded_counts(printed, computed, expected):
    assert row(printed).agrees(computed) is expected


def test_truncated_counts():
    assert row("119 M", truncated=True).agrees(119_589_889) and not row("119 M").agrees(119_589_889)
    assert row("209.8 k", truncated=True).agrees(209_802)


def test_every_row_names_a_config():
    assert {r.config.partition(":")[0] for r in ROWS + RANGES + READINGS} <= {
        path.stem for path in CONFIGS.glob("*.py")
    }
    assert len([r for r in ROWS if r.table in (4, 5)]) == 22


def test_savings_add_up_and_are_by_what_changed(tiny):
    lean = tiny.copy_and_resolve_references()
    lean.unlock()
    lean.model.update(depth=2, num_heads=4, mlp_dim=13)
    found = audit.saved(tiny, lean)
    assert sum(found.values()) == pytest.approx(audit.params(tiny) - audit.params(lean), abs=2)
    assert found["depth"] > 0 > found["heads"] and found["MLP"] > 0
    # One change alone is all of it: a head costs 3 (D H + H) + H D numbers a layer.
    more = tiny.copy_and_resolve_references()
    more.unlock()
    more.model.num_heads = 4
    d, h, depth = 12, 8, 3
    assert audit.saved(tiny, more) == {"depth": 0, "heads": -depth * (3 * (d * h + h) + h * d), "MLP": 0}
    more.model.width = 14
    with refuses("width"):
        audit.saved(tiny, more)


def test_a_config_that_is_not_there():
    with refuses("no_such.py"):
        audit.load("no_such", CONFIGS)


@pytest.mark.slow
def test_the_command(tmp_path, unchecked):
    status, out, err = inside(
        [sys.executable, "-m", "experiments.paper_tables", f"--out={tmp_path}", f"--configs={CONFIGS}", "--nomemory"]
    )
    assert status == 0, err
    found = json.loads((tmp_path / "audit.json").read_text())
    wrong = [(r["model"], r["variant"]) for r in found["rows"] if r["table"] in (4, 5) and not r["agrees"]]
    assert wrong == [("DaViT-B", "lean")]
    assert [r["agrees"] for r in found["ranges"]] == [False, False]
    sequences = [(r["model"], r["variant"]) for r in found["rows"] if r["table"] == 3 and r["agrees"]]
    assert sequences == [("ListOps", "original"), ("ListOps", "lean")]
    assert all(r["agrees"] for r in found["readings"])
    assert mentions(out, 27, 36, "62.653 M") and (tmp_path / "audit.png").stat().st_size > 10_000


def test_memory_of_a_row_on_another_device(monkeypatch):
    """An eighth of the config's batch, times eight."""
    row = next(row for row in ROWS if row.config == "nystromformer_image_1x4")
    seen = []
    monkeypatch.setattr(audit.compiled, "peak", lambda c, device: seen.append((c.batch_size, device)) or 7)
    assert audit.examine(row, CONFIGS, memory=True, device="h100")["train_memory_bytes"] == 8 * 7
    assert seen == [(audit.load(row.config).batch_size // 8, "h100")]


def test_an_unknown_device_is_refused_before_anything_is_counted(tmp_path):
    refused(command("audit", config=None) + ["--device=abacus", f"--out={tmp_path}/audit"], "--device=abacus", "h100")
    assert not list(tmp_path.iterdir())
