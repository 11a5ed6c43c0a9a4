"""A teacher as data: its files, its answers in the batch, where a map's cells come to lie, and training with it."""

import io
import json
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from PIL import Image

from leanformer import config, data, tasks
from leanformer.data.images.teacher import SAMPLED
from leanformer.errors import ConfigError, DataError
from leanformer.runtime import mesh as sharding
from leanformer.tasks.distillation import label_tokens
from leanformer.training import experiment, streams


V, ROWS, COLUMNS, K = 5, 7, 6, 3


def write(folder, about, **arrays):
    folder.mkdir(exist_ok=True)
    (folder / "teacher.json").write_text(json.dumps(about))
    for name, array in arrays.items():
        np.save(folder / f"{name}.npy", array)
    return folder


class Pictures:
    """Pictures, as arrays, whose colours say the place: red grows with x, green with y."""

    num_classes, classes = V, None

    def __len__(self):
        return 11

    def __getitem__(self, index):
        height, width = (90, 130) if index % 2 else (120, 80)
        x, y = np.meshgrid((np.arange(width) + 0.5) / width, (np.arange(height) + 0.5) / height)
        return {"image": np.uint8(np.stack([255 * x, 255 * y, 0 * x], -1).round()), "label": index % V}

    def name(self, index):
        return f"picture {index}"


ABOUT = {"source": "pictures", "split": "train", "examples": 11}


def opened(folder, source=None, num_classes=V):
    return data.open_teacher(str(folder), source or Pictures(), name="pictures", split="train", num_classes=num_classes)


@pytest.fixture
def logits(rng, tmp_path):
    values = rng.standard_normal((11, V)).astype(np.float16)
    return values, opened(write(tmp_path / "logits", ABOUT, logits=values))


@pytest.fixture
def maps(rng, tmp_path):
    classes = rng.permuted(np.tile(np.arange(V, dtype=np.int16), (11, ROWS, COLUMNS, 1)), axis=-1)[..., :K]
    scores = (5 * rng.standard_normal(classes.shape)).astype(np.float16)
    return classes, scores, opened(write(tmp_path / "maps", ABOUT, classes=classes, scores=scores))


def batches(teacher, seed=3, source=None, **options):
    augment = config.base().augment.to_dict() | {"crop_scale": (0.2, 1.0), "rand_magnitude": 0.0}
    shape = {"size": 32, "channels": 3, "num_classes": V, "mean": (0.5,) * 3, "std": (0.5,) * 3, "crop_fraction": 1.0}
    images = tasks.Images(**shape, augment=augment, teacher=teacher)
    return images.train_batches(source or Pictures(), seed=seed, **({"batch_size": 6} | options))


def test_logits_stand_beside_their_examples(logits):
    values, teacher = logits
    plain, taught = batches(None)[4], batches(teacher)[4]
    assert set(taught) - set(plain) == {"teacher_logits"} == set(teacher.leaves())
    np.testing.assert_array_equal(taught["teacher_logits"], values[taught["index"]])
    for name, value in plain.items():
        np.testing.assert_array_equal(taught[name], value)


def test_maps_stand_beside_their_examples(maps):
    classes, scores, teacher = maps
    plain, taught = batches(None)[4], batches(teacher)[4]
    np.testing.assert_array_equal(taught["teacher_classes"], classes[taught["index"]])
    np.testing.assert_array_equal(taught["teacher_scores"], scores[taught["index"]])
    np.testing.assert_array_equal(taught["image"], plain["image"])
    for name, (shape, dtype) in teacher.leaves().items():
        assert taught[name].shape[1:] == shape and taught[name].dtype == dtype


@pytest.mark.parametrize("kind", ["logits", "maps"])
def test_answers_are_a_function_of_seed_and_step(kind, request):
    teacher = request.getfixturevalue(kind)[-1]
    whole = batches(teacher)
    later = batches(pickle.loads(pickle.dumps(teacher)))[5]
    halves = [batches(teacher, process=p, processes=2)[5] for p in range(2)]
    for name in teacher.leaves():
        np.testing.assert_array_equal(whole[5][name], later[name])
        np.testing.assert_array_equal(np.concatenate([half[name] for half in halves]), later[name])


def test_copies_take_no_data_along(logits):
    teacher = logits[-1]
    other = pickle.loads(pickle.dumps(teacher))
    assert "array" in vars(teacher.rows["logits"]) and "array" not in vars(other.rows["logits"])


def test_a_neighbour_brings_its_own_answer(logits):
    values, teacher = logits

    class Broken(Pictures):
        def __getitem__(self, index):
            if index == 4:
                raise OSError("broken")
            return super().__getitem__(index)

    found = batches(teacher, source=Broken(), batch_size=11)[0]
    assert (found["corrupt"] == 4).sum() == 1 and (found["index"] == 5).sum() == 2
    np.testing.assert_array_equal(found["teacher_logits"], values[found["index"]])


def test_cells_come_to_lie_where_their_pixels_do(tmp_path):
    """Logits that are the cell's place: RoI-align keeps a linear map, so a token's must be the place in its colours."""
    rows, columns, side = 13, 11, 4
    x, y = np.meshgrid((np.arange(columns) + 0.5) / columns, (np.arange(rows) + 0.5) / rows)
    scores = np.tile(np.stack([x, y], -1).astype(np.float32), (11, 1, 1, 1))
    classes = np.tile(np.array([1, 3], np.int16), (11, rows, columns, 1))
    teacher = opened(write(tmp_path / "places", ABOUT, classes=classes, scores=scores))
    loader, flipped, seen = batches(teacher, seed=0, batch_size=11), set(), 0
    for step in range(4):
        batch = loader[step]
        maps = (jnp.asarray(batch[f"teacher_{name}"]) for name in ("classes", "scores", "view"))
        told = np.log(np.asarray(label_tokens(*maps, (side, side), V)))
        told = (told - told[..., :1])[..., [1, 3]]  # logits of the two, the others' being 0
        shown = batch["image"].reshape(11, side, 32 // side, side, 32 // side, 3).mean((2, 4)).reshape(11, -1, 3) / 255
        # Beyond the outermost centres of cells a map is constant: only tokens that lie within are compared.
        half = np.abs(batch["teacher_view"][:, [3, 2]] - batch["teacher_view"][:, [1, 0]])[:, None] / side / 2
        edge = np.array([0.5 / columns, 0.5 / rows])
        inside = ((told - half > edge) & (told + half < 1 - edge)).all(-1)
        assert np.abs(told - shown[..., :2])[inside].max() < 0.012  # 3 of 255 levels
        assert np.abs(told - shown[..., :2]).max() < 0.05
        flipped |= set((batch["teacher_view"][:, 1] > batch["teacher_view"][:, 3]).tolist())
        seen += inside.sum()
    assert flipped == {False, True} and seen > 300


def test_encoded_pictures_have_the_same_view(rng, tmp_path):
    """A JPEG's size is read from its header."""
    picture = Pictures()[1]["image"]
    classes = np.zeros((11, 2, 2, 1), np.int16)
    teacher = opened(write(tmp_path / "maps", ABOUT, classes=classes, scores=classes.astype(np.float16)))
    buffer = io.BytesIO()
    Image.fromarray(picture).save(buffer, "JPEG")
    options = {"crop_scale": (0.1, 0.9), "crop_ratio": (0.5, 2.0), "flip": 0.5}
    views = [
        teacher.answer(3, x, np.random.default_rng(5), **options)["teacher_view"] for x in (picture, buffer.getvalue())
    ]
    np.testing.assert_array_equal(*views)


def test_how_often_it_is_right_is_said(tmp_path):
    logits = np.eye(V, dtype=np.float32)[np.arange(11) % V]
    logits[:3] = np.roll(logits[:3], 1, axis=1)
    teacher = opened(write(tmp_path / "teacher", ABOUT, logits=logits))
    assert SAMPLED > 11 and teacher.agreement == 8 / 11 and "right on 73 %" in str(teacher)
    classes = np.argsort(-logits, axis=1).astype(np.int16)[:, None, None, :2].repeat(3, axis=1)
    scores = np.broadcast_to(np.float16([2, 1]), classes.shape)
    assert opened(write(tmp_path / "maps", ABOUT, classes=classes, scores=scores)).agreement == 8 / 11


GOOD = np.zeros((11, V), np.float32)
CLASSES, SCORES = np.zeros((11, ROWS, COLUMNS, K), np.int16), np.zeros((11, ROWS, COLUMNS, K), np.float16)
WRONG = {
    "no files": ({}, ABOUT, "holds teacher.json. Wanted teacher.json and either"),
    "half": ({"scores": SCORES}, ABOUT, "holds scores.npy, teacher.json. Wanted"),
    "both": ({"logits": GOOD, "classes": CLASSES, "scores": SCORES}, ABOUT, "Wanted teacher.json and either"),
    "words": ({"logits": GOOD}, ["n"], 'teacher.json must be like .*"examples": 11'),
    "key": ({"logits": GOOD}, {"source": "pictures"}, "must be like .*KeyError\\('split'\\)"),
    "source": ({"logits": GOOD}, ABOUT | {"source": "other"}, "is about .*other.*this run trains on .*pictures"),
    "rows": ({"logits": GOOD[:7]}, ABOUT, "logits.npy has 7 rows, the training split 11 examples"),
    "V": ({"logits": GOOD[:, :3]}, ABOUT, r"logits.npy is float32 \(11, 3\); model.num_classes=5"),
    "dtype": ({"logits": GOOD.astype(int)}, ABOUT, "logits.npy is int64 .* wanted float16 or float32"),
    "pickled": ({"logits": np.array([{}] * 11)}, ABOUT, "logits.npy is not a whole .npy file of numbers"),
    "NaN": ({"logits": GOOD + np.float32(np.nan)}, ABOUT, "logits.npy, row 0, is not finite"),
    "axes": (
        {"classes": CLASSES[0], "scores": SCORES[0]},
        ABOUT,
        r"wanted int16 .* \(examples, rows, columns, K\)",
    ),
    "pair": ({"classes": CLASSES, "scores": SCORES[..., :2]}, ABOUT, r"classes.npy is int16 \(11, 7, 6, 3\), scores"),
    "classes": ({"classes": CLASSES + np.int16(V), "scores": SCORES}, ABOUT, "row 0, has classes 5 to 5; model.num"),
    "negative": ({"classes": CLASSES - np.int16(1), "scores": SCORES}, ABOUT, "row 0, has classes -1 to -1"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_files_are_one_message(tmp_path, case):
    arrays, about, message = WRONG[case]
    with pytest.raises(DataError, match=message):
        opened(write(tmp_path / "teacher", about, **arrays))


def test_missing_folder_and_cut_off_file(tmp_path):
    with pytest.raises(DataError, match="there is no such folder. Without one, train on plain labels"):
        opened(tmp_path / "nowhere")
    folder = write(tmp_path / "teacher", ABOUT, logits=GOOD)
    whole = (folder / "logits.npy").read_bytes()
    for part in (whole[:-4], whole[:20], b""):
        (folder / "logits.npy").write_bytes(part)
        with pytest.raises(DataError, match="not a whole .npy file"):
            opened(folder)


# Training.


def of_volo(c):
    c.unlock()
    stages = {"width": (8, 12), "depth": (1, 1), "num_heads": (2, 3), "head_dim": (4, 4), "mlp_dim": (16, 20)}
    m = config.model("volo", image_size=24, channels=1, num_classes=V, patch_size=4, drop_path=0.2, stem_width=5)
    m.update(class_depth=1, class_heads=2, class_head_dim=4, **stages)
    c.model = m
    return c.lock()


def taught(c, folder, mesh):
    """The experiment, and its training source."""
    c.teacher.path = str(folder)
    config.check(c)
    source, _ = tasks.open_data(tasks.of(c), c)
    return experiment.build(c, examples=len(source), mesh=mesh, task=tasks.of(c).trained_on(source)), source


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Of the synthetic source: the teacher's class is the label + 1; on the right half of a map it is the label + 2."""
    folder, labels = tmp_path_factory.mktemp("teachers"), np.arange(65536) % V
    about = {"source": "synthetic", "split": "train", "examples": 65536}
    logits = 6 * np.eye(V, dtype=np.float16)[(labels + 1) % V]
    halves = (labels[:, None] + [1, 2]) % V
    classes = np.broadcast_to(halves[:, None, :, None], (65536, 1, 2, 1)).astype(np.int16)
    scores = np.full(classes.shape, 6, np.float16)
    return {
        "distilled": write(folder / "logits", about, logits=logits),
        "tokens": write(folder / "maps", about, classes=classes, scores=scores),
    }


def whole(c):
    """No randomness on the host or the device, and the image as it is."""
    c.augment.update(crop_scale=(1.0, 1.0), crop_ratio=(1.0, 1.0), flip=0.0, rand_magnitude=0.0, erase=0.0)
    c.augment.update(mixup=0.0, cutmix=0.0, label_smoothing=0.0)
    c.model.drop_path = 0.0
    c.update(batch_size=32, total_steps=40, log_every=1)
    c.optim.update(lr=1e-2, weight_decay=0.0, ema=0.0)
    return c


@pytest.mark.parametrize("kind", ["hard", "soft", "tokens"])
def test_each_head_learns_what_it_is_told(tiny, meshes, folders, kind):
    """The class head comes to say the label, the other head what the teacher says, which is another class."""
    c = whole(of_volo(tiny) if kind == "tokens" else tiny)
    head = "tokens" if kind == "tokens" else "distilled"
    if head == "distilled":
        c.model.distilled = True
        c.teacher.update(kind=kind, temperature=2.0)
    run, source = taught(c, folders[head], meshes(1, 1))
    state, key, step, losses = run.initial_state(), run.run_key(), jax.jit(run.train_step), []
    for host in streams.train(run, source, 0):
        state, metrics = step(state, streams.put(run, host), key)
        losses.append(float(metrics["loss"]))
    host = next(streams.train(run, source, 0))
    pixels = (host["image"] / 255 - 0.5) / 0.5
    heads, _ = nnx.merge(run.graphdef, *state.weights).heads(jnp.asarray(pixels, jnp.float32))
    assert (heads["class"].argmax(-1) == host["label"]).all()
    if head == "distilled":
        assert (heads["distilled"].argmax(-1) == (host["label"] + 1) % V).all()
    else:
        said = np.asarray(heads["tokens"].argmax(-1)).reshape(-1, 3, 3)
        assert (said[:, :, 0] == (host["label"][:, None] + 1) % V).all()
        assert (said[:, :, 2] == (host["label"][:, None] + 2) % V).all()
    assert np.mean(losses[-5:]) < 0.5 * np.mean(losses[:5])
    assert f"the {head} head learns" in run.notes["teacher"] and "right on 0 %" in run.notes["teacher"]


@pytest.mark.parametrize("head", ["distilled", "tokens"])
def test_accumulation_and_devices_change_nothing(tiny, meshes, folders, head, monkeypatch):
    """With everything random switched on, mixing too."""
    monkeypatch.setattr(sharding, "SMALL", 1)
    c = of_volo(tiny) if head == "tokens" else tiny
    c.model.update({} if head == "tokens" else {"distilled": True})

    def gradient(accumulate, data, fsdp):
        c.accumulate = accumulate
        run, source = taught(c, folders[head], meshes(data, fsdp))
        host = next(streams.train(run, source, 0))
        state, metrics = jax.jit(run.train_step)(run.initial_state(), streams.put(run, host), run.run_key())
        return jax.device_get((metrics["loss"], state.moments[0].mu))

    loss, whole = gradient(1, 1, 1)
    other, parts = gradient(1 if head == "tokens" else 2, 2, 2)  # VOLO's batch statistics are a micro-batch's
    np.testing.assert_allclose(loss, other, rtol=2e-6)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-7, rtol=1e-4), whole, parts)


def test_without_a_teacher_the_program_is_the_same(tiny, meshes):
    tiny.model.distilled = True

    def program():
        run = experiment.build(tiny, examples=64, mesh=meshes(1, 1))
        assert set(run.abstract_batch()) == {"image", "label"}
        return run.lower_train_step().as_text()

    before = program()
    tiny.teacher.update(kind="soft", weight=0.1, temperature=2.0)
    assert program() == before


def test_with_a_teacher_the_batch_carries_its_answers(tiny, meshes, folders):
    tiny.model.distilled = True
    run, _ = taught(tiny, folders["distilled"], meshes(1, 2))
    leaf = run.abstract_batch()["teacher_logits"]
    assert leaf.shape == (16, V) and leaf.dtype == np.float16 and leaf.sharding == sharding.over_batch(run.mesh)
    assert "teacher_logits" in run.lower_train_step().as_text(debug_info=True)
    assert all(flops > 0 for flops in run.flops_per_example)


def test_what_the_page_says_without_a_teacher(tiny, meshes):
    assert experiment.build(tiny, examples=64, mesh=meshes(1, 1)).notes == {}
    tiny.model.distilled = True
    said = experiment.build(tiny, examples=64, mesh=meshes(1, 1)).notes["teacher"]
    assert "teacher.path is not set: the distilled head learns plain labels" in said
    assert tasks.of(tiny).trained_on(Pictures()).teacher is None
    c = of_volo(tiny)
    assert "the tokens head learns plain labels" in experiment.build(c, examples=64, mesh=meshes(1, 1)).notes["teacher"]


def test_a_model_without_the_head_is_refused(tiny, meshes, folders):
    with pytest.raises(ConfigError, match="for a distilled head; the model's are class.*model.distilled=True"):
        taught(tiny, folders["distilled"], meshes(1, 1))
    with pytest.raises(ConfigError, match="for a tokens head"):
        taught(tiny, folders["tokens"], meshes(1, 1))
    c = of_volo(tiny)
    c.model.image_size = 20
    with pytest.raises(ConfigError, match="4 square tokens of whole patches of 4 pixels do not tile .*multiple of 8"):
        taught(c, folders["tokens"], meshes(1, 1))
