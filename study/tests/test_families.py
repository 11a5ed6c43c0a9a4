"""The small pairs of shapes of each family: sizes, data that are cut from the novels, and the table."""

import fake_runs
import jax
import numpy as np
import pytest
from messages import refuses

from leanformer import config
from leanformer.costs import count
from leanformer.data.sequences import open_sequences
from leanformer.runtime.mesh import make_mesh
from leanformer.training import model_setup
from study import common
from study.heads import families
from study.heads.families import FAMILIES, SHAPES


NAMES = ("Emma", "Catherine", "Anne", "Elizabeth", "Elinor")  # the heroine of each novel


@pytest.mark.parametrize("name", FAMILIES)
def test_lean_shape_has_fewer_layers_more_heads_and_fewer_parameters(name, tmp_path):
    configs = {shape: families.get_config(name, shape, 0, tmp_path) for shape in SHAPES}
    mesh = make_mesh(devices=jax.devices()[:1])
    params = {shape: count.parameters(model_setup.set_up_model(c, mesh=mesh).weights) for shape, c in configs.items()}
    original, lean = (configs[shape].model for shape in SHAPES)
    assert params["lean"] < params["original"]
    assert np.sum(lean.depth) < np.sum(original.depth)
    assert np.max(lean.num_heads) > np.max(original.num_heads) or name == "DaViT"
    differing = {key for key in lean if lean[key] != original[key]}
    assert differing == set(FAMILIES[name].lean)
    assert {key for key, value in configs["lean"].items() if value != configs["original"][key]} == {"model"}


def test_finished_run_of_another_config_is_not_read(tmp_path):
    fake_runs.write_run(tmp_path / "run")
    c = config.load("quickstart")
    assert common.train(c, tmp_path / "run")["final"]["top1"] == 0.8
    c.total_epochs = 2.0
    with refuses("total_epochs=30.0", "2.0"):
        common.train(c, tmp_path / "run")


def test_passages_have_the_novel_of_their_heroine():
    for split in ("train", "test"):
        counts = np.zeros((len(NAMES), len(NAMES)))
        for novel, text in families.read_passages(split):
            assert len(text.encode()) == families.PASSAGE
            counts[novel] += [text.count(name) for name in NAMES]
        assert (counts.argmax(axis=1) == range(len(NAMES))).all()
        assert (counts.argmax(axis=0) == range(len(NAMES))).all()


def test_data_open_and_pairs_are_labelled_by_their_novels(tmp_path):
    families.write_passages(tmp_path)
    c = families.get_config("Nyströmformer, Text", "lean", 0, tmp_path)
    needs = {"vocabulary": 512, "num_classes": 5, "max_length": 256, "length": None, "recipe": {}}
    source = open_sequences(c.data.name, "test", towers=1, **needs)
    passages = families.read_passages("test")
    assert [source[i]["label"] for i in (0, 500, -1)] == [passages[i][0] for i in (0, 500, -1)]
    rows = [line.split("\t") for line in (tmp_path / "pairs" / "new_aan_pairs.test.tsv").read_text().splitlines()]
    assert len(rows) == families.PAIRS["test"]
    assert all((passages[int(a)][0] == passages[int(b)][0]) == (label == "1") for label, a, b, *_ in rows)
    assert 0.4 < np.mean([row[0] == "1" for row in rows]) < 0.6


def make_rows(name, original, lean, bounds=0.0):
    """Return rows as `tables.read` does, with invented scores by seed."""
    common = {"params": "10", "train_flops": "20", "log10_condition": "3.0", "bounds": str(bounds)}
    return [
        {"family": name, "shape": shape, "seed": str(seed), "score": str(score), **common}
        for shape, scores in zip(SHAPES, (original, lean), strict=True)
        for seed, score in enumerate(scores)
    ]


def test_verdict_follows_the_interval_and_the_direction_of_the_score():
    rows = make_rows("XCiT", [0.80, 0.81, 0.82], [0.85, 0.861, 0.87])
    rows += make_rows("VOLO", [0.80, 0.85, 0.82], [0.85, 0.80, 0.83], bounds=0.5)
    rows += make_rows("Crammed BERT", [3.0, 3.1, 3.2], [3.5, 3.61, 3.7])
    rows += make_rows("TNT", [0.8], [0.9])  # one seed only
    results = {r.family: r for r in families.summarise(rows)}
    assert {name: r.verdict for name, r in results.items()} == {
        "XCiT": "better",
        "VOLO": "not shown",
        "Crammed BERT": "worse",
    }
    assert results["XCiT"].difference.value == pytest.approx(100 * (2.581 - 2.43) / 3)  # points
    assert results["VOLO"].kappa["lean"] == "≥ 3.0" and results["XCiT"].kappa["lean"] == "3.0"
    assert len([*families.report(rows)]) == 3
