"""Causal language modelling: loss per token in nats, and bits per byte."""

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
from leanformer.tasks import texts
from leanformer.tasks.task import Batch, Spec, Task
from leanformer.tasks.texts import Rows, TextData, TokenObjective


@dataclasses.dataclass(frozen=True, kw_only=True)
class LanguageData(TextData):
    """Rows of tokens; `targets` (B T) are the tokens that come next."""

    def make_prepare(self, source: Rows, *, train: bool) -> data.loader.Prepare:
        return rows.prepare

    def target_specs(self, *, train: bool) -> dict[str, Spec]:
        specs = {"targets": ((self.length,), np.int32)}
        return specs if train else specs | {"bytes": ((), np.int32)}

    def read(self, raw: bytes | np.ndarray) -> dict[str, Any]:
        raise DataError(
            "A file cannot be an example of language modelling. Run python -m leanformer.generate to continue a text."
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class CausalLanguageModelling(TokenObjective):
    """Cross-entropy of the next token."""

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
        """Return the summed loss in nats, the number of targets, and the bytes of text that they stand for."""
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
        """Return `loss` in nats/token; and `bits_per_byte` of text, which allows to compare tokenizers: the loss of all
        targets, ends of documents too, over the bytes of the texts. It is left out if tokens do not stand for bytes."""
        values = {"loss": float(totals["nats"] / totals["tokens"])}
        if totals["bytes"]:
            values["bits_per_byte"] = float(totals["nats"] / totals["bytes"] / math.log(2))
        return values


def from_config(c: Any) -> Task:
    """Return the task of a config. Raises ConfigError for an unknown `data.name`."""
    corpus, objective = texts.settings(c)
    return Task(LanguageData(**corpus), CausalLanguageModelling(soft_cap=c.model.head_cap, **objective))
