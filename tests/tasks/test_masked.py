"""Masked language modelling: masks, metrics of both language-modelling tasks by definition, and refused configs."""

import math
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from messages import refuses
from random_weights import fill_weights

from leanformer import config, models, tasks
from leanformer.data.text.rows import IGNORE, Masking, num_masked, prepare_masked
from leanformer.data.text.tokenizer import SPECIAL, parse, train_wordpiece
from leanformer.errors import ConfigError, DataError
from leanformer.tasks.language import CausalLanguageModelling
from leanformer.training import evaluators, run_files, train_setup
from leanformer.training import step as steps
from tests.tasks.test_language import folder
from tests.tasks.test_language import make_config as make_language_config


__all__ = ["folder"]  # fixture


VOCABULARY = 83


def make_masked_config(folder):
    c = config.masked()
    c.update(batch_size=8, total_steps=2, dtype="float32", log_every=2, logits_at_once=8 * VOCABULARY, loggers=())
    c.model.update(vocabulary=VOCABULARY, max_length=24, width=12, depth=2, num_heads=3, head_dim=4, mlp_dim=20)
    c.model.dropout = 0.1
    c.data.update(name=f"text:{folder}", tokenizer="wordpiece:61", separator="|", workers=0)
    c.data.dir = str(folder.with_name(f"{folder.name}-cache"))
    c.optim.update(lr=1e-2, schedule="cosine", warmup_steps=0)
    c.eval.update(every=2, batch_size=8)
    c.checkpoint.every = 2
    c.probe.update(every=2, examples=8)
    return c


@pytest.fixture
def texts(folder):
    return make_masked_config(folder)


def test_run_saves_its_tokenizer_and_probes_masked_rows(texts, tmp_path, meshes):
    run = train_setup.set_up_training(texts, examples=None, mesh=meshes(1, 1))
    source = run.task.data.open("test")
    run_files.save_classes_and_tokenizer(tmp_path, source)
    assert run_files.load_tokenizer(tmp_path).mask == SPECIAL.index("[MASK]")
    batch = evaluators.probe_batch(run.model, run.task.data, source, run.config.probe.examples)
    np.testing.assert_array_equal((np.asarray(batch["tokens"]) == SPECIAL.index("[MASK]")).sum(axis=1), 6)
    jax.eval_shape(run.model.probe_step(run.task.objective, run.config.probe.measures), run.state.weights, batch)


def test_forward_flops_are_a_third_of_training(texts, meshes):
    """Each matmul has two in the gradient; the logits of an evaluation are computed once, for loss and accuracy."""
    run = train_setup.set_up_training(texts, examples=None, mesh=meshes(1, 1))
    forward, training = run.flops_per_example
    assert training / forward == pytest.approx(3, rel=0.01)


def open_split(c, split="train"):
    task = tasks.build_task(c)
    return task, task.data.open(split)


def refuse_draws():
    raise AssertionError("evaluation masks must depend on the row alone")


def test_mask_counts_and_positions_of_10_000_rows():
    """In every row of 128, 32 are targets: 26 masked, 3 random tokens, 3 unchanged; positions are uniform."""
    mask_row = Masking(0.25, mask=4, vocabulary=1000, length=128)
    rng = np.random.default_rng(0)
    text = rng.integers(5, 1000, size=(10_000, 128)).astype(np.int32)
    rows = [mask_row(row, 0, np.random.default_rng(i)) for i, row in enumerate(text)]
    places, targets, tokens = (np.stack([row[name] for row in rows]) for name in ("places", "targets", "tokens"))
    assert places.shape == (10_000, 32) and all(len({*row}) == 32 for row in places.tolist())
    np.testing.assert_array_equal(np.take_along_axis(text, places, axis=1), targets)
    seen = np.take_along_axis(tokens, places, axis=1)
    np.testing.assert_array_equal((seen[:, 6:] == 4).sum(axis=1), 26)
    np.testing.assert_array_equal(seen[:, 3:6], targets[:, 3:6])
    changed = (tokens != text).sum(axis=1)
    assert set(changed.tolist()) <= {26, 27, 28, 29} and (changed == 29).mean() > 0.98
    random = seen[:, :3].ravel()
    assert 0 <= random.min() < 10 and 990 < random.max() < 1000 and abs(random.mean() - 499.5) < 5 * 288.7 / 30_000**0.5
    for columns in (slice(0, 3), slice(3, 6), slice(6, 32)):  # positions are uniform
        counts = np.bincount(places[:, columns].ravel(), minlength=128)
        expected = counts.sum() / 128
        assert np.square(counts - expected).sum() / expected < 127 + 5 * (2 * 127) ** 0.5


def test_padding_is_never_masked():
    for tokens, share, expected in ((128, 0.25, 32), (100, 0.29, 29), (3, 0.25, 1), (10, 0.7, 7)):
        assert num_masked(share, tokens) == expected
    mask_row = Masking(0.25, mask=4, vocabulary=99, length=12)
    text = np.array([7, 8, 9, 10, 11, 12, 13, 14, *[IGNORE] * 4], np.int32)
    for seed in range(50):
        row = mask_row(text, 3, np.random.default_rng(seed))
        assert num_masked(0.25, 5) == 1 and row["targets"][0] == text[row["places"][0]] and 3 <= row["places"][0] < 8
        np.testing.assert_array_equal(row["targets"][1:], IGNORE)
        np.testing.assert_array_equal(row["tokens"][8:], 0)


def test_evaluation_masks_depend_on_the_row_alone(texts):
    """tests/training/test_resume.py shows that masks of training are functions of seed and step."""
    task, test = open_split(texts, "test")
    for rows in (task.data.eval_batches(test, batch_size=size) for size in (3, 5)):
        tokens = [rows[i]["tokens"][rows[i]["mask"]] for i in range(len(rows))]
        expected = [rows.prepare(i, test[i], refuse_draws)["tokens"] for i in range(len(test))]
        np.testing.assert_array_equal(np.concatenate(tokens), expected)


@pytest.mark.parametrize("packed", [False, True])
def test_every_token_is_a_target_at_most_once(texts, packed):
    """Rows contain every token once as a possible target; unpacked rows are not padded."""
    texts.model.packed = packed
    _, source = open_split(texts, "test")
    places = np.zeros(len(source.corpus), int)
    text, start = source.corpus[slice(0, len(source.corpus))], 0
    for i in range(len(source)):
        row = prepare_masked(i, source[i], refuse_draws, how=Masking(0.25, 4, 61, 24), train=False)
        raw = source[i]["targets"]
        begin = start if packed else min(i * 24, len(text) - 24)
        real = int((raw != IGNORE).sum())
        np.testing.assert_array_equal(raw[:real], text[begin : begin + real])
        start += real
        is_target = row["targets"] != IGNORE
        assert packed or real == 24
        assert is_target.sum() == num_masked(0.25, real - int(source[i].get("old", 0)))
        np.testing.assert_array_equal(raw[row["places"][is_target]], row["targets"][is_target])
        np.add.at(places, begin + row["places"][is_target], 1)
    assert places.max() == 1 and (packed or len(text) % 24)


LOSSES = [(make_language_config, True), (make_masked_config, False)]
LOSSES += [pytest.param(make, not packed, marks=pytest.mark.slow) for make, packed in LOSSES]


@pytest.mark.parametrize(("make_config", "packed"), LOSSES)
def test_metrics_equal_those_over_all_tokens(make_config, packed, folder):
    """Compute metrics in float64 from the logits of whole rows; batch size, loss chunks and padding do not matter."""
    c = make_config(folder)
    c.model.packed = packed
    task, source = open_split(c, "test")
    model = fill_weights(lambda: models.build(**c.model.to_dict() | {"backend": "xla"}, rngs=nnx.Rngs(1)))
    graphdef, *weights = nnx.split(model, nnx.Param, ...)
    prepare = task.data.make_prepare(source, train=False)
    rows = [prepare(i, source[i], refuse_draws) for i in range(len(source))]
    batch = {name: jnp.asarray(np.stack([row[name] for row in rows])) for name in rows[0]}
    forward = jax.jit(lambda w, b: nnx.merge(graphdef, *w)(*task.objective.inputs(b))[0])
    logits = np.asarray(forward(weights, batch), np.float64)
    if c.task == "masked":
        logits = np.take_along_axis(logits, np.asarray(batch["places"])[..., None], axis=1)
        # An untrained model is never right, so every other row gets its predictions as targets.
        replaced = (np.asarray(batch["targets"]) >= 0) & (np.arange(len(rows)) % 2 == 0)[:, None]
        batch["targets"] = jnp.where(replaced, logits.argmax(axis=-1), batch["targets"])
    log = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    targets = np.asarray(batch["targets"])
    is_target = targets >= 0
    nats = -np.take_along_axis(log, np.maximum(targets, 0)[..., None], axis=-1)[is_target].sum()
    correct, tokens = (logits.argmax(axis=-1) == targets)[is_target].sum(), is_target.sum()
    expected = {"loss": nats / tokens, "examples": len(source)}
    if c.task == "masked":
        expected["accuracy"] = correct / tokens
        assert 0.2 < correct / tokens < 0.9 and len(source) != tokens > 20
    else:
        documents = Path(c.data.name.removeprefix("text:"), "test.txt").read_text().split("|")
        expected["bits_per_byte"] = nats / sum(len(text.encode()) for text in documents) / math.log(2)
        assert tokens == len(source.corpus)
    assert tokens == task.objective.loss_denominator(batch) and len(source) % 9
    batches = task.data.eval_batches(source, batch_size=9)

    def place(host):
        return jax.tree.map(jnp.asarray, dict(host)) | {"targets": batch["targets"][host["index"]]}

    result = steps.evaluate(
        jax.jit(lambda w, b: task.objective.statistics(nnx.merge(graphdef, *w), b)),
        task.objective.metrics,
        {"": weights},
        [place(batches[i]) for i in range(len(batches))],
    )
    # A token's nats, 5 or so, are off by some 30 roundings of float32, 2e-6 of them; omitting one changes it by 1e-3.
    assert result == pytest.approx(expected, rel=2e-5)
    loss = jax.jit(lambda w, b: task.objective.loss(nnx.merge(graphdef, *w), b, None, None))
    assert float(loss(weights, batch)) == pytest.approx(nats, rel=2e-5)


def test_wordpiece_training_is_deterministic():
    texts = ["Über the bears, the BEARS of the day!", "a day of days"]
    first, second = train_wordpiece(texts, 33), train_wordpiece(texts[::-1], 33)
    assert first.json() == second.json() == parse(first.json()).json()
    (tokens,) = first.encode(["UBER the day [MASK]"])
    assert tokens[-1] == first.mask == 4 and first.end == 3 and first.vocabulary == 33
    assert first.decode(tokens[:-1]) == "uber the day" and first.lengths is None
    with refuses("wordpiece:900", error=DataError):
        train_wordpiece(texts, 900)
    with refuses("wordpiece:9", error=DataError):
        train_wordpiece(texts, 9)


@pytest.mark.parametrize(
    ("changes", "error", "parts"),
    [
        ({"data.tokenizer": "bytes", "model.vocabulary": 257}, DataError, ('data.tokenizer="bytes"', "[MASK]")),
        ({"model.vocabulary": 60}, DataError, (61, "model.vocabulary=60", "--config.model.vocabulary=61")),
        ({"mask_share": 1.0}, ConfigError, ("mask_share=1.0",)),
        ({"model.max_length": 600}, DataError, ("test", "model.max_length=600")),
    ],
    ids=str,
)
def test_invalid_configs_are_refused(texts, changes, error, parts):
    texts.update_from_flattened_dict(changes)
    with refuses(*parts, error=error):
        train_setup.check(texts)
        tasks.build_task(texts).data.open("test")


def test_model_of_another_task_is_refused(texts):
    """Refuse a model that would see its targets, that cannot see both sides, or that has no head for tokens."""

    def split_model(*name, **arguments):
        graphdef, *weights = nnx.split(nnx.eval_shape(lambda: models.build(*name, **arguments, rngs=nnx.Rngs(0))), ...)
        return graphdef, weights

    with refuses('task="language"', 'model.name="gpt"'):
        bert = split_model(**texts.model.to_dict() | {"backend": "xla"})
        CausalLanguageModelling(vocabulary=83, packed=False, at_once=83).check_model(*bert)
    sizes = {"vocabulary": 83, "max_length": 24, "width": 12, "depth": 1, "num_heads": 3, "head_dim": 4, "mlp_dim": 20}
    for name, more in (("gpt", {}), ("bert", {"num_classes": 2})):
        with refuses('task="masked"', 'model.name="bert"', "model.num_classes"):
            tasks.build_task(texts).objective.check_model(*split_model(name, **sizes, **more))
