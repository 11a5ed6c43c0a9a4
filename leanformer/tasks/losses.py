"""Per-example losses and ranks; tasks apply masks and sums."""

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def classify(logits: Float[Array, "*b v"], targets: Float[Array, "*b v"], loss: str) -> Float[Array, "*b"]:
    """Return the classification loss of each example against soft targets, in nats, in float32 or wider.

    Args:
        logits: logits of V classes, of any floating type.
        targets: probability of each class.
        loss: "softmax", cross-entropy; or "sigmoid", the sum of the binary cross-entropies of the classes.

    Raises:
        ValueError: the loss is unknown.
    """
    if loss not in LOSSES:
        raise ValueError(f"loss={loss!r} is not one of {', '.join(LOSSES)}.")
    return LOSSES[loss](logits.astype(jnp.promote_types(logits.dtype, jnp.float32)), targets)


def _softmax(logits: Float[Array, "*b v"], targets: Float[Array, "*b v"]) -> Float[Array, "*b"]:
    return -jnp.sum(targets * jax.nn.log_softmax(logits), axis=-1)


def _sigmoid(logits: Float[Array, "*b v"], targets: Float[Array, "*b v"]) -> Float[Array, "*b"]:
    """Return the sum of binary cross-entropies of the classes, whose size, unlike that of a mean, does not shrink with
    the number of classes (Beyer et al. 2020)."""
    positive, negative = jax.nn.log_sigmoid(logits), jax.nn.log_sigmoid(-logits)
    return -jnp.sum(targets * positive + (1 - targets) * negative, axis=-1)


LOSSES = {"softmax": _softmax, "sigmoid": _sigmoid}  # by name, as in config.loss


def divergence_threshold(loss: str, num_classes: int) -> float:
    """Return 100 times the loss of a uniform prediction, in nats, above which a run has diverged.

    Args:
        loss: "softmax" or "sigmoid".
        num_classes: number of classes; 1 counts as 2.
    """
    classes = max(num_classes, 2)
    return 100 * (classes * math.log(2) if loss == "sigmoid" else math.log(classes))


def probabilities(logits: Float[Array, "*b v"], loss: str) -> Float[Array, "*b v"]:
    """Return class probabilities from logits of a model trained with `loss`, in float32 or wider.

    They sum to 1 for "softmax", and are independent for "sigmoid".
    """
    logits = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
    return jax.nn.sigmoid(logits) if loss == "sigmoid" else jax.nn.softmax(logits)


def rank_of_label(logits: Float[Array, "b v"], labels: Int[Array, "b"]) -> Int[Array, "b"]:
    """Return, for each example, the number of classes with a higher logit than its label; top-k means rank < k.

    Ties and NaN count as higher, so that constant or broken logits are never correct. For a label whose logit is NaN
    the rank is at least V.
    """
    label_logit = jnp.take_along_axis(logits, labels[:, None], axis=-1)
    above = ~(logits < label_logit)  # at least as high, or NaN; includes the label itself
    return above.sum(axis=-1) - 1 + jnp.isnan(label_logit[:, 0]) * logits.shape[-1]
