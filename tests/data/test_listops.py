"""ListOps: distribution against exact probabilities, re-evaluated answers, dataset files, and published files."""

import dataclasses
import hashlib
import itertools
import pickle
import statistics

import numpy as np
import pytest
from messages import refuses

from leanformer.data.sequences import listops
from leanformer.data.sequences.listops import DRAWS, ListOps, Published, Recipe, sample, write
from leanformer.data.source import Source
from leanformer.errors import DataError


SHORT = Recipe(train=211, val=31, test=29, min_length=100, max_length=200, seed=3)
WORDS = ["PAD", *"0123456789", "[MIN", "[MAX", "[MED", "[SM", "]"]  # written out, not taken from the module
# Shares of the labels 0 to 9 in 289,503 trees from a recursive sampler that follows the published one.
LABEL_SHARES = (0.1685, 0.0913, 0.0764, 0.0841, 0.0889, 0.0859, 0.0768, 0.0721, 0.0875, 0.1684)


def evaluate(words: list[str]) -> int:
    """Return the value of an expression, using a stack of open operators."""
    operators = {"[MIN": min, "[MAX": max, "[MED": lambda x: int(statistics.median(x)), "[SM": lambda x: sum(x) % 10}
    stack = [(None, [])]
    for word in words:
        if word in operators:
            stack.append((operators[word], []))
        elif word == "]":
            operator, values = stack.pop()
            stack[-1][1].append(operator(values))
        else:
            stack[-1][1].append(int(word))
    ((_, (value,)),) = stack  # no open operator, and one value
    return value


def compute_length_probabilities(depth: int, max_args: int, limit: int) -> np.ndarray:
    """Return the exact P(length = n) for n < limit: an operator's length is 2 plus the lengths of its arguments."""
    below = np.eye(1, limit, 1)[0]
    for _ in range(depth - 1):
        sums, total = below, np.zeros(limit)
        for _ in range(2, max_args + 1):
            sums = np.convolve(sums, below)[:limit]
            total[2:] += sums[:-2] / (max_args - 1)
        below = 0.75 * np.eye(1, limit, 1)[0] + 0.25 * total
    return below


def sample_texts(recipe: Recipe, blocks: int) -> tuple[list[list[str]], np.ndarray]:
    parts = [sample(recipe, block) for block in range(blocks)]
    texts = [
        [WORDS[token] for token in tokens[start:end].tolist()]
        for tokens, offsets, _ in parts
        for start, end in itertools.pairwise(offsets)
    ]
    return texts, np.concatenate([part.labels for part in parts])


def test_published_distribution():
    """Check lengths, draws per accepted expression and answers against the published distribution."""
    blocks, standard_errors = 4, 3.5
    texts, labels = sample_texts(Recipe(), blocks)
    assert [evaluate(text) for text in texts] == labels.tolist()
    exact = compute_length_probabilities(depth=10, max_args=10, limit=2000)
    exact[:501] = 0
    share, n = exact.sum(), np.arange(2000)
    mean = (n * exact).sum() / share
    deviation = np.sqrt((n**2 * exact).sum() / share - mean**2)
    lengths, draws = np.array([len(text) for text in texts]), blocks * DRAWS
    assert lengths.min() > 500 and lengths.max() < 2000
    assert abs(lengths.mean() - mean) < standard_errors * deviation / np.sqrt(len(texts))
    assert abs(len(texts) - draws * share) < standard_errors * np.sqrt(draws * share * (1 - share))
    below_median = (np.cumsum(exact) / share)[int(np.median(lengths))]
    assert abs(below_median - 0.5) < standard_errors * 0.5 / np.sqrt(len(texts))
    expected = np.array(LABEL_SHARES) / sum(LABEL_SHARES) * len(labels)
    chi_square = ((np.bincount(labels, minlength=10) - expected) ** 2 / expected).sum()
    assert chi_square < 27.9 * (1 + len(labels) / 289_503)  # 9 degrees of freedom, 0.1 %


def test_small_trees_have_exact_probabilities():
    """Depth 2, at most 3 arguments: 3/4 digits, 1/8 with two and 1/8 with three arguments, all symbols uniform."""
    texts, _ = sample_texts(Recipe(min_length=0, max_length=99, depth=2, max_args=3), blocks=5)
    assert len(texts) == 5 * DRAWS
    lengths = np.bincount([len(text) for text in texts], minlength=6)
    expected = np.array([3 / 4, 1 / 8, 1 / 8]) * len(texts)
    assert lengths.sum() == lengths[[1, 4, 5]].sum()
    assert ((lengths[[1, 4, 5]] - expected) ** 2 / expected).sum() < 13.8  # 2 degrees of freedom, 0.1 %
    words = [word for text in texts for word in text if word != "]"]
    for symbols, limit in ((WORDS[1:11], 27.9), (WORDS[11:15], 16.3)):  # 9 and 3 degrees of freedom, 0.1 %
        counts = np.array([words.count(symbol) for symbol in symbols])
        assert (((counts - counts.mean()) ** 2) / counts.mean()).sum() < limit


def test_expressions_of_a_seed_never_change():
    """If this digest changes, every dataset that users generate changes too: raise VERSION."""
    tokens, offsets, labels = sample(Recipe(), 0)
    assert (len(labels), int(offsets[-1])) == (338, 357062)
    digest = hashlib.sha256(tokens.tobytes() + offsets.astype("<i8").tobytes() + labels.tobytes()).hexdigest()
    assert digest[:16] == "469c438ba724018f"


def test_dataset_is_written_once_and_read(tmp_path, monkeypatch):
    folder = write(tmp_path / "new" / "set", SHORT)
    monkeypatch.setattr(listops, "sample", None)  # a second call samples nothing
    assert write(tmp_path / "new" / "set", SHORT) == folder
    assert [p.name for p in folder.parent.iterdir()] == ["set"]
    seen = set()
    for split, count in (("train", 211), ("val", 31), ("test", 29)):
        source = ListOps(folder, split)
        assert isinstance(source, Source) and len(source) == count
        assert source.num_classes == 10 and source.vocabulary == 16
        for example in source:
            tokens, label = example["tokens"], example["label"]
            assert tokens.dtype == np.int32 and tokens.ndim == 1 and 100 < len(tokens) < 200 and type(label) is int
            assert evaluate([WORDS[token] for token in tokens]) == label
            seen.add(tokens.tobytes())
    assert len(seen) == 211 + 31 + 29  # all different, within and across splits
    assert source.name(7) == f"{folder}, test, expression 7"
    np.testing.assert_array_equal(source[-1]["tokens"], source[28]["tokens"])
    packed = pickle.dumps(source)  # reopens its files
    assert len(packed) < 1000
    np.testing.assert_array_equal(pickle.loads(packed)[5]["tokens"], source[5]["tokens"])


def test_held_out_splits_do_not_depend_on_training_size(tmp_path):
    large, small = (write(tmp_path / str(n), dataclasses.replace(SHORT, train=n)) for n in (211, 17))
    for split, count in (("test", 29), ("val", 31), ("train", 17)):
        one, two = ListOps(large, split), ListOps(small, split)
        assert all(one[i]["tokens"].tobytes() == two[i]["tokens"].tobytes() for i in range(count))


HEADER = b"Source\tTarget\r\n"
GOOD = b"( ( ( ( [MAX 4 ) 3 ) ( ( ( [SM 7 ) 5 ) ] ) ) ] )\t4\r\n"


def test_published_files_are_read(tmp_path):
    (tmp_path / "basic_val.tsv").write_bytes(HEADER + GOOD + b"7\t7\n" + b"( ( ( [MED 9 ) 8 ) ] )\t8")
    source = Published(tmp_path, "val")
    assert isinstance(source, Source) and len(source) == 3 and source.num_classes == 10 and source.vocabulary == 16
    assert " ".join(WORDS[t] for t in source[0]["tokens"]) == "[MAX 4 3 [SM 7 5 ] ]"
    assert [example["label"] for example in source] == [4, 7, 8] and source[1]["tokens"].tolist() == [8]
    assert source.name(1) == f"{tmp_path}/basic_val.tsv, line 3"
    assert pickle.loads(pickle.dumps(source))[2]["tokens"].tolist() == [13, 10, 9, 15]


@pytest.mark.parametrize(
    ("line", "parts"),
    [
        (b"( ( [MAX 4 ) 3 ) ]\r\n", ("1 columns", 2)),
        (b"[MAX 4 12 ]\t4\r\n", ("'12'",)),
        (b"7\t10\r\n", ("'10'",)),
    ],
)
def test_malformed_line_is_refused(tmp_path, line, parts):
    (tmp_path / "basic_train.tsv").write_bytes(HEADER + GOOD + line + GOOD)
    with refuses("basic_train.tsv, line 3", *parts, error=DataError):
        Published(tmp_path, "train")
