"""Causal language modelling: loss per token in nats, and bits per byte; and the base of language-modelling tasks."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int, Key

from leanformer import data
from leanformer.data.loader import Prepare
from leanformer.data.source import Subset, find
from leanformer.data.text import documents, rows
from leanformer.data.text.corpus import Corpus, open_corpus
from leanformer.data.text.rows import OverlappingLastWindow, Packed, Stream, Windows
from leanformer.errors import ConfigError, DataError
from leanformer.tasks import Batch, DataModule, Objective, Score, Spec, Task
from leanformer.tasks.chunked_cross_entropy import cross_entropy
from leanformer.tasks.classification import divergence_threshold


Rows = Stream | Packed | Windows | OverlappingLastWindow | Subset


def decode(raw: bytes | np.ndarray) -> str:
    """Return a text in UTF-8. Raise DataError if it is not."""
    try:
        return bytes(raw).decode()
    except UnicodeDecodeError as error:
        raise DataError(f"It is not UTF-8: byte {error.start:,} is {error.object[error.start]:#04x}.") from error


def check_vocabulary(tokenizer: str, number: int, vocabulary: int) -> None:
    """Raise DataError if the tokenizer that the config names has more tokens than the model."""
    if number > vocabulary:
        raise DataError(
            f'data.tokenizer="{tokenizer}" has {number:,} tokens, and model.vocabulary={vocabulary}. Set '
            f"--config.model.vocabulary={number}, or take the tokenizer that the model was trained with."
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextData(DataModule):
    """Base class of the data of language modelling: `tokens` (B T, int32) and, if packed, `segments` (B T).

    Subclasses define `make_prepare` and the targets. The fields from `tokenizer` on are arguments of `open_corpus`.
    """

    length: int  # row length T, the model's max_length
    vocabulary: int
    packed: bool  # rows are whole documents, packed; else windows of the stream of tokens
    tokenizer: str
    separator: str | None
    documents: int
    train_split: str
    name: str = ""
    dir: str | None = None
    workers: int = 0
    splits: tuple[str, ...] = ()  # that the config names, which `build` tokenises

    eval_rows: ClassVar[type] = Stream  # rows of an evaluation split that is not packed

    def build(self) -> bool:
        for split in self.splits:
            self.open(split)
        return True

    def open(self, split: str, classes: Sequence[str] | None = None) -> Rows:
        about = {name: getattr(self, name) for name in ("separator", "documents", "dir", "workers")}
        corpus = open_corpus(self.name, split, tokenizer=self.tokenizer, train_split=self.train_split, **about)
        self.check(corpus)
        return (Packed if self.packed else self.eval_rows)(corpus, self.length)

    def check(self, corpus: Corpus) -> None:
        """Raise DataError if the tokenizer of a corpus does not fit the model."""
        check_vocabulary(self.tokenizer, corpus.tokenizer.vocabulary, self.vocabulary)

    def train_batches(self, source: Any, **options: Any) -> data.Batches:
        """Return packed documents in shuffled epochs, or else windows at random positions, which may overlap."""
        return super().train_batches(source if self.packed else Windows(source.corpus, self.length), **options)

    def prepare(self, example: Mapping[str, Any]) -> dict[str, np.ndarray]:
        return {name: np.asarray(example[name], np.int32) for name in self.input_specs()}

    def read_text(self, raw: bytes, tokenizer: Any) -> dict[str, np.ndarray]:
        """Return the first row of a UTF-8 text, `tokens` and `segments` (T,): the end token, then the text's tokens."""
        tokens = np.append(np.int32(tokenizer.end), tokenizer.encode([decode(raw)])[0])[: self.length]
        if len(tokens) < self.length:
            raise DataError(
                f"model.max_length={self.length}: the text has only {len(tokens):,} tokens, including the one that "
                "begins a document. Pass a text that fills a row of the model."
            )
        return {"tokens": tokens, "segments": np.ones(self.length, np.int32)}

    def input_specs(self) -> dict[str, Spec]:
        return dict.fromkeys(("tokens", *(("segments",) * self.packed)), ((self.length,), np.int32))


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenObjective(Objective):
    """Base class of objectives of language models; subclasses define `inputs`, `loss`, `statistics` and `metrics`."""

    vocabulary: int
    packed: bool  # True if batches have `segments`
    at_once: int  # most logits in memory at a time, of B x T x V
    soft_cap: float | None = None  # of the output logits

    score = Score("loss", higher=False)

    @property
    def divergence_loss(self) -> float:
        return divergence_threshold("softmax", self.vocabulary)

    def loss_denominator(self, batch: Batch) -> Int[Array, ""]:
        """Return the number of targets in a batch, at least 1: rows of padding do not count."""
        return jnp.maximum(jnp.sum(batch["targets"] >= 0), 1)

    def token_loss(self, model: Any, x: Float[Array, "b t d"], targets: Int[Array, "b t"]) -> Float[Array, ""]:
        """Return the cross-entropy in nats, summed over targets, of what the model's output layer makes of `x`."""
        return cross_entropy(x, *model.unembedding(), targets, at_once=self.at_once, soft_cap=self.soft_cap)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LanguageData(TextData):
    """Rows of tokens, the next tokens as `targets` (B T), and in evaluation their number of text `bytes` (B)."""

    def make_prepare(self, source: Rows, *, train: bool) -> Prepare:
        return rows.prepare

    def target_specs(self, *, train: bool) -> dict[str, Spec]:
        specs = {"targets": ((self.length,), np.int32)}
        return specs if train else specs | {"bytes": ((), np.int32)}


@dataclasses.dataclass(frozen=True, kw_only=True)
class CausalLanguageModelling(TokenObjective):
    """Objective of causal language modelling: cross-entropy of the next token."""

    def check_model(self, graphdef: Any, weights: Any) -> None:
        if not hasattr(nnx.merge(graphdef, *weights), "extend"):
            raise ConfigError('task="language" requires a causal language model. Set model.name="gpt".')

    def inputs(self, batch: Batch) -> tuple[Array, ...]:
        return (batch["tokens"], batch["segments"]) if self.packed else (batch["tokens"],)

    def loss(
        self, model: Any, part: dict[str, Array], batch_aux: None, key: Key[Array, "b"] | None
    ) -> Float[Array, ""]:
        x, _ = model.hidden(*self.inputs(part), key=key)
        return self.token_loss(model, x, part["targets"])

    def statistics(self, model: Any, batch: Batch, *, detail: bool = False) -> dict[str, Array]:
        """Return the loss in `nats`, the target `tokens` and their `bytes` of text, 0 if unknown, and the rows."""
        mask = batch["mask"]
        targets = jnp.where(mask[:, None], batch["targets"], rows.IGNORE)
        x, _ = model.hidden(*self.inputs(batch))
        return {
            "nats": self.token_loss(model, x, targets),
            "tokens": jnp.sum(targets >= 0),
            "bytes": jnp.sum(jnp.where(mask, batch["bytes"], 0)),
            "examples": jnp.sum(mask),
        }

    def metrics(self, totals: Mapping[str, Any]) -> dict[str, Any]:
        """Return `loss` in nats/token and, if bytes are known, `bits_per_byte`, comparable between tokenizers."""
        values = {"loss": float(totals["nats"] / totals["tokens"])}
        if totals["bytes"]:
            values["bits_per_byte"] = float(totals["nats"] / totals["bytes"] / math.log(2))
        return values


def settings(c: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the keyword arguments of `TextData` and of `TokenObjective`, without `soft_cap`, for a config."""
    m, d = c.model, c.data
    find(d.name, documents.KINDS)
    shared = {"vocabulary": m.vocabulary, "packed": m.packed}
    keys = ("tokenizer", "separator", "documents", "train_split", "name", "dir", "workers")
    splits = (d.train_split, d.eval_split, *(more.split for more in c.eval.more.values()))
    corpus = {"length": m.max_length, "splits": splits, **{name: d[name] for name in keys}}
    return shared | corpus, shared | {"at_once": c.logits_at_once}


def from_config(c: Any) -> Task:
    corpus, objective = settings(c)
    return Task(LanguageData(**corpus), CausalLanguageModelling(soft_cap=c.model.head_cap, **objective))
