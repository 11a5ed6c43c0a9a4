"""Memory-mapped tokens of texts, computed once per combination of documents and tokenizer."""

import dataclasses
import functools
import hashlib
import itertools
import json
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from leanformer.data.loader import count_cores, map_ordered
from leanformer.data.source import make_dataset, read_record
from leanformer.data.text.documents import Documents, Split, find
from leanformer.data.text.tokenizer import FILE, Tokenizer, byte_tokenizer, parse, read, train_bpe, train_wordpiece
from leanformer.errors import DataError


VERSION = 3  # version of tokens and vocabularies, part of their folders' names: another version is made beside them
CACHE = "~/.cache/leanformer/texts"
PIECE_BYTES = 1 << 23  # of text tokenised at a time: some seconds on one core, and megabytes of tokens
PIECES_PER_WORKER = 16  # minimum: minutes of work, for seconds to start it
DOCUMENTS_PER_CALL = 256  # of the tokenizer
TOKENS, ENDS = "tokens.bin", "ends.npy"
TRAINED = {"bpe": train_bpe, "wordpiece": train_wordpiece}


def dtype(vocabulary: int) -> type[np.unsignedinteger]:
    """Return the integer type of tokens on disk."""
    return np.uint16 if vocabulary <= 1 << 16 else np.uint32


@dataclasses.dataclass(frozen=True)
class Corpus:
    """Memory-mapped tokens of one split of a text, with the end token after each document.

    `corpus[start:stop]` is an int32 array; indices count from the split's first token. With start = -1 it begins with
    the end token, the input of the first token. The slice must have both ends.
    """

    folder: Path  # of the token dataset, which may contain other splits
    name: str  # of text and split, for messages
    tokenizer_json: str = dataclasses.field(repr=False)
    first: int  # index of the split's first token in the dataset
    last: int  # index after the split's last token

    @functools.cached_property
    def tokenizer(self) -> Tokenizer:
        return parse(self.tokenizer_json)

    @functools.cached_property
    def _mapped_tokens(self) -> np.ndarray:
        return np.memmap(self.folder / TOKENS, dtype(self.tokenizer.vocabulary), "r")

    @functools.cached_property
    def ends(self) -> np.ndarray:
        """Index after the end token of each document, int64; the last is the end of the split, maybe inside one."""
        every = np.load(self.folder / ENDS) - self.first
        inside = every[(every > 0) & (every < len(self))]
        return np.append(inside, len(self))

    def __len__(self) -> int:
        return self.last - self.first

    def __getitem__(self, places: slice) -> np.ndarray:
        start, stop = places.start, min(places.stop, len(self))
        values = self._mapped_tokens[self.first + max(start, 0) : self.first + stop].astype(np.int32)
        return np.concatenate([[np.int32(self.tokenizer.end)], values]) if start < 0 else values

    def __getstate__(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}  # workers open files again


def open_corpus(
    name: str,
    split: str,
    *,
    tokenizer: str,
    train_split: str,
    separator: str | None = None,
    documents: int = 0,
    dir: str | None = None,
    workers: int = 0,
) -> Corpus:
    """Return the tokens of a split. If they are not on disk, tokenise the text, and train the tokenizer if it must be.

    `name`, `separator` and `documents` are as in `documents.find`. The split may be a part, such as `all[:90%]`. The
    tokenizer is "bytes", "bpe:<vocabulary>" or "wordpiece:<vocabulary>", trained on all files of `train_split`, or a
    path. Tokens and tokenizers are saved in `dir`, by default CACHE; they do not depend on `workers`.
    """
    folder = Path(dir or CACHE).expanduser()
    part = Split.of(split)
    options: dict[str, Any] = {"separator": separator, "most": documents}
    texts = find(name, part.stem, **options)
    chosen = make_tokenizer(tokenizer, find(name, Split.of(train_split).stem, **options), folder)
    recipe = texts.identity() | {"tokenizer": hashlib.sha256(chosen.json().encode()).hexdigest(), "version": VERSION}
    workers = min(workers, count_cores(), texts.size // (PIECES_PER_WORKER * PIECE_BYTES))
    fill = functools.partial(_write, texts, chosen, workers if workers > 1 else 0)
    place = make_dataset(folder / f"tokens-{_digest(recipe)}", recipe, fill)
    record = read_record(place, recipe)
    plain = not documents and all(".txt" in file.suffixes for file in texts.files)
    if texts.separator and plain and record["documents"] <= len(texts.files):
        warnings.warn(
            f"data.separator={texts.separator!r} splits none of the {len(texts.files)} files of {name}, {split}: each "
            "is one document. In a shell, a line break is written $'\\n'.",
            stacklevel=2,
        )
    first, last = (record["tokens"] * share // 100 for share in (part.start, part.stop))
    if first == last:
        raise DataError(f'data.name="{name}", split "{split}": no tokens left of {record["tokens"]:,}.')
    return Corpus(place, f"{name}, {split}", chosen.json(), first, last)


def make_tokenizer(words: str, texts: Any, folder: Path) -> Tokenizer:
    """Return the tokenizer of a `data.tokenizer`; one that is not in `folder` is trained on `texts`, and saved."""
    kind, _, size = words.partition(":")
    if words == "bytes":
        return byte_tokenizer()
    if kind not in TRAINED:
        return read(Path(words).expanduser())
    recipe = texts.identity() | {"vocabulary": int(size), "version": VERSION}
    fill = functools.partial(_train, TRAINED[kind], texts, int(size))
    return read(make_dataset(folder / f"{kind}-{_digest(recipe)}", recipe, fill) / FILE)


def _digest(recipe: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(recipe, sort_keys=True).encode()).hexdigest()[:16]


def _train(train: Callable[..., Tokenizer], texts: Iterable[str], vocabulary: int, folder: Path) -> None:
    (folder / FILE).write_text(train(texts, vocabulary).json(), encoding="utf-8")


def _write(texts: Documents, chosen: Tokenizer, workers: int, folder: Path) -> dict[str, int]:
    """Write the tokens of all documents, with end tokens, and the ends of documents; return their counts."""
    encode = functools.partial(_encode, chosen.json() if workers else chosen)
    counts, size = [np.zeros(0, np.int64)], 0
    with (folder / TOKENS).open("wb") as file:
        for piece, lengths, read in map_ordered(encode, _pieces(texts), workers):
            file.write(piece.tobytes())
            counts.append(lengths)
            size += read
    ends = np.cumsum(np.concatenate(counts), dtype=np.int64)
    np.save(folder / ENDS, ends)
    return {"documents": len(ends), "tokens": int(ends[-1]), "bytes": size}


def _pieces(documents: Iterable[str]) -> Iterator[list[str]]:
    """Yield groups of documents with at least PIECE_BYTES bytes; the last may have fewer."""
    piece, size = [], 0
    for text in documents:
        piece.append(text)
        size += len(text.encode())
        if size >= PIECE_BYTES:
            yield piece
            piece, size = [], 0
    if piece:
        yield piece


def _encode(chosen: Tokenizer | str, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray, int]:
    """Return the tokens of documents with end tokens, tokens per document, and bytes; workers pass JSON as `chosen`."""
    chosen = _parse_cached(chosen) if isinstance(chosen, str) else chosen
    arrays, kind = [], dtype(chosen.vocabulary)
    for batch in itertools.batched(texts, DOCUMENTS_PER_CALL):
        arrays += [np.append(numbers, chosen.end).astype(kind) for numbers in chosen.encode(batch)]
    lengths = np.array([len(numbers) for numbers in arrays], np.int64)
    return np.concatenate(arrays), lengths, sum(len(text.encode()) for text in texts)


_parse_cached = functools.lru_cache(maxsize=1)(parse)
