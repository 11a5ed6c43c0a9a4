"""Look for a config's data, or get them, before any training.

    python -m leanformer.prepare check --config=FILE     # what is there, what is missing, where it was looked for
    python -m leanformer.prepare build --config=FILE     # makes listops: and pathfinder: sets, and tokenizers and
                                                         # tokens of texts; downloads and prepares tfds: data (needs
                                                         # tensorflow, once)
    python -m leanformer.prepare cache --config=FILE --short_side=288 --out=DIR    # smaller images, to be read faster:
                                                         # then train with --config.data.name=cache:DIR

`check` also reads and prepares a few examples of each split, so a wrong image size or broken file shows now, and
measures how many training examples one core prepares per second.
"""

import time
from pathlib import Path
from typing import Any

import numpy as np
from ml_collections import ConfigDict

from leanformer import cli, data, tasks
from leanformer.config.rules import sides
from leanformer.data.images import cache as caches
from leanformer.errors import ConfigError, DataError
from leanformer.tasks import DataModule
from leanformer.training import report


SAMPLES = 8  # examples of each split that are read
TIMED = 16  # training examples of which the speed of one core is measured
OUT = cli.Flag("out", "Folder that `cache` makes.", writes=True)
SHORT_SIDE = cli.Flag("short_side", "Of the images that `cache` makes smaller, in pixels.", int, default=288)


def check(c: ConfigDict) -> dict[str, dict[str, Any]]:
    """What each split holds: examples, classes, and a few examples read from beginning to end.

    Raises:
        DataError: the first thing that is missing or unreadable, and what to do.
    """
    found, module = {}, tasks.of(c).data
    train, held_out = tasks.open_data(module, c)
    tasks.check_names(c, train)
    splits = {c.data.train_split: train} if data.size(train) is not None else {}
    splits |= {c.data.eval_split: held_out.pop("")}
    splits |= {c.eval.more[name].split: source for name, source in held_out.items()}
    for split, source in splits.items():
        named = tasks.names(source)
        batches = module.eval_batches(source, batch_size=1, process=0, processes=1)
        picked = np.linspace(0, len(source) - 1, min(SAMPLES, len(source))).astype(int)
        labels = []
        for index in picked.tolist():
            batch = batches[index]
            labels += [named[label] if named else label for label in batch.get("label", np.array([])).tolist()]
            if batch["corrupt"][0] >= 0:
                raise DataError(f"Unreadable: {source.name(index)} ({batches.why(index)}). Mend or remove it.")
        found[split] = {"examples": len(source)}
        if labels:
            found[split] |= {"classes": data.shown(named) if named else source.num_classes, "labels seen": labels}
    if c.data.train_split in found:
        found[c.data.train_split]["one core"] = f"{examples_per_core(c, module, train):,.0f} training examples/s"
    return found


def examples_per_core(c: ConfigDict, module: DataModule, train: data.Source) -> float:
    """Return the training examples per second that one core reads and augments; waiting for a disk is left out."""
    batches = module.train_batches(train, batch_size=TIMED, seed=c.seed, process=0, processes=1)
    batches[0]  # what is read and set up once
    start = time.thread_time()
    batches[1]
    return TIMED / max(time.thread_time() - start, 1e-9)


def cache(c: ConfigDict, folder: Path, short_side: int) -> None:
    """Writes the training split with images of at most that short side, and the evaluation split as it is, so that
    evaluation gives the same numbers. What a killed call leaves is gone on with by the same one.

    Raises:
        ConfigError: no images are read, or they would be smaller than the model's.
        DataError: the source is not there, or the cache cannot be written.
    """
    if "image_size" not in c.model:
        raise ConfigError(f'prepare cache is for images, and data.name="{c.data.name}" of task="{c.task}" has none.')
    size = sides(c.model.image_size)
    if short_side < max(size):
        raise ConfigError(f"--short_side={short_side} is less than model.image_size={c.model.image_size}.")
    train, held_out = tasks.open_data(tasks.of(c).data, c)
    wanted = {c.data.eval_split: (held_out[""], None), c.data.train_split: (train, short_side)}
    for split, (source, side) in wanted.items():
        about = {"name": c.data.name, "split": split, "short_side": side, "channels": c.model.channels}
        record = caches.write(source, folder, processes=c.data.workers, **about)
        gigabytes = sum(record["bytes"].values()) / 1e9
        rows = {key: f"{record[key]:,}" for key in ("examples", "shrunk", "kept", "unreadable")}
        rows |= {"changes": caches.change(record, size), "size": f"{gigabytes:,.1f} GB"}
        print(report.page(f"{folder / split}, of {c.data.name}", rows))
    print(f"Train from it: --config.data.name=cache:{folder}")


@cli.command(cli.CONFIG, OUT, SHORT_SIDE, verbs=("check", "build", "cache"))
def main(f: cli.Values) -> None:
    c = f.config
    if f.verb == "cache":
        if f.out is None:
            raise ConfigError("prepare cache needs --out=DIR, the folder that it makes.")
        cache(c, Path(f.out).expanduser(), f.short_side)
        return
    if f.verb == "build" and not tasks.of(c).data.build():
        print(f"{c.data.name} needs no building; looking whether it is there.")
    for split, facts in check(c).items():
        print(report.page(f"{c.data.name}, {split}", facts))


if __name__ == "__main__":
    cli.run(main)
