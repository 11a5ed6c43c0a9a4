"""How batches reach the devices of a run: its streams of training and evaluation, and the probe's fixed batch."""

from collections.abc import Iterator, Mapping

import jax
import numpy as np

from leanformer import data
from leanformer.errors import ConfigError
from leanformer.runtime import mesh as meshes
from leanformer.runtime import peers
from leanformer.training.experiment import Experiment


def train_batches(run: Experiment, source: data.Source) -> data.Batches:
    """This process's part of every training batch, in host memory."""
    return run.task.train_batches(source, batch_size=run.config.batch_size, seed=run.config.seed, **_process())


def train(run: Experiment, source: data.Source, start: int) -> Iterator[dict[str, np.ndarray]]:
    """The same from step `start` to the end."""
    d = run.config.data
    batches = train_batches(run, source)
    return data.stream(batches, start=start, stop=run.total, workers=d.workers, prefetch=d.prefetch)


def put(run: Experiment, host: Mapping[str, np.ndarray]) -> dict[str, jax.Array]:
    """What the training step takes of this process's part of a batch, at its place in the global one."""
    return meshes.put_batch(run.mesh, {name: host[name] for name in run.abstract_batch()})


def evaluation(run: Experiment, source: data.Source) -> Iterator[dict[str, jax.Array]]:
    """Global batches of every example once. Raises DataError over the allowed share of unreadable ones."""
    c, names = run.config, run.abstract_batch(train=False)
    batches = run.task.eval_batches(source, batch_size=c.eval.batch_size, **_process())
    corrupt = data.CorruptLog(batches, c.data.max_corrupt)
    for host in data.stream(batches, workers=c.data.workers, prefetch=c.data.prefetch):
        corrupt(host["corrupt"])
        yield meshes.put_batch(run.mesh, {name: host[name] for name in names})


def probe(run: Experiment, source: data.Source) -> dict[str, jax.Array]:
    """The first examples of a split, as evaluation sees them: the fixed batch that the probe looks at.

    Raises:
        ConfigError: there are not so many, or these devices cannot share them out.
    """
    wanted = run.config.probe.examples
    if len(source) < wanted:
        raise ConfigError(
            f"probe.examples={wanted}, and the evaluation split has {len(source)}. Set --config.probe.examples="
            f"{len(source)} or fewer."
        )
    meshes.check_batch(run.mesh, "probe.examples", wanted)
    host = run.task.eval_batches(source, batch_size=wanted, **_process())[0]
    return meshes.put_batch(run.mesh, {name: host[name] for name in run.task.leaves()})


def _process() -> dict[str, int]:
    return {"process": peers.index(), "processes": peers.count()}
