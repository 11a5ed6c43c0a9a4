"""Commands that read a run: weights that are not finite are refused, damage is reported, and nothing is changed."""

import dataclasses
import shutil

import jax.numpy as jnp
import numpy as np
import pytest
from commands import run_in_process
from messages import mentions, refuses
from PIL import Image
from small_runs import write_run

import leanformer
from leanformer.errors import CorruptExample, DataError, WeightsError
from leanformer.tasks import Score
from leanformer.training import model_setup, run_files, train_setup
from leanformer.training.checkpoint import Checkpoints


@pytest.fixture(scope="module")
def original(tmp_path_factory, make_tiny, meshes):
    """The folder of a run with checkpoints of steps 1 and 2."""
    folder, c = tmp_path_factory.mktemp("original"), make_tiny()
    c.model.depth, c.eval.examples = 1, 16
    c.probe.update(examples=8, measures=("tokens",))
    write_run(folder, c, meshes(1, 1), 1, 2)
    return folder


@pytest.fixture
def workdir(original, tmp_path):
    """A copy of `original`, which a test may modify."""
    return shutil.copytree(original, tmp_path / "run")


def save_non_finite(workdir, meshes):
    """Save a newest checkpoint with one NaN and one infinity in the head of the raw and of the EMA weights."""
    run = train_setup.set_up_training(run_files.load_config(workdir), examples=64, mesh=meshes(1, 1))
    with Checkpoints(workdir / "checkpoints", score=Score("top1")) as checkpoints:
        state = checkpoints.restore(run.state).state
        for params in (state.params, state.ema[0]):
            params["head"]["kernel"] = params["head"]["kernel"].at[0, :2].set(jnp.array([jnp.nan, jnp.inf]))
        checkpoints.save(3, dataclasses.replace(state, step=jnp.int32(3)))
        checkpoints.wait()
    return run


def truncate_checkpoint(workdir, step=2):
    folder = workdir / "checkpoints" / str(step)
    largest = max((path for path in folder.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
    largest.write_bytes(largest.read_bytes()[:-1])


def read_files(folder):
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def write_picture(folder):
    path = folder / "a.png"
    Image.fromarray(np.zeros((9, 9), np.uint8)).save(path)
    return path


def make_command(name, workdir, tmp_path):
    """Return the command line of a command that reads weights."""
    words = {
        "evaluate": [f"--workdir={workdir}"],
        "probe": [f"--workdir={workdir}", f"--out={tmp_path / 'probe'}"],
        "predict": [f"--workdir={workdir}", str(write_picture(tmp_path))],
        "convert": [f"--weights={workdir}", "--to=timm", f"--out={tmp_path / 'out'}"],
    }
    return ["", "", f"leanformer.{name}", *words[name]]


READERS = ("evaluate", "probe", "predict", "convert")


def test_non_finite_weights_are_refused_by_every_command(workdir, tmp_path, meshes):
    run = save_non_finite(workdir, meshes)
    for name in READERS:
        status, out, err = run_in_process(make_command(name, workdir, tmp_path))
        assert (status, out) == (2, "") and mentions(err, "head.kernel", 2, run.state.params["head"]["kernel"].size), (
            name
        )
    for read in (leanformer.load, lambda path: model_setup.read_weights(str(path), "own")):
        with refuses("head.kernel", 2, error=WeightsError):
            read(workdir)
    assert leanformer.load(workdir, step=2).step == 2


def test_training_falls_back_to_finite_weights(workdir, meshes, capfd):
    run = save_non_finite(workdir, meshes)
    with Checkpoints(workdir / "checkpoints", score=Score("top1")) as checkpoints:  # as training does
        state = checkpoints.restore(run.state).state
        assert int(state.step) == 2 and checkpoints.steps == [2, 3]
        checkpoints.save(4, state)
        checkpoints.wait()
        assert checkpoints.steps == [2, 3, 4]  # the one that is not finite neither counts nor is deleted
    assert mentions(capfd.readouterr().err, "head.kernel", 3, 2)


def test_damaged_newest_checkpoint_is_reported_and_left(workdir, tmp_path):
    truncate_checkpoint(workdir)
    before = read_files(workdir)
    for name in ("evaluate", "convert"):  # one for each way to read a checkpoint
        status, _, err = run_in_process(make_command(name, workdir, tmp_path))
        assert status == 0 and err.count("WARNING") == 1 and mentions(err, workdir / "checkpoints", 2, 1), name
    after = read_files(workdir)
    new = {path for path in after.keys() - before.keys() if path.parts[0] not in ("plots", "evaluation.json")}
    assert {str(path) for path in new} == {"confusion.csv"}  # the output of evaluate
    assert {path: after[path] for path in before} == before
    assert leanformer.load(workdir).step == 1


def test_damaged_checkpoint_is_refused_if_requested(workdir, tmp_path):
    truncate_checkpoint(workdir)
    for name in ("evaluate", "convert"):
        status, _, err = run_in_process([*make_command(name, workdir, tmp_path), "--step=2"])
        assert status == 2 and mentions(err, workdir / "checkpoints", 2) and "WARNING" not in err, name


def test_probabilities_accept_every_type_of_image(workdir, tmp_path):
    model, path = leanformer.load(workdir), write_picture(tmp_path)
    array = np.zeros((9, 9), np.uint8)
    with Image.open(path) as image:
        single = [str(path), path, path.read_bytes(), bytearray(path.read_bytes()), image, array, jnp.asarray(array)]
        single += [array[..., None], np.zeros((9, 9, 3), np.uint8), image.convert("RGB"), image.convert("P")]
        expected = model.probabilities([path.read_bytes()])
        assert expected.shape == (1, 5)
        for example in single:
            np.testing.assert_array_equal(model.probabilities(example), expected)
        several = model.probabilities(iter(single))
    np.testing.assert_allclose(several, np.repeat(expected, len(single), axis=0), rtol=1e-5)  # a different batch size
    assert model.probabilities(np.zeros((2, 9, 9, 1), np.uint8)).shape == (2, 5)


def test_invalid_examples_are_refused(workdir, tmp_path):
    model = leanformer.load(workdir)
    for example, parts in [
        ([3, b"a"], ("int", 3)),
        ("no.png", ("no.png",)),
        (np.zeros((9, 9), np.float32), ("ndarray", "float32")),
    ]:
        with refuses(*parts, error=(DataError, CorruptExample)):
            model.probabilities(example)
    (tmp_path / "cut.png").write_bytes(write_picture(tmp_path).read_bytes()[:45])
    with refuses("bytes", error=CorruptExample) as error:
        model.predict([tmp_path / "a.png", tmp_path / "cut.png"])
    assert mentions(*error.value.__notes__, tmp_path / "cut.png")
