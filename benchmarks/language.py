"""Memory of the language models' loss, and speed of tokenizers, on a CPU.

    python benchmarks/language.py [--rounds=5] [--tiny] [--json]

Memory is that of the loss and its gradient alone, in float32, for the batch size of the config (micro-batches of 128
rows for Crammed BERT): with all logits by plain softmax, by our loss in one piece, and by our loss in pieces of
`logits_at_once`. Tokenizers are trained on the bundled novels and encode them; the fastest round counts. Training steps
are measured by benchmarks/peers.py.
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
AT_ONCE = 128  # rows of a micro-batch of Crammed BERT
TOKENIZERS = ("bytes", "bpe:512", "bpe:8192", "wordpiece:1024", "wordpiece:8192")
TINY = {"vocabulary": 101, "max_length": 12, "width": 12, "depth": 2, "num_heads": 3, "head_dim": 4, "mlp_dim": 24}


def plain_loss(x: jax.Array, kernel: jax.Array, bias: jax.Array | None, targets: jax.Array) -> jax.Array:
    """Return the cross-entropy, computing all logits at once."""
    logits = jnp.einsum("btd,dv->btv", x, kernel)
    logits = jax.nn.log_softmax(logits if bias is None else logits + bias[None, None])
    return -jnp.sum(jnp.take_along_axis(logits, targets[..., None], axis=-1))


def measure_memory(name: str, *, tiny: bool) -> dict[str, Any]:
    """Return the workspace of the loss and its gradient, without arguments and results."""
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
        "plain": plain_loss,
        "one piece": functools.partial(cross_entropy, at_once=rows * tokens * vocabulary),
        "pieces": functools.partial(cross_entropy, at_once=at_once),
    }
    row = {"config": name, "rows": rows, "tokens": tokens, "logits MB": _megabytes(4 * rows * tokens * vocabulary)}
    for kind, loss in losses.items():
        argnums = (0, 1) if bias is None else (0, 1, 2)
        compiled = jax.jit(jax.value_and_grad(loss, argnums=argnums)).lower(x, kernel, bias, targets).compile()
        row[f"{kind} MB"] = _megabytes(compiled.memory_analysis().temp_size_in_bytes)
    return row


def _megabytes(size: int) -> float:
    return float(f"{size / 1e6:.4g}")


def measure_tokenizer(words: str, texts: list[str], rounds: int) -> dict[str, Any]:
    """Return the speed at which a tokenizer encodes the texts, on all cores."""
    kind, _, size = words.partition(":")
    makers = {"bytes": tokenizer.byte_tokenizer}
    makers |= {
        name: lambda make=make: make(texts, int(size))
        for name, make in (("bpe", tokenizer.train_bpe), ("wordpiece", tokenizer.train_wordpiece))
    }
    start = time.perf_counter()
    encoder = makers[kind]()
    train_s, fastest = time.perf_counter() - start, timing.MinTime()
    for _ in range(rounds):
        result = fastest.time(encoder.encode, texts)
    bytes_read, tokens = sum(len(text.encode()) for text in texts), sum(map(len, result))
    return {
        "tokenizer": words,
        "trained s": round(train_s, 2) if size else None,
        "MB": round(bytes_read / 1e6, 2),
        "bytes/token": round(bytes_read / tokens, 2),
        "MB/s": round(bytes_read / 1e6 / fastest.wall, 2),
        "MB/CPU s": round(bytes_read / 1e6 / fastest.cpu, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tiny", action="store_true", help="small shapes and one novel")
    parser.add_argument("--json", action="store_true")
    f = parser.parse_args()
    timing.show([measure_memory(name, tiny=f.tiny) for name in CONFIGS], as_json=f.json)
    texts = list(documents.find("bundled:austen", "train"))[: 1 if f.tiny else None]
    rows = [measure_tokenizer(words, texts, f.rounds) for words in TOKENIZERS[: 2 if f.tiny else None]]
    timing.show(rows, as_json=f.json)


if __name__ == "__main__":
    main()
