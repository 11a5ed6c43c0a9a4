"""Sentence classification and regression: metrics by definition, commands, and fine-tuning from another run."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from messages import mentions, refuses
from random_weights import fill_weights
from scipy import stats

import leanformer
from leanformer import config, evaluate, predict, tasks, train
from leanformer.data.sentences import open_table
from leanformer.data.text import corpus
from leanformer.data.text import tokenizer as readers
from leanformer.errors import ConfigError, DataError
from leanformer.tasks import Score
from leanformer.training import evaluators, inference, run_files, train_setup
from leanformer.training import step as steps
from tests.data.test_sentences import HEADERS, download, make_row, wordpiece, write_table


__all__ = ["download", "wordpiece"]  # fixtures


def make_config(c, download, wordpiece):
    c.update(batch_size=8, total_steps=4, total_epochs=0.0, dtype="float32", log_every=1, loggers=())
    c.data.update(dir=str(download), tokenizer=wordpiece and str(wordpiece), max_length=13)
    c.model.update(vocabulary=23, max_length=16, width=12, depth=1, num_heads=3, head_dim=4, mlp_dim=10, pooler_dim=7)
    c.optim.update(lr=1e-2, warmup_epochs=0.0, warmup_steps=1)
    c.eval.update(batch_size=8, every=2)
    c.checkpoint.update(every=1, keep=3)
    return c


def build(c, meshes):
    return train_setup.set_up_training(c, examples=37, mesh=meshes(1, 1))


@pytest.mark.parametrize("task", ["rte", pytest.param("stsb", marks=pytest.mark.slow)])
def test_metrics_equal_those_over_all_examples(task, download, wordpiece, meshes):
    """Compute metrics from the logits of rows with extra padding; the evaluation batch size does not matter."""
    c = make_config(config.glue(task), download, wordpiece)
    train_setup.check(c)
    run = build(c, meshes)
    assert run.task.objective.score == Score(c.score)
    source, weights = run.task.data.open("dev"), fill_weights(run.state.weights)
    rows = [run.task.data.prepare(source[i]) for i in range(len(source))]
    tokens, lengths = (np.stack([row[name] for row in rows]) for name in ("tokens", "lengths"))
    assert len({*lengths.tolist()}) > 3
    longer = jnp.asarray(np.pad(tokens, ((0, 0), (0, 3)), constant_values=9))
    forward = jax.jit(lambda w, *inputs: nnx.merge(run.model.graphdef, *w)(*inputs)[0])
    logits = np.asarray(forward(weights, longer, jnp.asarray(lengths)), np.float64)
    labels = np.array([source[i]["label"] for i in range(len(source))])
    values = steps.evaluate(
        jax.jit(run.model.eval_step(run.task.objective)),
        run.task.objective.metrics,
        {"": weights},
        evaluators.evaluation_batches(run.config, run.model, run.task.data, source),
    )
    assert values.pop("examples") == 37 and len(source) % c.eval.batch_size
    if task == "rte":
        predictions = logits.argmax(axis=1)
        loss = (np.log(np.exp(logits).sum(axis=1)) - logits[np.arange(37), labels]).mean()
        assert np.ptp(predictions) and values.keys() == {"loss", "accuracy", "matthews", "f1"}
        assert values["accuracy"] == pytest.approx(np.mean(predictions == labels))
        assert values["matthews"] == pytest.approx(np.corrcoef(predictions, labels)[0, 1])
    else:
        predictions = logits[:, 0]
        loss = np.square(predictions - labels).mean()
        expected = {"pearson": stats.pearsonr(predictions, labels)[0], "spread": predictions.std()}
        # Outputs of about one are off by some 30 roundings of float32, 2e-6.
        assert {name: values[name] for name in expected} == pytest.approx(expected, rel=1e-5, abs=1e-5)
        assert values["spearman"] == pytest.approx(stats.spearmanr(predictions, labels)[0]) and values["spread"] > 1e-2
    assert values["loss"] == pytest.approx(loss, rel=1e-5)


def test_constant_predictions_have_zero_correlation(download, wordpiece):
    task = tasks.build_task(make_config(config.glue("stsb"), download, wordpiece))
    per_example = {"predictions": np.full(4, 2.5, np.float32), "labels": np.arange(4.0)}
    totals = {"loss": 8.0, "examples": 4, "per_example": per_example}
    assert task.objective.metrics(totals) == {"loss": 2.0, "pearson": 0.0, "spearman": 0.0, "spread": 0.0}
    totals["per_example"]["predictions"] = np.array([1, np.nan, 2, 3], np.float32)
    assert np.isnan(task.objective.metrics(totals)["pearson"])


def make_mrpc_config(download, wordpiece):
    c = make_config(config.glue("mrpc"), download, wordpiece)
    c.model.types, c.total_steps = 2, 2
    return c


def start_run(workdir, c):
    """Write the files that a run with this config writes before its first step."""
    source = tasks.build_task(c).data.open("train")
    run_files.begin(workdir, c, {"train": len(source)}, 0)
    run_files.save_classes_and_tokenizer(workdir, source)


@pytest.mark.slow
def test_fine_tuning_from_another_run(download, wordpiece, tmp_path, capsys, meshes, one_device):
    """The first run is evaluated and predicts; the second has its tokenizer, its weights, and a new head."""
    first = tmp_path / "first"
    assert train.train(make_mrpc_config(download, wordpiece), first) == 0
    last = run_files.read_records(first, "eval")[0]
    assert evaluate.main([f"--workdir={first}"]) == 0
    again = json.loads((first / "evaluation.json").read_text())
    assert again["f1"] == pytest.approx(last["f1"])
    assert again["accuracy"] == pytest.approx(last["accuracy"])
    assert set(again["accuracy_by_class"]) == {"equivalent", "not_equivalent"}
    (tmp_path / "a.txt").write_text("the bear sang\tno bird sang")
    (tmp_path / "bad.txt").write_text("a\tb\tc")
    capsys.readouterr()
    assert predict.main([f"--workdir={first}", str(tmp_path / "a.txt"), str(tmp_path / "bad.txt")]) == 2
    out, err = capsys.readouterr()
    answer = json.loads(out.splitlines()[0])["classes"]
    assert sum(choice["probability"] for choice in answer) == pytest.approx(1, abs=1e-5)
    assert mentions(err, tmp_path / "bad.txt")

    c = make_config(config.glue("mnli"), download, None)
    c.model.types = 2
    c.init_from.update(path=str(first), new_head=True)
    train_setup.check(c)
    run = build(c, meshes)
    assert {name: len(run.task.data.open(more.split)) for name, more in c.eval.more.items()} == {"mm": 37}
    assert run.task.data.open("train").tokenizer.json() == readers.read(wordpiece).json()
    fresh = fill_weights(run.state.weights)
    initial = _get_initial_weights(run, fresh)
    for name in ("embed", "pooler"):
        assert not any(map(np.array_equal, jax.tree.leaves(fresh[0][name]), jax.tree.leaves(initial[0][name])))
    jax.tree.map(np.testing.assert_array_equal, initial[0]["head"], fresh[0]["head"])

    start_run(tmp_path / "second", c)
    first.rename(tmp_path / "moved")  # the second run has its own copy of the tokenizer
    c = run_files.load_config(tmp_path / "second")
    run_files.use_saved_tokenizer(tmp_path / "second", c)
    assert tasks.build_task(c).data.open("train").tokenizer.json() == readers.read(wordpiece).json()


def test_run_is_read_with_its_own_tokenizer(download, tmp_path):
    """A tokenizer trained on the texts would become another one, with other numbers, if the texts change."""
    c, workdir = make_config(config.glue("mrpc"), download, "wordpiece:60"), tmp_path / "run"
    c.model.update(types=2, vocabulary=60)
    start_run(workdir, c)
    saved = run_files.load_tokenizer(workdir)
    train_file = next((download / "MRPC").glob("*train*"))
    train_file.write_text(train_file.read_text().replace("bear", "zebra").replace("sang", "quacked"))
    assert tasks.build_task(run_files.load_config(workdir)).data._tokenizer.json() != saved.json()
    for folder in (download, download.rename(tmp_path / "elsewhere")):
        assert inference.open_run(workdir, dir=str(folder)).task.data._tokenizer.json() == saved.json()


@pytest.mark.slow
def test_regression_has_numbers_instead_of_classes(download, wordpiece, tmp_path, capsys):
    c, workdir = make_config(config.glue("stsb"), download, wordpiece), tmp_path / "run"
    c.update(total_steps=2)
    c.model.types = 2
    assert train.train(c, workdir) == 0
    model, texts = leanformer.load(workdir), [b"the bear sang\tno bird sang", b"the bear\tthe bear"]
    assert model.classes == () and model.model(*model.preprocess(texts))[0].shape == (2, 1)
    assert len(model.probe(texts)["attention_output"]) == 1
    with refuses("m.model(*m.preprocess(texts))[0]", error=ConfigError):
        model.predict(texts)
    (tmp_path / "a.txt").write_text("the bear\tthe bear")
    assert predict.main([f"--workdir={workdir}", str(tmp_path / "a.txt")]) == 2
    assert mentions(capsys.readouterr().err, "m.model(*m.preprocess(texts))[0]")


def _get_initial_weights(run, fresh):
    """Return the weights a run starts from; `fresh` stands for its random initialisation."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(run.model), "random_weights", lambda self, seed: fresh)
        return run.model.initial_weights()


@pytest.mark.parametrize(
    ("task", "changes", "error", "parts"),
    [
        ("sst2", {"score": "pearson"}, ConfigError, ('score="pearson"', "model.num_classes=2", "accuracy, f1")),
        ("sst2", {"data.max_length": 17}, ConfigError, ("data.max_length=17",)),
        ("sst2", {"model.vocabulary": 20}, DataError, (23, "model.vocabulary=20", "--config.model.vocabulary=23")),
        ("sst2", {"data.tokenizer": None}, DataError, ("data.tokenizer", "--config.data.tokenizer", "init_from.path")),
    ],
    ids=str,
)
def test_invalid_configs_are_refused(task, changes, error, parts, download, wordpiece):
    c = make_config(config.glue(task), download, wordpiece)
    c.update_from_flattened_dict(changes)
    with refuses(*parts, error=error):
        train_setup.check(c)
        tasks.build_task(c).data.open("dev")


def test_tokenizer_is_trained_on_the_table(download, wordpiece, tmp_path, monkeypatch):
    """The tokenizer is trained once on both texts of the training split, and again if a text changes."""
    monkeypatch.setattr(corpus, "CACHE", str(tmp_path / "cache"))
    c = make_config(config.glue("rte"), download, None)
    c.data.tokenizer, c.model.vocabulary = "wordpiece:45", 45
    first = tasks.build_task(c).data.open("train")
    assert first.vocabulary == 45 and tasks.build_task(c).data.open("dev").tokenizer.json() == first.tokenizer.json()
    assert len([*(tmp_path / "cache").iterdir()]) == 1
    row = first[3]
    assert first.tokenizer.decode(row["tokens2"]) == open_table("rte", "train", dir=str(download))[0][3].texts[1]
    text = "a zebra sang all day"
    write_table(download / "RTE" / "train.tsv", HEADERS["rte"].split(), [make_row("rte", text, text, "entailment")] * 9)
    c.data.tokenizer = "wordpiece:30"
    assert tasks.build_task(c).data.open("train").tokenizer.number("##r") is not None
    assert len([*(tmp_path / "cache").iterdir()]) == 2
