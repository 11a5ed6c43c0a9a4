"""Small runs of every task, with all random features enabled: configs, data, states without initialisers, and what
runs leave behind."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from random_weights import fill_weights

from leanformer import config
from leanformer.data.sequences import build_sequences
from leanformer.runtime.mesh import make_mesh
from leanformer.tasks import Score
from leanformer.training import run_files, train_setup
from leanformer.training.checkpoint import Checkpoints


WORDS = "the bear saw a bird and the bird saw a bear so they sang of it all day long".split()  # noqa: SIM905
SIZES = {"width": 16, "depth": 2, "num_heads": 4, "head_dim": 4, "mlp_dim": 24}  # divisible over 2 x 2 x 2 devices
UNEQUAL = {"depth": 3, "num_heads": (4, 2, 2), "head_dim": (4, 6, 6), "mlp_dim": (24, 8, 8), "num_kv_heads": 2}
LISTOPS = {"train": 40, "val": 9, "test": 9, "min_length": 5, "max_length": 24}


def make_small_config(name, folder):
    """Return the config of a small run of task `name`; "xcit" is an image model with batch normalisation, and "unequal"
    a language model with layers of different sizes.

    The data are generated in `folder`, which several runs may share.
    """
    c = CONFIG_MAKERS[name](folder)
    with c.unlocked():
        c.update(batch_size=8, total_steps=8, total_epochs=0.0, dtype="float32", log_every=2, loggers=())
        c.model.update(SIZES | (UNEQUAL if name == "unequal" else {}))
        c.data.workers = 0
        c.optim.update(lr=3e-3, warmup_epochs=0.0, warmup_steps=2, ema=0.9)
        c.eval.update(every=4, batch_size=8)
        c.checkpoint.update(every=4, keep=3)
        c.probe.update(every=0, examples=8)
    return c


def _images(folder):
    c = config.base()
    c.model.update(image_size=14, patch_size=7, channels=1, num_classes=5, drop_path=0.3)
    c.data.update(name="synthetic", mean=(0.5,), std=(0.5,), crop_fraction=1.0)
    c.augment.erase = 0.3
    c.accumulate = 2
    return c


def _xcit(folder):
    c = _images(folder)
    c.unlock()
    c.model = config.model("xcit", image_size=16, patch_size=4, channels=1, num_classes=5, drop_path=0.3, **SIZES)
    c.model.update(class_heads=2, class_head_dim=6, layer_scale=0.5)
    c.lock()
    c.accumulate = 1  # batch statistics of a micro-batch cover only its own examples
    c.augment.update(mixup=0.0, cutmix=0.0)
    return c


def _sequences(folder):
    if not (folder / "listops").exists():
        build_sequences(f"listops:{folder / 'listops'}", None, LISTOPS)
    c = config.sequences().unlock()
    c.data.recipe = dict(LISTOPS)
    c.data.update(name=f"listops:{folder / 'listops'}", eval_split="val", max_length=24)
    c.model.update(max_length=24, landmarks=4, convolution=3, dropout=0.1)
    return c.lock()


def _texts(c, folder):
    (folder / "texts").mkdir(exist_ok=True)
    rng = np.random.default_rng(5)
    for split, number in (("train", 60), ("test", 11)):
        texts = [" ".join(rng.choice(WORDS, size=rng.integers(3, 30))) for _ in range(number)]
        (folder / "texts" / f"{split}.txt").write_text("|".join(texts))
    c.data.update(name=f"text:{folder / 'texts'}", separator="|", dir=str(folder / "cache"))
    c.model.update(max_length=24, packed=True, dropout=0.1, attention_dropout=0.1)
    return c


def _language(folder):
    c = _texts(config.language(), folder)
    c.data.tokenizer = "bpe:269"
    c.model.vocabulary = 270
    c.logits_at_once = 8 * 270 * 7  # logits of seven tokens of each row at once
    return c


def _masked(folder):
    c = _texts(config.masked(), folder)
    c.data.tokenizer = "wordpiece:53"
    c.model.vocabulary = 54
    c.logits_at_once = 8 * 54 * 2
    return c


def _sentences(folder):
    """Return the config of a regression on pairs of sentences."""
    rng = np.random.default_rng(6)
    (folder / "pairs").mkdir(exist_ok=True)
    for split, number in (("train", 40), ("test", 11)):
        texts = [[" ".join(rng.choice(WORDS, size=rng.integers(1, 9))) for _ in range(2)] for _ in range(number)]
        rows = [f"{first}\t{second}\t{rng.uniform(0, 5):.2f}" for first, second in texts]
        (folder / "pairs" / f"{split}.tsv").write_text("\n".join(["sentence\tsentence2\tlabel", *rows]) + "\n")
    c = config.sentences()
    c.score = "spearman"
    c.data.update(name=f"tsv:{folder / 'pairs'}", dir=str(folder / "cache"), eval_split="test")
    c.data.update(tokenizer="wordpiece:53", max_length=16)
    c.model.update(vocabulary=54, max_length=16, num_classes=1, pooler_dim=6, dropout=0.1, attention_dropout=0.1)
    return c


def _points(folder):
    c = config.points()
    c.data.update(points=5, dim=SIZES["width"], examples=16)
    c.model.update(drop_path=0.3)
    return c


def _unequal(folder):
    c = _language(folder)
    c.model.update(drop_path=0.3)
    return c


CONFIG_MAKERS = {
    "images": _images,
    "sequences": _sequences,
    "language": _language,
    "masked": _masked,
    "sentences": _sentences,
    "points": _points,
    "xcit": _xcit,
    "unequal": _unequal,
}


def make_image_batch(rng, c, size=None):
    """Return a batch of random images and labels, of `size` or of the config's batch size, in host memory."""
    shape = (size or c.batch_size, c.model.image_size, c.model.image_size, c.model.channels)
    images = rng.integers(0, 256, shape, dtype=np.uint8)
    return {"image": images, "label": rng.integers(0, c.model.num_classes, shape[0]).astype(np.int32)}


def make_initial_state(run, seed=0):
    """Return a state before step 0 with weights drawn by NumPy, so that no initialiser is compiled."""
    zeros = jax.tree.map(lambda leaf: jax.device_put(np.zeros(leaf.shape, leaf.dtype), leaf.sharding), run.state)
    params, statistics = fill_weights(run.state.weights, seed)
    ema = None if run.state.ema is None else fill_weights(run.state.ema, seed)
    return dataclasses.replace(zeros, params=params, statistics=statistics, ema=ema)


def write_run(workdir, config, mesh, *steps):
    """Write a run with a checkpoint at each of `steps`, as training leaves it; return its setup and its states by step.

    Every state has weights of its own, and EMA weights that differ from them.
    """
    run = train_setup.set_up_training(config.copy_and_resolve_references(), examples=64, mesh=mesh)
    run_files.write_config(workdir, config)
    states = {}
    with Checkpoints(workdir / "checkpoints", len(steps), score=Score("top1")) as checkpoints:
        for step in steps:
            state = make_initial_state(run, seed=step)
            ema = jax.tree.map(lambda x: 0.7 * x, state.ema)
            states[step] = dataclasses.replace(state, step=jnp.int32(step), ema=ema)
            checkpoints.save(step, states[step])
            checkpoints.wait()
    return run, states


def read_records(workdir, kind=None):
    """Return the records of a run, of one kind or all, without timings."""
    return [
        {key: value for key, value in record.items() if key not in run_files.TIMING}
        for record in run_files.read_records(workdir, kind)
    ]


def load_last_state(workdir):
    """Return the newest checkpoint, on one device."""
    mesh = make_mesh(devices=jax.devices()[:1])
    with Checkpoints(workdir / "checkpoints") as checkpoints:
        setup = train_setup.set_up_training(run_files.load_config(workdir), examples=10_000, mesh=mesh)
        return checkpoints.restore(setup.state)[0]


def assert_equal_bits(a, b):
    """Assert that two trees have equal bytes, so that NaN and -0.0 are compared too."""
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for (path, x), y in zip(jax.tree.leaves_with_path(a), jax.tree.leaves(b), strict=True):
        x, y = np.asarray(jax.device_get(x)), np.asarray(jax.device_get(y))
        assert (x.shape, x.dtype, x.tobytes()) == (y.shape, y.dtype, y.tobytes()), jax.tree_util.keystr(path)


def assert_same_run(workdir, other, steps):
    """Assert that two runs have the same last state, after `steps` steps, and the same records."""
    state = load_last_state(workdir)
    assert int(state.step) == steps
    assert_equal_bits(state, load_last_state(other))
    assert read_records(workdir) == read_records(other)


def abstract_eval_batch(setup):
    """Return shapes, dtypes and shardings of a global evaluation batch."""
    return setup.model.abstract_batch(setup.config.eval.batch_size, setup.task.data.specs(train=False))


def lower_eval_step(setup):
    """Return the evaluation step, lowered for the device of the setup."""
    return setup.model.lower(
        jax.jit(setup.model.eval_step(setup.task.objective)), setup.model.weights, abstract_eval_batch(setup)
    )


def lower_probe_step(setup):
    """Return the probe step, lowered for the device of the setup."""
    probe = setup.config.probe
    batch = setup.model.abstract_batch(probe.examples, setup.task.data.input_specs())
    return setup.model.lower(
        jax.jit(setup.model.probe_step(setup.task.objective, probe.measures)), setup.model.weights, batch
    )
