"""Interfaces of a training task: a data module, an objective, and the pair of them; and the score of a run."""

import abc
import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Array, Key

from leanformer.data import Batches, Source
from leanformer.errors import DataError


Spec = tuple[tuple[int, ...], Any]  # shape and dtype of one example's array
Batch = Mapping[str, Array]  # arrays by name, with a leading axis B


@dataclasses.dataclass(frozen=True)
class Score:
    """Metric that selects the best checkpoint.

    Attributes:
        name: name of the metric in evaluation records, such as "top1".
        higher: True if higher is better, False if lower is.
    """

    name: str
    higher: bool = True

    def best(self, scores: Mapping[int, float]) -> int | None:
        """Return the step with the best finite value of {step: value}, the first among ties; None if there is none."""
        finite = {step: scores[step] for step in sorted(scores) if math.isfinite(scores[step])}
        return (max if self.higher else min)(finite, key=finite.__getitem__, default=None)

    def record(self, value: float) -> dict[str, Any]:
        """Return the record of a value for summary.json: {"score": value, "of": name, "higher": higher}."""
        return {"score": value, "of": self.name, "higher": self.higher}

    @classmethod
    def read(cls, record: Mapping[str, Any]) -> "Score":
        """Return the metric of a record of `Score.record`."""
        return cls(record["of"], record["higher"])


class DataModule(abc.ABC):
    """Base class of the data of a task: its splits, its batches, and the shapes and dtypes of an example's arrays.

    Subclasses define `open`, `train_batches`, `eval_batches`, `input_specs`, `target_specs` and `prepare`. The others
    have defaults: `build` does nothing, `read` refuses files, and `notes` is empty.
    """

    def build(self) -> bool:
        """Download or generate the data if that can be done here. Return False if there is nothing to build, else True.

        Raises:
            ConfigError: the recipe of the data is invalid.
            DataError: building failed.
        """
        return False

    @abc.abstractmethod
    def open(self, split: str, classes: Sequence[str] | None = None) -> Source:
        """Return a split of the data.

        Args:
            split: name of the split in the data.
            classes: class names in the order of the model's outputs, for data with named classes; None for those of
                this split.

        Raises:
            DataError: the split is missing, incomplete, or does not fit the model.
        """

    @abc.abstractmethod
    def train_batches(self, source: Source, *, batch_size: int, seed: int, process: int, processes: int) -> Batches:
        """Return endless training batches; order and augmentation are functions of the seed.

        Args:
            source: training split, from `open`.
            batch_size: global batch size.
            seed: seed of order and augmentation.
            process, processes: index of this process, and number of processes, each of which gets its part of every
                batch.
        """

    @abc.abstractmethod
    def eval_batches(self, source: Source, *, batch_size: int, process: int, processes: int) -> Batches:
        """Return batches of every example of a split once, in order; the last is padded, with False in its `mask`.

        The arguments are those of `train_batches` without seed; `source` is an evaluation split.
        """

    @abc.abstractmethod
    def input_specs(self) -> dict[str, Spec]:
        """Return {name: (shape, dtype)} of the arrays of one example that a model takes as input."""

    @abc.abstractmethod
    def target_specs(self, *, train: bool) -> dict[str, Spec]:
        """Return {name: (shape, dtype)} of the arrays of one example that are not inputs of the model, such as labels.

        They are those that the loss needs if `train`, else those that the metrics need; without the mask.
        """

    def specs(self, *, train: bool) -> dict[str, Spec]:
        """Return {name: (shape, dtype)} of all arrays of one example: for training, or for evaluation with the mask."""
        return self.input_specs() | self.target_specs(train=train) | ({} if train else {"mask": ((), bool)})

    @abc.abstractmethod
    def prepare(self, example: Mapping[str, Any]) -> dict[str, np.ndarray]:
        """Return the arrays of `input_specs` for one example, as in evaluation.

        Args:
            example: example of a source, or result of `read`.

        Raises:
            CorruptExample, DataError: the example cannot be read.
        """

    def read(self, raw: Any) -> dict[str, Any]:
        """Return an example for `prepare`, without a target, from the content of a file.

        Args:
            raw: bytes of the file; for images also an array or a PIL image.

        Raises:
            DataError: a single file cannot be an example, or these bytes are not one.
        """
        raise DataError("A file cannot be an example of these data.")

    def notes(self) -> dict[str, str]:
        """Return rows about the data for the startup summary, as {title: text}."""
        return {}


class Objective(abc.ABC):
    """Base class of the objective of a task: loss, evaluation sums and metrics.

    Subclasses define `score`, `inputs`, `loss`, `statistics` and `metrics`; the others have defaults. `score`, the
    metric that selects the best checkpoint, and `ceiling`, the divergence threshold, may be class attributes.
    """

    @property
    @abc.abstractmethod
    def score(self) -> Score:
        """Metric that selects the best checkpoint."""

    @property
    def ceiling(self) -> float:
        """Divergence threshold of the loss; a step above it is skipped. May be infinite."""
        return math.inf

    def check_model(self, graphdef: Any, weights: Any) -> None:  # noqa: B027 - most tasks take any model
        """Raise ConfigError if the model cannot do the task; by default no model is rejected.

        Args:
            graphdef: static definition of the model.
            weights: (parameters, batch statistics), or their shapes.
        """

    @abc.abstractmethod
    def inputs(self, batch: Batch) -> tuple[Array | None, ...]:
        """Return the positional arguments of a model for a batch, as in evaluation; None for one that is not passed."""

    def prepare_train_batch(
        self, batch: Batch, batch_key: Key[Array, ""], shared_key: Key[Array, ""]
    ) -> tuple[dict[str, Array], Any]:
        """Return the arguments `part` and `batch_aux` of `loss` for a whole batch.

        Everything random is drawn here for the whole batch, so that gradient accumulation does not change it.

        Args:
            batch: training batch.
            batch_key: random key of what is drawn per example.
            shared_key: random key of what is drawn once for all examples.

        Returns:
            A dict of the arrays of the batch (B ...), with a random `key` for each example; and what is drawn once for
            all examples, by default None.
        """
        return {**batch, "key": jax.random.split(batch_key, batch_size(batch))}, None

    def loss_denominator(self, batch: Batch) -> int | Array:
        """Return the divisor of the summed loss of a whole batch: its number of examples, or of targets for texts."""
        return batch_size(batch)

    @abc.abstractmethod
    def loss(self, model: Any, part: dict[str, Array], batch_aux: Any, key: Key[Array, "b"] | None) -> Array:
        """Return the sum of the losses of a (micro-)batch, float32.

        Args:
            model: model, a `nnx.Module`.
            part: arrays of `prepare_train_batch`, or of some of its examples.
            batch_aux: second result of `prepare_train_batch`.
            key: random keys of the model, one per example; None for a deterministic model.
        """

    @abc.abstractmethod
    def statistics(self, model: Any, batch: Batch, *, detail: bool = False) -> dict[str, Any]:
        """Return sums over the examples that `batch["mask"]` marks as present, their number `examples` among them.

        Sums are numbers or arrays. Under "per_example" are arrays by name with a leading axis B, for metrics that need
        more than sums, such as a rank correlation. `detail` adds what is too expensive for evaluations during training.
        """

    @abc.abstractmethod
    def metrics(self, totals: Mapping[str, Any]) -> dict[str, Any]:
        """Return the metrics of a split: numbers, lists, or NumPy arrays.

        Args:
            totals: `statistics` summed over the split, floats as float64, counts as int64; under "per_example" every
                example of the split once, in order.
        """


class Task(NamedTuple):
    """Training task, which `tasks.build` makes from a config.

    Attributes:
        data: data module, with the splits and batches.
        objective: loss, evaluation sums and metrics.
    """

    data: DataModule
    objective: Objective


def batch_size(batch: Batch) -> int:
    """Return the number of examples B in a batch, the length of its first array."""
    return len(next(iter(batch.values())))
