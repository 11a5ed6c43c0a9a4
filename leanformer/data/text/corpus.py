"""Tokens of texts in a memory map, made once and kept: which documents, by which tokenizer, in one folder each."""

import dataclasses
import functools
import hashlib
import itertools
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np

from leanformer.data import made, pool
from leanformer.data.text import tokenizer as tokens
from leanformer.data.text.documents import Documents, Split, find
from leanformer.data.text.tokenizer import Tokenizer
from leanformer.errors import DataError


VERSION = 1
KIND, VOCABULARY = "Tokens", "Vocabulary"  # of made sets
CACHE = "~/.cache/leanformer/texts"
PIECE = 1 << 23  # bytes of text that are tokenised at a time: some seconds' work of a core, and megabytes of tokens
LEAST = 16  # pieces of texts for each process: minutes of work for one that takes seconds to start
TOGETHER = 256  # documents that are handed to the tokenizer at a time
TOKENS, ENDS = "tokens.bin", "ends.npy"
TRAINED = {tokens.BPE: tokens.train_bpe, tokens.WORDPIECE: tokens.train_wordpiece}


def dtype(vocabulary: int) -> type[np.unsignedinteger]:
    """Return the type of tokens on disk."""
    return np.uint16 if vocabulary <= 1 << 16 else np.uint32


@dataclasses.dataclass(frozen=True)
class Corpus:
    """The tokens of a split.

    Attributes:
        folder: of the set.
        name: of the split, for messages.
        tokenizer_json: what made them.
        first, last: of the set's tokens, those of this split.
    """

    folder: Path
    name: str
    tokenizer_json: str = dataclasses.field(repr=False)
    first: int
    last: int

    @functools.cached_property
    def tokenizer(self) -> Tokenizer:
        return tokens.parse(self.tokenizer_json, self.name)

    @functools.cached_property
    def _map(self) -> np.ndarray:
        return np.memmap(self.folder / TOKENS, dtype(self.tokenizer.vocabulary), "r")

    @functools.cached_property
    def ends(self) -> np.ndarray:
        """One past the last token of each document, the end token included, int64; the split's end is the last."""
        every = np.load(self.folder / ENDS) - self.first
        inside = every[(every > 0) & (every < len(self))]
        return np.append(inside, len(self))

    def __len__(self) -> int:
        return self.last - self.first

    def __getitem__(self, places: slice) -> np.ndarray:
        """Tokens from `start` to `stop`, int32; the one before the first is the end of a document."""
        start, stop = places.start, min(places.stop, len(self))
        found = self._map[self.first + max(start, 0) : self.first + stop].astype(np.int32)
        return np.concatenate([[np.int32(self.tokenizer.end)], found]) if start < 0 else found

    def __getstate__(self) -> dict[str, Any]:
        """Without what is opened: worker processes open it for themselves."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}


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
    """The tokens of a split, which are made first where nobody has.

    Args:
        name: of `documents.KINDS`.
        split: see `documents.find`; with a part of its tokens, such as `all[:90%]`.
        tokenizer: "bytes"; "bpe:<vocabulary>" or "wordpiece:<vocabulary>", trained on all files of `train_split`; or a
            path, see `tokenizer.read`.
        separator: between the documents of a .txt.
        documents: that are taken of a split; 0 for all.
        dir: where sets of tokens are; CACHE if None.
        workers: processes that make one, where cores and texts are enough for them; they change nothing in it.

    Raises:
        ConfigError: a name of no known kind.
        DataError: texts or tokenizer are not there, not whole or empty, or the set cannot be written.
    """
    folder = Path(dir or CACHE).expanduser()
    part, how = Split.of(split), {"separator": separator, "most": documents}
    texts = find(name, part.stem, **how)
    chosen = tokenizer_of(tokenizer, find(name, Split.of(train_split).stem, **how), folder)
    recipe = texts.identity() | {"tokenizer": hashlib.sha256(chosen.json().encode()).hexdigest()}
    target = folder / f"tokens-{_digest(recipe)}"
    workers = min(workers, pool.cores(), texts.size // (LEAST * PIECE))
    fill = functools.partial(_write, texts, chosen, workers if workers > 1 else 0)
    place = made.make(target, KIND, VERSION, recipe, fill)
    record = made.read(place, KIND, VERSION, recipe)
    size = (place / TOKENS).stat().st_size // np.dtype(dtype(chosen.vocabulary)).itemsize
    if size != record["tokens"]:
        raise DataError(
            f"{place / TOKENS} has {size:,} tokens of {record['tokens']:,}. Remove {place} to make it again."
        )
    first, last = (record["tokens"] * share // 100 for share in (part.start, part.stop))
    if first == last:
        raise DataError(f'data.name="{name}", split "{split}": of {record["tokens"]:,} tokens none are left.')
    return Corpus(place, f"{name}, {split}", chosen.json(), first, last)


@runtime_checkable
class Texts(Protocol):
    """What a tokenizer can be trained on."""

    def __iter__(self) -> Iterator[str]: ...

    def identity(self) -> dict[str, Any]:
        """What changes when the texts do."""


def tokenizer_of(words: str, texts: Texts, folder: Path) -> Tokenizer:
    """The tokenizer of `data.tokenizer`, as of `open_corpus`; one that is trained on the texts is kept in `folder`.

    Raises:
        DataError: it is not there, not whole, or cannot be trained on these texts.
    """
    kind, _, size = words.partition(":")
    if words == tokens.BYTES:
        return tokens.of_bytes()
    if kind not in TRAINED:
        return tokens.read(Path(words).expanduser())
    if not size.isdecimal():
        raise DataError(f'data.tokenizer="{words}": wanted {kind}:<vocabulary>, such as {kind}:1024.')
    recipe = texts.identity() | {"vocabulary": int(size)}
    fill = functools.partial(_train, TRAINED[kind], texts, int(size))
    place = made.make(folder / f"{kind}-{_digest(recipe)}", VOCABULARY, VERSION, recipe, fill)
    return tokens.read(place / tokens.FILE)


def _digest(recipe: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(recipe, sort_keys=True).encode()).hexdigest()[:16]


def _train(train: Callable[..., Tokenizer], texts: Texts, vocabulary: int, folder: Path) -> dict[str, Any]:
    found = train(iter(texts), vocabulary)
    (folder / tokens.FILE).write_text(found.json(), encoding="utf-8")
    return {}


def _write(texts: Documents, chosen: Tokenizer, workers: int, folder: Path) -> dict[str, int]:
    """Write each document's tokens with the token of its end, and where documents end; return how many there are."""
    encode = functools.partial(_encode, chosen.json() if workers else chosen)
    counts, size = [np.zeros(0, np.int64)], 0
    with (folder / TOKENS).open("wb") as file:
        for found, lengths, read in pool.ordered(encode, _pieces(texts), workers):
            file.write(found.tobytes())
            counts.append(lengths)
            size += read
    ends = np.cumsum(np.concatenate(counts), dtype=np.int64)
    if not len(ends):
        raise DataError(f"{texts.name} holds no text at all: {', '.join(map(os.fspath, texts.files[:3]))} ...")
    np.save(folder / ENDS, ends)
    return {"documents": len(ends), "tokens": int(ends[-1]), "bytes": size}


def _pieces(documents: Iterable[str]) -> Iterator[list[str]]:
    """Documents in runs of at least PIECE bytes; the last may have fewer."""
    found, size = [], 0
    for text in documents:
        found.append(text)
        size += len(text.encode())
        if size >= PIECE:
            yield found
            found, size = [], 0
    if found:
        yield found


def _encode(chosen: Tokenizer | str, texts: Sequence[str]) -> tuple[np.ndarray, np.ndarray, int]:
    """Tokens with those of the ends; how many each document has; bytes of text. In a worker `chosen` is JSON."""
    chosen = _parsed(chosen) if isinstance(chosen, str) else chosen
    found, kind = [], dtype(chosen.vocabulary)
    for some in itertools.batched(texts, TOGETHER):
        found += [np.append(numbers, chosen.end).astype(kind) for numbers in chosen.encode(some)]
    lengths = np.array([len(numbers) for numbers in found], np.int64)
    return np.concatenate(found), lengths, sum(len(text.encode()) for text in texts)


_parsed = functools.lru_cache(maxsize=1)(functools.partial(tokens.parse, name="the tokenizer"))
