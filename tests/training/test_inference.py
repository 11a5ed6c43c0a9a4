"""A run's model, taken out of its folder by one line, and into the next run by one key."""

import csv
import dataclasses
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from commands import inside
from flax import nnx
from messages import mentions, refuses
from rounding import LOSS
from safetensors.numpy import load_file
from small_runs import fresh_state

import leanformer
from leanformer import conditioning, data
from leanformer.errors import CheckpointError, DataError, WeightsError
from leanformer.tasks.scores import Score
from leanformer.training import run_files, train_setup
from leanformer.training.checkpoint import Checkpoints


def numbered(state, step):
    """Return the state of a step, with averages that are not its weights."""
    ema = jax.tree.map(lambda x: 0.7 * x, state.ema)
    return dataclasses.replace(state, step=jnp.int32(step), ema=ema)


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    """What `kept` hands out copies of, made by the first test that asks: the folder, and then its run and states."""
    return [tmp_path_factory.mktemp("original")]


@pytest.fixture
def kept(original, tmp_path, tiny, meshes):
    """A workdir with checkpoints of steps 1, 2 and 3, the second the best, as training would leave it; its states."""
    folder, *made = original
    if not made:
        run = train_setup.build(tiny.copy_and_resolve_references(), examples=64, mesh=meshes(1, 1))
        states = {step: numbered(fresh_state(run, seed=step), step) for step in (1, 2, 3)}
        run_files.write_config(folder, tiny)
        with Checkpoints(folder / "checkpoints", keep=3, score=Score("top1")) as saved:
            for step, state in states.items():
                saved.save(step, state, score={2: 0.9, 3: 0.1}.get(step))
                saved.wait()
        original += [run, states]
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    return tmp_path, *original[1:]


def images(rng):
    return [rng.integers(0, 256, (19, 23), dtype=np.uint8) for _ in range(3)]


@pytest.mark.parametrize(("asked", "step"), [({}, 3), ({"best": True}, 2), ({"step": 1}, 1)])
def test_a_loaded_model_is_the_one_that_was_saved(kept, rng, asked, step):
    folder, run, states = kept
    result = leanformer.load(folder, **asked)
    assert (result.step, result.averaged) == (step, True)
    fed = result.preprocess(examples := images(rng))
    assert fed[0].shape == (3, 14, 14, 1)
    logits, _ = nnx.merge(run.model.graphdef, *states[step].ema)(*fed)
    probabilities = result.probabilities(examples)
    np.testing.assert_allclose(probabilities, jax.nn.softmax(logits), rtol=10 * LOSS)
    other, _ = nnx.merge(run.model.graphdef, *states[step].weights)(*fed)
    assert np.abs(jax.nn.softmax(other) / probabilities - 1).max() > 1000 * LOSS


def test_evaluation_prepares_examples_the_same_way(kept):
    folder, run, _ = kept
    result = leanformer.load(folder)
    c = result.config
    source = run.task.data.open(c.data.eval_split)
    batch = run.task.data.eval_batches(source, batch_size=3)[0]
    fed = result.preprocess([source[i]["image"] for i in range(3)])
    np.testing.assert_array_equal(fed[0], result.task.objective.inputs({"image": jnp.asarray(batch["image"])})[0])


@pytest.mark.parametrize(
    ("asked", "parts"), [({"step": 9}, ["step 9", "[1, 2, 3]"]), ({"step": 1, "best": True}, ["--best", "--step=1"])]
)
def test_a_checkpoint_that_is_not_there(kept, asked, parts):
    with refuses(*parts, error=CheckpointError):
        leanformer.load(kept[0], **asked)


def test_a_folder_without_a_run(tmp_path):
    with refuses(tmp_path):
        leanformer.load(tmp_path)


def test_a_run_begins_with_the_best_weights_of_another(kept, tiny, meshes):
    folder, _, states = kept
    tiny.init_from.path = str(folder)
    result = train_setup.build(tiny, examples=64, mesh=meshes(1, 1)).model.initial_weights()
    jax.tree.map(np.testing.assert_array_equal, result, states[2].ema)


def test_another_number_of_classes_needs_a_new_head(kept, tiny, meshes):
    folder, _, states = kept
    tiny.model.num_classes = 7
    tiny.init_from.path = str(folder)
    run = train_setup.build(tiny, examples=64, mesh=meshes(1, 1))
    with refuses("head.kernel", "init_from.new_head", error=WeightsError):
        run.model.initial_weights()
    tiny.init_from.new_head = True
    params, _ = train_setup.build(tiny, examples=64, mesh=meshes(1, 1)).model.initial_weights()
    assert params["head"]["kernel"].shape == (12, 7)
    np.testing.assert_array_equal(params["norm"]["scale"], states[2].ema[0]["norm"]["scale"])


def test_a_run_has_no_layout_but_its_own(kept, tiny, meshes):
    tiny.init_from.update(path=str(kept[0]), layout="timm")
    with refuses('"timm"', kept[0], '"own"'):
        train_setup.build(tiny, examples=64, mesh=meshes(1, 1)).model.initial_weights()


def test_damage_is_named(kept):
    folder = kept[0]
    largest = max((p for p in (folder / "checkpoints" / "2").rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
    size = largest.stat().st_size
    largest.write_bytes(largest.read_bytes()[:-1])
    with refuses("step 2", folder / "checkpoints", size, size - 1, error=CheckpointError):
        leanformer.load(folder, best=True)


def test_files_as_examples_of_sequences():
    np.testing.assert_array_equal(data.encode("text:x", b"ab", 8), [98, 99])
    np.testing.assert_array_equal(data.encode("listops:x", b"[MAX 4 ( 9 ) ]", 8), [12, 5, 10, 15])
    black = np.zeros((5, 4, 3), np.uint8)
    np.testing.assert_array_equal(data.encode("pixels:tfds:cifar10", black, 9), np.zeros(9))
    with pytest.raises(DataError):
        data.encode("listops:x", b"[MAX 4", 8)
    with refuses('data.name="pairs:x"', "listops", "imdb", "text", "pixels", error=DataError):
        data.encode("pairs:x", b"ab", 8)


@pytest.mark.parametrize(("asked", "step"), [((), 3), (("--best",), 2), (("--step=1",), 1)])
def test_weights_out_of_a_run(kept, tmp_path, asked, step):
    folder, _, states = kept
    status, out, err = inside(
        ["", "", "leanformer.convert", f"--weights={folder}", "--to=timm", f"--out={tmp_path}", *asked]
    )
    assert (status, err) == (0, "") and mentions(out, "timm")
    written = load_file(tmp_path / "model.safetensors")
    np.testing.assert_array_equal(written["head.weight"].T, states[step].ema[0]["head"]["kernel"])
    np.testing.assert_array_equal(written["norm.weight"], states[step].ema[0]["norm"]["scale"])


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (("--config=configs/quickstart.py",), ["--config"]),
        (("--from=timm",), ['"timm"', '"own"']),
        (("--step=7",), ["step 7", "[1, 2, 3]"]),
    ],
)
def test_what_cannot_be_converted(kept, tmp_path, words, parts):
    status, _, err = inside(
        ["", "", "leanformer.convert", f"--weights={kept[0]}", "--to=timm", f"--out={tmp_path}", *words]
    )
    assert status == 2 and mentions(err, kept[0], *parts)


def test_a_file_needs_a_config_and_has_no_checkpoints(tmp_path):
    words = ["", "", "leanformer.convert", f"--weights={tmp_path / 'w.safetensors'}", f"--out={tmp_path}"]
    assert mentions(inside(words)[2], "--config=FILE")
    assert mentions(inside([*words, "--config=configs/quickstart.py", "--best"])[2], "--best")


def test_evaluation_says_which_class_is_taken_for_which(kept):
    folder, *_ = kept
    status, out, err = inside(["", "", "leanformer.evaluate", f"--workdir={folder}", "--best"])
    assert (status, err) == (0, "") and mentions(out, "5 classes")
    result = json.loads((folder / "evaluation.json").read_text())
    head, *rows = csv.reader((folder / "confusion.csv").read_text().splitlines())
    matrix = np.array([list(map(int, row[1:])) for row in rows])
    assert head[1:] == list(result["accuracy"]) and result["step"] == 2
    assert matrix.sum() == result["examples"] == 2048
    assert matrix.trace() / matrix.sum() == pytest.approx(result["ema_top1"], abs=1e-9)
    assert list(result["accuracy"].values()) == pytest.approx(list(matrix.diagonal() / matrix.sum(axis=1)))
    assert (folder / "plots" / "confusion.png").is_file()


def test_a_loaded_model_names_classes_and_measures_layers(kept, rng):
    folder, _, _ = kept
    model, examples = leanformer.load(folder), images(rng)
    (folder / "classes.json").write_text(json.dumps([f"class {i}" for i in range(10)]))
    named = leanformer.load(folder)
    assert named.predict(examples) == [f"class {i}" for i in model.probabilities(examples).argmax(axis=1)]
    measured = named.probe(examples, ["attention_output", "tokens"])
    assert measured.keys() == {"attention_output", "tokens"}
    _, taps = model.model(*model.preprocess(examples), tap=conditioning.tap(["tokens"]))
    expected = conditioning.digest(conditioning.by_name(taps, ["tokens"])["tokens"])
    assert [layer["count"] for layer in measured["tokens"]] == [3] * model.config.model.depth
    np.testing.assert_allclose(measured["tokens"][0]["median"], expected[0]["median"], rtol=1e-3)
    for call in (model.generate, model.embed):
        with refuses(folder):
            call("text")
    with refuses("nothing"):
        model.probe(examples, ["nothing"])


def test_a_folder_for_transformers_out_of_a_run(kept, tmp_path):
    """Named as the first word; with the run's classes, and the scores of its summary."""
    folder, _, states = kept
    (folder / "classes.json").write_text(json.dumps([f"class {i}" for i in range(10)]))
    (folder / "summary.json").write_text(json.dumps({"final": {"step": 3, "top1": 0.12345678}}))
    out = tmp_path / "elsewhere"
    status, _, err = inside(["", "", "leanformer.convert", folder, "--to=huggingface", f"--out={out}"])
    assert (status, err) == (0, "")
    content = json.loads((out / "config.json").read_text())
    assert content["id2label"]["3"] == "class 3" and content["num_channels"] == 3  # of a model of grey images
    written = load_file(out / "model.safetensors")
    np.testing.assert_array_equal(written["classifier.weight"].T, states[3].ema[0]["head"]["kernel"])
    assert "0.1235" in (out / "README.md").read_text()
