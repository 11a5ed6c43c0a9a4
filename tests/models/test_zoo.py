"""Every family through the ordinary trainer: it learns, resumes bit for bit, is the same on one device and eight."""

import json
import shutil

import jax
import numpy as np
import pytest

from leanformer import conditioning, config
from leanformer.conditioning import tables
from leanformer.errors import ConfigError
from leanformer.runtime import mesh as sharding
from leanformer.train import train
from leanformer.training import experiment, probing, report
from leanformer.training.checkpoint import Checkpoints


STAGES = {"num_heads": (2, 3), "head_dim": (5, 4)}
FAMILIES = {
    "vit": {"patch_size": 7, "width": 24, "depth": 2, "num_heads": 3, "head_dim": 8, "mlp_dim": 36, "distilled": True},
    "xcit": {
        **{"patch_size": 4, "width": 24, "depth": 2, "num_heads": 3, "head_dim": 10, "mlp_dim": 36},
        **{"class_heads": 2, "class_head_dim": 8, "layer_scale": 1.0},
    },
    "tnt": {
        **{"patch_size": 14, "width": 24, "depth": 2, "num_heads": 3, "head_dim": 10, "mlp_dim": 36},
        **{"inner_width": 8, "inner_heads": 2, "inner_head_dim": 5, "inner_mlp_dim": 16, "pixel_stride": 7},
    },
    "volo": {
        **{"patch_size": 4, "width": (16, 24), "depth": (1, 1), "mlp_dim": (24, 36), **STAGES},
        **{"class_heads": 2, "class_head_dim": 8, "stem_width": 8},
    },
    "davit": {
        **{"width": (8, 16), "depth": (1, 1), "mlp_dim": (16, 24), **STAGES},
        **{"window_size": 3},
    },
}
IMAGE_SIZE = {"volo": 32, "davit": 32}
OTHERS = [name for name in FAMILIES if name != "vit"]  # that one is whole runs in test_train, on meshes in test_step
STEPS = 30
slow = pytest.mark.slow


def small(name):
    """A few steps on the bundled images, everything random switched on."""
    c = config.base()
    c.update(batch_size=32, total_epochs=0.0, total_steps=STEPS, dtype="float32", log_every=1)
    c.unlock()
    size = IMAGE_SIZE.get(name, 28)
    c.model = config.model(name, image_size=size, channels=1, num_classes=10, drop_path=0.1, **FAMILIES[name])
    c.lock()
    c.data.update(name="bundled:fashion_mnist", train_split="train", eval_split="t10k", workers=0)
    c.data.update(mean=(0.286,), std=(0.353,), crop_fraction=1.0)
    c.augment.update(rand_magnitude=0.0)
    if name != "volo":  # whose labels of tokens follow the boxes; of the others mixing knows nothing: test_step has it
        c.augment.update(mixup=0.0, cutmix=0.0)
    c.optim.update(lr=3e-3, warmup_epochs=0.0, ema=0.9)
    c.eval.update(every=0, batch_size=64, examples=64)
    c.checkpoint.update(every=STEPS // 2, keep=3)
    c.probe.update(every=0, examples=8, measures=("attention_output", "tokens"))
    c.mesh.fsdp = 2
    config.check(c)
    return c


def saved(workdir, like):
    """The newest checkpoint."""
    with Checkpoints(workdir / "checkpoints", 3) as checkpoints:
        return checkpoints.restore(like)[0]


@slow
@pytest.mark.parametrize("name", OTHERS)
def test_it_learns_and_resumes_bitwise(name, tmp_path, capsys, keeping, unchecked):
    c = small(name)
    assert train(c, tmp_path) == 0
    records = report.read_records(tmp_path / "metrics.jsonl")
    losses = [record["loss"] for record in records if record["kind"] == "train"]
    assert np.mean(losses[-8:]) < np.mean(losses[:8])
    like = experiment.build(c, examples=10_000, mesh=sharding.make_mesh(**c.mesh)).like
    whole = saved(tmp_path, like)
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["final"]["examples"] == 64

    shutil.rmtree(tmp_path / "checkpoints" / str(STEPS))
    (tmp_path / "summary.json").unlink()
    assert train(c, tmp_path) == 0
    assert f"Going on from step {STEPS // 2}" in capsys.readouterr().out
    jax.tree.map(np.testing.assert_array_equal, saved(tmp_path, like), whole)

    c = probing.bare(report.read_config(tmp_path))  # as the folder tells it
    run = experiment.build(c, examples=1, mesh=sharding.make_mesh(**c.mesh))
    found = probing.make_reader(run, ["query_weights", *c.probe.measures])(whole.weights, probing.batch(run))
    entries, _ = tables.describe(jax.device_get(found))
    assert all(layer["not_finite"] == 0 for entry in entries.values() for layer in entry["layers"])


@pytest.mark.parametrize("name", OTHERS)
def test_one_device_and_eight_agree(name, meshes):
    c = small(name)
    rng = np.random.default_rng(0)
    size = c.model.image_size
    batches = [
        {
            "image": rng.integers(0, 256, (32, size, size, 1), np.uint8),
            "label": rng.integers(0, 10, 32).astype(np.int32),
        }
        for _ in range(2)
    ]

    def run(mesh):
        built = experiment.build(c, examples=10_000, mesh=mesh)
        state, step, losses = built.initial_state(), built.compile_train_step(), []
        for batch in batches:
            state, metrics = step(state, sharding.put_batch(mesh, batch), built.run_key())
            losses.append(float(metrics["loss"]))
        return losses, jax.device_get(state)

    (losses, one), (sharded_losses, eight) = run(meshes(1, 1)), run(meshes(4, 2))
    np.testing.assert_allclose(losses, sharded_losses, rtol=2e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4), one.statistics, eight.statistics)
    if name in ("xcit", "volo"):
        moved = [np.abs(x).max() for path, x in jax.tree.leaves_with_path(one.statistics) if "mean" in str(path)]
        assert min(moved) > 0


@pytest.mark.parametrize("name", FAMILIES)
def test_the_table_of_the_probe(name, meshes, rng):
    c = small(name)
    if name in ("volo", "davit"):
        c.model.depth = (1, 2)  # stacks of a model may differ
    built = experiment.build(probing.bare(c), examples=1, mesh=meshes(1, 1))
    names = ["attention_output", "tokens", "mlp_hidden", "output_weights"]
    images = rng.integers(0, 256, (4, c.model.image_size, c.model.image_size, 1), np.uint8)
    found = probing.make_reader(built, names)(built.first_weights(), {"image": images})
    entries, _ = tables.describe(jax.device_get(found))
    stacks = {entry.rpartition(".")[0] for entry in entries}
    assert len(entries) == len(names) * len(stacks)
    assert all(entry["layers"] for entry in entries.values()) and "layer 0" in tables.table(entries)
    assert conditioning.measure(next(iter(entries))).what
    if isinstance(c.model.num_heads, tuple):
        with pytest.raises(ConfigError, match="heads by stage"):
            probing.head_plans(c.model, [2])
    elif name == "tnt":  # two attentions in a block; the outer one has the heads
        swept = probing.sweep(c, meshes(1, 1), {"image": jax.numpy.asarray(images)}, [2], 1)
        assert [point["shape"] for point in swept["points"]] == [[5, 20], [5, 30]]


@pytest.mark.parametrize("name", FAMILIES)
def test_nystrom_attention_in_every_family(name, meshes, rng):
    """One key changes the attention; its parameters are the convolution's alone, and it is another function."""
    c = small(name)
    c.unlock()
    c.model.update(attention="nystrom", landmarks=4)
    c.lock()
    built = experiment.build(probing.bare(c), examples=1, mesh=meshes(1, 1))
    names = {jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(built.like.params)}
    assert any("skip" in found for found in names)
    batch = {"image": rng.integers(0, 256, (4, c.model.image_size, c.model.image_size, 1), np.uint8)}
    found = probing.make_reader(built, ["attention_output", "pseudo_inverse_residual"])(built.first_weights(), batch)
    assert all(entry["layers"] for entry in tables.describe(jax.device_get(found))[0].values())
    c.unlock()
    c.model.update(attention="softmax" if name != "xcit" else "cross_covariance", landmarks=None)
    own = experiment.build(probing.bare(c), examples=1, mesh=meshes(1, 1))
    assert not any("skip" in jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(own.like.params))
    c.model.attention = "linear"
    with pytest.raises(ConfigError, match='model.attention="linear" is not a kind of attention here'):
        experiment.build(probing.bare(c), examples=1, mesh=meshes(1, 1))
