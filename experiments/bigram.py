"""What a language model must beat: a bigram model of the same tokens, on the same split.

    python -m experiments.bigram [--config=configs/quickstart_gpt.py] [--config.data.tokenizer=bpe:1024]

p(b | a) = (n(a, b) + k p(b)) / (n(a) + k), p(b) = (n(b) + 1) / (N + V), counted on the training split. k is the best of
powers of two on the evaluation split itself, so the bigram model is flattered, and what beats it does so honestly.
"""

import math

import numpy as np

from leanformer import cli
from leanformer.data.text import Corpus, open_corpus


def nats(train: np.ndarray, test: np.ndarray, vocabulary: int, k: float) -> float:
    """Nats of all tokens of a text, each after the one before it; the first is not counted."""
    single = (np.bincount(train, minlength=vocabulary) + 1) / (len(train) + vocabulary)
    pairs = np.bincount(train[:-1] * vocabulary + train[1:], minlength=vocabulary**2)
    before = np.bincount(train[:-1], minlength=vocabulary)
    seen = pairs[test[:-1] * vocabulary + test[1:]] + k * single[test[1:]]
    return float(-np.log(seen / (before[test[:-1]] + k)).sum())


def tokens(corpus: Corpus) -> np.ndarray:
    """All of them, int64, the end of a document in front."""
    return corpus[slice(-1, len(corpus))].astype(np.int64)


@cli.command(cli.CONFIG)
def main(f: cli.Values) -> None:
    d, splits = f.config.data, {}
    about = {name: d[name] for name in ("separator", "documents", "dir", "tokenizer", "train_split")}
    for split in (d.train_split, d.eval_split):
        splits[split] = open_corpus(d.name, split, **about)
    corpus = splits[d.eval_split]
    vocabulary, test = corpus.tokenizer.vocabulary, tokens(corpus)
    train = tokens(splits[d.train_split])
    result = {k: nats(train, test, vocabulary, k) for k in (2.0**i for i in range(13))}
    k = min(result, key=result.get)
    ends = corpus.tokenizer.end
    text = sum(len(part.encode()) for part in _texts(corpus, test[1:], ends))
    print(
        f"{d.name}, {d.tokenizer}: {len(train) - 1:,} tokens to count, {len(test) - 1:,} to tell, {vocabulary:,} kinds"
    )
    print(
        f"k = {k:g}: {result[k] / (len(test) - 1):.3f} nats a token, {result[k] / text / math.log(2):.3f} bits a byte"
    )


def _texts(corpus: Corpus, found: np.ndarray, end: int) -> list[str]:
    return [corpus.tokenizer.decode(part[part != end]) for part in np.split(found, np.flatnonzero(found == end) + 1)]


if __name__ == "__main__":
    cli.run(main)
