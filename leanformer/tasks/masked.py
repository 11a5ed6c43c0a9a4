"""Texts of which some tokens are masked, to be told from those around them: nats and accuracy of the masked ones.

Only the places that are to be told go through the model's head, a fixed number a row (Geiping & Goldstein 2023).
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
from leanformer.data.text import Corpus, Full, masking, rows
from leanformer.data.text.masking import Masking, num_masked
from leanformer.data.text.tokenizer import MASKS
from leanformer.errors import ConfigError, DataError
from leanformer.tasks.chunked_cross_entropy import hits
from leanformer.tasks.task import Batch, Leaf
from leanformer.tasks.texts import Rows, Texts


@dataclasses.dataclass(frozen=True, kw_only=True)
class Masked(Texts):
    """Rows as `tokens` (B T, int32), masked, and, of packed ones, `segments` (B T); `places` (B K) of those that are to
    be told, and what they were, `targets` (B K). Masks are a function of seed and step, in evaluation of the row; the
    probe sees rows as evaluation does, masked.

    Attributes:
        share: of a row's tokens that are to be told, see `data.text.masking`.
    """

    share: float

    whole_rows = Full

    @classmethod
    def of(cls, c: Any) -> "Masked":
        """The task of a config. Raises ConfigError for data of no known kind."""
        return cls(share=c.mask_share, **cls.arguments(c))

    def check(self, corpus: Corpus) -> None:
        super().check(corpus)
        if corpus.tokenizer.mask is None:
            raise DataError(
                f'data.tokenizer="{self.tokenizer}" has no token for what is masked, none of '
                f'{" ".join(MASKS)}. Take "wordpiece:<vocabulary>", which is trained with one, or a '
                "tokenizer.json that has one."
            )

    def fit(self, graphdef: Any, weights: Any) -> None:
        model = nnx.merge(graphdef, *weights)
        if not hasattr(model, "decoded") or model.num_classes:
            raise ConfigError(
                'task="masked" wants a model that tells masked tokens: set model.name="bert", without '
                "model.num_classes."
            )

    def notes(self, graphdef: Any, weights: Any) -> dict[str, str]:
        kind = "whole documents, packed" if self.packed else "windows of the stream of tokens"
        of = f"{kind}, {self.length} tokens each, of a vocabulary of {self.vocabulary:,}"
        number = num_masked(self.share, self.length)
        other = number // 10
        masks = (
            f"{number} of {self.length} tokens: {number - 2 * other} masked, {other} drawn anew, {other} as they are"
        )
        return {"rows": of, "to be told": masks}

    def preparing(self, source: Rows, *, train: bool) -> data.loader.Prepare:
        known = source.tokenizer
        how = Masking(self.share, known.mask, known.vocabulary, self.length)
        return functools.partial(masking.prepare, how=how, train=train)

    def read(self, raw: bytes | np.ndarray) -> dict[str, Any]:
        raise DataError("No file is an example of masked text: python -m leanformer.embed reads texts.")

    def targets(self, *, train: bool) -> dict[str, Leaf]:
        return dict.fromkeys(("places", "targets"), ((num_masked(self.share, self.length),), np.int32))

    def inputs(self, batch: Batch) -> tuple[Array | None, ...]:
        return (batch["tokens"], None, None, batch["segments"]) if self.packed else (batch["tokens"],)

    def _told(self, model: Any, batch: Batch, key: Key[Array, "b"] | None = None) -> Float[Array, "b k d"]:
        """What the logits of the places to be told are products with."""
        x, _ = model.hidden(*self.inputs(batch), key=key)
        return model.decoded(jnp.take_along_axis(x, batch["places"][..., None], axis=1))

    def loss(self, model: Any, part: dict[str, Array], shared: None, key: Key[Array, "b"] | None) -> Float[Array, ""]:
        """Cross-entropy in nats, summed over targets."""
        return self.nats(model, self._told(model, part, key), part["targets"])

    def statistics(self, model: Any, batch: Batch, *, detail: bool = False) -> dict[str, Array]:
        """Nats, tokens that were to be told, and how many of them were the likeliest."""
        targets = jnp.where(batch["mask"][:, None], batch["targets"], rows.IGNORE)
        x = self._told(model, batch)
        return {
            "nats": self.nats(model, x, targets),
            "hits": hits(x, *model.unembedding(), targets, at_once=self.at_once),
            "tokens": jnp.sum(targets >= 0),
            "examples": jnp.sum(batch["mask"]),
        }

    def metrics(self, totals: Mapping[str, Any]) -> dict[str, Any]:
        """`loss`, nats a masked token; `accuracy`, the share of them that was told."""
        return {
            "loss": float(totals["nats"] / totals["tokens"]),
            "accuracy": float(totals["hits"] / totals["tokens"]),
        }
