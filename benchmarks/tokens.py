"""Speed of building a tokenized dataset from texts, by number of worker processes.

    python benchmarks/tokens.py [--megabytes=300] [--workers=0,2] [--rounds=2]

The texts are the bundled novels, repeated, one document per chapter, as one .jsonl. The tokenizer is BPE of 8,192
tokens, trained on them beforehand. The time includes reading, splitting, tokenizing, checksums, writing and joining
shards, and the start of the processes. All datasets must be the same, byte by byte. With 0 or 1 worker, only this
process works, with the threads of the tokenizers library.
"""

import argparse
import itertools
import json
import tempfile
import time
from pathlib import Path

import timing

from leanformer.data.text import documents, open_corpus
from leanformer.data.text.tokenizer import FILE, train_bpe


def write_texts(folder: Path, megabytes: float) -> int:
    """Write texts and a tokenizer for them, and return the bytes of text."""
    novels = list(documents.find("bundled:austen", "train"))
    (folder / FILE).write_text(train_bpe(novels, 8192).json(), encoding="utf-8")
    size, number = 0, 0
    with (folder / "train.jsonl").open("w") as file:
        while size < megabytes * 1e6:
            text = f"{number}: {novels[number % len(novels)]}"  # makes all documents different
            file.write(json.dumps({"text": text}) + "\n")
            size, number = size + len(text.encode()), number + 1
    return size


def build_dataset(folder: Path, workers: int, place: Path) -> tuple[float, dict[str, bytes]]:
    """Build the dataset in `place`, and return the seconds and its files by name."""
    start = time.perf_counter()
    arguments = {"tokenizer": str(folder / FILE), "train_split": "train", "dir": str(place), "workers": workers}
    corpus = open_corpus(f"text:{folder}", "train", **arguments)
    return time.perf_counter() - start, {path.name: path.read_bytes() for path in corpus.folder.iterdir()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=float, default=300)
    parser.add_argument("--workers", default="0,2")
    parser.add_argument("--rounds", type=int, default=2)
    options = parser.parse_args()
    numbers = [int(word) for word in options.workers.split(",")]
    times: dict[int, list[float]] = {number: [] for number in numbers}
    with tempfile.TemporaryDirectory() as root:
        size, first = write_texts(folder := Path(root), options.megabytes), None
        for round_number, number in itertools.product(range(options.rounds), numbers):
            elapsed, files = build_dataset(folder, number, folder / f"{round_number}-{number}")
            if files != (first := first or files):
                raise SystemExit(f"{number} workers build a different dataset.")
            times[number].append(elapsed)
    timing.show(
        [
            {"workers": n, "MB": round(size / 1e6, 1), "s": round(min(s), 2), "MB/s": round(size / 1e6 / min(s), 2)}
            for n, s in times.items()
        ]
    )


if __name__ == "__main__":
    main()
