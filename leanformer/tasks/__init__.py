"""Training tasks: their interfaces, and `build_task(config)`, which imports no task but the one that it builds."""

import abc
import dataclasses
import hashlib
import importlib
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import jax
import numpy as np
from jaxtyping import Array, Key

from leanformer import config
from leanformer.data import Batches, Source, quote, size
from leanformer.data.images import count_classes
from leanformer.data.loader import Prepare
from leanformer.errors import ConfigError, DataError
from leanformer.runtime import multihost, timing


Spec = tuple[tuple[int, ...], Any]  # shape and dtype of one example's array
Batch = Mapping[str, Array]  # arrays by name, with a leading axis B


@dataclasses.dataclass(frozen=True)
class Score:
    """Metric that selects the best checkpoint."""

    name: str  # in evaluation records, such as "top1"
    higher: bool = True  # whether higher is better

    def best(self, scores: Mapping[int, float]) -> int | None:
        """Return the step with the best finite value of {step: value}, the first among ties; None if there is none."""
        finite = {step: scores[step] for step in sorted(scores) if math.isfinite(scores[step])}
        return (max if self.higher else min)(finite, key=finite.__getitem__, default=None)

    def record(self, value: float) -> dict[str, Any]:
        """Return the record of a value for summary.json."""
        return {"score": value, "of": self.name, "higher": self.higher}

    @classmethod
    def read(cls, record: Mapping[str, Any]) -> "Score":
        """Return the metric of a `record`."""
        return cls(record["of"], record["higher"])


class DataModule(abc.ABC):
    """Base class of the data of a task: its splits, its batches, and the shapes and dtypes of an example's arrays.

    Subclasses define `open`, `make_prepare`, `input_specs`, `target_specs` and `prepare`. The others have defaults:
    `build` does nothing, `read` refuses files, and `notes` is empty.
    """

    batches: ClassVar[type[Batches]] = Batches

    def build(self) -> bool:
        """Download or generate the data if that can be done here. Return False if there is nothing to build."""
        return False

    @abc.abstractmethod
    def open(self, split: str, classes: Sequence[str] | None = None) -> Source:
        """Return a split of the data. Raise DataError if it is missing, incomplete, or does not fit the model.

        `classes` are the class names in the order of the model's outputs; None: this split's.
        """

    @abc.abstractmethod
    def make_prepare(self, source: Any, *, train: bool) -> Prepare:
        """Return the function from an example of a split to its arrays, see `data.Batches`."""

    def train_batches(self, source: Any, **options: Any) -> Batches:
        """Return endless batches of a split for training; order and augmentation are functions of the seed.

        `options` are `batch_size`, which is global, `seed`, and `process` of `processes`, which gets its part.
        """
        return self.batches(source, self.make_prepare(source, train=True), train=True, **options)

    def eval_batches(self, source: Any, **options: Any) -> Batches:
        """Return batches of every example once, in order; the last is padded, with False in its `mask`."""
        return self.batches(source, self.make_prepare(source, train=False), train=False, **options)

    @abc.abstractmethod
    def input_specs(self) -> dict[str, Spec]:
        """Return {name: (shape, dtype)} of the arrays of one example that a model takes as input."""

    @abc.abstractmethod
    def target_specs(self, *, train: bool) -> dict[str, Spec]:
        """Return {name: (shape, dtype)} of the other arrays that the loss needs if `train`, or else the metrics."""

    def specs(self, *, train: bool) -> dict[str, Spec]:
        """Return {name: (shape, dtype)} of all arrays of one example; in evaluation with the mask."""
        return self.input_specs() | self.target_specs(train=train) | ({} if train else {"mask": ((), bool)})

    @abc.abstractmethod
    def prepare(self, example: Mapping[str, Any]) -> dict[str, np.ndarray]:
        """Return the arrays of `input_specs` for an example of a source, or a result of `read`, as in evaluation."""

    def read(self, raw: Any) -> dict[str, Any]:
        """Return an example without a target from the bytes of a file; for images also from an array or a PIL image."""
        raise DataError("A file cannot be an example of these data.")

    def notes(self) -> dict[str, str]:
        """Return rows about the data for the start page, as {title: text}."""
        return {}


class Objective(abc.ABC):
    """Base class of the objective of a task: loss, evaluation sums and metrics.

    Subclasses define `score`, `inputs`, `loss`, `statistics` and `metrics`; the others have defaults. `score` and
    `divergence_loss` may be class attributes.
    """

    @property
    @abc.abstractmethod
    def score(self) -> Score:
        """Metric that selects the best checkpoint."""

    @property
    def divergence_loss(self) -> float:
        """Loss above which a step is skipped; may be infinite."""
        return math.inf

    def check_model(self, graphdef: Any, weights: Any) -> None:  # noqa: B027 - most tasks take any model
        """Raise ConfigError if the model cannot do the task; `weights` are (parameters, statistics), or shapes."""

    @abc.abstractmethod
    def inputs(self, batch: Batch) -> tuple[Array | None, ...]:
        """Return the positional arguments of a model for a batch, as in evaluation; None for one that is not passed."""

    def prepare_train_batch(
        self, batch: Batch, batch_key: Key[Array, ""], shared_key: Key[Array, ""]
    ) -> tuple[dict[str, Array], Any]:
        """Return the arguments `part` and `batch_aux` of `loss` for a whole batch.

        Everything random is drawn here, so that gradient accumulation does not change it: from `batch_key` what is
        drawn per example, from `shared_key` what is drawn once for all. By default these are the arrays of the batch
        with a random `key` per example, and None.
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
        """Return the metrics of a split, numbers, lists or arrays, from its `statistics`.

        Floats are summed as float64, counts as int64; "per_example" has every example of the split once, in order.
        """


class Task(NamedTuple):
    """Training task, which `tasks.build_task` makes from a config: `data`, its `DataModule`, and its `objective`."""

    data: DataModule
    objective: Objective


def batch_size(batch: Batch) -> int:
    return len(next(iter(batch.values())))


def _from_config(name: str) -> Callable[[Any], Task]:
    return lambda c: importlib.import_module(f"leanformer.tasks.{name}").from_config(c)


# task type, as in config.task, to a function from a config to its task
KINDS = {name: _from_config(name) for name in ("images", "sequences", "points", "language", "sentences", "masked")}


def build_task(c: Any) -> Task:
    """Return the task of a config: its data module and its objective.

    >>> from leanformer import config
    >>> build_task(config.points()).data.name
    'nearest'
    """
    if c.task not in KINDS:
        raise ConfigError(f'task="{c.task}": unknown task. Choose one of: {", ".join(KINDS)}.')
    return KINDS[c.task](c)


def _eval_splits(c: Any) -> dict[str, str]:
    """Return the evaluation splits by name: "" for `data.eval_split`, and the names of `eval.more`."""
    return {"": c.data.eval_split} | {name: more.split for name, more in c.eval.more.items()}


def open_data(module: DataModule, c: Any, classes: Sequence[str] | None = None) -> tuple[Source, dict[str, Source]]:
    """Return the training split, and the evaluation splits by name, "" for `data.eval_split`.

    `classes` are of a run that has started, by default of the training split; other splits may lack some. Raises
    DataError if another process has other data.
    """
    with timing.announce(f"Reading the data of {c.data.name}"):
        train = module.open(c.data.train_split, classes)
        held_out = {name: module.open(split, class_names(train)) for name, split in _eval_splits(c).items()}
    tokenizer, facts = getattr(train, "tokenizer", None), {}
    facts |= {f"examples of {name}": size(source) for name, source in by_split(c, train, held_out).items()}
    facts["classes"] = class_names(train)
    facts["tokenizer"] = tokenizer and hashlib.sha256(tokenizer.json().encode()).hexdigest()
    first, *others = multihost.all_gather_host(facts)
    for process, other in enumerate(others, 1):
        if differ := [key for key in first if first[key] != other[key]]:
            raise DataError(f"Processes 0 and {process} have other data: {differ}. Copy them, or share data.dir.")
    return train, held_out


def by_split(c: Any, train: Source, held_out: Mapping[str, Source]) -> dict[str, Source]:
    """Return {name of a split in the data, such as "train": the split} for the splits that `open_data` returned."""
    names = _eval_splits(c)
    return {c.data.train_split: train} | {names[name]: source for name, source in held_out.items()}


def class_names(source: Source) -> Sequence[str] | None:
    """Return the class names of a source in the order of the outputs; None if it has none."""
    return getattr(source, "classes", None)


def resolve(c: Any) -> None:
    """Check the keys of a config, and replace model.num_classes=0, in place, by the classes of the training images."""
    config.check_keys(c)
    if c.task != "images" or c.model.num_classes != 0:
        return
    number = count_classes(c.data.name, c.data.train_split, c.data.dir)
    if not number:
        raise ConfigError(
            f'model.num_classes=0: data.name="{c.data.name}" names no classes (a folder needs images such as .jpg and '
            ".png). Set --config.model.num_classes."
        )
    with c.unlocked():
        c.model.num_classes = number


def check_names(c: Any, source: Source) -> None:
    """Raise DataError if the training split names fewer than two classes, or not one per output of the model."""
    named = class_names(source)
    if named is not None and not 2 <= len(named) == c.model.num_classes:
        fix = f"Set --config.model.num_classes={len(named)}" if len(named) > 1 else "At least 2 are needed"
        raise DataError(
            f'The classes of data.name="{c.data.name}", split "{c.data.train_split}": {quote(named)}, but '
            f"model.num_classes={c.model.num_classes}. {fix}, or, if there are more, list all in classes.txt "
            "beside the splits."
        )
