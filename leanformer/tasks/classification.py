"""Single-label classification, shared by tasks: labels, losses, accuracy and confusion matrix."""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from leanformer.data import Source
from leanformer.data.loader import Prepare
from leanformer.errors import DataError
from leanformer.tasks import Batch, Objective, Score, Spec


LABEL: dict[str, Spec] = {"label": ((), np.int32)}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Classification(Objective):
    """Base class of classification objectives; subclasses define `inputs` and `loss`. Outputs begin with the logits."""

    num_classes: int  # outputs V of the model
    kind: str = "softmax"  # loss, a key of LOSSES

    score = Score("top1")

    @property
    def divergence_loss(self) -> float:
        return divergence_threshold(self.kind, self.num_classes)

    def statistics(self, model: Any, batch: Batch, *, detail: bool = False) -> dict[str, Array]:
        """Return the sum of losses, and the numbers of correct predictions and of examples; `top5` above 5 classes.

        With `detail` also the `confusion` matrix (V V): rows are labels, columns predictions.
        """
        logits, _ = model(*self.inputs(batch))
        loss = classify(logits, jax.nn.one_hot(batch["label"], self.num_classes), self.kind)
        rank = rank_of_label(logits, batch["label"])
        mask = batch["mask"]
        return {
            "loss": jnp.where(mask, loss, 0).sum(),
            "top1": jnp.sum(mask & (rank < 1)),
            "examples": jnp.sum(mask),
            **({"top5": jnp.sum(mask & (rank < 5))} if self.num_classes > 5 else {}),
            **({"confusion": _confusion(logits, batch["label"], rank, mask)} if detail else {}),
        }

    def metrics(self, totals: Mapping[str, Any]) -> dict[str, Any]:
        """Return the mean `loss`, the fractions `top1` and `top5`, and `confusion` (V V), as far as they are summed."""
        examples = totals["examples"]
        means = {name: float(totals[name] / examples) for name in ("loss", "top1", "top5") if name in totals}
        return means | {name: totals[name] for name in ("confusion",) if name in totals}


def labelled(source: Source, prepare: Prepare) -> Prepare:
    """Return a function like `prepare` whose result also has the example's `label`, an int32."""
    return functools.partial(_labelled, source, prepare)


def _labelled(
    source: Any, prepare: Prepare, index: int, example: Mapping[str, Any], draws: Callable[[], np.random.Generator]
) -> dict[str, Any]:
    label, classes = example["label"], source.num_classes
    if not (hasattr(label, "__index__") and 0 <= label < (classes or 2**31)):  # 3.8 would become 3
        raise DataError(f"{source.name(index)} has the label {label!r}, not a number of one of {classes} classes.")
    return {**prepare(index, example, draws), "label": np.int32(label)}


def _confusion(
    logits: Float[Array, "b v"], labels: Int[Array, "b"], rank: Int[Array, "b"], mask: Bool[Array, "b"]
) -> Int[Array, "v v"]:
    """Return counts[label, prediction] of the examples in `mask`: the label at `rank` 0, else the likeliest other."""
    others = jnp.where(jax.nn.one_hot(labels, logits.shape[-1], dtype=bool), -jnp.inf, logits)
    predicted = jnp.where(rank < 1, labels, jnp.argmax(others, axis=-1))
    counts = jnp.zeros((logits.shape[-1],) * 2, jnp.int32)
    return counts.at[labels, predicted].add(mask.astype(jnp.int32))


def classify(logits: Float[Array, "*b v"], targets: Float[Array, "*b v"], loss: str) -> Float[Array, "*b"]:
    """Return the loss, a key of LOSSES, of each example against soft targets, in nats, in float32 or wider."""
    return LOSSES[loss](logits.astype(jnp.promote_types(logits.dtype, jnp.float32)), targets)


def _softmax(logits: Float[Array, "*b v"], targets: Float[Array, "*b v"]) -> Float[Array, "*b"]:
    return -jnp.sum(targets * jax.nn.log_softmax(logits), axis=-1)


def _sigmoid(logits: Float[Array, "*b v"], targets: Float[Array, "*b v"]) -> Float[Array, "*b"]:
    """Return the sum over classes: a mean would shrink with their number (Beyer et al. 2020)."""
    positive, negative = jax.nn.log_sigmoid(logits), jax.nn.log_sigmoid(-logits)
    return -jnp.sum(targets * positive + (1 - targets) * negative, axis=-1)


LOSSES = {"softmax": _softmax, "sigmoid": _sigmoid}  # by name, as in config.loss


def divergence_threshold(loss: str, num_classes: int) -> float:
    """Return 100 times the loss of a uniform prediction, in nats, above which a run has diverged."""
    classes = max(num_classes, 2)
    return 100 * (classes * math.log(2) if loss == "sigmoid" else math.log(classes))


def smoothed(labels: Int[Array, "b"], num_classes: int, smoothing: float) -> Float[Array, "b v"]:
    """Return one-hot targets, of which `smoothing` is spread over all classes (Szegedy et al. 2016).

    >>> smoothed(jnp.array([1]), num_classes=4, smoothing=0.25).tolist()
    [[0.0625, 0.8125, 0.0625, 0.0625]]
    """
    return jax.nn.one_hot(labels, num_classes) * (1 - smoothing) + smoothing / num_classes


def probabilities(logits: Float[Array, "*b v"], loss: str) -> Float[Array, "*b v"]:
    """Return class probabilities, in float32 or wider; for the loss "sigmoid" they do not sum to 1."""
    logits = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
    return jax.nn.sigmoid(logits) if loss == "sigmoid" else jax.nn.softmax(logits)


def rank_of_label(logits: Float[Array, "b v"], labels: Int[Array, "b"]) -> Int[Array, "b"]:
    """Return how many classes come before the label: those of larger logits, and of equal ones the first, as in argmax.

    In bfloat16 ties are common: counted as wrong, they would lower top-1. NaN makes an answer wrong.
    """
    label, label_logit = labels[:, None], jnp.take_along_axis(logits, labels[:, None], axis=-1)
    tied = (logits == label_logit) & (jax.lax.broadcasted_iota(labels.dtype, logits.shape, 1) < label)
    return (~(logits <= label_logit) | tied).sum(axis=-1) + jnp.isnan(label_logit[:, 0])  # larger, NaN, or tied
