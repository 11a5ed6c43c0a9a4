"""Runs on sentences with a label or a number: trained, killed, evaluated, asked, begun from others; eight devices."""

import collections
import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from commands import inside
from flax import nnx
from power_cuts import power_cut

from leanformer import config, evaluate, predict, tasks, train
from leanformer.data.sentences import open_table
from leanformer.data.text import corpus
from leanformer.data.text import tokenizer as readers
from leanformer.errors import ConfigError, DataError
from leanformer.tasks import sentences
from leanformer.training import checks, experiment, report, streams
from leanformer.training import step as steps
from tests.data.test_sentences import HEADERS, download, row, wordpiece, write


__all__ = ["download", "wordpiece"]  # fixtures


def small(c, download, wordpiece):
    c.update(batch_size=8, total_steps=4, total_epochs=0.0, dtype="float32", log_every=1, loggers=())
    c.data.update(dir=str(download), tokenizer=wordpiece and str(wordpiece), max_length=13)
    c.model.update(vocabulary=23, max_length=16, width=12, depth=1, num_heads=3, head_dim=4, mlp_dim=10, pooler_dim=7)
    c.optim.update(lr=1e-2, warmup_epochs=0.0, warmup_steps=1)
    c.eval.update(batch_size=8, every=2)
    c.checkpoint.update(every=1, keep=3)
    return c


def records(workdir, kind=None):
    found = report.read_records(workdir / "metrics.jsonl")
    kept = [{key: value for key, value in record.items() if key not in report.TIMING} for record in found]
    return [record for record in kept if kind in (None, record["kind"])]


def test_a_run_of_numbers_is_killed_and_goes_on(download, wordpiece, tmp_path, monkeypatch, capsys, keeping):
    c = small(config.glue("stsb"), download, wordpiece)
    checks.check(c)
    assert train.train(c, tmp_path / "whole") == 0
    assert "13 tokens each at most, of a vocabulary of 23; pearson" in capsys.readouterr().out
    with power_cut(monkeypatch, 3):
        train.train(c, tmp_path / "killed")
    assert train.train(c, tmp_path / "killed") == 0
    assert records(tmp_path / "whole") == records(tmp_path / "killed")
    summary = json.loads((tmp_path / "whole" / "summary.json").read_text())
    last = records(tmp_path / "whole", "eval")[-1]
    assert summary["score"] == {"score": last["pearson"], "of": "pearson", "higher": True} and last["examples"] == 37
    (tmp_path / "a.txt").write_text("the bear sang\tno bird sang")
    assert predict.main([f"--workdir={tmp_path / 'whole'}", str(tmp_path / "a.txt")]) == 2
    assert "tells a number of each pair and has no classes" in capsys.readouterr().err


@pytest.mark.parametrize("task", ["mnli", "stsb"])
def test_one_device_and_eight(task, download, wordpiece, meshes):
    """Training and all metrics, whatever the mesh, the batch of evaluation and its padding."""
    c, found = small(config.glue(task), download, wordpiece), []
    for mesh, size in ((meshes(1, 1), 37), (meshes(4, 2), 16)):
        c.eval.batch_size = size
        run = experiment.build(c, examples=37, mesh=mesh)
        source, held_out = run.task.open("train"), run.task.open(c.data.eval_split)
        step, state, key = jax.jit(run.train_step), run.initial_state(), run.run_key()
        state = dataclasses.replace(state, params=jax.tree.map(lambda x: 6 * x, state.params))  # or all are told alike
        batches = streams.train_batches(run, source)
        state, told = step(state, streams.put(run, batches[0]), key)
        split = streams.evaluation(run, held_out)
        values = steps.evaluate(jax.jit(run.eval_step), run.task.metrics, {"": state.weights}, split)
        found.append([float(told["last_loss"]), float(told["grad_norm"]), *map(float, values.values())])
    np.testing.assert_allclose(found[1], found[0], rtol=2e-5)
    assert values["examples"] == 37 and values.get("spread", 1) > 1e-3


def test_metrics_are_those_of_all_examples(download, wordpiece, meshes):
    """By definition, from the logits of rows that are padded further."""
    c = small(config.glue("rte"), download, wordpiece)
    run = experiment.build(c, examples=37, mesh=meshes(1, 1))
    source, weights = run.task.open("dev"), run.initial_state().weights
    rows = [run.task.prepare(source[i]) for i in range(len(source))]
    tokens, lengths = (np.stack([row[name] for row in rows]) for name in ("tokens", "lengths"))
    assert len({*lengths.tolist()}) > 3
    longer = jnp.asarray(np.pad(tokens, ((0, 0), (0, 3)), constant_values=9))
    logits = np.asarray(nnx.merge(run.graphdef, *weights)(longer, jnp.asarray(lengths))[0], np.float64)
    labels, told = np.array([source[i]["label"] for i in range(len(source))]), logits.argmax(axis=1)
    loss = np.log(np.exp(logits).sum(axis=1)) - logits[np.arange(37), labels]
    values = steps.evaluate(jax.jit(run.eval_step), run.task.metrics, {"": weights}, streams.evaluation(run, source))
    assert values["loss"] == pytest.approx(loss.mean(), rel=1e-5) and values["examples"] == 37
    assert values["accuracy"] == pytest.approx(np.mean(told == labels))
    assert values["matthews"] == pytest.approx(np.corrcoef(told, labels)[0, 1] if np.ptp(told) else 0, abs=1e-9)


def test_a_constant_is_told(download, wordpiece):
    task = tasks.of(small(config.glue("stsb"), download, wordpiece))
    totals = {"loss": 8.0, "examples": 4, "each": {"found": np.full(4, 2.5, np.float32), "wanted": np.arange(4.0)}}
    with pytest.warns(UserWarning, match="The model tells the same of all rows: there is no correlation"):
        found = task.metrics(totals)
    assert found == {"loss": 2.0, "pearson": 0.0, "spearman": 0.0, "spread": 0.0}
    totals["each"]["found"] = np.array([1, np.nan, 2, 3], np.float32)
    assert np.isnan(task.metrics(totals)["pearson"])


def test_a_run_and_one_from_its_weights(download, wordpiece, tmp_path, capsys, keeping):
    """Evaluated and asked by the ordinary commands; its tokenizer without being named, a new head, nothing that differs
    in silence."""
    first = small(config.glue("mrpc"), download, wordpiece)
    first.model.types, first.total_steps = 2, 2
    assert train.train(first, tmp_path / "first") == 0
    last = records(tmp_path / "first", "eval")[-1]
    assert evaluate.main([f"--workdir={tmp_path / 'first'}"]) == 0
    again = json.loads((tmp_path / "first" / "evaluation.json").read_text())
    assert again["f1"] == pytest.approx(last["f1"], rel=1e-6)
    assert set(again["accuracy"]) == {"equivalent", "not_equivalent"}
    (tmp_path / "a.txt").write_text("the bear sang\tno bird sang")
    (tmp_path / "bad.txt").write_text("a\tb\tc")
    capsys.readouterr()
    assert predict.main([f"--workdir={tmp_path / 'first'}", str(tmp_path / "a.txt"), str(tmp_path / "bad.txt")]) == 2
    out, err = capsys.readouterr()
    answer = json.loads(out.splitlines()[0])["classes"]
    assert sum(found["probability"] for found in answer) == pytest.approx(1, abs=1e-5)
    assert "or two with a tab between them" in err

    c = small(config.glue("mnli"), download, None)
    c.model.types, c.total_steps = 2, 2
    c.init_from.update(path=str(tmp_path / "first"), new_head=True)
    assert train.train(c, tmp_path / "second") == 0
    own = [(tmp_path / name / "tokenizer.json").read_text() for name in ("first", "second")]
    assert own[0] == own[1] == readers.read(wordpiece).json()
    assert {record["kind"] for record in records(tmp_path / "second")} == {"train", "eval", "eval mm"}
    (tmp_path / "first").rename(tmp_path / "moved")  # the run has a tokenizer of its own
    assert predict.main([f"--workdir={tmp_path / 'second'}", str(tmp_path / "a.txt")]) == 0
    (tmp_path / "moved").rename(tmp_path / "first")
    run = experiment.build(c, examples=37, mesh=experiment.meshes.make_mesh(devices=jax.devices()[:1]))
    before, begun = run.random_weights(0)[0], run.first_weights()[0]
    assert not np.array_equal(before["embed"], begun["embed"])
    np.testing.assert_array_equal(before["head"]["kernel"], begun["head"]["kernel"])

    c.model.update(num_heads=2, head_dim=6, activation="relu")
    with pytest.raises(
        ConfigError,
        match=r"another model than model.activation=relu, .* Set --config.model.activation=gelu --",
    ):
        checks.check(c)
    c = small(config.glue("mnli"), download, tmp_path / "other.json")
    c.model.types = 2
    c.init_from.update(path=str(tmp_path / "first"), new_head=True)
    (tmp_path / "other.json").write_text(wordpiece.read_text().replace('"##ing"', '"##ed"'))
    with pytest.raises(
        DataError, match="other.json., of 23 tokens, is not the tokenizer of init_from.path=.*/first, of"
    ):
        train.train(c, tmp_path / "third")


def test_what_a_config_cannot_ask(download, wordpiece, capsys):
    def fails(message, task="sst2", error=ConfigError, **changes):
        c = small(config.glue(task), download, wordpiece)
        for key, value in changes.items():
            section, _, name = key.rpartition("__")
            (c[section] if section else c)[name] = value
        with pytest.raises(error, match=message):
            checks.check(c)
            tasks.of(c).open("dev")

    fails('score="pearson" is none of model.num_classes=2: choose one of accuracy, f1, matthews', score="pearson")
    fails('score="f1" is none of model.num_classes=3', "mnli", score="f1")
    fails("data.max_length=17 tokens are a row, and the model has positions for model.max_", data__max_length=17)
    fails('data.name="sst2" wants model.num_classes=2, found 3', model__num_classes=3)
    fails(
        "has 23 tokens, and model.vocabulary=20. Set --config.model.vocabulary=23",
        error=DataError,
        model__vocabulary=20,
    )
    fails("data.tokenizer is unset, and init_from.path names no run", error=DataError, data__tokenizer=None)
    fails("There is no tokenizer", error=DataError, data__tokenizer="nowhere")
    with pytest.raises(ConfigError, match="task=wnli: GLUE's tasks are cola, sst2"):
        config.glue("wnli")
    status, _, err = inside(["", "", "leanformer.train", "--config=glue:task=x", f"--workdir={download.parent / 'x'}"])
    assert status == 2 and "GLUE's tasks are" in err


def test_a_tokenizer_without_marks(download, wordpiece, tmp_path):
    (tmp_path / "bytes.json").write_text(readers.of_bytes().json())
    c = small(config.glue("sst2"), download, tmp_path / "bytes.json")
    with pytest.raises(DataError, match=r"The tokenizer has no \[CLS\] and no \[SEP\], which stand before"):
        tasks.of(c).open("dev")


def test_a_tokenizer_trained_on_the_table(download, wordpiece, tmp_path, monkeypatch):
    """Of both texts of the training split, made once, and again where a text is another."""
    monkeypatch.setattr(corpus, "CACHE", str(tmp_path / "cache"))
    c = small(config.glue("rte"), download, None)
    c.data.tokenizer, c.model.vocabulary = "wordpiece:45", 45
    first = tasks.of(c).open("train")
    assert first.vocabulary == 45 and tasks.of(c).open("dev").tokenizer.json() == first.tokenizer.json()
    assert len([*(tmp_path / "cache").iterdir()]) == 1
    row = first[3]
    assert first.tokenizer.decode(row["tokens2"]) == open_table("rte", "train", dir=str(download))[0][3].texts[1]
    write(download / "RTE" / "train.tsv", HEADERS["rte"].split(), [row_of("a zebra sang all day")] * 9)
    c.data.tokenizer = "wordpiece:30"
    assert tasks.of(c).open("train").tokenizer.number("##r") is not None
    assert len([*(tmp_path / "cache").iterdir()]) == 2


def row_of(text):
    return row("rte", text, text, "entailment")


def test_labels_are_spread_over_examples(download, wordpiece):
    """Order and labels survive the way into batches."""
    task = tasks.of(small(config.glue("qnli"), download, wordpiece))
    source = task.open("dev")
    batches = task.eval_batches(source, batch_size=8)
    told = np.concatenate([batches[i]["label"][batches[i]["mask"]] for i in range(len(batches))])
    rows, _ = open_table("qnli", "dev", dir=str(download))
    assert told.tolist() == [found.label for found in rows] and len(collections.Counter(told.tolist())) == 2
    assert source.name(3) == f"{download}/QNLI/dev.tsv, line 5"
    assert isinstance(task, sentences.Classified) and isinstance(task, tasks.Task)
