"""What a model is fed: host batches, their shapes, and their preparation on the device, by kind."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Array, Key

from leanformer import data, rules
from leanformer.data import Batches, Source, Teacher, shown
from leanformer.errors import DataError
from leanformer.tasks.images import Images
from leanformer.tasks.sequences import Sequences


__all__ = ["Images", "Inputs", "Sequences", "check_names", "of", "open_data", "open_teacher"]


@runtime_checkable
class Inputs(Protocol):
    """One kind of input. `Images` and `Sequences` have it all from plain arguments; `of` makes them from a config."""

    num_classes: int

    def open_source(self, name: str, split: str, dir: str | None, classes: Sequence[str] | None = None) -> Source:
        """`classes`: by name, in the order of the model's outputs; those of this split if not given.

        Raises DataError: it is not there, not whole, or not what the model takes.
        """

    def train_batches(
        self, source: Source, *, batch_size: int, seed: int, teacher: Teacher | None, process: int, processes: int
    ) -> Batches:
        """Shuffled epochs without end."""

    def eval_batches(self, source: Source, *, batch_size: int, process: int, processes: int) -> Batches:
        """Every example once, in order; the last batch padded and masked."""

    def read(self, raw: bytes | np.ndarray, name: str) -> dict[str, Any]:
        """An example out of the bytes of a file, written as those of the source `name`; of no known label.

        Raises:
            DataError: no single file can be an example of such a source, or these bytes are none.
        """

    def prepare(self, example: Mapping[str, Any]) -> dict[str, np.ndarray]:
        """The leaves of one example of a source as evaluation sees them. Raises CorruptImage, DataError: unreadable."""

    def leaves(self) -> dict[str, tuple[tuple[int, ...], Any]]:
        """Shape and dtype of what a model is fed of one example, by its name in a batch."""

    def draw(
        self, batch: Mapping[str, Array], batch_key: Key[Array, ""], mix_key: Key[Array, ""]
    ) -> tuple[dict[str, Array], Any]:
        """The batch with a `key` an example and whatever else training needs of each; and what is drawn for all of
        them. All that is random is drawn here for the whole batch, so accumulation cannot change it."""

    def training(self, part: dict[str, Array], mix: Any) -> tuple[tuple[Array, ...], Array]:
        """What a model takes of a (micro-)batch that `draw` made, and the soft targets (B, V)."""

    def plain(self, batch: Mapping[str, Array]) -> tuple[Array, ...]:
        """What a model takes of a batch as it is."""


def of(c: Any) -> Inputs:
    """The inputs of a config: `Sequences` for a model that has a `max_length`, else `Images`."""
    m, d = c.model, c.data
    if "max_length" in m:
        return Sequences(
            length=m.max_length,
            kept=d.max_length,
            vocabulary=m.vocabulary,
            num_classes=m.num_classes,
            towers=m.towers,
            full=d.name.partition(":")[0] in rules.WHOLE,
            recipe=d.recipe.to_dict(),
            label_smoothing=c.augment.label_smoothing,
        )
    return Images(
        size=m.image_size if isinstance(m.image_size, int) else tuple(m.image_size),
        channels=m.channels,
        num_classes=m.num_classes,
        mean=tuple(map(float, d.mean)),
        std=tuple(map(float, d.std)),
        crop_fraction=d.crop_fraction,
        augment=c.augment.to_dict(),
    )


def open_data(c: Any, classes: Sequence[str] | None = None) -> tuple[Source, Source]:
    """The training and the evaluation source of a config.

    Args:
        classes: by name, in the order of the outputs of a run that was begun; those of the training split else. The
            evaluation split has no others, and may lack some.

    Raises:
        DataError: a split is missing or not whole, or has classes by other names.
    """
    kind, d = of(c), c.data
    train = kind.open_source(d.name, d.train_split, d.dir, classes)
    return train, kind.open_source(d.name, d.eval_split, d.dir, train.classes)


def open_teacher(c: Any, source: Source) -> Teacher | None:
    """The teacher of a config, None where it names none. Raises DataError where it does not speak of this source."""
    if "teacher" not in c or c.teacher.path is None:
        return None
    about = {"name": c.data.name, "split": c.data.train_split, "num_classes": c.model.num_classes}
    return data.open_teacher(c.teacher.path, source, **about)


def check_names(c: Any, source: Source) -> None:
    """Raises DataError where a new model would have outputs that no class of its training split gives a meaning."""
    named = source.classes
    if named is not None and len(named) != c.model.num_classes:
        raise DataError(
            f'data.name="{c.data.name}", split "{c.data.train_split}" has the classes '
            f"{shown(named)}, model.num_classes={c.model.num_classes}. Set --config.model.num_classes="
            f"{len(named)}, or, where files have names for more, list all in classes.txt beside the splits."
        )
