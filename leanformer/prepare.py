"""Preparation of a config's data before training: check, build or cache.

    python -m leanformer.prepare check --config=FILE     # checks that the data are present and complete
    python -m leanformer.prepare build --config=FILE     # generates listops: and pathfinder: data; trains tokenizers
                                                         # and tokenises texts; downloads and prepares tfds: data
                                                         # (requires tensorflow once)
    python -m leanformer.prepare cache --config=FILE --short_side=288 --out=DIR    # writes smaller images for faster
                                                         # reading; then train with --config.data.name=cache:DIR

`check` also reads and preprocesses a few examples of each split, so that a wrong image size or a corrupted file is
detected early, and measures the number of training examples per second that one core prepares.
"""

if __name__ == "__main__":
    from leanformer.__main__ import run

    run("prepare")  # imports this module again, once the command line is parsed


import time
from pathlib import Path
from typing import Any

import numpy as np
from ml_collections import ConfigDict

from leanformer import cli, data, tasks
from leanformer.config.rules import image_sides
from leanformer.data.images import cache as caches
from leanformer.errors import ConfigError, DataError
from leanformer.tasks import DataModule
from leanformer.training import progress


SAMPLES = 8  # examples to read from each split
SHORT_SIDE = 288  # default short side of cached images, in pixels
TIMED = 16  # training examples with which the speed of one core is measured


def check(c: ConfigDict) -> dict[str, dict[str, Any]]:
    """Return {split: facts} about a config's data, after reading a few examples of each split.

    The facts are `examples` (number); for labelled data, `classes` (names as text, their number, or None) and `labels
    seen` (of the read examples); and for the training split, `one core` (text: training examples/s). An endless
    training split is left out. Files that a split lists twice, and data that splits share, are reported on stderr.

    Raises:
        DataError: data are missing or unreadable, or do not fit the model; the message says how to fix it.
    """
    result, module = {}, tasks.build(c).data
    train, held_out = tasks.open_data(module, c)
    tasks.check_names(c, train)
    tasks.warn_repeats(c, train, held_out)
    splits = {c.data.train_split: train} if data.size(train) is not None else {}
    splits |= {c.data.eval_split: held_out.pop("")}
    splits |= {c.eval.more[name].split: source for name, source in held_out.items()}
    for split, source in splits.items():
        named = tasks.class_names(source)
        batches = module.eval_batches(source, batch_size=1, process=0, processes=1)
        size = data.size(source) or 0
        picked = np.linspace(0, size - 1, min(SAMPLES, size)).astype(int)
        labels = []
        for index in picked.tolist():
            batch = batches[index]
            labels += [named[label] if named else label for label in batch.get("label", np.array([])).tolist()]
            if batch["corrupt"][0] >= 0:
                raise DataError(
                    f"{source.name(index)} is unreadable: {batches.unreadable_reason(index)}. Fix or remove it."
                )
        result[split] = {"examples": size}
        if labels:
            result[split] |= {
                "classes": data.quote(named) if named else getattr(source, "num_classes", None),
                "labels seen": labels,
            }
    if c.data.train_split in result:
        result[c.data.train_split]["one core"] = f"{examples_per_core(c, module, train):,.0f} training examples/s"
    return result


def examples_per_core(c: ConfigDict, module: DataModule, train: data.Source) -> float:
    """Return the number of training examples per second that one core reads and augments, measured on one batch.

    The time waiting for a disk does not count.

    Args:
        c: config, for the seed.
        module: data module of the config's task.
        train: source of the training split.
    """
    batches = module.train_batches(train, batch_size=TIMED, seed=c.seed, process=0, processes=1)
    batches[0]  # the first batch includes one-time setup
    start = time.thread_time()
    batches[1]
    return TIMED / max(time.thread_time() - start, 1e-9)


def cache(c: ConfigDict, folder: Path, short_side: int) -> None:
    """Write a cache of the training split with smaller images, and of the unchanged evaluation split.

    Evaluation on the cache gives the same numbers. The same call resumes after a kill. A page on each split is printed.

    Args:
        c: config; `data.workers` processes are used.
        folder: folder of the cache, with a folder per split.
        short_side: maximal short side of the training images, in pixels.

    Raises:
        ConfigError: the data are not images, or `short_side` is less than the model's image size.
        DataError: the source is missing, or the cache cannot be written.
    """
    if "image_size" not in c.model:
        raise ConfigError(f'data.name="{c.data.name}": prepare cache requires images, but task="{c.task}" has none.')
    size = image_sides(c.model.image_size)
    if short_side < max(size):
        raise ConfigError(
            f"--short_side={short_side} is less than model.image_size={c.model.image_size}. Raise --short_side."
        )
    train, held_out = tasks.open_data(tasks.build(c).data, c)
    splits = {c.data.eval_split: (held_out[""], None), c.data.train_split: (train, short_side)}
    for split, (source, side) in splits.items():
        about: dict[str, Any] = {"name": c.data.name, "split": split, "short_side": side, "channels": c.model.channels}
        images: Any = source  # labelled, as all sources of images
        record = caches.write(images, folder, processes=c.data.workers, **about)
        gigabytes = sum(record["bytes"].values()) / 1e9
        rows = {key: f"{record[key]:,}" for key in ("examples", "shrunk", "kept", "unreadable")}
        rows |= {"changes": caches.describe_effect(record, size), "size": f"{gigabytes:,.1f} GB"}
        print(progress.format_page(f"{folder / split}, of {c.data.name}", rows))
    print(f"To train on it, pass --config.data.name=cache:{folder}")


@cli.body("prepare")
def main(f: cli.Values) -> None:
    c = f.config
    if f.verb == "cache":
        if f.out is None:
            raise ConfigError("prepare cache requires a folder for the cache. Pass --out=DIR.")
        cache(c, Path(f.out).expanduser(), SHORT_SIDE if f.short_side is None else f.short_side)
        return
    for name in ("out", "short_side"):
        if (value := getattr(f, name)) is not None:
            raise ConfigError(f"--{name}={value}: only `prepare cache` uses it. Leave it out of `prepare {f.verb}`.")
    if f.verb == "build" and not tasks.build(c).data.build():
        print(f"{c.data.name} does not need to be built. Checking that it is present.")
    for split, facts in check(c).items():
        print(progress.format_page(f"{c.data.name}, {split}", facts))
