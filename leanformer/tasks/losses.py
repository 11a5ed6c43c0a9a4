"""Losses and ranks of one example each; sums and masks are taken by the task."""

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def classify(logits: Float[Array, "*b v"], targets: Float[Array, "*b v"], loss: str) -> Float[Array, "*b"]:
    """Per-example loss, of LOSSES, in float32 against soft targets. Raises ValueError for one that is not known."""
    if loss not in LOSSES:
        raise ValueError(f"loss={loss!r} is not one of {', '.join(LOSSES)}.")
    return LOSSES[loss](logits.astype(jnp.promote_types(logits.dtype, jnp.float32)), targets)


def _softmax(logits: Float[Array, "*b v"], targets: Float[Array, "*b v"]) -> Float[Array, "*b"]:
    """Cross-entropy."""
    return -jnp.sum(targets * jax.nn.log_softmax(logits), axis=-1)


def _sigmoid(logits: Float[Array, "*b v"], targets: Float[Array, "*b v"]) -> Float[Array, "*b"]:
    """Binary cross-entropies of the classes, summed, not averaged, so that its size does not shrink with the number of
    classes (Beyer et al. 2020)."""
    positive, negative = jax.nn.log_sigmoid(logits), jax.nn.log_sigmoid(-logits)
    return -jnp.sum(targets * positive + (1 - targets) * negative, axis=-1)


LOSSES = {"softmax": _softmax, "sigmoid": _sigmoid}  # by the word of config.loss


def ceiling(loss: str, num_classes: int) -> float:
    """A mean loss above which no model still learns: a hundred times that of taking all classes for alike."""
    classes = max(num_classes, 2)
    return 100 * (classes * math.log(2) if loss == "sigmoid" else math.log(classes))


def probabilities(logits: Float[Array, "*b v"], loss: str) -> Float[Array, "*b v"]:
    """What the logits of a model trained with `loss` say of each class, in float32."""
    logits = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
    return jax.nn.sigmoid(logits) if loss == "sigmoid" else jax.nn.softmax(logits)


def rank_of_label(logits: Float[Array, "b v"], labels: Int[Array, "b"]) -> Int[Array, "b"]:
    """How many classes score above the label; top-k is rank < k.

    Ties count against the model, NaN too, so that constant or broken logits cannot look right.
    """
    own = jnp.take_along_axis(logits, labels[:, None], axis=-1)
    above = ~(logits < own)  # at least as high, or NaN on either side; the label itself among them
    return above.sum(axis=-1) - 1 + jnp.isnan(own[:, 0]) * logits.shape[-1]
