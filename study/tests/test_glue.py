"""GLUE: config keys from a pre-trained run, and the table."""

import json

import pytest
from messages import refuses

from leanformer import config
from leanformer.training import run_files
from study.trained import glue


def write_finished_run(folder, score, mismatched=None):
    folder.mkdir(parents=True)
    (folder / "summary.json").write_text(json.dumps({"score": {"score": score, "of": "x", "higher": True}}))
    lines = [{"step": 4, "kind": "eval mm", "accuracy": mismatched}] if mismatched is not None else []
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_table_of_scores(tmp_path):
    """Medians, extremes and means calculated by hand; then a score that is not finite."""
    for seed, (mnli, mm, cola) in enumerate([(0.7, 0.6, 0.1), (0.8, 0.9, 0.5), (0.75, 0.5, 0.2)]):
        write_finished_run(tmp_path / f"glue,task=mnli,seed={seed}", mnli, mm)
        write_finished_run(tmp_path / f"glue,task=cola,seed={seed}", cola)
    scores = glue.read(tmp_path)
    assert [*scores] == ["mnli", "mnli-mm", "cola"] and scores["cola"] == {0: 0.1, 1: 0.5, 2: 0.2}
    means = glue.means(scores)
    assert means["mean"] == pytest.approx([(0.75 + 0.2) / 2, 0.4, 0.65, 0.475])
    assert means["mean with mnli-mm"][0] == pytest.approx((0.75 + 0.6 + 0.2) / 3)
    lines = [line.split() for line in glue.table(scores).splitlines()]
    assert ["cola", "matthews", "20.00", "10.00", "50.00", "3"] in lines
    assert ["mean", "47.50", "40.00", "65.00", "3"] in lines
    scores["cola"][1] = None
    assert glue.means(scores) == {}


def test_settings_have_architecture_and_weights_of_the_run(tmp_path):
    c = config.glue("cola")
    c.model.update(positions="learned", max_length=77, width=12, dropout=0.0)
    run_files.write_config(tmp_path, c)
    keys = glue.settings(tmp_path)
    assert keys["init_from.path"] == str(tmp_path) and keys["init_from.new_head"] is True
    assert (keys["model.max_length"], keys["data.max_length"], keys["model.width"]) == (77, 77, 12)
    assert not {"model.dropout", "model.num_classes", "model.remat"} & keys.keys()
    with refuses("--init_from=nowhere"):
        glue.settings(glue.Path("nowhere"))
