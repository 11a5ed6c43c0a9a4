"""Memory of the language models' loss, and speed of tokenizers, on a CPU.

    python benchmarks/language.py [--rounds=5] [--tiny] [--json]

Memory is of the loss with its gradient alone, in float32, for the batch of the config (128 rows at a time of Crammed
BERT): with all logits by plain softmax, by our loss in one piece, and in the pieces of `logits_at_once`. Tokenizers are
trained on the bundled novels, and read them: the best of the rounds. Training steps: benchmarks/peers.py.
"""

import argparse
import functools
import time
from typing import Any

import jax
import jax.numpy as jnp
import timing

from leanformer import config
from leanformer.data.text import documents, tokenizer
from leanformer.data.text.masking import num_masked
from leanformer.tasks.chunked_cross_entropy import cross_entropy


CONFIGS = ("gpt2_tinystories_12x12", "gpt2_tinystories_4x16", "bert_crammed_16x12", "bert_crammed_10x24")
AT_ONCE = 128  # rows of Crammed BERT, whose batch is accumulated
TOKENIZERS = ("bytes", "bpe:512", "bpe:8192", "wordpiece:1024", "wordpiece:8192")
TINY = {"vocabulary": 101, "max_length": 12, "width": 12, "depth": 2, "num_heads": 3, "head_dim": 4, "mlp_dim": 24}


def plain(x: jax.Array, kernel: jax.Array, bias: jax.Array | None, targets: jax.Array) -> jax.Array:
    """Return the cross-entropy of all logits at once."""
    logits = jnp.einsum("btd,dv->btv", x, kernel)
    logits = jax.nn.log_softmax(logits if bias is None else logits + bias[None, None])
    return -jnp.sum(jnp.take_along_axis(logits, targets[..., None], axis=-1))


def memory(name: str, *, tiny: bool) -> dict[str, Any]:
    """Return the workspace of the loss with its gradient, without arguments and results."""
    c = config.load(name)
    m = c.model.to_dict() | (TINY if tiny else {})
    rows = 2 if tiny else min(c.batch_size, AT_ONCE)
    tokens = num_masked(c.mask_share, m["max_length"]) if c.task == "masked" else m["max_length"]
    at_once = rows * m["vocabulary"] if tiny else c.logits_at_once
    width, vocabulary = m["width"], m["vocabulary"]
    x, kernel = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((rows, tokens, width), (width, vocabulary)))
    bias = jax.ShapeDtypeStruct((vocabulary,), jnp.float32) if m.get("head_bias") else None
    targets = jax.ShapeDtypeStruct((rows, tokens), jnp.int32)
    losses = {
        "plain": plain,
        "one piece": functools.partial(cross_entropy, at_once=rows * tokens * vocabulary),
        "pieces": functools.partial(cross_entropy, at_once=at_once),
    }
    row = {"config": name, "rows": rows, "tokens": tokens, "logits MB": _megabytes(4 * rows * tokens * vocabulary)}
    for kind, loss in losses.items():
        by = (0, 1) if bias is None else (0, 1, 2)
        compiled = jax.jit(jax.value_and_grad(loss, argnums=by)).lower(x, kernel, bias, targets).compile()
        row[f"{kind} MB"] = _megabytes(compiled.memory_analysis().temp_size_in_bytes)
    return row


def _megabytes(size: int) -> float:
    return float(f"{size / 1e6:.4g}")


def tokenized(words: str, texts: list[str], rounds: int) -> dict[str, Any]:
    """Return how fast a tokenizer reads the texts, with all cores."""
    kind, _, size = words.partition(":")
    makes = {"bytes": tokenizer.byte_tokenizer}
    makes |= {
        name: lambda make=make: make(texts, int(size))
        for name, make in (("bpe", tokenizer.train_bpe), ("wordpiece", tokenizer.train_wordpiece))
    }
    begun = time.perf_counter()
    made = makes[kind]()
    trained, least = time.perf_counter() - begun, timing.Least()
    for _ in range(rounds):
        result = least.of(made.encode, texts)
    size_of, tokens = sum(len(text.encode()) for text in texts), sum(map(len, result))
    return {
        "tokenizer": words,
        "trained s": round(trained, 2) if size else None,
        "MB": round(size_of / 1e6, 2),
        "bytes/token": round(size_of / tokens, 2),
        "MB/s": round(size_of / 1e6 / least.wall, 2),
        "MB/CPU s": round(size_of / 1e6 / least.cpu, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tiny", action="store_true", help="small shapes and one novel")
    parser.add_argument("--json", action="store_true")
    f = parser.parse_args()
    timing.show([memory(name, tiny=f.tiny) for name in CONFIGS], as_json=f.json)
    texts = list(documents.find("bundled:austen", "train"))[: 1 if f.tiny else None]
    rows = [tokenized(words, texts, f.rounds) for words in TOKENIZERS[: 2 if f.tiny else None]]
    timing.show(rows, as_json=f.json)


if __name__ == "__main__":
    main()
