"""Models of runs: `leanformer.load`, `init_from`, `convert` and `evaluate` on the folder of a run."""

import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from commands import check_refused, run_in_process
from flax import nnx
from messages import refuses
from rounding import LOSS_TOLERANCE
from small_runs import write_run

import leanformer
from leanformer import conditioning
from leanformer.data.sequences import encode
from leanformer.errors import CheckpointError, CorruptExample, DataError, WeightsError
from leanformer.training import inference, train_setup
from leanformer.training.inference import LoadedModel


@pytest.fixture(scope="module")
def original(tmp_path_factory, make_tiny, meshes):
    """A run with checkpoints of steps 1, 2 (best) and 3: its folder, its setup and its states by step."""
    folder = tmp_path_factory.mktemp("original")
    records = [{"step": step, "kind": "eval", "top1": value} for step, value in {2: 0.9, 3: 0.1}.items()]
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(record)}\n" for record in records))
    return folder, *write_run(folder, make_tiny(), meshes(1, 1), 1, 2, 3)


@pytest.fixture
def saved_run(original, tmp_path):
    """A copy of `original`, which a test may modify."""
    shutil.copytree(original[0], tmp_path, dirs_exist_ok=True)
    return tmp_path, *original[1:]


def make_images(rng):
    return [rng.integers(0, 256, (19, 23), dtype=np.uint8) for _ in range(3)]


@pytest.mark.parametrize(("options", "step"), [({}, 3), ({"best": True}, 2), ({"step": 1}, 1)])
def test_loaded_model_matches_the_checkpoint(saved_run, rng, options, step):
    folder, run, states = saved_run
    result = leanformer.load(folder, **options)
    assert (result.step, result.averaged) == (step, True)
    inputs = result.preprocess(examples := make_images(rng))
    assert inputs[0].shape == (3, 14, 14, 1)
    logits, _ = nnx.merge(run.model.graphdef, *states[step].ema)(*inputs)
    probabilities = result.probabilities(examples)
    np.testing.assert_allclose(probabilities, jax.nn.softmax(logits), rtol=10 * LOSS_TOLERANCE)
    raw_logits, _ = nnx.merge(run.model.graphdef, *states[step].weights)(*inputs)
    assert np.abs(jax.nn.softmax(raw_logits) / probabilities - 1).max() > 1000 * LOSS_TOLERANCE


def test_evaluation_preprocesses_examples_the_same_way(saved_run):
    folder, run, _ = saved_run
    result = leanformer.load(folder)
    c = result.config
    source = run.task.data.open(c.data.eval_split)
    batch = run.task.data.eval_batches(source, batch_size=3)[0]
    inputs = result.preprocess([source[i]["image"] for i in range(3)])
    np.testing.assert_array_equal(inputs[0], result.task.objective.inputs({"image": jnp.asarray(batch["image"])})[0])


@pytest.mark.parametrize(
    ("options", "parts"), [({"step": 9}, ["step 9", "[1, 2, 3]"]), ({"step": 1, "best": True}, ["--best", "--step=1"])]
)
def test_missing_checkpoint_is_refused(saved_run, options, parts):
    with refuses(*parts, error=CheckpointError):
        leanformer.load(saved_run[0], **options)


def test_init_from_a_run_uses_its_best_weights(saved_run, tiny, meshes):
    folder, _, states = saved_run
    tiny.init_from.path = str(folder)
    result = train_setup.set_up_training(tiny, examples=64, mesh=meshes(1, 1)).model.initial_weights()
    jax.tree.map(np.testing.assert_array_equal, result, states[2].ema)


def test_another_number_of_classes_needs_a_new_head(saved_run, tiny, meshes):
    folder, _, states = saved_run
    tiny.model.num_classes = 7
    tiny.init_from.path = str(folder)
    run = train_setup.set_up_training(tiny, examples=64, mesh=meshes(1, 1))
    with refuses("head.kernel", "init_from.new_head", error=WeightsError):
        run.model.initial_weights()
    tiny.init_from.new_head = True
    params, _ = train_setup.set_up_training(tiny, examples=64, mesh=meshes(1, 1)).model.initial_weights()
    assert params["head"]["kernel"].shape == (12, 7)
    np.testing.assert_array_equal(params["norm"]["scale"], states[2].ema[0]["norm"]["scale"])


@pytest.mark.parametrize("change", ["model.epsilon", "data.mean", None])
def test_what_initial_weights_were_trained_with_is_compared(saved_run, tiny, meshes, capfd, change):
    """Neither shows in the shapes of the weights."""
    tiny.init_from.path, tiny.optim.lr = str(saved_run[0]), 0.5  # the rate is the new run's own
    if change == "model.epsilon":
        tiny.model.epsilon = 0.5
    elif change:
        tiny.data.mean = (0.25,)
    train_setup.set_up_training(tiny, examples=64, mesh=meshes(1, 1)).model.initial_weights()
    err = capfd.readouterr().err
    assert f"{change}=" in err if change else not err


def test_classes_in_another_order_need_a_new_head(saved_run, tiny, meshes):
    """An output of the weights would otherwise have another class's name."""
    folder, names = saved_run[0], [f"class {i}" for i in range(10)]
    (folder / "classes.json").write_text(json.dumps(names))
    tiny.init_from.path = str(folder)
    run = train_setup.set_up_training(tiny, examples=64, mesh=meshes(1, 1))
    for right in (names, [*names[:-1], "another"], None):
        run.model.check_source(None, right)
    with refuses("classes.json", "--config.init_from.new_head", error=DataError):
        run.model.check_source(None, names[::-1])
    tiny.init_from.new_head = True
    run.model.check_source(None, names[::-1])
    params, _ = train_setup.set_up_training(tiny, examples=64, mesh=meshes(1, 1)).model.initial_weights()
    fresh, _ = run.model.random_weights(tiny.seed)
    np.testing.assert_array_equal(params["head"]["kernel"], fresh["head"]["kernel"])


def test_encode_makes_token_sequences_of_files():
    np.testing.assert_array_equal(encode("text:x", b"ab\n", 8), [98, 99])
    np.testing.assert_array_equal(encode("listops:x", b"[MAX 4 ( 9 ) ]", 8), [12, 5, 10, 15])
    black = np.zeros((5, 4, 3), np.uint8)
    np.testing.assert_array_equal(encode("pixels:tfds:cifar10", black, 9), np.zeros(9))
    with refuses("3 bytes", error=CorruptExample):
        encode("pixels:tfds:cifar10", b"ab\n", 9)
    with refuses('data.name="pairs:x"', "listops", "imdb", "text", "pixels", error=DataError):
        encode("pairs:x", b"ab", 8)


def test_evaluate_command_reads_the_best_checkpoint(saved_run):
    folder, *_ = saved_run
    status, _, err = run_in_process(["", "", "leanformer.evaluate", f"--workdir={folder}", "--best"])
    assert (status, err) == (0, "") and json.loads((folder / "evaluation.json").read_text())["step"] == 2


def test_loaded_model_predicts_class_names_and_probes_layers(saved_run, rng):
    folder, _, _ = saved_run
    model, examples = leanformer.load(folder), make_images(rng)
    (folder / "classes.json").write_text(json.dumps([f"class {i}" for i in range(10)]))
    with_names = leanformer.load(folder)
    assert with_names.predict(examples) == [f"class {i}" for i in model.probabilities(examples).argmax(axis=1)]
    measurements = with_names.probe(examples, ["attention_output", "tokens"])
    assert measurements.keys() == {"attention_output", "tokens"}
    _, taps = model.model(*model.preprocess(examples), tap=conditioning.tap(["tokens"]))
    expected = conditioning.digest(conditioning.by_name(taps, ["tokens"])["tokens"])
    assert [layer["count"] for layer in measurements["tokens"]] == [3] * model.config.model.depth
    np.testing.assert_allclose(measurements["tokens"][0]["median"], expected[0]["median"], rtol=1e-3)
    for call in (model.generate, model.embed):
        with refuses(folder):
            call("text")
    model.config.unlock().dtype = "bfloat16"  # a run's, whose probe is in float32
    assert model.probe(examples, "tokens") == {"tokens": measurements["tokens"]}
    with refuses("nothing"):
        model.probe(examples, "nothing")


def test_batches_have_few_sizes_and_do_not_change_the_results(saved_run, rng, monkeypatch):
    """Every other size would be compiled again."""
    model, sizes, make_batch = leanformer.load(saved_run[0]), [], LoadedModel._batch
    examples = [example for _ in range(4) for example in make_images(rng)][:11]
    one_by_one = np.concatenate([model.probabilities(example) for example in examples])
    monkeypatch.setattr(inference, "BATCH", 8)
    monkeypatch.setattr(LoadedModel, "_batch", lambda model, rows: sizes.append(len(rows)) or make_batch(model, rows))
    np.testing.assert_allclose(model.probabilities(examples), one_by_one, rtol=10 * LOSS_TOLERANCE)
    assert sizes == [8, 4]
    assert model.predict([]) == []


def test_exported_folder_opens_like_the_run(saved_run, tmp_path, rng):
    folder, *_ = saved_run
    (folder / "classes.json").write_text(json.dumps([f"class {i}" for i in range(5)]))
    config = json.loads((folder / "config.json").read_text())
    config["config"]["init_from"]["new_head"] = True  # which is about what the run began with
    (folder / "config.json").write_text(json.dumps(config))
    out, examples = tmp_path / "elsewhere", make_images(rng)
    convert = ["", "", "leanformer.convert", folder, "--step=2", f"--out={out}"]
    assert run_in_process(convert)[::2] == (0, "")
    for filled in (out, folder):
        check_refused([*convert, f"--out={filled}"], f"--out={filled}")
    expected, model = leanformer.load(folder, step=2), leanformer.load(out)
    assert (model.step, model.averaged, model.classes) == (2, expected.averaged, expected.classes)
    np.testing.assert_array_equal(model.probabilities(examples), expected.probabilities(examples))
    for options in ({"best": True}, {"step": 1}):
        with refuses("step 2", error=CheckpointError):
            leanformer.load(out, **options)
    assert run_in_process(["", "", "leanformer.evaluate", f"--workdir={out}"])[::2] == (0, "")
    values = json.loads((out / "evaluation.json").read_text())
    assert "ema_top1" in values and "top1" not in values  # it has no other weights
    probe = ["", "", "leanformer.probe", f"--workdir={out}", "--all", "--measures=output_weights"]
    assert run_in_process(probe)[::2] == (0, "")
