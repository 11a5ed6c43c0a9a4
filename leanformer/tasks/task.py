"""What every kind of task is: the one protocol between data, a model and the loop that trains it."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Array, Key

from leanformer.data import Batches, Source
from leanformer.tasks.scores import Score


Leaf = tuple[tuple[int, ...], Any]  # shape of one example's, and dtype
Batch = Mapping[str, Array]


@runtime_checkable
class Task(Protocol):
    """What is asked of a model. Made once, from a config (`tasks.of`); every array of a batch is named by it.

    Attributes:
        score: which metric decides the best checkpoint.
        ceiling: a loss above which no model still learns; a step over it is skipped. May be infinite.
    """

    score: Score
    ceiling: float

    def build(self) -> bool:
        """Makes or gets the data, where that can be done here; False where there is nothing to do.

        Raises:
            DataError: it could not be done, and why.
        """

    def open(self, split: str, classes: Sequence[str] | None = None) -> Source:
        """A split of the data.

        Args:
            classes: what the outputs of the model stand for, by name and in order, where the data have names for them;
                those of this split if not given.

        Raises:
            DataError: it is not there, not whole, or not what the model takes.
        """

    def fit(self, graphdef: Any, weights: Any) -> None:
        """Raises ConfigError if the model, whose weights may be abstract, cannot do the task."""

    def notes(self, graphdef: Any, weights: Any) -> dict[str, str]:
        """What the start page should say of the task with this model."""

    def train_batches(self, source: Source, *, batch_size: int, seed: int, process: int, processes: int) -> Batches:
        """Examples without end, in an order and with an augmentation that are functions of the seed."""

    def eval_batches(self, source: Source, *, batch_size: int, process: int, processes: int) -> Batches:
        """Every example once, in order; the last batch padded and masked."""

    def leaves(self) -> dict[str, Leaf]:
        """What a model is fed of one example, by its name in a batch."""

    def targets(self, *, train: bool) -> dict[str, Leaf]:
        """What else the loss of one example needs, or with `train` False its statistics."""

    def inputs(self, batch: Batch) -> tuple[Array, ...]:
        """What a model takes of a batch as evaluation sees it."""

    def draw(self, batch: Batch, batch_key: Key[Array, ""], shared_key: Key[Array, ""]) -> tuple[dict[str, Array], Any]:
        """The batch with a `key` an example and whatever else training needs of each; and what is drawn for all of
        them. All that is random is drawn here for the whole batch, so accumulation cannot change it."""

    def weight(self, batch: Batch) -> int | Array:
        """What the loss of a whole batch is divided by: examples, or whatever is counted in them."""

    def loss(self, model: Any, part: dict[str, Array], shared: Any, key: Key[Array, "b"] | None) -> Array:
        """Return the sum of the losses of a (micro-)batch that `draw` made, float32. `key` is the model's, one per
        example, or None."""

    def statistics(self, model: Any, batch: Batch, *, detail: bool = False) -> dict[str, Array]:
        """Sums over the examples that `batch["mask"]` marks as present, `examples` among them: numbers or arrays.

        Under "each", by name, arrays with a leading axis of examples: what no sum can tell, as a rank correlation.
        `detail` asks for what is only worth its time in a single evaluation.
        """

    def metrics(self, totals: Mapping[str, Any]) -> dict[str, Any]:
        """Metrics out of `statistics`, added up over a split: numbers; lists, by position say; or NumPy arrays.

        Args:
            totals: floats as float64, counts as int64; under "each" every example of the split once, in order.
        """

    def read(self, raw: Any) -> dict[str, Any]:
        """Return an example without a target from the bytes of a file; images also from an array or a PIL image.

        Raises:
            DataError: no single file can be an example of such data, or these bytes are none.
        """

    def prepare(self, example: Mapping[str, Any]) -> dict[str, np.ndarray]:
        """The `leaves` of an example as evaluation sees them. Raises CorruptExample, DataError: unreadable."""
