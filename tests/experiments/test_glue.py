"""The GLUE command: its runs, its table, its refusals, and a sweep that is stopped and resumes."""

import json
import re
import signal
import statistics
import subprocess
import sys
import time

import numpy as np
import pytest
from commands import environment, refused
from messages import mentions, refuses
from processes import QUICK, ROOT, records

from experiments import glue
from leanformer import cli, config
from leanformer.training import report
from leanformer.training.checkpoint import read_weights
from leanformer.training.grid import Member
from tests.data.test_sentences import HEADERS, download, row, wordpiece, write
from tests.tasks.test_sentence_runs import small


__all__ = ["download", "wordpiece"]  # fixtures
FILE = """
from leanformer import config

def get_config(arguments=""):
    c = config.glue(config.arguments(arguments, task="sst2")["task"])
    c.update(batch_size=8, total_steps=200, total_epochs=0.0, dtype="float32", log_every=1, loggers=())
    c.data.update(max_length=13)
    c.model.update(vocabulary=23, max_length=16, width=12, depth=1, num_heads=3, head_dim=4, mlp_dim=10, pooler_dim=7)
    c.optim.update(lr=1e-2, warmup_epochs=0.0, warmup_steps=1)
    c.eval.update(batch_size=8)
    c.checkpoint.update(every=10)
    return c
"""


def ended(folder, score, others=None):
    folder.mkdir(parents=True)
    (folder / "summary.json").write_text(json.dumps({"score": {"score": score, "of": "x", "higher": True}}))
    told = [{"step": 4, "kind": "eval mm", "accuracy": others}] if others is not None else []
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in told))
    return Member(folder, ())


def test_the_table(tmp_path):
    """Medians, extremes and means by hand; a seed that is missing, one that is not finite."""
    found = {}
    for seed, (mnli, mm, cola) in enumerate([(0.7, 0.6, 0.1), (0.8, 0.9, 0.5), (0.75, 0.5, 0.2)]):
        found["mnli", seed] = ended(tmp_path / f"m{seed}", mnli, mm)
        found["cola", seed] = ended(tmp_path / f"c{seed}", cola)
    told = glue.columns(found | {("rte", 0): Member(tmp_path / "none", ())})
    assert told == {
        "mnli": {0: 0.7, 1: 0.8, 2: 0.75},
        "mnli-mm": {0: 0.6, 1: 0.9, 2: 0.5},
        "cola": {0: 0.1, 1: 0.5, 2: 0.2},
    }
    means = glue.means(told)
    assert means["mean"]["columns"] == ["mnli", "cola"] and means["mean with mnli-mm"]["columns"] == [*told]
    assert means["mean"]["of_medians"] == pytest.approx((0.75 + 0.2) / 2)
    assert means["mean with mnli-mm"]["of_medians"] == pytest.approx((0.75 + 0.6 + 0.2) / 3)
    assert means["mean"]["by_seed"] == pytest.approx({0: 0.4, 1: 0.65, 2: 0.475})
    text = glue.table(told, 5)
    assert re.search(r"mnli +accuracy +75\.00 +70\.00 +80\.00  3 of 5\n", text)
    assert re.search(r"cola +matthews +20\.00 +10\.00 +50\.00  3 of 5\n", text)
    assert re.search(r"mean, of 2 +47\.50 +40\.00 +65\.00  3 of 5\n", text)
    told["cola"][1] = None
    assert glue.means(told) == {} and "15.00   10.00   20.00  2 of 5, 1 not finite" in glue.table(told, 5)
    del told["cola"][1], told["mnli"][0]
    found = glue.means(told)["mean"]
    assert [*found["by_seed"]] == [2] and found["of_medians"] == pytest.approx(
        statistics.fmean([statistics.median([0.8, 0.75]), statistics.median([0.1, 0.2])])
    )


def values(tmp_path, **changes):
    known = {"data": "data", "init_from": None, "config": "glue", "set": [], "tasks": [*glue.ORDER], "seeds": 5}
    return cli.Values(**known | changes)


def test_a_run_gives_its_shape_and_its_weights(tmp_path, download, wordpiece):
    c = small(config.glue("cola"), download, wordpiece)
    c.model.update(positions="learned", max_length=77, dropout=0.0, pool="mean")
    report.write_config(tmp_path / "run", c)
    told = dict(
        text.split("=", 1)
        for text in glue.fixed(values(tmp_path, init_from=str(tmp_path / "run"), set=["optim.lr=1", "seed=x"]))
    )
    assert told["init_from.path"] == str(tmp_path / "run") and told["init_from.new_head"] == "True"
    assert told["model.positions"] == "learned" and told["model.gated"] == "True" and told["model.width"] == "12"
    assert (told["model.max_length"], told["data.max_length"], told["optim.lr"]) == ("77", "77", "1")
    assert not {"model.dropout", "model.pool", "model.num_classes", "model.remat"} & told.keys()
    assert {key for key in told if key.startswith("data.")} == {"data.dir", "data.max_length"}
    with refuses("--init_from=nowhere", "--set=init_from.path=FILE"):
        glue.fixed(values(tmp_path, init_from="nowhere"))


def test_refused_before_anything_is_written(tmp_path, download):
    words = ["", "", "experiments.glue", f"--workdir={tmp_path / 'x'}"]
    refused([*words, "--tasks=wnli"], "--tasks=wnli", "mnli", "sst2")
    refused([*words, "--tasks=rte", f"--data={tmp_path}"], "train", "RTE")
    write(download / "RTE" / "dev.tsv", HEADERS["rte"].split(), [row("rte", "a", "b", "entailment"), ["short"]])
    refused([*words, "--tasks=rte,cola", f"--data={download}"], "RTE/dev.tsv", "line 3", 1, 4)
    assert not (tmp_path / "x").exists()


@pytest.mark.slow
def test_stopped_in_the_middle_it_goes_on_bit_by_bit(tmp_path, download, wordpiece):
    """Two tasks, stopped while the second trains; weights, records and table are those of a sweep left alone."""
    (tmp_path / "small.py").write_text(FILE)

    def start(folder):
        words = [sys.executable, "-m", "experiments.glue", f"--config={tmp_path / 'small.py'}", f"--data={download}"]
        words += [f"--workdir={tmp_path / folder}", "--tasks=cola,mrpc", "--seeds=1"]
        words += [f"--set=data.tokenizer={wordpiece}"]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        return subprocess.Popen(words, cwd=ROOT, env=environment() | {"XLA_FLAGS": QUICK}, **pipes)

    whole = start("whole")
    out, err = whole.communicate(timeout=400)
    assert whole.returncode == 0, err
    first, second = start("stopped"), tmp_path / "stopped" / "small,task=cola,seed=0"
    end = time.monotonic() + 240
    while len(records(second, "train")) < 5 and time.monotonic() < end and first.poll() is None:
        time.sleep(0.01)
    first.send_signal(signal.SIGTERM)
    stopped, err = first.communicate(timeout=120)
    assert first.returncode == 75 and mentions(stopped, 1), err
    assert 5 <= max(records(second, "train")) < 200
    again = start("stopped")
    table, err = again.communicate(timeout=400)
    assert again.returncode == 0 and mentions(table, 2, 1), err
    assert table.partition("glue.json")[2] == out.partition("glue.json")[2] and "mean, of 2" in table
    for name in ("small,task=mrpc,seed=0", "small,task=cola,seed=0"):
        one, other = (read_weights(str(tmp_path / folder / name), "own") for folder in ("whole", "stopped"))
        assert one.keys() == other.keys() and len(one) > 10
        for key in one:
            np.testing.assert_array_equal(one[key], other[key])
    same = [json.loads((tmp_path / folder / "glue.json").read_text()) for folder in ("whole", "stopped")]
    assert same[0] == same[1] and [*same[0]["scores"]] == ["mrpc", "cola"]
    assert json.loads((second / "summary.json").read_text())["attempts"] == 2
