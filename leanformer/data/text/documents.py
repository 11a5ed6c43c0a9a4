"""Documents read in order from text files: `text:<folder>` and `bundled:austen`."""

import dataclasses
import hashlib
import itertools
import json
import lzma
import re
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from leanformer.data.source import Kind
from leanformer.data.source import find as find_kind
from leanformer.data.tables import json_lines, line_error
from leanformer.errors import DataError


SUFFIXES = (".txt", ".txt.xz", ".jsonl", ".parquet")
ALL_FILES = "all"  # split with all files of a folder
BLOCK_BYTES = 1 << 24  # per read
BUNDLED = Path(__file__).parents[1] / "bundled"
FORM_FEED = "\f"  # between the chapters of the bundled text
# Number of the shard, number of shards, and hash of the Hugging Face hub.
SHARD = re.compile(r"-\d+(-of-\d+(-[0-9a-f]+)?)?$")
SLICE = re.compile(r"(?P<stem>[^\[\]]+)(?:\[(?:(?P<start>\d+)%)?:(?:(?P<stop>\d+)%)?\])?")


@dataclasses.dataclass(frozen=True)
class Split:
    """Split of a text: some files, and a part of their tokens."""

    stem: str  # of the file names, name of a folder of files, or "all"
    start: int = 0  # of the part, in percent of the tokens
    stop: int = 100

    @classmethod
    def of(cls, text: str) -> "Split":
        """Parse a split such as "train", "all[:90%]" or "all[90%:]"."""
        match = SLICE.fullmatch(text)
        start, stop = (int((match and match[name]) or other) for name, other in (("start", 0), ("stop", 100)))
        if match is None or not 0 <= start < stop <= 100:
            raise DataError(
                f'The split "{text}" is invalid. Use a name, or a name with a range in percent, such as all[:90%].'
            )
        return cls(match["stem"], start, stop)


@dataclasses.dataclass(frozen=True)
class Documents:
    """Documents of text files, an iterable of str in the order of the files.

    White space around a document is removed, and empty documents are left out. A .jsonl has one object per line with
    its text under "text"; a .parquet, as on the Hugging Face hub, has a column "text".
    """

    name: str
    files: tuple[Path, ...]
    separator: str | None = None  # between the documents of a .txt; None if each .txt is one document
    most: int = 0  # maximum number of documents; 0 for all

    def __iter__(self) -> Iterator[str]:
        documents = itertools.chain.from_iterable(map(self._read_file, self.files))
        documents = filter(None, (document.strip() for document in documents))
        return itertools.islice(documents, self.most or None)

    def _read_file(self, file: Path) -> Iterator[str]:
        reader = {".jsonl": _lines, ".parquet": _rows}.get(file.suffix)
        return reader(file) if reader else _pieces(file, self.separator)

    @property
    def size(self) -> int:
        """Size of all files in bytes."""
        return sum(file.stat().st_size for file in self.files)

    def identity(self) -> dict[str, Any]:
        """Return a dict, ready for JSON, that changes if names, sizes or modification times of the files change."""
        stats = [(file.name, file.stat()) for file in self.files]
        named = json.dumps([[name, stat.st_size, stat.st_mtime_ns] for name, stat in stats])
        digest = hashlib.sha256(named.encode()).hexdigest()[:16]
        return {"texts": self.name, "files": digest, "separator": self.separator, "documents": self.most}


def find(name: str, stem: str, *, separator: str | None = None, most: int = 0) -> Documents:
    """Return the documents of a split of a `data.name`; a bundled text has a separator of its own.

    `stem` names files, <stem>.txt, <stem>-00000.jsonl, <stem>-00000-of-00004.parquet, or a folder of files; "all" is
    every file.
    """
    kind, rest = find_kind(name, KINDS)
    return kind.open(rest, stem, {"separator": separator, "most": most})


def _austen(name: str, stem: str, how: Mapping[str, Any]) -> Documents:
    file = BUNDLED / f"{name}-{stem}.txt.xz"
    return Documents(f"{name} {stem}", (file,), separator=FORM_FEED, most=how["most"])


def _folder(path: str, stem: str, how: Mapping[str, Any]) -> Documents:
    folder = Path(path).expanduser()
    found = [file for file in sorted(folder.rglob("*")) if not file.is_dir()]
    texts = [file for file in found if _is_text(file, folder)]
    if len(texts) < len(found):
        ignored = next(file for file in found if file not in texts)
        message = f"Ignored in {folder}, hidden or no texts: {len(found) - len(texts)} files, such as {ignored.name}"
        warnings.warn(message, stacklevel=2)
    files = tuple(file for file in texts if stem in (ALL_FILES, _stem(file, folder)))
    if not files:
        stems = ", ".join(sorted({_stem(file, folder) for file in texts})) or f"no file with {' '.join(SUFFIXES)}"
        raise DataError(
            f'{folder} has no text "{stem}": no {stem}.txt, .jsonl or .parquet, and no folder {stem} of these. Found: '
            f"{stems}. Set data.train_split and data.eval_split, which may be parts, such as all[:90%]."
        )
    return Documents(f"{folder.resolve()} {stem}", files, **how)


def _is_text(file: Path, folder: Path) -> bool:
    hidden = any(part.startswith(".") for part in file.relative_to(folder).parts)  # such as `._x.txt` beside `x.txt`
    return not hidden and file.name.endswith(SUFFIXES)


KINDS = {
    "text": Kind("text:<folder>", _folder, "of .txt, .jsonl or .parquet, named by split"),
    "bundled": Kind("bundled:austen", _austen, "five novels by Jane Austen"),
}


def _stem(file: Path, folder: Path) -> str:
    """Return the split of a file: the first folder of its path below `folder`, else its name without shard number."""
    first, *inside = file.relative_to(folder).parts
    if inside:
        return first
    return SHARD.sub("", next(first.removesuffix(s) for s in SUFFIXES[::-1] if first.endswith(s)))


def _pieces(file: Path, separator: str | None) -> Iterator[str]:
    """Yield the documents of a .txt or .txt.xz file."""
    mark, left, done = (separator or "").encode(), b"", 0
    with (lzma.open if file.suffix == ".xz" else Path.open)(file, "rb") as content:
        while block := content.read(BLOCK_BYTES):
            *whole, left = (left + block).split(mark) if mark else (left + block,)
            for piece in whole:
                yield _decode(file, piece, done)
                done += len(piece) + len(mark)
    yield _decode(file, left, done)


def _decode(file: Path, raw: bytes, start: int) -> str:
    """Decode bytes that start at a position of a file, without byte-order mark."""
    try:
        text = raw.decode()
    except UnicodeDecodeError as error:
        raise DataError(
            f"{file} is not UTF-8: byte {start + error.start:,} is {raw[error.start]:#04x}. Convert it, or remove it."
        ) from error
    return text if start else text.removeprefix("\ufeff")


def _lines(file: Path) -> Iterator[str]:
    for number, (text,) in json_lines(file, ["text"]):
        if not isinstance(text, str):
            raise line_error(file, number, "has a text that is not a string")
        yield text


def _rows(file: Path) -> Iterator[str]:
    """Yield the documents of a .parquet file, with one batch of rows in memory at a time."""
    import pyarrow.parquet  # takes half a second, so only if needed

    try:
        with pyarrow.parquet.ParquetFile(file) as content:
            content.schema_arrow.field("text")  # raises KeyError for a missing column
            for batch in content.iter_batches(columns=["text"]):
                yield from batch.column("text").drop_null().to_pylist()
    except (KeyError, pyarrow.ArrowException) as error:
        raise DataError(f'{file} is not a complete .parquet file with a column "text": {error}') from error
