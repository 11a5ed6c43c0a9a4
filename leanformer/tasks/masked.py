"""Masked language modelling, and embeddings of texts."""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int, Key

from leanformer.data.loader import Prepare
from leanformer.data.sentences import join_pair, special_tokens
from leanformer.data.text import rows
from leanformer.data.text.corpus import Corpus
from leanformer.data.text.rows import Masking, OverlappingLastWindow, num_masked, prepare_masked
from leanformer.data.text.tokenizer import MASKS, Tokenizer
from leanformer.errors import ConfigError, DataError
from leanformer.layers.masks import mean_pool
from leanformer.tasks import Batch, Spec, Task
from leanformer.tasks.chunked_cross_entropy import cross_entropy_and_hits
from leanformer.tasks.language import TextData, TokenObjective, settings


@dataclasses.dataclass(frozen=True, kw_only=True)
class MaskedData(TextData):
    """Masked rows, with the `places` (B K) of the targets in the row, and the `targets` (B K), -1 for padding."""

    share: float  # of a row's tokens that are targets, see `data.text.rows.Masking`

    eval_rows = OverlappingLastWindow

    def check(self, corpus: Corpus) -> None:
        super().check(corpus)
        if corpus.tokenizer.mask is None:
            raise DataError(
                f'data.tokenizer="{self.tokenizer}" has no mask token ({" or ".join(MASKS)}). Use '
                '"wordpiece:<vocabulary>", or a tokenizer.json that has one.'
            )

    def make_prepare(self, source: Any, *, train: bool) -> Prepare:
        tokenizer = source.tokenizer
        how = Masking(self.share, tokenizer.mask, tokenizer.vocabulary, self.length)
        return functools.partial(prepare_masked, how=how, train=train)

    def target_specs(self, *, train: bool) -> dict[str, Spec]:
        return dict.fromkeys(("places", "targets"), ((num_masked(self.share, self.length),), np.int32))


@dataclasses.dataclass(frozen=True, kw_only=True)
class MaskedLanguageModelling(TokenObjective):
    """Objective of masked language modelling: cross-entropy of masked tokens."""

    def check_model(self, graphdef: Any, weights: Any) -> None:
        model = nnx.merge(graphdef, *weights)
        if not hasattr(model, "decoded") or model.num_classes:
            raise ConfigError(
                'task="masked" requires a masked language model. Set model.name="bert", without model.num_classes.'
            )

    def inputs(self, batch: Batch) -> tuple[Array | None, ...]:
        return (batch["tokens"], None, None, batch["segments"]) if self.packed else (batch["tokens"],)

    def _decoded(self, model: Any, batch: Batch, key: Key[Array, "b"] | None = None) -> Float[Array, "b k d"]:
        """Return the vectors of the target positions alone, K per row, for the head (Geiping & Goldstein 2023)."""
        x, _ = model.hidden(*self.inputs(batch), key=key)
        return model.decoded(jnp.take_along_axis(x, batch["places"][..., None], axis=1))

    def loss(
        self, model: Any, part: dict[str, Array], batch_aux: None, key: Key[Array, "b"] | None
    ) -> Float[Array, ""]:
        return self.token_loss(model, self._decoded(model, part, key), part["targets"])

    def statistics(self, model: Any, batch: Batch, *, detail: bool = False) -> dict[str, Array]:
        """Return sums: `nats`, target `tokens`, `hits` (targets ranked first), and `examples` (rows)."""
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
        return {"loss": float(totals["nats"] / totals["tokens"]), "accuracy": float(totals["hits"] / totals["tokens"])}


def from_config(c: Any) -> Task:
    corpus, objective = settings(c)
    return Task(MaskedData(share=c.mask_share, **corpus), MaskedLanguageModelling(**objective))


LENGTH_MULTIPLE = 16  # of row lengths, to limit the number of compiled programs


def embeddings(
    model: Any, tokenizer: Tokenizer, texts: Sequence[str], *, batch_size: int = 32
) -> tuple[Float[np.ndarray, "n d"], Int[np.ndarray, "m"]]:
    """Return the embedding of each text, and the indices of texts that were truncated to the model's length.

    An embedding is the mean over tokens, [CLS] and [SEP] included, of the last layer of a `models.bert.Model`,
    normalised to length 1 (Reimers & Gurevych 2019). `batch_size` affects only rounding.
    """
    marks, encoded = special_tokens(tokenizer), tokenizer.encode(texts)
    sizes = np.array([len(tokens) + 2 for tokens in encoded])
    vectors = np.empty((len(texts), model.embed.shape[1]), np.float32)
    order = np.argsort(sizes, kind="stable")  # similar lengths per batch reduce padding
    for some in np.split(order, range(batch_size, len(texts), batch_size)):
        longest = min(int(-(-sizes[some].max() // LENGTH_MULTIPLE) * LENGTH_MULTIPLE), model.max_length)
        rows = [join_pair({"tokens": encoded[i]}, marks, longest) for i in some]
        rows += rows[:1] * (batch_size - len(rows))
        tokens, lengths = (jnp.asarray(np.stack([row[name] for row in rows])) for name in ("tokens", "lengths"))
        vectors[some] = np.asarray(_embed(model, tokens, lengths))[: len(some)]
    return vectors, np.flatnonzero(sizes > model.max_length)


@nnx.jit
def _embed(model: Any, tokens: Int[Array, "b t"], lengths: Int[Array, "b"]) -> Float[Array, "b d"]:
    x = mean_pool(model.hidden(tokens, lengths)[0].astype(jnp.float32), lengths)
    return x * jax.lax.rsqrt(jnp.square(x).sum(axis=1, keepdims=True))
