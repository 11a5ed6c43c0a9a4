"""Classification and regression of sentences and pairs of them: GLUE's tasks (Wang et al. 2019) with their metrics."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int, Key

from leanformer import data
from leanformer.data.loader import Prepare
from leanformer.data.sentences import KINDS, Texts, join_pair, open_sentences, special_tokens
from leanformer.data.source import find
from leanformer.data.text import corpus
from leanformer.data.text.tokenizer import Tokenizer
from leanformer.errors import ConfigError, DataError
from leanformer.tasks import Batch, DataModule, Objective, Score, Spec, Task
from leanformer.tasks.classification import LABEL, Classification, classify, labelled
from leanformer.tasks.language import check_vocabulary, decode


@dataclasses.dataclass(frozen=True, kw_only=True)
class SentenceData(DataModule):
    """Data of sentences and pairs: `tokens` (B T), `lengths` (B) and, for a model with token types, `types` (B T).

    The `label` (B) is int32, or float32 if the model has one output.
    """

    num_classes: int  # outputs of the model; 1 for a regression
    length: int  # row length T, `data.max_length`: longer rows are truncated, of pairs the longer text first
    vocabulary: int
    types: bool  # True if the model has token types
    source_run: Path | None  # folder of the run that the initial weights come from
    tokenizer: str | None  # None: from `source_run`
    train_split: str
    name: str
    dir: str | None = None  # of GLUE's download

    @property
    def numbers(self) -> bool:
        return self.num_classes == 1

    def open(self, split: str, classes: Sequence[str] | None = None) -> data.Source:
        options = {"dir": self.dir, "numbers": self.numbers, "classes": classes}
        return open_sentences(self.name, split, self._tokenizer, **options)

    @functools.cached_property
    def _tokenizer(self) -> Tokenizer:
        """Tokenizer of the config, or else of the source run."""
        words = str(self.source_run or "") if self.tokenizer is None else self.tokenizer
        if not words:
            raise DataError(
                "data.tokenizer is unset, and init_from.path names no run that has one. Set --config.data.tokenizer to "
                'a tokenizer.json, to a folder with one, or to "wordpiece:4096", trained on the training split.'
            )
        texts = Texts(self.name, self.train_split, self.dir, self.numbers)
        chosen = corpus.make_tokenizer(words, texts, Path(corpus.CACHE).expanduser())
        special_tokens(chosen)
        check_vocabulary(words, chosen.vocabulary, self.vocabulary)
        return chosen

    def make_prepare(self, source: data.Source, *, train: bool) -> Prepare:
        return functools.partial(_with_number, self._encoded) if self.numbers else labelled(source, self._encoded)

    @property
    def _encoded(self) -> Callable[..., Any]:
        names = tuple(self.input_specs())
        return functools.partial(_encoded, marks=special_tokens(self._tokenizer), length=self.length, names=names)

    def input_specs(self) -> dict[str, Spec]:
        return _input_specs(self.length, self.types)

    def target_specs(self, *, train: bool) -> dict[str, Spec]:
        return {"label": ((), np.float32)} if self.numbers else LABEL

    def read(self, raw: bytes | np.ndarray) -> dict[str, Any]:
        """Tokenise a UTF-8 text, or two separated by a tab: `tokens`, and `tokens2` of the second, int32 (n,)."""
        texts = [text.strip() for text in decode(raw).strip().split("\t")]
        if not all(texts) or len(texts) > 2:
            raise DataError("A file is one text, or two separated by a tab, none of them empty; not a table.")
        return dict(zip(("tokens", "tokens2"), self._tokenizer.encode(texts), strict=False))

    def prepare(self, example: Mapping[str, Any]) -> dict[str, np.ndarray]:
        return self._encoded(0, example, None)


def _input_specs(length: int, types: bool) -> dict[str, Spec]:
    specs: dict[str, Spec] = {"tokens": ((length,), np.int32), "lengths": ((), np.int32)}
    return specs | ({"types": ((length,), np.int32)} if types else {})


def _encoded(
    index: int, example: Mapping[str, Any], draws: object, *, marks: tuple[int, int, int], length: int, names: Any
) -> dict[str, np.ndarray]:
    arrays = join_pair(example, marks, length)
    return {name: arrays[name] for name in names}


def _with_number(prepare: Callable[..., Any], index: int, example: Mapping[str, Any], draws: object) -> dict[str, Any]:
    return {**prepare(index, example, draws), "label": np.float32(example["label"])}


def accuracy(confusion: Int[np.ndarray, "v v"]) -> float:
    """Return the accuracy from a confusion matrix; rows are labels, columns predictions."""
    return float(np.trace(confusion) / confusion.sum())


def f1(confusion: Int[np.ndarray, "2 2"]) -> float:
    """Return F1, the harmonic mean of precision and recall, of class 1; 0 without true positives."""
    right, wrong = int(confusion[1, 1]), int(confusion[0, 1] + confusion[1, 0])
    return 2 * right / (2 * right + wrong) if right else 0.0


def matthews(confusion: Int[np.ndarray, "v v"]) -> float:
    """Return the Matthews correlation, 0 if labels or predictions are of one class (Gorodkin 2004, eq. 8)."""
    counts = confusion.astype(object)  # Python integers: products of three counts exceed 2^63
    labels, taken, total = counts.sum(axis=1), counts.sum(axis=0), counts.sum()
    shared = total * np.trace(counts) - labels @ taken
    spread = (total**2 - labels @ labels) * (total**2 - taken @ taken)
    return float(shared) / float(spread) ** 0.5 if spread else 0.0


def pearson(a: Float[np.ndarray, "n"], b: Float[np.ndarray, "n"]) -> float:
    """Return the linear correlation; 0 if an argument is constant, NaN if a number is not finite."""
    if not (np.isfinite(a).all() and np.isfinite(b).all()):
        return float("nan")
    if np.ptp(a) == 0 or np.ptp(b) == 0:
        return 0.0
    x, y = (values.astype(np.float64) - values.astype(np.float64).mean() for values in (a, b))
    return float(np.clip((x / np.linalg.norm(x)) @ (y / np.linalg.norm(y)), -1, 1))


def spearman(a: Float[np.ndarray, "n"], b: Float[np.ndarray, "n"]) -> float:
    """Return the rank correlation, with mean ranks for ties; 0 and NaN as in `pearson`."""
    from scipy import stats  # slow to import

    return pearson(*(stats.rankdata(values) for values in (a, b)))


@dataclasses.dataclass(frozen=True, kw_only=True)
class SentenceObjective(Objective):
    """Base class of objectives of sentences: inputs of the model, check of its outputs, score."""

    num_classes: int  # outputs of the model; 1 for a regression
    length: int  # row length T
    types: bool  # True if the model has token types
    metric: str  # that selects the best checkpoint, such as "accuracy"

    @property
    def score(self) -> Score:
        return Score(self.metric)

    def check_model(self, graphdef: Any, weights: Any) -> None:
        """Raise ConfigError unless the model returns one vector of `num_classes` outputs per row."""
        specs = _input_specs(self.length, self.types)
        batch = {name: jax.ShapeDtypeStruct((1, *shape), dtype) for name, (shape, dtype) in specs.items()}
        shape = jax.eval_shape(lambda w, b: nnx.merge(graphdef, *w)(*self.inputs(b))[0], weights, batch).shape
        if shape != (1, self.num_classes):
            raise ConfigError(
                f'task="sentences" requires {self.num_classes} outputs per row, but the model returns {shape[1:]}. Set '
                'model.name="bert" with model.num_classes.'
            )

    def inputs(self, batch: Batch) -> tuple[Array, ...]:
        return tuple(batch[name] for name in _input_specs(self.length, self.types))


@dataclasses.dataclass(frozen=True, kw_only=True)
class SentenceClassification(SentenceObjective, Classification):
    """Objective of sentences with a class: cross-entropy."""

    def loss(self, model: Any, part: dict[str, Array], batch_aux: Any, key: Key[Array, "b"] | None) -> Float[Array, ""]:
        logits, _ = model(*self.inputs(part), key=key)
        return classify(logits, jax.nn.one_hot(part["label"], self.num_classes), self.kind).sum()

    def statistics(self, model: Any, batch: Batch, *, detail: bool = False) -> dict[str, Array]:
        """Return the `loss`, the `examples`, and the confusion matrix `counts`; with `detail` also as `confusion`."""
        sums = super().statistics(model, batch, detail=True)
        return {name: sums[name] for name in ("loss", "examples")} | {
            "counts": sums["confusion"],
            **({"confusion": sums["confusion"]} if detail else {}),
        }

    def metrics(self, totals: Mapping[str, Any]) -> dict[str, Any]:
        """Return the mean `loss`, `accuracy`, `matthews`, and with two classes `f1` of the second."""
        counts, values = totals["counts"], {"loss": float(totals["loss"] / totals["examples"])}
        values |= {"accuracy": accuracy(counts), "matthews": matthews(counts)}
        values |= {"f1": f1(counts)} if self.num_classes == 2 else {}
        return values | {name: totals[name] for name in ("confusion",) if name in totals}


@dataclasses.dataclass(frozen=True, kw_only=True)
class SentenceRegression(SentenceObjective):
    """Objective of sentences with a number, as in STS-B: squared error of the only output."""

    def loss(self, model: Any, part: dict[str, Array], batch_aux: Any, key: Key[Array, "b"] | None) -> Float[Array, ""]:
        return jnp.square(self._outputs(model, part, key) - part["label"]).sum()

    def _outputs(self, model: Any, batch: Batch, key: Key[Array, "b"] | None = None) -> Float[Array, "b"]:
        outputs, _ = model(*self.inputs(batch), key=key)
        return outputs[:, 0].astype(jnp.float32)

    def statistics(self, model: Any, batch: Batch, *, detail: bool = False) -> dict[str, Any]:
        """Return the sum of squared errors, `loss`, the `examples`, and `predictions` and `labels` per example."""
        outputs = self._outputs(model, batch)
        errors = jnp.square(outputs - batch["label"])
        return {
            "loss": jnp.where(batch["mask"], errors, 0).sum(),
            "examples": jnp.sum(batch["mask"]),
            "per_example": {"predictions": outputs, "labels": batch["label"]},
        }

    def metrics(self, totals: Mapping[str, Any]) -> dict[str, Any]:
        """Return `loss` (mean squared error), `pearson`, `spearman`, and `spread`, the outputs' standard deviation."""
        outputs, labels = (totals["per_example"][name] for name in ("predictions", "labels"))
        return {
            "loss": float(totals["loss"] / totals["examples"]),
            "pearson": pearson(outputs, labels),
            "spearman": spearman(outputs, labels),
            "spread": float(outputs.std()),
        }


def from_config(c: Any) -> Task:
    """Return the task of a config: regression if the model has one output, otherwise classification."""
    m, d = c.model, c.data
    find(d.name, KINDS)
    start = Path(c.init_from.path or "").expanduser()
    source_run = start if c.init_from.path and (start / "config.json").is_file() else None
    shared: dict[str, Any] = {"num_classes": m.num_classes, "length": d.max_length, "types": bool(m.get("types"))}
    keys = {name: d[name] for name in ("tokenizer", "train_split", "name", "dir")}
    objective = SentenceRegression if m.num_classes == 1 else SentenceClassification
    return Task(
        SentenceData(**shared, **keys, vocabulary=m.vocabulary, source_run=source_run),
        objective(**shared, metric=c.score),
    )
