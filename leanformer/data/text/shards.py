"""Tokens of documents, shard by shard: by several processes, each shard there whole or not at all, in the order of the
documents.

Shards are kept in a hidden folder beside the set until all of them are there and joined: whoever is killed loses those
under way, and the next one goes on with the rest. Neither kills nor the number of processes change a byte of the set.
"""

import concurrent.futures
import functools
import hashlib
import itertools
import json
import multiprocessing
import os
import shutil
import signal
import sys
import threading
import uuid
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np

from leanformer.data.text import tokenizer as tokenizers
from leanformer.data.text.tokenizer import Tokenizer
from leanformer.errors import DataError


SHARD = 1 << 23  # bytes of text: some seconds' work of a core, and megabytes of tokens
TOGETHER = 256  # documents that are handed to the tokenizer at a time
TOKENS, ENDS = "tokens.bin", "ends.npy"
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
Texts = Sequence[str]


def dtype(vocabulary: int) -> type[np.unsignedinteger]:
    return np.uint16 if vocabulary <= 1 << 16 else np.uint32


def cut(documents: Iterable[str]) -> Iterator[list[str]]:
    """Documents in runs of at least SHARD bytes; the last may have fewer."""
    found, size = [], 0
    for text in documents:
        found.append(text)
        size += len(text.encode())
        if size >= SHARD:
            yield found
            found, size = [], 0
    if found:
        yield found


def write(documents: Iterable[str], chosen: Tokenizer, folder: Path, kept: Path, workers: int) -> dict[str, int]:
    """Writes each document's tokens with the token of its end, and where documents end, into `folder`.

    Args:
        kept: where shards are until the set is whole; those that are there are not made again. The caller removes it.
        workers: processes; in this one, by the tokenizer's own threads, for 0 and for texts of one shard.

    Returns:
        How many documents, tokens and bytes of text there are.

    Raises:
        DataError: a worker came to an end by itself, killed for its memory, say.
    """
    shards = cut(documents)
    first = list(itertools.islice(shards, 2))
    if len(first) < 2:
        made = [_encode(texts, chosen) for texts in first]
        return _join(folder, [(tokens.tobytes(), counts, size) for tokens, counts, size in made])
    kept.mkdir(exist_ok=True)
    names = []
    wanted = _missing(itertools.chain(first, shards), kept, names)
    try:
        for _ in _each(wanted, chosen, kept, workers):
            pass
    except concurrent.futures.BrokenExecutor as error:
        raise DataError(
            "A process that made tokens was ended from outside, for its memory perhaps. What it and others had made is "
            f"kept in {kept}. Run the same again to go on, with fewer data.workers."
        ) from error
    except DataError:  # of documents, which are others once they are mended
        forget(kept)
        raise
    return _join(folder, (_read(kept, name) for name in names))


def _missing(shards: Iterable[Texts], kept: Path, names: list[str]) -> Iterator[tuple[str, Texts]]:
    """Shards that are not there whole, by name; the names of all go to `names`."""
    there = 0
    for number, texts in enumerate(shards):
        digest = hashlib.blake2b(digest_size=8)
        for text in texts:
            digest.update(text.encode() + b"\0")
        names.append(f"{number:06d}-{digest.hexdigest()}")
        if _whole(kept, names[-1]):
            there += 1
        else:
            yield names[-1], texts
    if there:
        print(f"{there} of {len(names)} shards of tokens were there: went on from them.", file=sys.stderr, flush=True)


def _whole(kept: Path, name: str) -> bool:
    """Whether a shard is what was written; one that is not is said to be made again."""
    if not (kept / f"{name}.json").is_file():
        return False
    try:
        _read(kept, name)
    except (DataError, OSError, ValueError, LookupError):
        print(f"*** THE SHARD {kept / name} IS DAMAGED: it is made again.", file=sys.stderr, flush=True)
        return False
    return True


def _each(wanted: Iterable[tuple[str, Texts]], chosen: Tokenizer, kept: Path, workers: int) -> Iterator[None]:
    """Makes shards in so many processes, a few of them waiting."""
    if not workers:
        yield from (_save(kept, name, *_encode(texts, chosen)) for name, texts in wanted)
        return
    spawned = multiprocessing.get_context("spawn")  # not forked: this process has threads
    _put(kept / tokenizers.FILE, chosen.json().encode())
    pool = concurrent.futures.ProcessPoolExecutor(workers, mp_context=spawned, initializer=_begin)
    running: deque[concurrent.futures.Future[None]] = deque()
    try:
        for name, texts in wanted:
            running.append(pool.submit(_make, kept, name, texts))
            if len(running) > 2 * workers:
                yield running.popleft().result()
        while running:
            yield running.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)


def _begin() -> None:
    """A signal to stop is for the process that hands out work, with whose end its workers' comes; each of them is one
    core's work, so that the library has no threads of its own."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    multiprocessing.parent_process().join()
    os._exit(1)


def _make(kept: Path, name: str, texts: Texts) -> None:
    _save(kept, name, *_encode(texts, _tokenizer(kept / tokenizers.FILE)))


_tokenizer = functools.lru_cache(maxsize=1)(tokenizers.read)  # of a worker, which has one for all of its shards


def _encode(texts: Texts, chosen: Tokenizer) -> tuple[np.ndarray, np.ndarray, int]:
    """Tokens with those of the ends; how many each document has; bytes of text."""
    found, kind = [], dtype(chosen.vocabulary)
    for some in itertools.batched(texts, TOGETHER):
        found += [np.append(tokens, chosen.end).astype(kind) for tokens in chosen.encode(some)]
    counts = np.array([len(tokens) for tokens in found], np.int64)
    return np.concatenate(found), counts, sum(len(text.encode()) for text in texts)


def _save(kept: Path, name: str, tokens: np.ndarray, counts: np.ndarray, size: int) -> None:
    """The record comes last: a shard without one is not there. Two runs may write one shard; it is the same."""
    content = tokens.tobytes()
    _put(kept / f"{name}.bin", content)
    _put(kept / f"{name}.counts", counts.tobytes())
    sums = [hashlib.sha256(part).hexdigest() for part in (content, counts.tobytes())]
    _put(kept / f"{name}.json", json.dumps({"bytes": size, "sha256": sums}).encode())


def _put(path: Path, content: bytes) -> None:
    draft = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}")
    draft.write_bytes(content)
    draft.replace(path)


def _read(kept: Path, name: str) -> tuple[bytes, np.ndarray, int]:
    """A shard's tokens as they are on disk, its counts and its bytes of text. Raises DataError where it is damaged."""
    record = json.loads((kept / f"{name}.json").read_bytes())
    parts = [(kept / f"{name}{suffix}").read_bytes() for suffix in (".bin", ".counts")]
    if [hashlib.sha256(part).hexdigest() for part in parts] != record["sha256"]:
        raise DataError(f"The shard {kept / name} is not what was written (SHA-256). Run the same again.")
    return parts[0], np.frombuffer(parts[1], np.int64), record["bytes"]


def _join(folder: Path, shards: Iterable[tuple[bytes, np.ndarray, int]]) -> dict[str, int]:
    counts, size = [np.zeros(0, np.int64)], 0
    with (folder / TOKENS).open("wb") as file:
        for content, some, length in shards:
            file.write(content)
            counts.append(some)
            size += length
    ends = np.cumsum(np.concatenate(counts), dtype=np.int64)
    np.save(folder / ENDS, ends)
    return {"documents": len(ends), "tokens": int(ends[-1]) if len(ends) else 0, "bytes": size}


def forget(kept: Path) -> None:
    """Removes shards."""
    shutil.rmtree(kept, ignore_errors=True)
