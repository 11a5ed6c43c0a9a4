"""Losses of models that learn from a teacher too, whose answers are leaves of the batch (`data.images.teacher`).

A mixed image's answers are those of the two images mixed as the image is, since a stored teacher cannot be shown the
mixed one; DeiT's own teacher is.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from leanformer.tasks.losses import classify, divergence


KINDS = ("hard", "soft")  # of lessons, by the word of config.teacher.kind


@dataclasses.dataclass(frozen=True)
class Distillation:
    """DeiT's losses (Touvron et al. 2021, section 4): the class head learns the labels, the distilled head the teacher.

    The loss is (1 - weight) x cross-entropy + weight x the teacher's part. Of the kind "hard", equation 3, that is the
    cross-entropy with the teacher's best class, never smoothed; of "soft", equation 2, temperature² x the divergence
    KL(teacher, head) of both at that temperature. A batch needs the leaf `teacher_logits`, B V.
    """

    kind: str
    temperature: float
    weight: float

    def __str__(self) -> str:
        what = "best classes" if self.kind == "hard" else f"probabilities at temperature {self.temperature:g}"
        return f"{what}, weight {self.weight:g}"

    def __call__(
        self, heads: Mapping[str, Array], targets: Float[Array, "b v"], part: Mapping[str, Array], mix: Any
    ) -> Float[Array, "b"]:
        """Per-example loss of the logits `heads`; `part` is the (micro-)batch, `mix` an `mixing.Mix` or None."""

        def answers(prefix: str) -> Float[Array, "b v"]:
            logits = part[f"{prefix}teacher_logits"].astype(jnp.float32)
            if self.kind == "hard":
                return jax.nn.one_hot(logits.argmax(axis=-1), logits.shape[-1])
            return jax.nn.softmax(logits / self.temperature)

        asked = answers("") if mix is None else mix.share * answers("") + (1 - mix.share) * answers("partner_")
        if self.kind == "hard":
            taught = classify(heads["distilled"], asked, "softmax")
        else:
            taught = divergence(heads["distilled"], asked, self.temperature)
        return (1 - self.weight) * classify(heads["class"], targets, "softmax") + self.weight * taught


@dataclasses.dataclass(frozen=True)
class TokenLabels:
    """Token labelling (Jiang et al. 2021, https://arxiv.org/abs/2104.10858, section 3.2).

    The loss is the class head's cross-entropy with the labels + weight x the mean over tokens of the token head's with
    what the teacher's label map says at each token (`label_tokens`). The class head learns labels, as in the paper; its
    published program takes the map's answer for the whole view there too. A token of a cutmixed image belongs to the
    partner by the share of its pixels that are the partner's. A batch needs `teacher_classes` and `teacher_scores`,
    B rows columns K, and `teacher_view`, B 4.
    """

    weight: float

    def __str__(self) -> str:
        return f"label maps, weight {self.weight:g}"

    def __call__(
        self, heads: Mapping[str, Array], targets: Float[Array, "b v"], part: Mapping[str, Array], mix: Any
    ) -> Float[Array, "b"]:
        """Per-example loss of the logits `heads`; `part` is the (micro-)batch, `mix` an `mixing.Mix` or None."""
        _, tokens, num_classes = heads["tokens"].shape
        height, width = part["image"].shape[1:3]
        side = math.isqrt(height * width // tokens)  # of a token, in pixels
        grid = height // side, width // side

        def answers(prefix: str) -> Float[Array, "b t v"]:
            maps = (part[f"{prefix}teacher_{name}"] for name in ("classes", "scores", "view"))
            return label_tokens(*maps, grid, num_classes)

        asked = answers("")
        if mix is not None:
            own = mix.weight * (1 - token_shares(mix.inside, grid))[None, :, None]
            asked = own * asked + (1 - own) * answers("partner_")
        taught = classify(heads["tokens"], asked, "softmax").mean(axis=-1)
        return classify(heads["class"], targets, "softmax") + self.weight * taught


def lesson(head: str, *, kind: str, temperature: float, weight: float) -> Distillation | TokenLabels:
    """The loss with a teacher, by the head that learns from it: "distilled" or "tokens"."""
    return TokenLabels(weight) if head == "tokens" else Distillation(kind, temperature, weight)


def token_shares(inside: Bool[Array, "height width"], grid: tuple[int, int]) -> Float[Array, "t"]:
    """The share of each token's pixels that are inside; `grid` rows and columns of tokens, row by row."""
    (height, width), (rows, columns) = inside.shape, grid
    return inside.reshape(rows, height // rows, columns, width // columns).mean(axis=(1, 3)).reshape(-1)


def label_tokens(
    classes: Int[Array, "b rows columns k"],
    scores: Float[Array, "b rows columns k"],
    view: Float[Array, "b 4"],
    grid: tuple[int, int],
    num_classes: int,
) -> Float[Array, "b t v"]:
    """What label maps say of the tokens of a view, probabilities: RoI-align of the logits (He et al. 2017), softmax.

    A cell's logits are its K scores, and 0 of all other classes. The view is top, left, bottom, right in shares of the
    whole picture; left beyond right is a flipped view. T is `grid` rows and columns of tokens, row by row.
    """

    def one(classes: Array, scores: Array, view: Array) -> Float[Array, "t v"]:
        # Comparisons and a sum, which a compiler fuses; a scatter's additions have no fixed order on a GPU.
        logits = (jax.nn.one_hot(classes, num_classes) * scores.astype(jnp.float32)[..., None]).sum(axis=-2)
        top, left, bottom, right = view
        along = _aligned(top, bottom, grid[0], classes.shape[0]), _aligned(left, right, grid[1], classes.shape[1])
        aligned = jnp.einsum("ir,jc,rcv->ijv", *along, logits, precision=jax.lax.Precision.HIGHEST)
        return jax.nn.softmax(aligned.reshape(math.prod(grid), num_classes))

    return jax.vmap(one)(classes, scores, view)


def _aligned(start: Float[Array, ""], stop: Float[Array, ""], bins: int, cells: int) -> Float[Array, "bins cells"]:
    """RoI-align along one axis: each bin's weights of the cells.

    A bin is the mean over as many evenly spaced points as it spans cells, rounded up, of the linear interpolation
    between the cells' centres, constant beyond the outermost ones.
    """
    most = math.ceil(cells / bins)
    points = jnp.clip(jnp.ceil(jnp.abs(stop - start) * cells / bins), 1, most)
    point = jnp.arange(most)
    place = (jnp.arange(bins)[:, None] + (point[None, :] + 0.5) / points) / bins
    centre = jnp.clip((start + (stop - start) * place) * cells - 0.5, 0, cells - 1)
    weights = jnp.maximum(0, 1 - jnp.abs(centre[..., None] - jnp.arange(cells)[None, None, :]))
    return (weights * (point < points)[None, :, None] / points).sum(axis=1)
