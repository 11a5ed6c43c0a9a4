"""A trained model out of its workdir: `leanformer.load("runs/quickstart")`, for Python and for `predict`."""

import dataclasses
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Float
from ml_collections import ConfigDict
from PIL import Image

from leanformer import tasks
from leanformer.errors import ConfigError, DataError
from leanformer.tasks import Task, artifacts, losses
from leanformer.training import model_setup
from leanformer.training.checkpoint import Checkpoints, RestoredWeights
from leanformer.training.model_setup import ModelSetup


SINGLE = (str, os.PathLike, bytes, bytearray, memoryview, Image.Image)
EXPECTED = "Expected a path, bytes, a PIL image, a uint8 array (height, width[, channels]), or a list of these."


class OpenRun(NamedTuple):
    """A finished or running workdir, opened for reading."""

    workdir: Path
    config: ConfigDict
    task: Task
    model: ModelSetup

    def restore(self, step: int | None = None, *, best: bool = False, finite: bool = True) -> RestoredWeights:
        """Return the weights of a checkpoint: of `step`, the best by evaluation, or the newest that can be read.

        Raises:
            CheckpointError: there is no such checkpoint, or it is damaged, or of another model.
            WeightsError: its weights are not finite, and `finite` is asked for.
        """
        with Checkpoints(self.workdir / "checkpoints", self.config.checkpoint.keep) as checkpoints:
            chosen = checkpoints.choose(step, best=best)
            only = chosen if best or step is not None else None
            return checkpoints.restore_weights(self.model.weights, only, finite=finite)


def run_folder(workdir: str | Path) -> Path:
    """Return the folder of an earlier run. Raises ConfigError if there is none, or its list of classes is broken."""
    path = Path(workdir).expanduser()
    if not (path / "config.json").is_file():
        raise ConfigError(f"--workdir={workdir} holds no run: {path / 'config.json'} is not there.")
    artifacts.load_classes(path)
    return path


def open_run(workdir: str | Path, *, mesh: Mesh | None = None, **data: Any) -> OpenRun:
    """Open the workdir of a run to evaluate, probe or use its model.

    Args:
        mesh: devices of the weights; the first device if None.
        data: keys of the config section `data` to replace.

    Raises:
        ConfigError: there is no run.
    """
    folder = run_folder(workdir)
    c = artifacts.load_config(folder)
    artifacts.use_saved_tokenizer(folder, c)
    c.unlock()
    c.eval.more = ConfigDict()  # splits that need not be there any more
    c.data.update(data)
    return OpenRun(folder, c, tasks.of(c), model_setup.build(c, mesh=mesh))


@dataclasses.dataclass(frozen=True)
class Trained:
    """A model with its weights, and what it takes.

    Attributes:
        model: `model(*inputs)` gives (logits B V or B T V, taps); deterministic, since no key is given.
        config: the run's.
        task: the run's task: `task.data` prepares an example on the host, `task.objective` makes inputs on the device.
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

    def prepare(self, example: Any) -> dict[str, np.ndarray]:
        """Prepare one example as evaluation does, by the names of the model's inputs.

        Args:
            example: path of a file, or its content as bytes. For a model of images also a PIL image, or a uint8 array
                (height, width[, channels]).

        Raises:
            CorruptExample, DataError: it is none of these, or cannot be read.
        """
        return self.task.data.prepare(self.task.data.read(_content(example, images=self.takes_images)))

    def preprocess(self, examples: Any) -> tuple[jax.Array, ...]:
        """Return the inputs of `model` for one or several examples. Raises as `prepare`."""
        return self._batch(self._prepared(examples))

    def probabilities(self, examples: Any) -> Float[np.ndarray, "b v"]:
        """Return the probability of each class, a row per example: by softmax, or independent for loss="sigmoid".

        Args:
            examples: one that `prepare` takes, or several: a list of them, or an array of images (B height width
                channels).

        Raises as `prepare`.
        """
        return self.scores(self._prepared(examples))

    def _prepared(self, examples: Any) -> list[dict[str, np.ndarray]]:
        array = hasattr(examples, "__array__") and not isinstance(examples, Image.Image)
        several = np.ndim(examples) == 4 if array else not isinstance(examples, SINGLE)
        if several and (isinstance(examples, Mapping) or not isinstance(examples, Iterable)):
            raise DataError(f"{_described(examples)} is no example. {EXPECTED}")
        rows = [self.prepare(example) for example in (examples if several else [examples])]
        if not rows:
            raise DataError(f"{_described(examples)} holds no example. {EXPECTED}")
        return rows

    def scores(self, prepared: Sequence[Mapping[str, np.ndarray]]) -> Float[np.ndarray, "b v"]:
        """`probabilities` of examples that `prepare` has prepared."""
        return np.asarray(
            losses.probabilities(_logits(self.model, self._batch(prepared)), self.config.get("loss", "softmax"))
        )

    def _batch(self, prepared: Sequence[Mapping[str, np.ndarray]]) -> tuple[jax.Array, ...]:
        names = self.task.data.input_specs()
        return self.task.objective.inputs({name: jnp.stack([row[name] for row in prepared]) for name in names})

    @property
    def takes_images(self) -> bool:
        """Whether files of examples are images, and not texts."""
        return "image" in self.task.data.input_specs() or self.config.data.name.startswith("pixels:")


def _content(example: Any, *, images: bool) -> bytes | np.ndarray | Image.Image:
    """Return an example as tasks read it: encoded, or an image as an array or by PIL. Raises DataError for others."""
    if isinstance(example, bytes | bytearray | memoryview):
        return bytes(example)
    if isinstance(example, str | os.PathLike):
        try:
            return Path(example).expanduser().read_bytes()
        except (OSError, ValueError, RuntimeError) as error:  # no such file; a null byte in it; no home of a user
            text = "" if images else " A text itself is given as bytes: text.encode()."
            reason = getattr(error, "strerror", None) or error
            raise DataError(f"The file {str(example)[:200]} cannot be read: {reason}.{text} {EXPECTED}") from error
    if images and isinstance(example, Image.Image):
        return example
    if images and hasattr(example, "__array__"):
        array = np.asarray(example)
        if array.dtype == np.uint8 and array.size and (array.ndim == 2 or (array.ndim == 3 and array.shape[2] < 5)):
            return array
    raise DataError(f"{_described(example)} is no example. {EXPECTED}")


def _described(value: Any) -> str:
    """Return the type of a value, of an array its dtype and shape too."""
    if hasattr(value, "dtype") and hasattr(value, "shape"):
        return f"{type(value).__name__} of {value.dtype} {tuple(value.shape)}"
    return f"{type(value).__name__} {str(value)[:60]!r}"


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
        WeightsError: its weights are not finite.
    """
    run = open_run(workdir)
    restored = run.restore(step, best=best)
    classes = tuple(artifacts.output_names(artifacts.load_classes(run.workdir), run.config.model.get("num_classes", 0)))
    model = run.model.merge(restored.ema or restored.weights)
    return Trained(model, run.config, run.task, restored.step, restored.ema is not None, classes)
