"""A trained model out of its workdir: `leanformer.load("runs/quickstart")`, for Python and for `predict`."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Float
from ml_collections import ConfigDict

from leanformer import cli, pretrained
from leanformer.errors import CheckpointError, WeightsError
from leanformer.tasks import Task, kept, labels, losses
from leanformer.training import experiment, probing, report
from leanformer.training.checkpoint import Checkpoints


@dataclasses.dataclass(frozen=True)
class Trained:
    """A model with its weights, and what it takes.

    Attributes:
        model: `model(*inputs)` gives (logits B V or B T V, taps); deterministic, since no key is given.
        config: the run's.
        task: what it was trained for: `prepare` for one example on the host, `inputs` for a batch on the device.
        step: of the checkpoint that the weights are of.
        averaged: whether they are the averaged ones.
        classes: what the outputs stand for, by name; by number where the run's data have no names; none where they
            are no classes.
    """

    model: nnx.Module
    config: ConfigDict
    task: Task
    step: int
    averaged: bool
    classes: tuple[str, ...]

    def prepare(self, example: bytes | np.ndarray) -> dict[str, np.ndarray]:
        """One example as evaluation prepares it, by the names of the model's inputs.

        Args:
            example: an image, encoded or a uint8 array (height, width[, channels]); or a text, as bytes, for a run
                that was trained on texts.

        Raises:
            CorruptExample, DataError: it is none.
        """
        return self.task.prepare(self.task.read(example))

    def preprocess(self, examples: Iterable[bytes | np.ndarray]) -> tuple[jax.Array, ...]:
        """What `model` takes of several examples. Raises as `prepare`."""
        return self._batch([self.prepare(example) for example in examples])

    def probabilities(self, examples: Iterable[bytes | np.ndarray]) -> Float[np.ndarray, "b v"]:
        """Of each class, for each example: by softmax, or independent of one another for loss="sigmoid".

        Raises as `prepare`.
        """
        return self.scores([self.prepare(example) for example in examples])

    def scores(self, prepared: Sequence[Mapping[str, np.ndarray]]) -> Float[np.ndarray, "b v"]:
        """`probabilities` of examples that `prepare` has prepared."""
        return np.asarray(
            losses.probabilities(_logits(self.model, self._batch(prepared)), self.config.get("loss", "softmax"))
        )

    def _batch(self, prepared: Sequence[Mapping[str, np.ndarray]]) -> tuple[jax.Array, ...]:
        return self.task.inputs({leaf: jnp.stack([row[leaf] for row in prepared]) for leaf in self.task.leaves()})

    @property
    def takes_images(self) -> bool:
        """Whether files of examples are images, and not texts."""
        return "image" in self.task.leaves() or self.config.data.name.startswith("pixels:")


@nnx.jit
def _logits(model: nnx.Module, inputs: tuple[jax.Array, ...]) -> jax.Array:
    return model(*inputs)[0]


def load(workdir: str | Path, *, step: int | None = None, best: bool = False) -> Trained:
    """The model of a run, with the averaged weights where the run keeps them.

    Args:
        step: of the checkpoint; the newest if neither this nor `best` is given.
        best: the best by evaluation.

    Raises:
        ConfigError, CheckpointError: there is no such run or checkpoint, or it is damaged.
    """
    folder = cli.existing(str(workdir))
    c = report.read_config(folder)
    kept.fill(folder, c)
    run = experiment.build(probing.bare(c), examples=1, mesh=None)
    with Checkpoints(folder / "checkpoints") as saved:
        chosen = saved.choose(step, best=best)
        tensors = saved.tensors(chosen)
    try:
        weights = pretrained.load(tensors, pretrained.own_layout(run.like.weights), run.like.weights)
    except WeightsError as error:
        raise CheckpointError(f"Step {chosen} in {workdir} is not of the model in its config.json: {error}") from error
    classes = tuple(labels.of_outputs(labels.read(folder), c.model.get("num_classes", 0)))
    return Trained(nnx.merge(run.graphdef, *weights), c, run.task, chosen, c.optim.ema > 0, classes)
