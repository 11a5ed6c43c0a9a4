"""Text embeddings: normalised means of an encoder's token vectors (Reimers & Gurevych 2019)."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from leanformer.data.sentences.encoded import join_pair, special_tokens
from leanformer.data.text import Tokenizer
from leanformer.errors import ConfigError, DataError
from leanformer.layers.masks import mean_pool


LENGTH_MULTIPLE = 16  # of row lengths, to limit the number of compiled programs


def embeddings(
    model: Any, tokenizer: Tokenizer, texts: Sequence[str], *, batch_size: int = 32
) -> tuple[Float[np.ndarray, "n d"], Int[np.ndarray, "m"]]:
    """Return the embedding of each text, float32, and the indices of texts that were truncated to the model's length.

    An embedding is the mean over tokens, [CLS] and [SEP] included, of the model's last layer, normalised to length 1.

    Args:
        model: instance of `models.bert.Model`.
        tokenizer: tokenizer that the model was trained with.
        texts: n texts, none of them empty.
        batch_size: number of texts per forward pass, which affects only rounding.

    Raises:
        ConfigError: the model has another architecture, or a smaller vocabulary than the tokenizer.
        DataError: the tokenizer has no [CLS] or no [SEP]; or there is no text, or one that is empty or not a text.
    """
    check_model(model, "The model")
    marks, vocabulary = special_tokens(tokenizer), model.embed.shape[0]
    if tokenizer.vocabulary > vocabulary:
        raise ConfigError(
            f"The tokenizer has {tokenizer.vocabulary:,} tokens, but model.vocabulary={vocabulary}. Use "
            "the tokenizer that the model was trained with."
        )
    if not len(texts):
        raise DataError("There are no texts. Pass at least one.")
    encoded = tokenizer.encode(texts)
    if empty := [index for index, text in enumerate(texts) if not text.strip()]:
        raise DataError(f"{len(empty)} of {len(texts)} texts are empty, the first is texts[{empty[0]}]. Remove them.")
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


def check_model(model: Any, name: str) -> None:
    """Raise ConfigError if a model is not a bidirectional language model; `name` stands for it in the message."""
    if not hasattr(model, "decoded"):
        raise ConfigError(f'{name} is no bidirectional language model. Embeddings of texts require model.name="bert".')


@nnx.jit
def _embed(model: Any, tokens: Int[Array, "b t"], lengths: Int[Array, "b"]) -> Float[Array, "b d"]:
    x = mean_pool(model.hidden(tokens, lengths)[0].astype(jnp.float32), lengths)
    return x * jax.lax.rsqrt(jnp.square(x).sum(axis=1, keepdims=True))
