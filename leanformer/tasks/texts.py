"""What the tasks of texts share: a corpus opened with the tokenizer of a config, and rows of it."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Key

from leanformer import data
from leanformer.data.source import find
from leanformer.data.text import Corpus, Full, Packed, Stream, Windows, documents, open_corpus
from leanformer.errors import DataError
from leanformer.tasks import losses
from leanformer.tasks.scores import Score
from leanformer.tasks.task import Batch, Leaf
from leanformer.tasks.vocabulary import cross_entropy


Rows = Stream | Packed | Full


@dataclasses.dataclass(frozen=True, kw_only=True)
class Texts:
    """Rows of tokens, and tokens of them that a model is to tell.

    The loss is a sum over `targets`, and its weight their number, so that a row of padding weighs nothing.

    Attributes:
        length: T, the model's max_length.
        packed: whether rows are whole documents, packed; else windows of the stream of tokens.
        tokenizer, separator, documents, train_split, name, dir, workers: those of config.data.
        splits: all that the config names.
        at_once: logits that the loss holds at a time.
        soft_cap: of the logits.
    """

    length: int
    vocabulary: int
    packed: bool
    tokenizer: str
    separator: str | None
    documents: int
    train_split: str
    splits: tuple[str, ...]
    at_once: int
    soft_cap: float | None = None
    name: str = ""
    dir: str | None = None
    workers: int = 0

    score = Score("loss", higher=False)
    whole_rows: ClassVar[type] = Stream  # of the stream, for evaluation

    @classmethod
    def arguments(cls, c: Any) -> dict[str, Any]:
        """Of a config. Raises ConfigError for data of no known kind."""
        m, d = c.model, c.data
        find(d.name, documents.KINDS)
        return {
            **{"length": m.max_length, "vocabulary": m.vocabulary, "packed": m.packed, "at_once": c.logits_at_once},
            **{name: d[name] for name in ("tokenizer", "separator", "documents", "train_split")},
            **{name: d[name] for name in ("name", "dir", "workers")},
            "splits": (d.train_split, d.eval_split, *(more.split for more in c.eval.more.values())),
        }

    @property
    def ceiling(self) -> float:
        return losses.ceiling("softmax", self.vocabulary)

    def build(self) -> bool:
        """Trains the tokenizer and makes the tokens, where nobody has."""
        for split in self.splits:
            self.open(split)
        return True

    def open(self, split: str, classes: Sequence[str] | None = None) -> Rows:
        about = {name: getattr(self, name) for name in ("separator", "documents", "dir", "workers")}
        corpus = open_corpus(self.name, split, tokenizer=self.tokenizer, train_split=self.train_split, **about)
        self.check(corpus)
        return (Packed if self.packed else self.whole_rows)(corpus, self.length)

    def check(self, corpus: Corpus) -> None:
        """Raises DataError where the model cannot read it."""
        found = corpus.tokenizer.vocabulary
        if found > self.vocabulary:
            raise DataError(
                f'data.tokenizer="{self.tokenizer}" has {found:,} tokens, and model.vocabulary={self.vocabulary}. Set '
                f"--config.model.vocabulary={found}, or take the tokenizer that the model was trained with."
            )

    def preparing(self, source: Rows, *, train: bool) -> data.loader.Prepare:
        """What a batch takes of the examples of a source."""
        raise NotImplementedError

    def train_batches(
        self, source: Rows, *, batch_size: int, seed: int, process: int = 0, processes: int = 1
    ) -> data.Batches:
        """An epoch is as many rows as hold the tokens once; windows are drawn, and may overlap."""
        rows_of = source if self.packed else Windows(source.corpus, self.length)
        where = {"process": process, "processes": processes}
        prepare = self.preparing(source, train=True)
        return data.Batches(rows_of, prepare, batch_size=batch_size, train=True, seed=seed, **where)

    def eval_batches(self, source: Rows, *, batch_size: int, process: int = 0, processes: int = 1) -> data.Batches:
        where = {"process": process, "processes": processes}
        return data.Batches(source, self.preparing(source, train=False), batch_size=batch_size, train=False, **where)

    def prepare(self, example: Mapping[str, Any]) -> dict[str, np.ndarray]:
        return {name: np.asarray(example[name], np.int32) for name in self.leaves()}

    def leaves(self) -> dict[str, Leaf]:
        return dict.fromkeys(("tokens", *(("segments",) * self.packed)), ((self.length,), np.int32))

    def draw(
        self, batch: Batch, batch_key: Key[Array, ""], shared_key: Key[Array, ""]
    ) -> tuple[dict[str, Array], None]:
        return {**batch, "key": jax.random.split(batch_key, len(batch["targets"]))}, None

    def weight(self, batch: Batch) -> Int[Array, ""]:
        return jnp.maximum(jnp.sum(batch["targets"] >= 0), 1)

    def nats(self, model: Any, x: Float[Array, "b t d"], targets: Int[Array, "b t"]) -> Float[Array, ""]:
        """Cross-entropy, summed over targets."""
        return cross_entropy(x, *model.unembedding(), targets, at_once=self.at_once, soft_cap=self.soft_cap)
