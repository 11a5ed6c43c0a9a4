"""Training with a teacher as data: each head learns what it is told, on eight devices too; and training without one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from leanformer import config, tasks
from leanformer.errors import ConfigError
from leanformer.runtime import mesh as sharding
from leanformer.training import experiment, streams
from tests.data.test_teacher import Pictures, V, write


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


def whole(c):
    """No randomness on the host or the device, and the image as it is."""
    c.augment.update(crop_scale=(1.0, 1.0), crop_ratio=(1.0, 1.0), flip=0.0, rand_magnitude=0.0, erase=0.0)
    c.augment.update(mixup=0.0, cutmix=0.0, label_smoothing=0.0)
    c.model.drop_path = 0.0
    c.update(batch_size=32, total_steps=40, log_every=1)
    c.optim.update(lr=1e-2, weight_decay=0.0, ema=0.0)
    return c


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
