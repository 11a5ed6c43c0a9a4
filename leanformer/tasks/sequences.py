"""Token sequences with a label: of any length on the host, padded there to one length; nothing is augmented."""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Float, Key

from leanformer import data
from leanformer.config.sequences import WHOLE
from leanformer.data.sequences import KINDS
from leanformer.data.source import build, find
from leanformer.errors import DataError
from leanformer.tasks import losses, mixup
from leanformer.tasks.classification import Classification, labelled
from leanformer.tasks.task import Batch, Leaf


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sequences(Classification):
    """Sequences as `tokens` (B T, int32; B 2 T with two towers) and, unless all are full, `lengths` (B; B 2).

    Attributes:
        length: T, the model's max_length.
        kept: tokens that are kept of an example; what is over is cut off.
        towers: 2 for pairs of sequences.
        full: every example has `length` tokens, so there is no padding.
        recipe: what generated data are made of; see `data.open_sequences`.
        name, dir: those of config.data.
    """

    length: int
    kept: int
    vocabulary: int
    towers: int
    full: bool
    recipe: Mapping[str, Any]
    label_smoothing: float
    name: str = ""
    dir: str | None = None

    @classmethod
    def of(cls, c: Any) -> "Sequences":
        """The task of a config. Raises ConfigError for data of no known kind."""
        m, d = c.model, c.data
        find(d.name, KINDS)
        return cls(
            num_classes=m.num_classes,
            kind=c.loss,
            length=m.max_length,
            kept=d.max_length,
            vocabulary=m.vocabulary,
            towers=m.towers,
            full=d.name.partition(":")[0] in WHOLE,
            recipe=d.recipe.to_dict(),
            label_smoothing=c.augment.label_smoothing,
            name=d.name,
            dir=d.dir,
        )

    def build(self) -> bool:
        return build(self.name, KINDS, self.dir, self.recipe)

    def open(self, split: str, classes: Sequence[str] | None = None) -> data.TokenSource:
        wanted = {"vocabulary": self.vocabulary, "num_classes": self.num_classes, "towers": self.towers}
        wanted |= {"max_length": self.kept, "length": self.length if self.full else None, "classes": classes}
        return data.open_sequences(self.name, split, dir=self.dir, recipe=self.recipe, **wanted)

    def train_batches(
        self, source: data.TokenSource, *, batch_size: int, seed: int, process: int = 0, processes: int = 1
    ) -> data.Batches:
        return self._batches(source, batch_size, True, seed=seed, process=process, processes=processes)

    def eval_batches(
        self, source: data.TokenSource, *, batch_size: int, process: int = 0, processes: int = 1
    ) -> data.Batches:
        return self._batches(source, batch_size, False, process=process, processes=processes)

    def _batches(self, source: data.TokenSource, batch_size: int, train: bool, **where: int) -> data.Batches:
        return data.Batches(source, labelled(source, self._padded), batch_size=batch_size, train=train, **where)

    def read(self, raw: bytes | np.ndarray) -> dict[str, Any]:
        return {"tokens": data.encode(self.name, raw, self.length)}

    def prepare(self, example: Mapping[str, Any]) -> dict[str, np.ndarray]:
        return self._padded(0, example, None)

    @property
    def _padded(self) -> Any:
        return functools.partial(_padded, length=self.length, kept=self.kept, towers=self.towers, full=self.full)

    def leaves(self) -> dict[str, Leaf]:
        several = (2,) * (self.towers > 1)
        tokens = {"tokens": ((*several, self.length), np.int32)}
        return tokens if self.full else tokens | {"lengths": (several, np.int32)}

    def draw(
        self, batch: Batch, batch_key: Key[Array, ""], shared_key: Key[Array, ""]
    ) -> tuple[dict[str, Array], None]:
        return {**batch, "key": jax.random.split(batch_key, len(batch["label"]))}, None

    def loss(self, model: Any, part: dict[str, Array], shared: None, key: Key[Array, "b"]) -> Float[Array, ""]:
        """Cross-entropy with smoothed labels."""
        logits, _ = model(*self.inputs(part), key=key)
        targets = mixup.smoothed(part["label"], self.num_classes, self.label_smoothing)
        return losses.classify(logits, targets, self.kind).sum()

    def inputs(self, batch: Batch) -> tuple[Array, ...]:
        return tuple(batch[name] for name in self.leaves())


def _padded(
    index: int, example: Mapping[str, Any], draws: object, *, length: int, kept: int, towers: int, full: bool
) -> dict[str, np.ndarray]:
    several = [example[name] for name in ("tokens", "tokens2")[:towers]]
    if full:
        if len(several[0]) != length:
            raise DataError(f"Example {index} has {len(several[0])} tokens; all must have model.max_length={length}.")
        return {"tokens": several[0].astype(np.int32)}
    several = [tokens[:kept] for tokens in several]
    tokens = np.stack([np.pad(tokens, (0, length - len(tokens))) for tokens in several]).astype(np.int32)
    lengths = np.array([len(tokens) for tokens in several], np.int32)
    return {"tokens": tokens, "lengths": lengths} if towers > 1 else {"tokens": tokens[0], "lengths": lengths[0]}
