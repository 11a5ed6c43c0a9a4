"""Bigram baseline for a language model: the same tokens, on the same split.

    python -m study.heads.bigram [--config=configs/quickstart_gpt.py] [--config.data.tokenizer=bpe:1024]

p(b | a) = (n(a, b) + k p(b)) / (n(a) + k), p(b) = (n(b) + 1) / (N + V), counted on the training split. k is the best
power of two on the evaluation split itself, which favours the bigram model, so a model that beats it is really better.
"""

import math

import numpy as np

from leanformer import cli
from leanformer.data.text.corpus import Corpus, open_corpus


def total_nats(train: np.ndarray, test: np.ndarray, vocabulary: int, k: float) -> float:
    """Return the total nats of a text's tokens, each given the token before it; the first token is not counted."""
    single = (np.bincount(train, minlength=vocabulary) + 1) / (len(train) + vocabulary)
    pairs = np.bincount(train[:-1] * vocabulary + train[1:], minlength=vocabulary**2)
    before = np.bincount(train[:-1], minlength=vocabulary)
    smoothed = pairs[test[:-1] * vocabulary + test[1:]] + k * single[test[1:]]
    return float(-np.log(smoothed / (before[test[:-1]] + k)).sum())


def load_tokens(corpus: Corpus) -> np.ndarray:
    """Return all tokens as int64, after an end-of-document token."""
    return corpus[slice(-1, len(corpus))].astype(np.int64)


@cli.command(cli.CONFIG)
def main(f: cli.Values) -> None:
    d, splits = f.config.data, {}
    arguments = {name: d[name] for name in ("separator", "documents", "dir", "tokenizer", "train_split")}
    for split in (d.train_split, d.eval_split):
        splits[split] = open_corpus(d.name, split, **arguments)
    corpus = splits[d.eval_split]
    vocabulary, test = corpus.tokenizer.vocabulary, load_tokens(corpus)
    train = load_tokens(splits[d.train_split])
    result = {k: total_nats(train, test, vocabulary, k) for k in (2.0**i for i in range(13))}
    k = min(result, key=result.get)
    end = corpus.tokenizer.end
    text_bytes = sum(len(part.encode()) for part in _decode_documents(corpus, test[1:], end))
    counts = f"{len(train) - 1:,} training tokens, {len(test) - 1:,} evaluation tokens, vocabulary of {vocabulary:,}"
    print(f"{d.name}, {d.tokenizer}: {counts}")
    print(
        f"k = {k:g}: {result[k] / (len(test) - 1):.3f} nats/token, {result[k] / text_bytes / math.log(2):.3f} bits/byte"
    )


def _decode_documents(corpus: Corpus, tokens: np.ndarray, end: int) -> list[str]:
    return [corpus.tokenizer.decode(part[part != end]) for part in np.split(tokens, np.flatnonzero(tokens == end) + 1)]


if __name__ == "__main__":
    cli.run(main)
