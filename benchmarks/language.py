"""Language at full size on a CPU, in float32: training steps, the memory of the loss, and tokenizers.

    python benchmarks/language.py [--python=/path/to/python] [--rounds=5] [--only=NAME,...]
        [--batch=N] [--unroll=N] [--tiny] [--json]

Steps of GPT-2 on TinyStories and of Crammed BERT (Tables 2 and 1 of Leaner Transformers), 1,024 tokens each, as shares
of the machine's matrix-product rate. Where `--python` names an environment with torch and transformers, the same models
under PyTorch eager step in turn with them (benchmarks/peers_huggingface.py says what is put in place to make them the
same, and numbers of parameters must agree). Products, our step and the peer's come in turn, so that all see the same
machine, whatever else it does: shares are of the least of the rounds, by wall clock and by the CPU's; `faster` is the
peer's seconds by ours of the same round, the median, the least and the most, then of the least of all, wall and CPU's.

Memory is of the loss with its gradient alone, compiled for the batch of the config (128 rows at a time of Crammed
BERT): with all logits by plain softmax, by our loss in one piece, and in the pieces of `logits_at_once`.

Tokenizers are trained on the bundled novels, and read them: the best of the rounds.
"""

import argparse
import functools
import json
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import timing

from leanformer import config
from leanformer.costs import count
from leanformer.data.text import documents, tokenizer
from leanformer.data.text.masking import told
from leanformer.runtime import malloc
from leanformer.tasks.vocabulary import cross_entropy


HERE = Path(__file__).parent
NEEDED = ("torch", "transformers")
PEER = "transformers"
BATCHES = {  # of 1,024 tokens
    "gpt2_tinystories_12x12": 16,
    "gpt2_tinystories_4x16": 16,
    "bert_crammed_16x12": 8,
    "bert_crammed_10x24": 8,
}
AT_ONCE = 128  # rows of Crammed BERT, whose batch is accumulated
TOKENIZERS = ("bytes", "bpe:512", "bpe:8192", "wordpiece:1024", "wordpiece:8192")
TINY = {"vocabulary": 101, "max_length": 12, "width": 12, "depth": 2, "num_heads": 3, "head_dim": 4, "mlp_dim": 24}


def steps(name: str, options: argparse.Namespace) -> tuple[dict[str, Any], list[str]]:
    """The row of one config, and the versions of both sides. Raises ConfigError where the two are not the same."""
    ours = timing.ours(HERE / "language.py", name, options)
    row = {"config": name, "batch": ours.about["peer"]["batch"], "parameters": ours.about["parameters"]}
    if options.python is None:
        for _ in range(options.rounds):
            ours.step()
        return row | json.loads(ours.close()), [ours.about["versions"]]
    peer = timing.Worker(options.python, str(HERE / "peers_huggingface.py"), json.dumps(ours.about["peer"]))
    pair = timing.Pair(PEER, ours, peer)
    pair.check(name)
    beside = pair.step(options.rounds)
    row |= json.loads(ours.close())
    beside["by CPU s"] = round(json.loads(peer.close())["CPU s"] / row["CPU s"], 2)
    return row | beside, [ours.about["versions"], peer.about["versions"]]


def work(name: str, *, batch: int | None, tiny: bool, **model: Any) -> None:
    """Our side: what peers_huggingface.py is of the other; the shares when no more is asked for."""
    malloc.keep_freed()  # as every command does
    batch = batch or (2 if tiny else BATCHES[name])
    member, rate = timing.Member(name, batch, **(TINY if tiny else {}), **model), timing.Rate()
    c = member.run.config
    for _ in range(2):  # which warm up
        member.train()
    member.least = timing.Least()
    number = told(c.mask_share, c.model.max_length) if c.task == "masked" else 0
    peer = {"model": c.model.to_dict(), "batch": batch, "told": number, "clip_norm": c.optim.clip_norm}
    parameters = count.parameters(member.run.state.params)
    print(json.dumps({"versions": f"jax {jax.__version__}", "parameters": parameters, "peer": peer}), flush=True)
    for _ in sys.stdin:
        rate.measure()
        print(json.dumps(timing.seconds(member.train)), flush=True)
    if member.least.wall == float("inf"):
        return  # nobody asked: the two are not the same
    found = rate.found()
    wall, cpu = member.shares(*found)
    row = {"tokens/s": round(batch * c.model.max_length / member.least.wall, 1)}
    row |= {"rate GFLOP/s": round(found[0] / 1e9, 1), "share": round(wall, 3)}
    row |= {"CPU s": round(member.least.cpu, 4), "CPU share": round(cpu, 3)}
    print(json.dumps(row))


def plain(x: jax.Array, kernel: jax.Array, bias: jax.Array | None, targets: jax.Array) -> jax.Array:
    """Cross-entropy, of all logits at once."""
    logits = jnp.einsum("btd,dv->btv", x, kernel)
    logits = jax.nn.log_softmax(logits if bias is None else logits + bias[None, None])
    return -jnp.sum(jnp.take_along_axis(logits, targets[..., None], axis=-1))


def memory(name: str, *, tiny: bool) -> dict[str, Any]:
    """Bytes of workspace of the loss with its gradient, arguments and results left out."""
    c = config.load(name)
    m = c.model.to_dict() | (TINY if tiny else {})
    rows = 2 if tiny else min(c.batch_size, AT_ONCE)
    tokens = told(c.mask_share, m["max_length"]) if c.task == "masked" else m["max_length"]
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
    """How fast a tokenizer reads the texts, by all cores."""
    kind, _, size = words.partition(":")
    makes = {"bytes": tokenizer.of_bytes}
    makes |= {
        name: lambda make=make: make(texts, int(size))
        for name, make in (("bpe", tokenizer.train_bpe), ("wordpiece", tokenizer.train_wordpiece))
    }
    begun = time.perf_counter()
    made = makes[kind]()
    trained, least = time.perf_counter() - begun, timing.Least()
    for _ in range(rounds):
        found = least.of(made.encode, texts)
    size_of, tokens = sum(len(text.encode()) for text in texts), sum(map(len, found))
    return {
        "tokenizer": words,
        "trained s": round(trained, 2) if size else None,
        "MB": round(size_of / 1e6, 2),
        "bytes a token": round(size_of / tokens, 2),
        "MB/s": round(size_of / 1e6 / least.wall, 2),
        "MB a CPU second": round(size_of / 1e6 / least.cpu, 2),
    }


def measure(names: list[str], options: argparse.Namespace) -> None:
    if options.python:
        timing.check_python(options.python, NEEDED)
    found = [steps(name, options) for name in names]
    texts = list(documents.find("bundled:austen", "train"))[: 1 if options.tiny else None]
    tables = {
        "steps": [row for row, _ in found],
        "loss": [memory(name, tiny=options.tiny) for name in names],
        "tokenizers": [tokenized(words, texts, options.rounds) for words in TOKENIZERS[: 2 if options.tiny else None]],
    }
    versions = found[0][1]
    if options.json:
        print(json.dumps({"versions": versions} | tables))
        return
    for rows in tables.values():
        timing.show(rows)
        print()
    print(f"{' beside '.join(versions)}{', eager' * bool(options.python)}; {options.rounds} rounds.")
    if not options.python:
        print(f"No peer: --python=/path/to/python of an environment with them (`pip install {' '.join(NEEDED)}`).")


if __name__ == "__main__":
    timing.main(__doc__, [*BATCHES], work, measure)
