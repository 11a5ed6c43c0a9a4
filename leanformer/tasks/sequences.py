"""Classification of token sequences, padded to a common length on the host, without augmentation."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Array, Float, Key

from leanformer import data
from leanformer.config.sequences import WHOLE
from leanformer.data.sequences import KINDS
from leanformer.data.source import build, find
from leanformer.errors import DataError
from leanformer.tasks import losses, mixup
from leanformer.tasks.classification import LABEL, Classification, labelled
from leanformer.tasks.task import Batch, DataModule, Spec, Task


@dataclasses.dataclass(frozen=True, kw_only=True)
class SequenceData(DataModule):
    """Sequences as `tokens` (B T, int32) and, unless all are full, `lengths` (B), with a `label` (B); with two towers
    `tokens` (B 2 T) and `lengths` (B 2).

    Attributes:
        length: T, the model's max_length.
        max_length: maximum number of tokens of an example; later ones are cut off.
        towers: 2 for pairs of sequences.
        full: every example has `length` tokens, so there is no padding.
        recipe: settings of data that are generated locally; see `data.open_sequences`.
        name, dir: keys of config.data.
    """

    num_classes: int
    length: int
    max_length: int
    vocabulary: int
    towers: int
    full: bool
    recipe: Mapping[str, Any]
    name: str = ""
    dir: str | None = None

    def build(self) -> bool:
        return build(self.name, KINDS, self.dir, self.recipe)

    def open(self, split: str, classes: Sequence[str] | None = None) -> data.TokenSource:
        required = {"vocabulary": self.vocabulary, "num_classes": self.num_classes, "towers": self.towers}
        required |= {"max_length": self.max_length, "length": self.length if self.full else None, "classes": classes}
        return data.open_sequences(self.name, split, dir=self.dir, recipe=self.recipe, **required)

    def train_batches(self, source: data.TokenSource, **options: Any) -> data.Batches:
        return data.Batches(source, labelled(source, self._padded), train=True, **options)

    def eval_batches(self, source: data.TokenSource, **options: Any) -> data.Batches:
        return data.Batches(source, labelled(source, self._padded), train=False, **options)

    @property
    def _padded(self) -> Callable[..., dict[str, np.ndarray]]:
        return functools.partial(
            _padded, length=self.length, max_length=self.max_length, towers=self.towers, full=self.full
        )

    def input_specs(self) -> dict[str, Spec]:
        several = (2,) * (self.towers > 1)
        tokens = {"tokens": ((*several, self.length), np.int32)}
        return tokens if self.full else tokens | {"lengths": (several, np.int32)}

    def target_specs(self, *, train: bool) -> dict[str, Spec]:
        return LABEL

    def read(self, raw: bytes | np.ndarray) -> dict[str, Any]:
        return {"tokens": data.encode(self.name, raw, self.length)}

    def prepare(self, example: Mapping[str, Any]) -> dict[str, np.ndarray]:
        return self._padded(0, example, None)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SequenceClassification(Classification):
    """Cross-entropy of sequences with smoothed labels.

    Attributes:
        full: there is no padding, and the model takes no `lengths`.
    """

    full: bool
    label_smoothing: float

    def inputs(self, batch: Batch) -> tuple[Array, ...]:
        return (batch["tokens"],) if self.full else (batch["tokens"], batch["lengths"])

    def loss(self, model: Any, part: dict[str, Array], batch_aux: None, key: Key[Array, "b"]) -> Float[Array, ""]:
        logits, _ = model(*self.inputs(part), key=key)
        targets = mixup.smoothed(part["label"], self.num_classes, self.label_smoothing)
        return losses.classify(logits, targets, self.kind).sum()


def from_config(c: Any) -> Task:
    """Return the task of a config. Raises ConfigError for an unknown `data.name`."""
    m, d = c.model, c.data
    find(d.name, KINDS)
    full = d.name.partition(":")[0] in WHOLE
    return Task(
        SequenceData(
            num_classes=m.num_classes,
            length=m.max_length,
            max_length=d.max_length,
            vocabulary=m.vocabulary,
            towers=m.towers,
            full=full,
            recipe=d.recipe.to_dict(),
            name=d.name,
            dir=d.dir,
        ),
        SequenceClassification(
            num_classes=m.num_classes, kind=c.loss, full=full, label_smoothing=c.augment.label_smoothing
        ),
    )


def _padded(
    index: int, example: Mapping[str, Any], draws: object, *, length: int, max_length: int, towers: int, full: bool
) -> dict[str, np.ndarray]:
    several = [example[name] for name in ("tokens", "tokens2")[:towers]]
    if full:
        if len(several[0]) != length:
            raise DataError(f"Example {index} has {len(several[0])} tokens; all must have model.max_length={length}.")
        return {"tokens": several[0].astype(np.int32)}
    several = [tokens[:max_length] for tokens in several]
    tokens = np.stack([np.pad(tokens, (0, length - len(tokens))) for tokens in several]).astype(np.int32)
    lengths = np.array([len(tokens) for tokens in several], np.int32)
    return {"tokens": tokens, "lengths": lengths} if towers > 1 else {"tokens": tokens[0], "lengths": lengths[0]}
