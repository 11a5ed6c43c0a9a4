"""Recipes of CONTRIBUTING.md ("Adding"), followed in a copy of the package: a new architecture, dataset and
attention are trained by the train command, and the attention is used in an existing architecture."""

import json
import shutil

import pytest
from commands import ROOT, run_python


ATTENTION = '''
"""Attention without a softmax: its cost grows with T, not T x S (Katharopoulos et al. 2020)."""

import jax
import jax.numpy as jnp

from leanformer.config.attention import LinearKeys
from leanformer.config.declare import types_of
from leanformer.layers.masks import EVAL_CONTEXT
from leanformer.layers.multihead import MultiHeadAttention


class LinearAttention(MultiHeadAttention):
    options = types_of(LinearKeys)
    masks = ()

    def __init__(self, width, num_heads, head_dim, value_dim=None, *, floor=0.0, **common):
        super().__init__(width, num_heads, head_dim, value_dim, **common)
        self.floor = floor

    def __call__(self, x, context=EVAL_CONTEXT):
        q, k, v = self.query(x), self.key(x), self.value(x)
        read, write = (self.floor + 1 + jax.nn.elu(array) for array in (q, k))
        weights = jnp.einsum("btnh,bsnh->bnts", read, write)  # simple, not fast: the recipe is tested
        out = jnp.einsum("bnts,bsnh->btnh", weights / weights.sum(-1, keepdims=True), v)
        return self.out(out), {"q": q, "k": k, "v": v, "out": out}, None
'''
DATASET = '''
"""Images of horizontal or vertical stripes."""

import numpy as np


class Stripes:
    num_classes, classes = 2, ("lying", "standing")

    def __init__(self, split):
        self.split = split

    def __len__(self):
        return {"train": 96, "test": 32}[self.split]

    def __getitem__(self, index):
        draw = np.random.default_rng((index, self.split == "train"))
        stripes = np.broadcast_to(255 * (np.arange(14) + draw.integers(4)) // 2 % 2 * 255, (14, 14)).astype(np.uint8)
        return {"image": (stripes if index % 2 else stripes.T)[..., None], "label": index % 2}

    def name(self, index):
        return f"stripes {self.split} {index}"
'''
FAMILY = '''
"""Minimal vision transformer: patches, blocks and mean pooling."""

from flax import nnx

from leanformer.config.architectures import PlainVitKeys
from leanformer.layers.stack import Stack
from leanformer.layers.masks import Context
from leanformer.layers.convolution import PatchConv
from leanformer.layers.model_base import Family
from leanformer.layers.norms import LayerNorm


class Model(Family):
    keys = PlainVitKeys

    def __init__(self, keys, blocks, *, rngs):
        self.patches = PatchConv(keys.channels, blocks.width, keys.patch_size, first=True, rngs=rngs)
        self.blocks = Stack.from_config(blocks, rngs=rngs)
        self.norm = LayerNorm(blocks.width, rngs=rngs)
        self.head = nnx.Linear(blocks.width, keys.num_classes, rngs=rngs)

    def __call__(self, images, *, key=None, tap=None):
        x = self.patches(images)
        x, taps = self.blocks(x.reshape(len(x), -1, x.shape[-1]), Context(key=key, tap=tap))
        return self.head(self.norm(x.mean(axis=1))), {"blocks": taps}
'''
CONFIG = '''
"""User-defined model, dataset and attention."""

from leanformer import config


def get_config():
    c = config.base()
    c.update(batch_size=16, total_epochs=12.0, dtype="float32", log_every=12)
    c.model = config.model("plain", patch_size=7, width=16, depth=2, num_heads=2, head_dim=8, mlp_dim=32)
    c.model.update(image_size=14, channels=1, num_classes=2, drop_path=0.0, attention="linear")
    c.data.update(name="stripes", train_split="train", eval_split="test", mean=(0.5,), std=(0.5,))
    c.data.update(crop_fraction=1.0, workers=0)
    c.augment.update(crop_scale=(1.0, 1.0), flip=0.0, rand_magnitude=0.0, mixup=0.0, cutmix=0.0)
    c.optim.update(lr=0.01, warmup_epochs=1.0)
    c.eval.batch_size = 32
    c.probe.update(examples=4, every=100)
    return c
'''
KEYS = "@dataclass(frozen=True)\nclass {}:\n    {}  # {}\n\n\n"
LINEAR = KEYS.format("LinearKeys", "floor: float | None = None", "added to the weights; 0 if unset")
PLAIN = KEYS.format("PlainVitKeys(ImageKeys)", "patch_size: int = 7", "side of a patch")
REGISTRIES = {
    "leanformer/config/attention.py": (("OPTIONS = (", LINEAR), ("InterventionKeys, LatentKeys", "LinearKeys, ")),
    "leanformer/config/architectures.py": (
        ("ARCHITECTURES: d", PLAIN),
        ('    "vit": V', '    "plain": PlainVitKeys,\n'),
    ),
    "leanformer/layers/model_base.py": (
        ("from leanformer.layers.latent", "from leanformer.layers.linear import LinearAttention\n"),
        ('"nystrom": NystromAttention', '"linear": LinearAttention, '),
    ),
    "leanformer/data/images/__init__.py": (
        ("from leanformer.data.images.sources", "from leanformer.data.images.stripes import Stripes\n"),
        ('    "synthetic": Kind(', '    "stripes": Kind("stripes", lambda _, split, w: Stripes(split)),\n'),
    ),
}


@pytest.fixture(scope="module")
def package_copy(tmp_path_factory):
    """Return a copy of the package and configs with four new files, and new lines in four registries."""
    folder = tmp_path_factory.mktemp("copy")
    for name in ("leanformer", "configs"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    files = {"layers/linear.py": ATTENTION, "data/images/stripes.py": DATASET, "models/plain.py": FAMILY}
    for name, text in files.items():
        (folder / "leanformer" / name).write_text(text)
    (folder / "configs" / "plain_stripes.py").write_text(CONFIG)
    for name, lines in REGISTRIES.items():
        text = (folder / name).read_text()
        for before, line in lines:
            assert text.count(before) == 1
            text = text.replace(before, line + before)
        (folder / name).write_text(text)
    return folder


@pytest.mark.slow
def test_extensions_train_with_the_train_command(package_copy, tmp_path):
    """Guessing gets half of the labels right; a trained model gets all."""
    words = ["-m", "leanformer.train", "--config=configs/plain_stripes.py", f"--workdir={tmp_path}"]
    run_python(*words, cwd=package_copy)
    summary, names = (json.loads((tmp_path / name).read_text()) for name in ("summary.json", "classes.json"))
    assert summary["final"]["top1"] == 1.0 and "lying" in str(names) and "standing" in str(names)
    program = f"import leanformer; print(type(leanformer.load({str(tmp_path)!r}).model).__module__)"
    assert run_python("-c", program, cwd=package_copy).splitlines()[-1] == "leanformer.models.plain"
