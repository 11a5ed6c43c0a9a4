"""Texts, and what comes next in them: rows of tokens, the loss of each token, nats a token and bits a byte."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int, Key

from leanformer import data
from leanformer.data.source import find
from leanformer.data.text import Packed, Stream, Windows, documents, open_corpus, rows
from leanformer.errors import ConfigError, DataError
from leanformer.tasks import losses
from leanformer.tasks.task import Batch, Leaf
from leanformer.tasks.vocabulary import cross_entropy
from leanformer.training.scores import Score


Rows = Stream | Packed


@dataclasses.dataclass(frozen=True, kw_only=True)
class Language:
    """Rows as `tokens` (B T, int32) and, of packed ones, `segments` (B T); `targets` are what comes next.

    The loss is a sum over targets, and its weight their number, so that a row of padding weighs nothing.

    Attributes:
        length: T, the model's max_length.
        packed: whether rows are whole documents, packed; else windows of the stream of tokens.
        tokenizer, separator, documents, train_split, name, dir: those of config.data.
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

    score = Score("loss", higher=False)

    @classmethod
    def of(cls, c: Any) -> "Language":
        """The task of a config. Raises ConfigError for data of no known kind."""
        m, d = c.model, c.data
        find(d.name, documents.KINDS)
        return cls(
            length=m.max_length,
            vocabulary=m.vocabulary,
            packed=m.packed,
            tokenizer=d.tokenizer,
            separator=d.separator,
            documents=d.documents,
            train_split=d.train_split,
            splits=(d.train_split, d.eval_split, *(more.split for more in c.eval.more.values())),
            at_once=c.logits_at_once,
            soft_cap=m.head_cap,
            name=d.name,
            dir=d.dir,
        )

    @property
    def ceiling(self) -> float:
        return losses.ceiling("softmax", self.vocabulary)

    def build(self) -> bool:
        """Trains the tokenizer and makes the tokens, where nobody has."""
        for split in self.splits:
            self.open(split)
        return True

    def open(self, split: str, classes: Sequence[str] | None = None) -> Rows:
        about = {"separator": self.separator, "documents": self.documents, "dir": self.dir}
        corpus = open_corpus(self.name, split, tokenizer=self.tokenizer, train_split=self.train_split, **about)
        found = corpus.tokenizer.vocabulary
        if found > self.vocabulary:
            raise DataError(
                f'data.tokenizer="{self.tokenizer}" has {found:,} tokens, and model.vocabulary={self.vocabulary}. Set '
                f"--config.model.vocabulary={found}, or take the tokenizer that the model was trained with."
            )
        return (Packed if self.packed else Stream)(corpus, self.length)

    def trained_on(self, source: Rows) -> "Language":
        return self

    def fit(self, graphdef: Any, weights: Any) -> None:
        if not hasattr(nnx.merge(graphdef, *weights), "unembedding"):
            raise ConfigError('task="language" wants a model of tokens that come next: set model.name="gpt".')

    def notes(self, graphdef: Any, weights: Any) -> dict[str, str]:
        kind = "whole documents, packed" if self.packed else "windows of the stream of tokens"
        return {"rows": f"{kind}, {self.length} tokens each, of a vocabulary of {self.vocabulary:,}"}

    def train_batches(
        self, source: Rows, *, batch_size: int, seed: int, process: int = 0, processes: int = 1
    ) -> data.Batches:
        """An epoch is as many rows as hold the tokens once; windows are drawn, and may overlap."""
        rows_of = source if self.packed else Windows(source.corpus, self.length)
        return data.Batches(
            rows_of, rows.prepare, batch_size=batch_size, train=True, seed=seed, process=process, processes=processes
        )

    def eval_batches(self, source: Rows, *, batch_size: int, process: int = 0, processes: int = 1) -> data.Batches:
        where = {"process": process, "processes": processes}
        return data.Batches(source, rows.prepare, batch_size=batch_size, train=False, **where)

    def read(self, raw: bytes | np.ndarray) -> dict[str, Any]:
        raise DataError("No file is an example of a language model's: python -m leanformer.generate goes on with one.")

    def prepare(self, example: Mapping[str, Any]) -> dict[str, np.ndarray]:
        return {name: np.asarray(example[name], np.int32) for name in self.leaves()}

    def leaves(self) -> dict[str, Leaf]:
        return dict.fromkeys(("tokens", *(("segments",) * self.packed)), ((self.length,), np.int32))

    def targets(self, *, train: bool) -> dict[str, Leaf]:
        wanted = {"targets": ((self.length,), np.int32)}
        return wanted if train else wanted | {"bytes": ((), np.int32)}

    def inputs(self, batch: Batch) -> tuple[Array, ...]:
        return tuple(batch[name] for name in self.leaves())

    def draw(
        self, batch: Batch, batch_key: Key[Array, ""], shared_key: Key[Array, ""]
    ) -> tuple[dict[str, Array], None]:
        return {**batch, "key": jax.random.split(batch_key, len(batch["targets"]))}, None

    def weight(self, batch: Batch) -> Int[Array, ""]:
        return jnp.maximum(jnp.sum(batch["targets"] >= 0), 1)

    def loss(self, model: Any, part: dict[str, Array], shared: None, key: Key[Array, "b"]) -> Float[Array, ""]:
        """Cross-entropy in nats, summed over targets."""
        x, _ = model.hidden(*self.inputs(part), key=key)
        return self._nats(model, x, part["targets"])

    def _nats(self, model: Any, x: Float[Array, "b t d"], targets: Int[Array, "b t"]) -> Float[Array, ""]:
        return cross_entropy(x, *model.unembedding(), targets, at_once=self.at_once, soft_cap=self.soft_cap)

    def statistics(self, model: Any, batch: Batch, *, detail: bool = False) -> dict[str, Array]:
        """Nats, tokens that are targets, and bytes of text that these stand for."""
        mask = batch["mask"]
        targets = jnp.where(mask[:, None], batch["targets"], rows.IGNORE)
        x, _ = model.hidden(*self.inputs(batch))
        return {
            "nats": self._nats(model, x, targets),
            "tokens": jnp.sum(targets >= 0),
            "bytes": jnp.sum(jnp.where(mask, batch["bytes"], 0)),
            "examples": jnp.sum(mask),
        }

    def metrics(self, totals: Mapping[str, Any]) -> dict[str, Any]:
        """`loss`, nats a token; and `bits_per_byte` of text, which tokenizers can be compared by: all that was told,
        ends of documents too, over the bytes of the texts. It is left out where tokens do not stand for bytes."""
        found = {"loss": float(totals["nats"] / totals["tokens"])}
        if totals["bytes"]:
            found["bits_per_byte"] = float(totals["nats"] / totals["bytes"] / math.log(2))
        return found
