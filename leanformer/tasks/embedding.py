"""Texts as vectors: what an encoder makes of their tokens, in the mean, of length 1 (Reimers & Gurevych 2019)."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from leanformer.data.sentences.encoded import joined, special
from leanformer.data.text import Tokenizer
from leanformer.errors import ConfigError
from leanformer.layers.pooling import mean_pool


STEP = 16  # lengths of rows are multiples of it, so that few programs are compiled


def embeddings(
    model: Any, tokenizer: Tokenizer, texts: Sequence[str], *, batch_size: int = 32
) -> tuple[Float[np.ndarray, "n d"], Int[np.ndarray, "m"]]:
    """The vector of each text, float32: the mean of its tokens in the model's last layer, [CLS] and [SEP] among them,
    divided by its length, so that products of two are their cosine. And which texts were cut to the model's length.

    Args:
        model: with `hidden`, a `models.bert.Model`.
        tokenizer: that it reads texts with.
        batch_size: texts at a time; they change nothing but the rounding.

    Raises:
        ConfigError: the model is of another kind, or knows fewer tokens than the tokenizer.
        DataError: the tokenizer has no [CLS] or no [SEP].
    """
    if not hasattr(model, "decoded"):
        raise ConfigError('Embeddings are of a model that sees whole texts: model.name="bert".')
    marks, known = special(tokenizer), model.embed.shape[0]
    if tokenizer.vocabulary > known:
        raise ConfigError(
            f"The tokenizer has {tokenizer.vocabulary:,} tokens, and the model knows model.vocabulary={known}. Give "
            "the one that it was trained with."
        )
    encoded = tokenizer.encode(texts)
    sizes = np.array([len(tokens) + 2 for tokens in encoded])
    found = np.empty((len(texts), model.embed.shape[1]), np.float32)
    order = np.argsort(sizes, kind="stable")  # so that little of a batch is padding
    for some in np.split(order, range(batch_size, len(texts), batch_size)):
        longest = min(int(-(-sizes[some].max() // STEP) * STEP), model.max_length)
        rows = [joined({"tokens": encoded[i]}, marks, longest) for i in some]
        rows += rows[:1] * (batch_size - len(rows))
        tokens, lengths = (jnp.asarray(np.stack([row[name] for row in rows])) for name in ("tokens", "lengths"))
        found[some] = np.asarray(_embed(model, tokens, lengths))[: len(some)]
    return found, np.flatnonzero(sizes > model.max_length)


@nnx.jit
def _embed(model: nnx.Module, tokens: Int[Array, "b t"], lengths: Int[Array, "b"]) -> Float[Array, "b d"]:
    x = mean_pool(model.hidden(tokens, lengths)[0].astype(jnp.float32), lengths)
    return x * jax.lax.rsqrt(jnp.square(x).sum(axis=1, keepdims=True))
