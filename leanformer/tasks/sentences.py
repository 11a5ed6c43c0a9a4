"""Sentences and pairs of them, classified, or given a number: GLUE's tasks (Wang et al. 2019), each with its metric."""

import dataclasses
import functools
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Key

from leanformer import data
from leanformer.data.sentences import KINDS, Texts, open_sentences
from leanformer.data.sentences.encoded import joined, special
from leanformer.data.source import find
from leanformer.data.text import Tokenizer, corpus
from leanformer.errors import ConfigError, DataError
from leanformer.tasks import finetune_checks, losses, metrics
from leanformer.tasks.classification import Classification, labelled
from leanformer.tasks.scores import Score
from leanformer.tasks.task import Batch, Leaf


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sentences:
    """What both kinds share: rows as `tokens` (B T, int32) and `lengths` (B), and of a model with types of tokens
    `types` (B T), 0 of the first text and 1 of the second.

    Attributes:
        length: T, data.max_length: what is longer is cut, of pairs the longer one first.
        types: whether the model has types of tokens.
        metric: the score.
        begins: the run whose weights are started from, if it is one.
        tokenizer, train_split, name, dir: those of config.data.
    """

    num_classes: int
    length: int
    vocabulary: int
    types: bool
    metric: str
    begins: Path | None
    tokenizer: str | None
    train_split: str
    name: str
    dir: str | None = None

    @property
    def score(self) -> Score:
        return Score(self.metric)

    def build(self) -> bool:
        return False

    def open(self, split: str, classes: Sequence[str] | None = None) -> data.Source:
        wanted = {"dir": self.dir, "numbers": self.num_classes == 1}
        return open_sentences(self.name, split, self._tokenizer, **wanted, classes=classes)

    @functools.cached_property
    def _tokenizer(self) -> Tokenizer:
        """Raises DataError where there is none, or another one than that of the run that is begun from."""
        words = str(self.begins or "") if self.tokenizer is None else self.tokenizer
        if not words:
            raise DataError(
                "data.tokenizer is unset, and init_from.path names no run that has one. Set --config.data.tokenizer to "
                'a tokenizer.json, to a folder with one, or to "wordpiece:4096", trained on the training split.'
            )
        texts = Texts(self.name, self.train_split, self.dir, self.num_classes == 1)
        chosen = corpus.tokenizer_of(words, texts, Path(corpus.CACHE).expanduser())
        special(chosen)
        if self.begins is not None:
            finetune_checks.check_tokenizer(self.begins, words, chosen)
        if chosen.vocabulary > self.vocabulary:
            raise DataError(
                f'data.tokenizer="{words}" has {chosen.vocabulary:,} tokens, and model.vocabulary={self.vocabulary}. '
                f"Set --config.model.vocabulary={chosen.vocabulary}, or take the model's own tokenizer."
            )
        return chosen

    def fit(self, graphdef: Any, weights: Any) -> None:
        """Raises ConfigError unless the model gives one vector of outputs a row."""
        batch = {name: jax.ShapeDtypeStruct((1, *shape), dtype) for name, (shape, dtype) in self.leaves().items()}
        found = jax.eval_shape(lambda w, b: nnx.merge(graphdef, *w)(*self.inputs(b))[0], weights, batch).shape
        if found != (1, self.num_classes):
            raise ConfigError(
                f'task="sentences" wants {self.num_classes} outputs a row, and the model gives {found[1:]}: take '
                'model.name="bert" with model.num_classes.'
            )

    def notes(self, graphdef: Any, weights: Any) -> dict[str, str]:
        return {"rows": f"{self.length} tokens each at most, of a vocabulary of {self.vocabulary:,}; {self.metric}"}

    def train_batches(self, source: data.Source, **options: Any) -> data.Batches:
        return data.Batches(source, self._with_targets(source), train=True, **options)

    def eval_batches(self, source: data.Source, **options: Any) -> data.Batches:
        return data.Batches(source, self._with_targets(source), train=False, **options)

    def _with_targets(self, source: data.Source) -> Callable[..., Any]:
        raise NotImplementedError

    @property
    def _fed(self) -> Callable[..., Any]:
        names = tuple(self.leaves())
        return functools.partial(_fed, marks=special(self._tokenizer), length=self.length, names=names)

    def leaves(self) -> dict[str, Leaf]:
        found = {"tokens": ((self.length,), np.int32), "lengths": ((), np.int32)}
        return found | ({"types": ((self.length,), np.int32)} if self.types else {})

    def inputs(self, batch: Batch) -> tuple[Array, ...]:
        return tuple(batch[name] for name in self.leaves())

    def draw(
        self, batch: Batch, batch_key: Key[Array, ""], shared_key: Key[Array, ""]
    ) -> tuple[dict[str, Array], None]:
        return {**batch, "key": jax.random.split(batch_key, len(batch["label"]))}, None

    def weight(self, batch: Batch) -> int:
        return len(batch["label"])

    def read(self, raw: bytes | np.ndarray) -> dict[str, Any]:
        """One text, or two with a tab between them."""
        try:
            texts = [text.strip() for text in bytes(raw).decode().strip().split("\t")]
        except UnicodeDecodeError as error:
            raise DataError(f"It is not UTF-8: byte {error.start:,} is {error.object[error.start]:#04x}.") from error
        if not all(texts) or len(texts) > 2:
            raise DataError("It should be a text, or two with a tab between them, and none of them empty.")
        return dict(zip(("tokens", "tokens2"), self._tokenizer.encode(texts), strict=False))

    def prepare(self, example: Mapping[str, Any]) -> dict[str, np.ndarray]:
        return self._fed(0, example, None)


def _fed(
    index: int, example: Mapping[str, Any], draws: object, *, marks: tuple[int, int, int], length: int, names: Any
) -> dict[str, np.ndarray]:
    found = joined(example, marks, length)
    return {name: found[name] for name in names}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Classified(Sentences, Classification):
    """Sentences with a class, by cross-entropy."""

    def _with_targets(self, source: data.Source) -> Callable[..., Any]:
        return labelled(source, self._fed)

    def loss(self, model: Any, part: dict[str, Array], shared: None, key: Key[Array, "b"]) -> Float[Array, ""]:
        logits, _ = model(*self.inputs(part), key=key)
        return losses.classify(logits, jax.nn.one_hot(part["label"], self.num_classes), self.kind).sum()

    def statistics(self, model: Any, batch: Batch, *, detail: bool = False) -> dict[str, Array]:
        """Loss, examples, and counts V V of labels and what was taken for them: additive, and all that accuracy, F1
        and Matthews need."""
        found = super().statistics(model, batch, detail=True)
        return {name: found[name] for name in ("loss", "examples")} | {
            "counts": found["confusion"],
            **({"confusion": found["confusion"]} if detail else {}),
        }

    def metrics(self, totals: Mapping[str, Any]) -> dict[str, Any]:
        """`loss`, `accuracy`, `matthews`, and of two classes `f1` of the second."""
        counts, found = totals["counts"], {"loss": float(totals["loss"] / totals["examples"])}
        found |= {"accuracy": metrics.accuracy(counts), "matthews": metrics.matthews(counts)}
        found |= {"f1": metrics.f1(counts)} if self.num_classes == 2 else {}
        return found | {name: totals[name] for name in ("confusion",) if name in totals}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scored(Sentences):
    """Sentences with a number, by squared error: STS-B."""

    @property
    def ceiling(self) -> float:
        return float("inf")

    def targets(self, *, train: bool) -> dict[str, Leaf]:
        return {"label": ((), np.float32)}

    def _with_targets(self, source: data.Source) -> Callable[..., Any]:
        return functools.partial(_with_number, self._fed)

    def loss(self, model: Any, part: dict[str, Array], shared: None, key: Key[Array, "b"]) -> Float[Array, ""]:
        return jnp.square(self._found(model, part, key) - part["label"]).sum()

    def _found(self, model: Any, batch: Batch, key: Key[Array, "b"] | None = None) -> Float[Array, "b"]:
        outputs, _ = model(*self.inputs(batch), key=key)
        return outputs[:, 0].astype(jnp.float32)

    def statistics(self, model: Any, batch: Batch, *, detail: bool = False) -> dict[str, Array]:
        """The sum of squared errors, and of each example what was told and what is true."""
        found = self._found(model, batch)
        errors = jnp.square(found - batch["label"])
        return {
            "loss": jnp.where(batch["mask"], errors, 0).sum(),
            "examples": jnp.sum(batch["mask"]),
            "each": {"found": found, "wanted": batch["label"]},
        }

    def metrics(self, totals: Mapping[str, Any]) -> dict[str, Any]:
        """`loss`, the mean squared error; `pearson` and `spearman`; and `spread`, the standard deviation of what is
        told. Of a constant there is no correlation: both are 0 then, with a warning, and `spread` is 0."""
        found, wanted = (totals["each"][name] for name in ("found", "wanted"))
        both = {"pearson": metrics.pearson(found, wanted), "spearman": metrics.spearman(found, wanted)}
        if None in both.values():
            what = "The model tells the same of all rows" if np.ptp(found) == 0 else "All rows have the same score"
            warnings.warn(f"{what}: there is no correlation, and it is recorded as 0.", stacklevel=2)
        told = {name: 0.0 if value is None else value for name, value in both.items()}
        return {"loss": float(totals["loss"] / totals["examples"])} | told | {"spread": float(found.std())}

    def read(self, raw: bytes | np.ndarray) -> dict[str, Any]:
        raise DataError("The run tells a number of each pair and has no classes to choose from: use leanformer.load.")


def _with_number(fed: Callable[..., Any], index: int, example: Mapping[str, Any], draws: object) -> dict[str, Any]:
    return {**fed(index, example, draws), "label": np.float32(example["label"])}


def of(c: Any) -> Classified | Scored:
    """The task of a config: a number where the model has one output, else a class.

    Raises:
        ConfigError: data of no known kind; or `init_from.path` is a run of another model.
    """
    m, d = c.model, c.data
    find(d.name, KINDS)
    begins = finetune_checks.source_run(c.init_from.path)
    if begins is not None:
        finetune_checks.check_model(begins, m)
    return (Scored if m.num_classes == 1 else Classified)(
        num_classes=m.num_classes,
        length=d.max_length,
        vocabulary=m.vocabulary,
        types=bool(m.get("types")),
        metric=c.score,
        begins=begins,
        tokenizer=d.tokenizer,
        train_split=d.train_split,
        name=d.name,
        dir=d.dir,
    )
