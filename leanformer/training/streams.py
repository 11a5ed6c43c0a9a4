"""Batches for evaluation, and the fixed batch for the probe."""

from collections.abc import Generator, Mapping

import jax
import numpy as np
from ml_collections import ConfigDict

from leanformer import data
from leanformer.errors import ConfigError
from leanformer.runtime import mesh as meshes
from leanformer.runtime import multihost
from leanformer.tasks import DataModule
from leanformer.training.model_setup import ModelSetup


def evaluation(
    c: ConfigDict, model: ModelSetup, module: DataModule, source: data.Source
) -> Generator[dict[str, jax.Array], None, None]:
    """Yield the global batches of an evaluation on the devices, with every example of a split once, in order.

    Args:
        c: config of the run, of which `eval.batch_size` and `data` are used.
        model: setup of the model, with the mesh.
        module: data of the task.
        source: evaluation split.

    Raises:
        DataError: too many examples are unreadable.
    """
    names = module.specs(train=False)
    split = module.eval_batches(source, batch_size=c.eval.batch_size, **process())
    corrupt = data.CorruptLog(split, c.data.max_corrupt)
    for host in data.batches(split, workers=c.data.workers, prefetch=c.data.prefetch):
        corrupt(host["corrupt"])
        yield put(model, host, names)


def check_probe(source: data.Source, examples: int) -> None:
    """Raise ConfigError if an evaluation split has fewer than the `examples` of the probe (probe.examples)."""
    size = data.size(source)
    if size is not None and size < examples:
        raise ConfigError(
            f"probe.examples={examples}: the evaluation split has only {size} examples. Set "
            f"--config.probe.examples={size} or lower."
        )


def probe(model: ModelSetup, module: DataModule, source: data.Source, examples: int) -> dict[str, jax.Array]:
    """Return the fixed batch of the probe on the devices, by name: the first examples of a split, as for evaluation.

    Args:
        model: setup of the model, with the mesh.
        module: data of the task.
        source: evaluation split.
        examples: number of examples.

    Raises:
        ConfigError: the split has too few examples, or the devices cannot divide them evenly.
    """
    check_probe(source, examples)
    meshes.check_batches(model.mesh, {"probe.examples": examples})
    return put(model, module.eval_batches(source, batch_size=examples, **process())[0], module.input_specs())


def put(model: ModelSetup, host: Mapping[str, np.ndarray], names: Mapping[str, object]) -> dict[str, jax.Array]:
    """Return the global arrays of a batch on the devices, sharded over the batch.

    Args:
        model: setup of the model, with the mesh.
        host: this process's part of each array, with leading axis B / processes.
        names: arrays to take; others of `host`, such as indices, stay there.
    """
    return meshes.put_batch(model.mesh, {name: host[name] for name in names})


def process() -> dict[str, int]:
    """Return {"process": index of this process, "processes": their number}, as keyword arguments for batches."""
    return {"process": multihost.index(), "processes": multihost.count()}
