"""BERT against Hugging Face: same weights, same outputs, and their names back; embeddings of a packaged model.

Fixture by tests/fixtures/make_bert_fixture.py.
"""

import functools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors import safe_open

from leanformer import models, pretrained
from leanformer.errors import ConfigError, WeightsError
from leanformer.pretrained import layouts
from leanformer.training import state


FILE = Path(__file__).parent / "fixtures" / "bert_huggingface.safetensors"
CASES = ("model", "masked", "classifier")
TOLERANCE = 1e-5  # of the largest output
NOTHING = pretrained.Allowed()


@functools.cache
def fixture(case):
    """Arguments of our model, their weights, and inputs and outputs."""
    with safe_open(str(FILE), "numpy") as file:
        about = json.loads(file.metadata()["about"])
        names = [name for name in file.keys() if name.startswith(f"{case}/")]  # noqa: SIM118 - the file is no dict
        tensors = {name.removeprefix(f"{case}/"): file.get_tensor(name) for name in names}
    others = {name: tensors.pop(name) for name in ("input", "types", "output", "output64")}
    return about["cases"][case], tensors, others | {"lengths": np.array(about["lengths"], np.int32)}


def definition(arguments, **other):
    return state.split(lambda rngs: models.build("bert", **arguments, **other, rngs=rngs))


def load(case, tensors=None, allowed=NOTHING, **other):
    arguments, theirs, _ = fixture(case)
    shapes = jax.eval_shape(definition(arguments | other)[1], jax.random.key(0))
    layout = layouts.layout("huggingface", {"name": "bert", **arguments, **other})
    return layout, pretrained.load(theirs if tensors is None else tensors, layout, shapes, allowed)


def run(case, weights, others, **other):
    model = nnx.merge(definition(fixture(case)[0], **other)[0], *weights)
    inputs = [jnp.asarray(others[name]) for name in ("input", "lengths", "types")]
    return jax.jit(lambda *inputs: (model.hidden if case == "model" else model)(*inputs)[0])(*inputs)


def difference(found, expected, others):
    """Of real tokens, where there is an output of each."""
    real = np.arange(expected.shape[1])[None] < others["lengths"][:, None]
    found, expected = (x[real] if x.ndim == 3 else x for x in map(np.asarray, (found, expected)))
    return np.abs(found - expected).max() / np.abs(expected).max()


@pytest.mark.parametrize("case", CASES)
def test_outputs(case):
    """With padding and both types; each of the two matters far more than the tolerance."""
    weights, others = load(case)[1], fixture(case)[2]
    weights = jax.tree.map(jnp.asarray, weights)
    assert difference(run(case, weights, others), others["output"], others) < TOLERANCE
    for name, wrong in (("types", 0 * others["types"]), ("lengths", 0 * others["lengths"] + 11)):
        assert difference(run(case, weights, others | {name: wrong}), others["output"], others) > 1e-3
    with jax.enable_x64(True):
        double = jax.tree.map(lambda x: jnp.asarray(x, np.float64), weights)
        found = run(case, double, others, dtype=jnp.float64)
        assert difference(found, others["output64"], others) < 1e-9


@pytest.mark.parametrize("case", CASES)
def test_there_and_back(case):
    """Of the pooler only where the model has it."""
    _, tensors, _ = fixture(case)
    layout, weights = load(case)
    found = pretrained.export(weights, layout)
    wanted = tensors if case != "model" else {f"bert.{n}": x for n, x in tensors.items() if not n.startswith("pooler")}
    assert found.keys() == wanted.keys()
    for name, x in wanted.items():
        np.testing.assert_array_equal(found[name], x, err_msg=name)


def test_names_that_files_have():
    """With and without the first part; of old files norms are called otherwise, and buffers are in them."""
    wanted = load("model")[1]
    theirs = {name: x for name, x in fixture("model")[1].items() if not name.startswith("pooler")}
    full = {f"bert.{name}": x for name, x in theirs.items()}
    ends = (("LayerNorm.weight", "LayerNorm.gamma"), ("LayerNorm.bias", "LayerNorm.beta"))
    old = {functools.reduce(lambda name, end: name.replace(*end), ends, name): x for name, x in theirs.items()}
    old["embeddings.position_ids"] = np.arange(11)[None]
    assert sum("gamma" in name for name in old) == 5
    decoder = {"cls.predictions.decoder.weight": np.zeros((23, 24)), "cls.seq_relationship.bias": np.zeros(2)}
    for tensors in (full, old, full | decoder):
        jax.tree.map(np.testing.assert_array_equal, load("model", tensors)[1], wanted)
    with pytest.raises(WeightsError, match=r"what \(1,\): in the file, not in this model"):
        load("model", full | {"what": np.zeros(1)})
    with pytest.raises(WeightsError, match=r"embeddings.word_embeddings.weight: missing in the file \(for embed\)"):
        load("model", {name: x for name, x in full.items() if "word_emb" not in name})


def test_a_classifier_begins_from_what_told_tokens():
    """From their file, and from our own: with a new head where it is asked for, and not else."""
    masked, arguments = fixture("masked")[1], fixture("classifier")[0]
    with pytest.raises(WeightsError, match="classifier.weight: missing in the file .*a new head is made if asked"):
        load("classifier", masked)
    heads = models.family("bert").classifiers
    allowed, definition_of = pretrained.Allowed(new_head=True, heads=heads), definition(arguments)
    fresh = jax.jit(definition_of[1])(jax.random.key(0))
    own = pretrained.named(load("masked")[1][0])
    for layout, tensors in (("huggingface", masked), ("own", own)):
        chosen = layouts.layout(layout, {"name": "bert", **arguments}) if layout != "own" else None
        found = pretrained.load(tensors, chosen or pretrained.own_layout(fresh), fresh, allowed)[0]
        np.testing.assert_array_equal(found["embed"], own["embed"])
        np.testing.assert_array_equal(found["head"]["kernel"], fresh[0]["head"]["kernel"])
    with pytest.raises(WeightsError, match=r"transform.kernel .*: in the file, not in this model"):
        pretrained.load(own, pretrained.own_layout(fresh), fresh)


@pytest.mark.parametrize(
    "changes",
    [{"gated": True}, {"post_norm": False}, {"positions": "sinusoidal"}, {"types": None}, {"head_bias": False}],
    ids=str,
)
def test_no_such_model(changes):
    (key, value), *_ = changes.items()
    with pytest.raises(ConfigError, match=f'model.{key}={value!r}.*: "huggingface" has no such BERT'):
        load("masked", **changes)


def test_positions_of_texts_are_not_resized():
    with pytest.raises(WeightsError, match=r"Positions \(11, 24\) are of texts"):
        load("model", allowed=pretrained.Allowed(resize_positions=True), max_length=9)
