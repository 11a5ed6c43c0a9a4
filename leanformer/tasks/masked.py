"""Masked language modelling: loss in nats and accuracy of the masked tokens.

Only the target positions, a fixed number per row, go through the model's head (Geiping & Goldstein 2023).
"""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Key

from leanformer import data
from leanformer.data.text import Corpus, OverlappingLastWindow, masking, rows
from leanformer.data.text.masking import Masking, num_masked
from leanformer.data.text.tokenizer import MASKS
from leanformer.errors import ConfigError, DataError
from leanformer.tasks.chunked_cross_entropy import cross_entropy_and_hits
from leanformer.tasks.language import TextData, TokenObjective, settings
from leanformer.tasks.task import Batch, Spec, Task


@dataclasses.dataclass(frozen=True, kw_only=True)
class MaskedData(TextData):
    """Data of masked language modelling: rows of tokens, some of them masked.

    Batches also have the `places` (B K) of the targets in the row, and the `targets` (B K), their tokens before
    masking, both int32. K is the number of targets in a full row; a row with fewer has -1 in `targets`. Masks are a
    function of seed and step in training, of the row in evaluation. Measurements of conditioning see the masked rows of
    evaluation.

    Attributes:
        share: fraction of a row's tokens that are targets, see `data.text.masking`. The other attributes are those of
            `TextData`.
    """

    share: float

    eval_rows = OverlappingLastWindow

    def check(self, corpus: Corpus) -> None:
        super().check(corpus)
        if corpus.tokenizer.mask is None:
            raise DataError(
                f'data.tokenizer="{self.tokenizer}" has no mask token ({" or ".join(MASKS)}). Use '
                '"wordpiece:<vocabulary>", or a tokenizer.json that has one.'
            )

    def notes(self) -> dict[str, str]:
        number = num_masked(self.share, self.length)
        other = number // 10
        masks = f"{number} of {self.length} tokens: {number - 2 * other} masked, {other} random, {other} unchanged"
        return super().notes() | {"targets": masks}

    def make_prepare(self, source: Any, *, train: bool) -> data.loader.Prepare:
        tokenizer = source.tokenizer
        how = Masking(self.share, tokenizer.mask, tokenizer.vocabulary, self.length)
        return functools.partial(masking.prepare, how=how, train=train)

    def target_specs(self, *, train: bool) -> dict[str, Spec]:
        return dict.fromkeys(("places", "targets"), ((num_masked(self.share, self.length),), np.int32))


@dataclasses.dataclass(frozen=True, kw_only=True)
class MaskedLanguageModelling(TokenObjective):
    """Objective of masked language modelling: cross-entropy of masked tokens.

    The model must have `decoded`, as that of `models.bert` without classes. Attributes are those of `TokenObjective`.
    """

    def check_model(self, graphdef: Any, weights: Any) -> None:
        model = nnx.merge(graphdef, *weights)
        if not hasattr(model, "decoded") or model.num_classes:
            raise ConfigError(
                'task="masked" requires a masked language model. Set model.name="bert", without model.num_classes.'
            )

    def inputs(self, batch: Batch) -> tuple[Array | None, ...]:
        return (batch["tokens"], None, None, batch["segments"]) if self.packed else (batch["tokens"],)

    def _decoded(self, model: Any, batch: Batch, key: Key[Array, "b"] | None = None) -> Float[Array, "b k d"]:
        """Return the vectors of the target positions that the unembedding multiplies."""
        x, _ = model.hidden(*self.inputs(batch), key=key)
        return model.decoded(jnp.take_along_axis(x, batch["places"][..., None], axis=1))

    def loss(
        self, model: Any, part: dict[str, Array], batch_aux: None, key: Key[Array, "b"] | None
    ) -> Float[Array, ""]:
        return self.token_loss(model, self._decoded(model, part, key), part["targets"])

    def statistics(self, model: Any, batch: Batch, *, detail: bool = False) -> dict[str, Array]:
        """Return sums over the examples that `batch["mask"]` marks as present.

        They are the loss `nats`, the number of target `tokens`, the number of `hits`, which are targets that are the
        most likely token, and the number of `examples`, which are rows.
        """
        targets = jnp.where(batch["mask"][:, None], batch["targets"], rows.IGNORE)
        how: dict[str, Any] = {"at_once": self.at_once, "soft_cap": self.soft_cap}
        nats, hits = cross_entropy_and_hits(self._decoded(model, batch), *model.unembedding(), targets, **how)
        return {
            "nats": nats,
            "hits": hits,
            "tokens": jnp.sum(targets >= 0),
            "examples": jnp.sum(batch["mask"]),
        }

    def metrics(self, totals: Mapping[str, Any]) -> dict[str, Any]:
        """Return `loss` in nats per target, and `accuracy`, the fraction of targets that are the most likely token."""
        return {"loss": float(totals["nats"] / totals["tokens"]), "accuracy": float(totals["hits"] / totals["tokens"])}


def from_config(c: Any) -> Task:
    """Return the masked language-modelling task of a config. Raises ConfigError for an unknown `data.name`."""
    corpus, objective = settings(c)
    return Task(MaskedData(share=c.mask_share, **corpus), MaskedLanguageModelling(**objective))
