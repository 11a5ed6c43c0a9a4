"""Preparation of a config's data before training: check or build.

    python -m leanformer.prepare check --config=FILE     # checks that the data are present and complete
    python -m leanformer.prepare build --config=FILE     # generates listops: data; trains tokenizers and tokenises
                                                         # texts; downloads and prepares tfds: data (requires
                                                         # tensorflow once)

`check` also reads and preprocesses a few examples of each split, so that a wrong image size is detected early (training
names corrupted files), and measures the number of training examples per second that one core prepares.
"""

import time
from typing import Any

import numpy as np
from ml_collections import ConfigDict

from leanformer import cli, data
from leanformer.errors import ConfigError, DataError


VERBS = ("check", "build")
EXAMPLES_READ = 8  # of each split
EXAMPLES_TIMED = 16  # training examples with which the speed of one core is measured


def check(config: ConfigDict) -> dict[str, dict[str, Any]]:
    """Return {split: facts} about a config's data, after reading a few examples of each split; not of endless ones.

    Raises DataError if data are missing or unreadable, or do not fit the model.
    """
    from leanformer import tasks

    module = tasks.build_task(config).data
    train, held_out = tasks.open_data(module, config)
    tasks.check_names(config, train)
    splits = tasks.by_split(config, train, held_out)
    facts = {split: _read_some(module, source) for split, source in splits.items() if data.size(source) is not None}
    if config.data.train_split in facts:
        speed = examples_per_core(config, module, train)
        facts[config.data.train_split]["one core"] = f"{speed:,.0f} training examples/s"
    return facts


def _read_some(module: Any, source: Any) -> dict[str, Any]:
    from leanformer import tasks

    names, labels = tasks.class_names(source), []
    batches = module.eval_batches(source, batch_size=1, process=0, processes=1)
    for index in np.linspace(0, len(source) - 1, min(EXAMPLES_READ, len(source))).astype(int).tolist():
        batch = batches[index]
        labels += [names[label] if names else label for label in batch.get("label", np.array([])).tolist()]
        if batch["corrupt"][0] >= 0:
            raise DataError(
                f"{source.name(index)} is unreadable: {batches.unreadable_reason(index)}. Fix or remove it."
            )
    classes = data.quote(names) if names else getattr(source, "num_classes", None)
    return {"examples": len(source)} | ({"classes": classes, "labels seen": labels} if labels else {})


def examples_per_core(config: ConfigDict, module: Any, train: Any) -> float:
    """Return the training examples that one core reads and augments per second of its time, measured on one batch."""
    batches = module.train_batches(train, batch_size=EXAMPLES_TIMED, seed=config.seed, process=0, processes=1)
    batches[0]  # the first batch includes one-time setup
    start = time.thread_time()
    batches[1]
    return EXAMPLES_TIMED / max(time.thread_time() - start, 1e-9)


@cli.command(
    cli.CONFIG,
    words=f"one of: {', '.join(VERBS)}",
)
def main(flags: cli.Values) -> None:
    from leanformer import tasks, text

    verb, config = " ".join(flags.words), flags.config
    if verb not in VERBS:
        raise ConfigError(f"prepare {verb}: expected one of: {', '.join(VERBS)}.")
    if verb == "build" and not tasks.build_task(config).data.build():
        print(f"{config.data.name} does not need to be built. Checking that it is present.")
    for split, facts in check(config).items():
        print(text.page(f"{config.data.name}, {split}", facts))


if __name__ == "__main__":
    cli.run(main)
