"""The task of language models by the ordinary commands: trained, killed, evaluated, probed, gone on with; its loss."""

import dataclasses
import json
import math
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from commands import inside
from flax import nnx
from power_cuts import power_cut

from leanformer import config, evaluate, generate, models, predict, together, train
from leanformer.data.text.tokenizer import of_bytes
from leanformer.errors import ConfigError, DataError
from leanformer.tasks import decoding, kept
from leanformer.tasks.decoding import NOTHING, Sampling
from leanformer.training import checks, experiment, report, streams


WORDS = "the bear saw a bird and the bird saw a bear so they sang of it all day long".split()  # noqa: SIM905


@pytest.fixture
def texts(tmp_path):
    """A run on sentences of few words, in seconds."""
    draw = np.random.default_rng(5)
    folder = tmp_path / "texts"
    folder.mkdir()
    for split, number in (("train", 60), ("test", 9)):
        lines = [" ".join(draw.choice(WORDS, size=draw.integers(3, 30))) + "." for _ in range(number)]
        (folder / f"{split}.txt").write_text("|".join(lines))
    c = config.language()
    c.update(batch_size=8, total_steps=4, dtype="float32", log_every=2, logits_at_once=8 * 269)
    c.model.update(vocabulary=270, max_length=24, width=12, depth=2, num_heads=3, head_dim=4, mlp_dim=20, dropout=0.1)
    c.data.update(name=f"text:{folder}", tokenizer="bpe:269", separator="|", dir=str(tmp_path / "cache"), workers=0)
    c.model.attention_dropout = 0.2
    c.optim.update(lr=1e-2, schedule="cosine")
    c.eval.update(every=2, batch_size=8)
    c.checkpoint.every = 2
    c.probe.update(every=4, examples=8)
    return c


def records(workdir):
    found = report.read_records(workdir / "metrics.jsonl")
    return [{key: value for key, value in record.items() if key not in report.TIMING} for record in found]


def test_a_run_by_the_ordinary_commands(texts, tmp_path, monkeypatch, capsys, keeping):
    checks.check(texts)
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert train.train(texts, whole) == 0
    assert "windows of the stream of tokens, 24 tokens each, of a vocabulary of 270" in capsys.readouterr().out
    with power_cut(monkeypatch, 3):
        train.train(texts, killed)
    assert train.train(texts, killed) == 0
    assert records(whole) == records(killed)
    last = next(r for r in records(whole) if r["kind"] == "eval" and r["step"] == 4)
    assert 0 < last["bits_per_byte"] < last["loss"] / math.log(2) < math.log2(269)
    assert "attention_entropy" in next(r for r in records(whole) if r["kind"] == "probe")
    assert json.loads((whole / "summary.json").read_text())["score"]["of"] == "loss"

    capsys.readouterr()
    assert evaluate.main([f"--workdir={whole}"]) == 0
    again = json.loads((whole / "evaluation.json").read_text())
    assert again["loss"] == pytest.approx(last["loss"], rel=1e-6)
    (tmp_path / "some.txt").write_text("the bear")
    assert predict.main([f"--workdir={whole}", str(tmp_path / "some.txt")]) == 2
    assert "has no classes to choose from. A language model goes on with" in capsys.readouterr().err
    _is_gone_on_with(whole, tmp_path, capsys)
    _refuses_another_tokenizer(texts, whole, capsys)


def _is_gone_on_with(workdir, tmp_path, capsys):
    def said(*words):
        status = generate.main([f"--workdir={workdir}", *words])
        done = capsys.readouterr()
        return status, done.out or done.err

    first = said("--prompt=the bear", "--tokens=9", "--seed=3")
    assert first == said("--prompt=the bear", "--tokens=9", "--seed=3") != said("--prompt=the bear", "--tokens=9")
    assert first[0] == 0 and first[1].startswith("the bear")
    greedy = said("--prompt=the bear", "--tokens=9", "--temperature=0")
    assert (
        greedy
        == said("--prompt=the bear", "--tokens=9", "--top_k=1")
        == said("--prompt=the bear", "--tokens=9", "--top_p=1e-9")
    )
    (tmp_path / "prompts.txt").write_text("the bear\n\na bird and the bird sang\n")
    status, lines = said(f"--prompts={tmp_path / 'prompts.txt'}", "--tokens=9", "--temperature=0")
    found = [json.loads(line) for line in lines.splitlines()]
    assert status == 0 and [line["prompt"] for line in found] == ["the bear", "a bird and the bird sang"]
    assert "the bear" + found[0]["text"] + "\n" == greedy[1]
    for words, message in [
        (["--prompt=the bear", "--tokens=99"], "The model sees model.max_length=24 tokens, and the longest prompt has"),
        (["--prompt=" + "they sang of it " * 20], "Ask for 0 more at most"),
        ([], "Give one of --prompt"),
        (["--prompt=a", "--temperature=-1"], "--temperature=-1.0: 0 takes the likeliest"),
        (["--prompt=a", "--top_p=0"], "--top_p=0.0 is a share"),
        (["--prompt=a", "--top_k=0"], "--top_k=0 leaves no token"),
        (["--prompt=a", f"--out={tmp_path}/x"], "--out goes with --prompts"),
        (["--prompt=a\udcff"], "--prompt is not UTF-8"),
        ([f"--prompts={tmp_path}/none"], "cannot be read as UTF-8"),
    ]:
        status, text = said(*words)
        assert status == 2 and message in text


def _refuses_another_tokenizer(c, workdir, capsys):
    c.unlock()
    c.data.tokenizer, c.total_steps = "bpe:268", 6
    with pytest.raises(DataError, match="is the tokenizer of this run, of 269 tokens, and data.token"):
        train.train(c, workdir)
    c.data.tokenizer = str(workdir / "tokenizer.json")
    assert train.train(c, workdir) == 0
    capsys.readouterr()
    (workdir / "tokenizer.json").unlink()
    assert generate.main([f"--workdir={workdir}", "--prompt=a"]) == 2
    assert "has no tokenizer.json: it is of no language model" in capsys.readouterr().err


@pytest.mark.parametrize("packed", [False, True])
def test_the_metrics_are_those_of_all_tokens(texts, packed, meshes):
    """By hand, in float64, from the logits of every row; whatever the batch, the pieces of the loss, or padding."""
    texts.model.packed = packed
    task = experiment.tasks.of(texts)
    source, model = task.open("test"), models.build(**texts.model.to_dict() | {"backend": "xla"}, rngs=nnx.Rngs(1))
    graphdef, *weights = nnx.split(model, nnx.Param, ...)
    nats = tokens = 0
    for i in range(len(source)):
        row = source[i]
        inputs = [jnp.asarray(row[name])[None] for name in task.leaves()]
        log = np.asarray(jax.nn.log_softmax(model(*inputs)[0].astype(jnp.float32)), np.float64)[0]
        own = row["targets"] >= 0
        nats, tokens = nats - log[own, row["targets"][own]].sum(), tokens + own.sum()
    text = sum(len(line.encode()) for line in (texts_of(texts) / "test.txt").read_text().split("|"))
    assert tokens == len(source.corpus) and len(source) % 7
    batches = task.eval_batches(source, batch_size=7)
    found = experiment.steps.evaluate(
        jax.jit(lambda w, b: task.statistics(nnx.merge(graphdef, *w), b)),
        task.metrics,
        {"": weights},
        [jax.tree.map(jnp.asarray, batches[i]) for i in range(len(batches))],
    )
    assert found == pytest.approx(
        {"loss": nats / tokens, "bits_per_byte": nats / text / math.log(2), "examples": len(source)}, rel=1e-5
    )


def texts_of(c):
    return Path(c.data.name.removeprefix("text:"))


def test_a_step_is_the_same_on_one_device_and_on_eight(texts, meshes):
    """Of a loss in pieces, with dropout, split parameters and packed documents."""
    texts.model.packed = True
    texts.model.num_heads = 4
    texts.logits_at_once = 8 * 270 * 7  # seven tokens of each row, of 24
    found = []
    for mesh, rate in ((meshes(1, 1), 0.2), (meshes(4, 2), 0.2), (meshes(2, 2, 2), 0.2), (meshes(4, 2), None)):
        texts.model.attention_dropout = rate
        run = experiment.build(texts, examples=None, mesh=mesh)
        state, step, losses = run.initial_state(), jax.jit(run.train_step), []
        state = dataclasses.replace(
            state, params=jax.tree.map(lambda x: 6 * x, state.params)
        )  # or attention says little
        batches = streams.train_batches(run, run.task.open("train"))
        for i in range(2):
            state, metrics = step(state, streams.put(run, batches[i]), run.run_key())
            losses += [float(metrics["loss"]), float(metrics["grad_norm"])]
        found.append(losses)
    np.testing.assert_allclose(found[1], found[0], rtol=2e-5)
    np.testing.assert_allclose(found[2], found[0], rtol=2e-5)  # the vocabulary of 270 over two, as heads
    assert found[0][0] != found[0][2] and abs(found[0][0] / found[3][0] - 1) > 1e-3


def test_the_loss_is_of_the_whole_batch(texts, meshes):
    """Rows of unequal numbers of targets weigh by them, however the batch is split."""
    texts.model.update(packed=True, dropout=0.0, attention_dropout=0.0)
    found = []
    for accumulate in (1, 4):
        texts.accumulate = accumulate
        run = experiment.build(texts, examples=None, mesh=meshes(2, 1))
        host = streams.train_batches(run, run.task.open("train"))[0]
        _, metrics = jax.jit(run.train_step)(run.initial_state(), streams.put(run, host), run.run_key())
        found.append((float(metrics["loss"]), float(metrics["grad_norm"])))
    counts = (host["targets"] >= 0).sum(axis=1)
    assert len({*counts.tolist()}) > 1
    np.testing.assert_allclose(*found, rtol=1e-5)


def test_runs_together_keep_their_tokenizer(texts, tmp_path):
    """Without which nobody could generate from them."""
    texts.update(total_steps=2)
    texts.probe.every = texts.eval.every = 0
    other = texts.copy_and_resolve_references()
    other.seed = 1
    members = [(tmp_path / "one", texts), (tmp_path / "two", other)]
    assert together.train(members) == 0
    assert [kept.tokenizer(folder).vocabulary for folder, _ in members] == [269, 269]


def reference(forward, prompt, tokens, how, key, row, end):
    """Each token from all before it, without a cache; what stands behind them nobody sees."""
    said = [*prompt]
    for _ in range(tokens):
        logits = forward(jnp.asarray([said + [0] * (16 - len(said))]))[:, len(said) - 1]
        keys = decoding.keys_of(key, row + 1, jnp.int32(len(said)))[row:]
        said.append(int(decoding.choose(logits, keys, how)[0]))
        if said[-1] == end:
            break
    return said[len(prompt) :]


@pytest.mark.parametrize("how", [Sampling(0.0), Sampling(0.7, top_k=7, top_p=0.9)], ids=["greedy", "sampled"])
def test_a_cache_goes_on_as_without_one(how, rng):
    """Prompts of several lengths at once, token by token; rows end where they end."""
    sizes = {"vocabulary": 13, "max_length": 16, "width": 12, "depth": 2, "num_heads": 3, "head_dim": 4, "mlp_dim": 20}
    model = models.build("gpt", **sizes, rngs=nnx.Rngs(0))
    model.embed[...] *= 30
    key, prompts = jax.random.key(8), [rng.integers(13, size=n) for n in (2, 5, 3)]
    forward = jax.jit(lambda tokens: model(tokens)[0])
    wanted = [reference(forward, prompt, 9, how, key, row, end=4) for row, prompt in enumerate(prompts)]
    rows = np.stack([*decoding.generate(model, prompts, 9, end=4, key=key, how=how)], axis=1)
    assert [row[row != NOTHING].tolist() for row in rows] == wanted
    assert len({*map(len, wanted), *map(tuple, wanted)}) > 2


def test_what_is_drawn(rng):
    logits = jnp.log(jnp.asarray([[0.5, 0.05, 0.25, 0.2]]))
    keys = jax.random.split(jax.random.key(1), 4000)

    def shares(how):
        drawn = jax.vmap(lambda key: decoding.choose(logits, key[None], how)[0])(keys)
        return np.bincount(drawn, minlength=4) / len(keys)

    for how, wanted in [
        (Sampling(), [0.5, 0.05, 0.25, 0.2]),
        (Sampling(top_k=2), [2 / 3, 0, 1 / 3, 0]),
        (Sampling(top_p=0.8), [0.5 / 0.95, 0, 0.25 / 0.95, 0.2 / 0.95]),
        (Sampling(top_p=0.75), [2 / 3, 0, 1 / 3, 0]),
        (Sampling(0.5), np.square([0.5, 0.05, 0.25, 0.2]) / np.square([0.5, 0.05, 0.25, 0.2]).sum()),
        (Sampling(0.0), [1, 0, 0, 0]),
    ]:
        np.testing.assert_allclose(shares(how), wanted, atol=0.03)


def test_text_comes_in_whole_characters():
    tokenizer = of_bytes()
    (tokens,) = tokenizer.encode(["äß漢!"])
    assert [*generate.pieces(tokenizer, tokens.tolist())] == ["ä", "ß", "漢", "!", ""]
    assert "".join(generate.pieces(tokenizer, tokens[:6].tolist())).startswith("äß")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model.vocabulary": 200}, "has 269 tokens, and model.vocabulary=200. Set --config.model.vocabulary=269"),
        ({"data.name": "folder:texts"}, "is not known: choose one of.*text:<folder>.*bundled:austen"),
        ({"model.dropout": 1.0}, "model.dropout=1.0 must be in"),
        ({"data.separator": ""}, "separates nothing"),
        ({"logits_at_once": 0}, "logits_at_once=0 must be at least 1"),
    ],
    ids=str,
)
def test_refused(texts, changes, message):
    texts.update_from_flattened_dict(changes)
    with pytest.raises((ConfigError, DataError), match=f"(?s){message}"):
        checks.check(texts)
        experiment.tasks.of(texts).open("train")


def test_another_family_is_refused(texts):
    graphdef, state = nnx.split(nnx.Linear(2, 2, rngs=nnx.Rngs(0)))
    with pytest.raises(ConfigError, match='task="language" wants a model of tokens that come next'):
        experiment.tasks.of(texts).fit(graphdef, (state,))


def test_what_it_costs():
    words = ["--config=quickstart_gpt", "--config.model.depth=1", "--config.model.width=8"]
    status, out, err = inside(["", "", "leanformer.cost", *words, "--json"])
    assert (status, err) == (0, "") and json.loads(out)["params"] > 4096
