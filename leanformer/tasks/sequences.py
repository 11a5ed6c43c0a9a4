"""Token sequences: of any length on the host, padded there to one length; nothing is augmented."""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Key

from leanformer import data
from leanformer.errors import DataError
from leanformer.tasks import mixing as aug


@dataclasses.dataclass(frozen=True)
class Sequences:
    """Sequences as `tokens` (B T, int32; B 2 T with two towers) and, unless all are full, `lengths` (B; B 2).

    Args:
        length: T, the model's max_length.
        kept: tokens that are kept of an example; what is over is cut off.
        towers: 2 for pairs of sequences.
        full: every example has `length` tokens, so there is no padding.
        recipe: what generated data are made of; see `data.open_sequences`.
    """

    length: int
    kept: int
    vocabulary: int
    num_classes: int
    towers: int
    full: bool
    recipe: Mapping[str, Any]
    label_smoothing: float

    def open_source(
        self, name: str, split: str, dir: str | None, classes: Sequence[str] | None = None
    ) -> data.TokenSource:
        wanted = {"vocabulary": self.vocabulary, "num_classes": self.num_classes, "towers": self.towers}
        wanted |= {"max_length": self.kept, "length": self.length if self.full else None, "classes": classes}
        return data.open_sequences(name, split, dir=dir, recipe=self.recipe, **wanted)

    def train_batches(
        self,
        source: data.TokenSource,
        *,
        batch_size: int,
        seed: int,
        teacher: None = None,
        process: int = 0,
        processes: int = 1,
    ) -> data.Batches:
        where = {"process": process, "processes": processes}
        return data.Batches(source, self._padded, batch_size=batch_size, train=True, seed=seed, **where)

    def eval_batches(
        self, source: data.TokenSource, *, batch_size: int, process: int = 0, processes: int = 1
    ) -> data.Batches:
        where = {"process": process, "processes": processes}
        return data.Batches(source, self._padded, batch_size=batch_size, train=False, **where)

    def read(self, raw: bytes | np.ndarray, name: str) -> dict[str, Any]:
        return {"tokens": data.encode(name, raw, self.length)}

    def prepare(self, example: Mapping[str, Any]) -> dict[str, np.ndarray]:
        return self._padded(0, example, None)

    @property
    def _padded(self) -> Any:
        return functools.partial(_padded, length=self.length, kept=self.kept, towers=self.towers, full=self.full)

    def leaves(self) -> dict[str, tuple[tuple[int, ...], Any]]:
        several = (2,) * (self.towers > 1)
        tokens = {"tokens": ((*several, self.length), np.int32)}
        return tokens if self.full else tokens | {"lengths": (several, np.int32)}

    def draw(
        self, batch: Mapping[str, Array], batch_key: Key[Array, ""], mix_key: Key[Array, ""]
    ) -> tuple[dict[str, Array], None]:
        return {**batch, "key": jax.random.split(batch_key, len(batch["label"]))}, None

    def training(self, part: dict[str, Array], mix: None) -> tuple[tuple[Array, ...], Array]:
        return self.plain(part), aug.smoothed(part["label"], self.num_classes, self.label_smoothing)

    def plain(self, batch: Mapping[str, Array]) -> tuple[Array, ...]:
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
