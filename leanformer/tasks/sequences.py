"""Classification of token sequences, padded to a common length on the host, without augmentation."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Array, Float, Key

from leanformer import data
from leanformer.config.arrays import IMAGE_TYPES
from leanformer.data.loader import Prepare
from leanformer.data.sequences import KINDS, build_sequences, encode, open_sequences
from leanformer.data.source import find
from leanformer.tasks import Batch, DataModule, Spec, Task
from leanformer.tasks.classification import LABEL, Classification, classify, labelled, smoothed


@dataclasses.dataclass(frozen=True, kw_only=True)
class SequenceData(DataModule):
    """Data of sequence classification: `tokens` (B T), a `label` (B), and `lengths` (B) unless all are full; int32.

    With two towers the arrays are `tokens` (B 2 T) and `lengths` (B 2).
    """

    num_classes: int
    length: int  # row length T, the model's max_length
    max_length: int  # tokens of an example; later ones are cut off
    vocabulary: int
    towers: int  # 1, or 2 for pairs of sequences
    full: bool  # True if every example has `length` tokens, so that there is no padding
    recipe: Mapping[str, Any]  # see `data.sequences.SourceSpec`
    name: str = ""
    dir: str | None = None  # of TFDS data

    def build(self) -> bool:
        return build_sequences(self.name, self.dir, self.recipe)

    def open(self, split: str, classes: Sequence[str] | None = None) -> data.Source:
        required = {"length": self.length if self.full else None, "classes": classes}
        required |= {
            key: getattr(self, key) for key in ("vocabulary", "num_classes", "towers", "max_length", "recipe", "dir")
        }
        return open_sequences(self.name, split, **required)

    def make_prepare(self, source: data.Source, *, train: bool) -> Prepare:
        return labelled(source, self._padded)

    def _padded(self, index: int, example: Mapping[str, Any], draws: object) -> dict[str, np.ndarray]:
        several = [example[name] for name in ("tokens", "tokens2")[: self.towers]]
        if self.full:
            return {"tokens": several[0].astype(np.int32)}
        several = [tokens[: self.max_length] for tokens in several]
        rows = np.stack([np.pad(tokens, (0, self.length - len(tokens))) for tokens in several]).astype(np.int32)
        lengths = np.array([len(tokens) for tokens in several], np.int32)
        return {"tokens": rows, "lengths": lengths} if self.towers > 1 else {"tokens": rows[0], "lengths": lengths[0]}

    def input_specs(self) -> dict[str, Spec]:
        several = (2,) * (self.towers > 1)
        tokens = {"tokens": ((*several, self.length), np.int32)}
        return tokens if self.full else tokens | {"lengths": (several, np.int32)}

    def target_specs(self, *, train: bool) -> dict[str, Spec]:
        return LABEL

    def read(self, raw: bytes | np.ndarray) -> dict[str, Any]:
        return {"tokens": encode(self.name, raw, self.length)}

    def prepare(self, example: Mapping[str, Any]) -> dict[str, np.ndarray]:
        return self._padded(0, example, None)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SequenceClassification(Classification):
    full: bool  # True if there is no padding, and the model takes no `lengths`
    label_smoothing: float

    def inputs(self, batch: Batch) -> tuple[Array, ...]:
        return (batch["tokens"],) if self.full else (batch["tokens"], batch["lengths"])

    def loss(self, model: Any, part: dict[str, Array], batch_aux: Any, key: Key[Array, "b"] | None) -> Float[Array, ""]:
        logits, _ = model(*self.inputs(part), key=key)
        targets = smoothed(part["label"], self.num_classes, self.label_smoothing)
        return classify(logits, targets, self.kind).sum()


def from_config(c: Any) -> Task:
    m, d = c.model, c.data
    find(d.name, KINDS)
    shared = {"num_classes": m.num_classes, "full": d.name.partition(":")[0] in IMAGE_TYPES}
    sizes = {"length": m.max_length, "max_length": d.max_length, "vocabulary": m.vocabulary, "towers": m.towers}
    return Task(
        SequenceData(**shared, **sizes, recipe=d.recipe.to_dict(), name=d.name, dir=d.dir),
        SequenceClassification(**shared, kind=c.loss, label_smoothing=c.augment.label_smoothing),
    )
