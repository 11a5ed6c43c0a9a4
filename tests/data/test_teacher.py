"""A teacher as data: its files, its answers in the batch, where a map's cells come to lie."""

import io
import json
import pickle

import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image

from leanformer import config, data, tasks
from leanformer.data.images.teacher import SAMPLED
from leanformer.errors import DataError
from leanformer.tasks.distillation import label_tokens


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
