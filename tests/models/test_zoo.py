"""Every image architecture on non-square images: a training step, a probe, other attention, and many devices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from messages import refuses
from random_weights import fill_weights

from leanformer import config, models, tasks
from leanformer.conditioning import tables
from leanformer.layers.masks import EVAL_CONTEXT
from leanformer.layers.stack import Stack
from leanformer.runtime import mesh as sharding
from leanformer.runtime.mesh import flatten_names
from leanformer.training import evaluators, model_setup, probing, train_setup


STAGES = {"num_heads": (2, 3), "head_dim": (5, 4)}
ARCHITECTURES = {
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
        **{"patch_size": 4, "width": (16, 24), "depth": (1, 2), "mlp_dim": (24, 36), **STAGES},
        **{"class_heads": 2, "class_head_dim": 8, "stem_width": 8},
    },
    "davit": {**{"width": (8, 16), "depth": (1, 2), "mlp_dim": (16, 24), **STAGES}, **{"window_size": 3}},
}
# Height and width: grids of 3 x 5 patches; VOLO's halved once; DaViT's of 11 x 7 and 6 x 4, no whole windows of 3.
SIZES = {"vit": (21, 35), "xcit": (12, 20), "tnt": (42, 70), "volo": (24, 40), "davit": (44, 28)}


def make_config(name, size=None, **model):
    """Return a config with all random augmentation and drop path, on non-square synthetic images."""
    c = config.base()
    c.update(batch_size=4, total_epochs=0.0, total_steps=2, dtype="float32")
    c.unlock()
    sizes = {"image_size": size or SIZES[name], "channels": 1, "num_classes": 5, "drop_path": 0.1}
    c.model = config.model(name, **sizes, **ARCHITECTURES[name])
    c.model.update(model)
    c.lock()
    c.data.update(name="synthetic", mean=(0.5,), std=(0.5,), workers=0)
    c.augment.update(erase=0.3)
    if name not in ("vit", "volo"):  # image mixing does not depend on the model; VOLO has labels per token
        c.augment.update(erase=0.0, mixup=0.0, cutmix=0.0)
    c.optim.update(warmup_epochs=0.0)
    c.eval.batch_size = 4
    c.probe.update(examples=4, measures=("attention_output", "tokens"))
    config.check(c)
    return c


def make_initial_state(run):
    """Return the state before step 0 with weights drawn by NumPy, placed on the run's mesh."""
    return model_setup.materialise(run.make_state, fill_weights(run.state.weights), run.state)


@pytest.mark.slow  # long to compile; faster tests compare logits with timm's
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_architecture_smoke(name, meshes):
    """A step changes every parameter, and the probe's table shows every stack. Parity tests check values."""
    c = make_config(name)
    run = train_setup.set_up_training(c, examples=64, mesh=meshes(1, 1))
    train, held_out = tasks.open_data(tasks.build_task(c).data, c)
    batches = run.batches(train, 0)
    host = next(batches)
    batches.close()
    assert host["image"].shape == (4, *SIZES[name], 1)
    before = make_initial_state(run)
    after, metrics = jax.jit(run.train_step)(before, run.put(host), run.run_key())
    assert np.isfinite(metrics["loss"]) and not metrics["skipped"]
    old, new = flatten_names(before.params), flatten_names(after.params)
    unchanged = [leaf for leaf in old if (np.asarray(old[leaf]) == new[leaf]).all()]
    assert all(leaf.endswith("key.bias") for leaf in unchanged), unchanged  # its gradient is only rounding
    changed = jax.tree.leaves(jax.tree.map(lambda a, b: np.abs(a - b).max() > 0, before.statistics, after.statistics))
    assert all(changed) and bool(changed) == (name in ("xcit", "volo"))  # only these have batch statistics

    names = ["attention_output", "tokens", "mlp_hidden", "output_weights"]
    values = probing.make_reader(run.model, run.task.objective, names)(
        after.weights, evaluators.probe_batch(run.model, run.task.data, held_out[""], c.probe.examples)
    )
    entries, _ = tables.describe(jax.device_get(values))
    assert len(entries) == len(names) * len({entry.rpartition(".")[0] for entry in entries})
    assert all(layer["not_finite"] == 0 for entry in entries.values() for layer in entry["layers"])


@pytest.mark.parametrize("name", ["vit", "tnt", "volo"])
def test_images_of_another_size_are_refused(name):
    """The positions of these models are learned, and a part of a patch would be left out."""
    definition, _, weights = model_setup.abstract_model(make_config(name))
    sides = [side + 1 for side in SIZES[name]]
    images = jax.ShapeDtypeStruct((2, *sides, 1), jnp.float32)
    with refuses(*sides, *SIZES[name]):
        jax.eval_shape(lambda weights, images: nnx.merge(definition, *weights)(images)[0], weights, images)


@pytest.mark.parametrize(
    "name", ["vit", "davit", *(pytest.param(name, marks=pytest.mark.slow) for name in ("xcit", "tnt", "volo"))]
)
def test_nystrom_attention_is_set_by_one_key(name, meshes):
    """Checks by shapes that it adds only the convolution's parameters, and that the probe reads it."""

    def build_model(**changes):
        c = make_config(name)
        with c.unlocked():
            c.model.update(changes)
        config.check(c)
        model = model_setup.set_up_model(c, mesh=meshes(1, 1))
        return model, flatten_names(model.weights[0]).keys()

    model, nystrom = build_model(attention="nystrom", landmarks=4)
    _, plain = build_model()
    assert nystrom - plain and all(leaf.endswith("skip") for leaf in nystrom - plain)
    names = ["attention_output", "pseudo_inverse_residual"]
    batch = {"image": jax.ShapeDtypeStruct((4, *SIZES[name], 1), jnp.uint8)}
    result = jax.eval_shape(
        probing.make_reader(model, tasks.build_task(model.config).objective, names), model.weights, batch
    )
    assert {entry.rpartition(".")[2] for entry in result} == set(names)


@pytest.mark.slow
def test_probe_sweeps_outer_heads_and_refuses_heads_by_stage(meshes):
    """TNT has two attentions per block, and the outer one is swept. Heads by stage cannot be swept."""
    c = make_config("tnt", depth=1)
    images = jnp.asarray(np.random.default_rng(0).integers(0, 256, (4, 42, 70, 1)), jnp.uint8)
    draw_weights = lambda model, seed: fill_weights(model.weights, seed)  # noqa: E731
    swept = probing.sweep(c, meshes(1, 1), {"image": images}, [2], 1, weights=draw_weights)
    assert [point["shape"] for point in swept["points"]] == [[16, 20], [16, 30]]
    with refuses("--heads", f"model.num_heads={STAGES['num_heads']}"):
        probing.head_plans(make_config("volo").model, [2])


@pytest.mark.parametrize("name", ["davit", "volo"])
def test_stages_use_different_random_keys(name, monkeypatch):
    keys, images = [], jnp.zeros((2, *SIZES[name], 1))

    def call(self, x, context=EVAL_CONTEXT):
        keys.append(context.key)
        return x, {}

    def collect_keys(key):
        monkeypatch.setattr(Stack, "__call__", call)
        fill_weights(lambda: models.build(**make_config(name).model, rngs=nnx.Rngs(0)))(images, key=key)
        return [key for key in keys if key is not None]  # class blocks have none

    stages = jax.jit(collect_keys)(jax.random.split(jax.random.key(2), 2))
    numbers = np.concatenate([jax.random.key_data(stage) for stage in stages])
    assert len(np.unique(numbers, axis=0)) == len(numbers) == 2 * len(ARCHITECTURES[name]["depth"])


@pytest.mark.slow  # long to compile; tests/training/test_sharding.py covers one architecture
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_one_device_and_eight_agree(name, meshes):
    """Loss, gradient and batch statistics of a step are sums over up to 8 x 44 x 28 numbers in another order."""
    c = make_config(name)
    c.update(batch_size=8)
    c.eval.batch_size = c.probe.examples = 8
    rng, eps = np.random.default_rng(0), np.finfo(np.float32).eps
    images = rng.integers(0, 256, (8, *SIZES[name], 1), np.uint8)

    def step(mesh, order=slice(None)):
        run = train_setup.set_up_training(c, examples=10_000, mesh=mesh)
        batch = {"image": images[order], "label": (np.arange(8) % 5).astype(np.int32)}
        after, metrics = jax.jit(run.train_step)(
            make_initial_state(run), sharding.put_batch(mesh, batch), run.run_key()
        )
        return np.array([metrics["loss"], metrics["grad_norm"]]), jax.device_get(after.statistics)

    (one, statistics), (eight, sharded_statistics), (other, _) = (
        step(meshes(1, 1)),
        step(meshes(2, 4)),
        step(meshes(1, 1), [*range(7), 0]),
    )
    np.testing.assert_allclose(eight, one, rtol=1000 * eps)  # about sqrt(8 x 44 x 28) = 100, a few layers deep
    assert (np.abs(other / one - 1) > 1e-2).any()  # one of eight images is another
    for a, b in zip(*map(jax.tree.leaves, (statistics, sharded_statistics)), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1000 * eps * np.abs(a).max())
