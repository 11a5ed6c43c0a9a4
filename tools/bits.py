"""Bit-exactness check of a program change: train a small run of each type, and write hashes of the final weights and
every metrics record.

    python tools/bits.py --out=after.json [--only=NAME,...]        # in one checkout of the repository
    python tools/bits.py --out=before.json                         # in the other, with this file copied
    python tools/bits.py --compare before.json after.json

Runs: `quickstart`, 60 steps at seed 7; `accumulated`, the same in two micro-batches; `listops`, and
one of each image architecture. About four minutes on two cores.
"""

import argparse
import hashlib
import json
import sys
import tempfile
from pathlib import Path

import numpy as np

from leanformer import config, train
from leanformer.data.sequences.listops import Recipe, write
from leanformer.training import run_files
from leanformer.training.checkpoint import Checkpoints


HERE = Path(__file__).resolve().parents[1]
TINY = {
    "vit": {"patch_size": 7, "width": 24, "depth": 2, "num_heads": 3, "head_dim": 8, "mlp_dim": 36, "distilled": True},
    "xcit": {"patch_size": 4, "width": 24, "depth": 2, "num_heads": 3, "head_dim": 10, "mlp_dim": 36}
    | {"class_heads": 2, "class_head_dim": 8, "layer_scale": 1.0},
    "tnt": {"patch_size": 14, "width": 24, "depth": 2, "num_heads": 3, "head_dim": 10, "mlp_dim": 36}
    | {"inner_width": 8, "inner_heads": 2, "inner_head_dim": 5, "inner_mlp_dim": 16, "pixel_stride": 7},
    "volo": {"patch_size": 4, "width": (16, 24), "depth": (1, 1), "mlp_dim": (24, 36), "num_heads": (2, 3)}
    | {"head_dim": (8, 8), "class_heads": 2, "class_head_dim": 8, "stem_width": 8},
    "davit": {"width": (8, 16), "depth": (1, 1), "mlp_dim": (16, 24), "num_heads": (2, 3), "head_dim": (8, 8)}
    | {"window_size": 3},
}


def make_quickstart(folder: Path) -> config.ConfigDict:
    c = config.load(str(HERE / "configs" / "quickstart.py"))
    c.update(seed=7, total_epochs=0.0, total_steps=60, log_every=10)
    c.optim.update(warmup_epochs=0.0, warmup_steps=10)
    c.eval.every = 30
    c.probe.every = 0
    return c


def make_accumulated(folder: Path) -> config.ConfigDict:
    c = make_quickstart(folder)
    c.accumulate = 2
    return c


def make_listops(folder: Path) -> config.ConfigDict:
    recipe = {"train": 400, "val": 40, "test": 40, "min_length": 5, "max_length": 40}
    fields = Recipe.__dataclass_fields__
    recipe = {name: value for name, value in recipe.items() if name in fields}
    write(folder / "listops", Recipe(**recipe))
    c = config.sequences().unlock()
    c.update(seed=7, batch_size=16, total_steps=30, dtype="float32", log_every=5)
    c.data.update(name=f"listops:{folder / 'listops'}", eval_split="val", max_length=64, workers=0)
    c.data.recipe = recipe
    c.model.update(max_length=64, width=24, mlp_dim=20, landmarks=4, convolution=3)
    c.optim.update(warmup_steps=4, ema=0.9)
    c.probe.every = 0
    return c.lock()


def make_small(name: str, **model: object) -> config.ConfigDict:
    """Return the config of a few steps of an architecture on the bundled images, with all augmentation enabled."""
    c = config.base()
    c.update(seed=7, batch_size=32, total_epochs=0.0, total_steps=20, dtype="float32", log_every=5)
    c.unlock()
    c.model = config.model(
        name, image_size=32 if name in ("volo", "davit") else 28, channels=1, num_classes=10, **TINY[name] | model
    )
    c.lock()
    c.data.update(name="bundled:fashion_mnist", eval_split="t10k", mean=(0.286,), std=(0.353,), workers=0)
    c.augment.erase = 0.3
    c.optim.update(warmup_epochs=0.0, ema=0.9)
    c.eval.update(every=0, batch_size=500)
    c.probe.every = 0
    return c


RUNS = {"quickstart": make_quickstart, "accumulated": make_accumulated, "listops": make_listops}
RUNS |= {name: lambda folder, name=name: make_small(name) for name in TINY}


def run_and_hash(make_config: object) -> dict[str, object]:
    """Train a config, and return hashes of the final weights and every record without its timing."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        train.train(make_config(folder), folder / "run")
        with Checkpoints(folder / "run" / "checkpoints") as saved:
            tensors = saved.restore_weights().tensors
        hashed = {name: hashlib.sha256(np.ascontiguousarray(x).tobytes()).hexdigest() for name, x in tensors.items()}
        records = run_files.read_records(folder / "run")
    return {
        "weights": hashed,
        "records": [{key: value for key, value in r.items() if key not in run_files.TIMING} for r in records],
    }


def compare(before: Path, after: Path) -> int:
    """Print the differences of each run, and return the number of runs that differ."""
    old, new = (json.loads(path.read_text()) for path in (before, after))
    differing = 0
    for name in old.keys() & new.keys():
        leaves = [leaf for leaf, x in old[name]["weights"].items() if new[name]["weights"].get(leaf) != x]
        records = sum(a != b for a, b in zip(old[name]["records"], new[name]["records"], strict=True))
        differing += bool(leaves or records)
        counts = len(old[name]["weights"]), len(old[name]["records"])
        print(f"{name:<14} differing weights {len(leaves)} of {counts[0]}, differing records {records} of {counts[1]}")
    return differing


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only", default=",".join(RUNS))
    parser.add_argument("--compare", type=Path, nargs=2, metavar=("BEFORE", "AFTER"))
    options = parser.parse_args()
    if options.compare:
        return int(bool(compare(*options.compare)))
    options.out.write_text(json.dumps({name: run_and_hash(RUNS[name]) for name in options.only.split(",")}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
