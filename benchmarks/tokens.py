"""Texts to a set of tokens, whole: how fast, by so many processes.

    python benchmarks/tokens.py [--megabytes=300] [--workers=0,2] [--rounds=2]

The bundled novels, over and over, one document a chapter, as one .jsonl; BPE of 8,192 tokens, trained on them before.
Reading, cutting, tokenizing, sums, shards and joining them are in the time, and so is the start of the processes. Sets
must be the same, byte by byte. 0 or 1 worker: this process alone, by the threads of the tokenizers library.
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


def write(folder: Path, megabytes: float) -> int:
    """Texts, and a tokenizer for them; returns bytes of text."""
    novels = list(documents.find("bundled:austen", "train"))
    (folder / FILE).write_text(train_bpe(novels, 8192).json(), encoding="utf-8")
    size, number = 0, 0
    with (folder / "train.jsonl").open("w") as file:
        while size < megabytes * 1e6:
            told = f"{number}: {novels[number % len(novels)]}"  # no two documents are the same
            file.write(json.dumps({"text": told}) + "\n")
            size, number = size + len(told.encode()), number + 1
    return size


def seconds(folder: Path, workers: int, place: Path) -> tuple[float, dict[str, bytes]]:
    """Of making the set, and its files."""
    begun = time.perf_counter()
    how = {"tokenizer": str(folder / FILE), "train_split": "train", "dir": str(place), "workers": workers}
    made = open_corpus(f"text:{folder}", "train", **how)
    return time.perf_counter() - begun, {path.name: path.read_bytes() for path in made.folder.iterdir()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=float, default=300)
    parser.add_argument("--workers", default="0,2")
    parser.add_argument("--rounds", type=int, default=2)
    options = parser.parse_args()
    numbers = [int(word) for word in options.workers.split(",")]
    took: dict[int, list[float]] = {number: [] for number in numbers}
    with tempfile.TemporaryDirectory() as root:
        size, first = write(folder := Path(root), options.megabytes), None
        for turn, number in itertools.product(range(options.rounds), numbers):
            spent, files = seconds(folder, number, folder / f"{turn}-{number}")
            if files != (first := first or files):
                raise SystemExit(f"{number} workers make another set.")
            took[number].append(spent)
    timing.show(
        [
            {"workers": n, "MB": round(size / 1e6, 1), "s": round(min(s), 2), "MB/s": round(size / 1e6 / min(s), 2)}
            for n, s in took.items()
        ]
    )


if __name__ == "__main__":
    main()
