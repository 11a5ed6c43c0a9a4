"""Texts, and what comes next in them: rows of tokens, the loss of each token, nats a token and bits a byte."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Key

from leanformer import data
from leanformer.data.text import rows
from leanformer.errors import ConfigError, DataError
from leanformer.tasks.task import Batch, Leaf
from leanformer.tasks.texts import Rows, Texts


@dataclasses.dataclass(frozen=True, kw_only=True)
class Language(Texts):
    """Rows as `tokens` (B T, int32) and, of packed ones, `segments` (B T); `targets` are what comes next."""

    @classmethod
    def of(cls, c: Any) -> "Language":
        """The task of a config. Raises ConfigError for data of no known kind."""
        return cls(soft_cap=c.model.head_cap, **cls.arguments(c))

    def fit(self, graphdef: Any, weights: Any) -> None:
        if not hasattr(nnx.merge(graphdef, *weights), "extend"):
            raise ConfigError('task="language" wants a model of tokens that come next: set model.name="gpt".')

    def notes(self, graphdef: Any, weights: Any) -> dict[str, str]:
        kind = "whole documents, packed" if self.packed else "windows of the stream of tokens"
        return {"rows": f"{kind}, {self.length} tokens each, of a vocabulary of {self.vocabulary:,}"}

    def preparing(self, source: Rows, *, train: bool) -> data.loader.Prepare:
        return rows.prepare

    def read(self, raw: bytes | np.ndarray) -> dict[str, Any]:
        raise DataError("No file is an example of a language model's: python -m leanformer.generate goes on with one.")

    def targets(self, *, train: bool) -> dict[str, Leaf]:
        wanted = {"targets": ((self.length,), np.int32)}
        return wanted if train else wanted | {"bytes": ((), np.int32)}

    def inputs(self, batch: Batch) -> tuple[Array, ...]:
        return tuple(batch[name] for name in self.leaves())

    def loss(self, model: Any, part: dict[str, Array], shared: None, key: Key[Array, "b"] | None) -> Float[Array, ""]:
        """Cross-entropy in nats, summed over targets."""
        x, _ = model.hidden(*self.inputs(part), key=key)
        return self.nats(model, x, part["targets"])

    def statistics(self, model: Any, batch: Batch, *, detail: bool = False) -> dict[str, Array]:
        """Nats, tokens that are targets, and bytes of text that these stand for."""
        mask = batch["mask"]
        targets = jnp.where(mask[:, None], batch["targets"], rows.IGNORE)
        x, _ = model.hidden(*self.inputs(batch))
        return {
            "nats": self.nats(model, x, targets),
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
