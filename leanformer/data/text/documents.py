"""Documents, one after the other, out of files of text: `text:<folder>` and `bundled:austen`."""

import dataclasses
import hashlib
import itertools
import json
import lzma
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from leanformer.data import source
from leanformer.data.source import Kind
from leanformer.errors import DataError, first_line


SUFFIXES = (".txt", ".txt.xz", ".jsonl", ".parquet")
ALL = "all"  # the split that is every file of a folder
BLOCK = 1 << 24  # bytes that are read at a time
BUNDLED = Path(__file__).parents[1] / "bundled"
FORM_FEED = "\f"  # between its chapters
SHARD = re.compile(r"-\d+(-of-\d+(-[0-9a-f]+)?)?$")  # number, of how many, and the hub's hash
SLICE = re.compile(r"(?P<stem>.+?)(?:\[(?P<start>\d+)?%?:(?:(?P<stop>\d+)%)?\])?")


@dataclasses.dataclass(frozen=True)
class Split:
    """Part of a set of texts.

    Attributes:
        stem: of the files.
        start, stop: shares of its tokens, in percent.
    """

    stem: str
    start: int = 0
    stop: int = 100

    @classmethod
    def of(cls, text: str) -> "Split":
        """Of "train", "all[:90%]", "all[90%:]". Raises DataError for a part that cannot be."""
        found = SLICE.fullmatch(text)
        start, stop = (int((found and found[name]) or other) for name, other in (("start", 0), ("stop", 100)))
        if found is None or not 0 <= start < stop <= 100:
            raise DataError(f'The split "{text}" is no name, nor a name with percents such as all[:90%] or all[90%:].')
        return cls(found["stem"], start, stop)


@dataclasses.dataclass(frozen=True)
class Documents:
    """Files of text, in order.

    Attributes:
        name: of the whole, for messages.
        files: each with one of SUFFIXES. A .jsonl has an object a line, its text under "text"; a .parquet, as the
            Hugging Face hub has them, a column of that name.
        separator: between the documents of a .txt, if there are several.
        most: documents; 0 for all.
    """

    name: str
    files: tuple[Path, ...]
    separator: str | None = None
    most: int = 0

    def __iter__(self) -> Iterator[str]:
        """The documents without the white space around them; empty ones are left out.

        Raises:
            DataError: a file that is not UTF-8 or not whole, or a line or row without a text.
        """
        found = itertools.chain.from_iterable(map(self._of, self.files))
        found = filter(None, (document.strip() for document in found))
        return itertools.islice(found, self.most or None)

    def _of(self, file: Path) -> Iterator[str]:
        if file.suffix == ".jsonl":
            yield from _lines(file)
        elif file.suffix == ".parquet":
            yield from _rows(file)
        else:
            yield from _pieces(file, self.separator)

    @property
    def size(self) -> int:
        """Bytes of the files."""
        return sum(file.stat().st_size for file in self.files)

    def identity(self) -> dict[str, Any]:
        """What changes when the texts do: names, sizes and times of the files, and what they are cut by."""
        stats = [(file.name, file.stat()) for file in self.files]
        named = json.dumps([[name, stat.st_size, stat.st_mtime_ns] for name, stat in stats])
        digest = hashlib.sha256(named.encode()).hexdigest()[:16]
        return {"texts": self.name, "files": digest, "separator": self.separator, "documents": self.most}


def find(name: str, stem: str, *, separator: str | None = None, most: int = 0) -> Documents:
    """The documents of a `data.name`, one of KINDS.

    Args:
        stem: of its files: <stem>.txt, <stem>-00000.jsonl, <stem>-00000-of-00004.parquet, ...; a folder of that name
            with files of any; or "all", every file in the folder.
        separator, most: as of `Documents`.

    Raises:
        ConfigError: a name of no known kind.
        DataError: there are none.
    """
    kind, rest = source.find(name, KINDS)
    return kind.open(rest, stem, {"separator": separator, "most": most})


def _austen(name: str, stem: str, how: Mapping[str, Any]) -> Documents:
    file = BUNDLED / f"{name}-{stem}.txt.xz"
    if not file.is_file():
        raise DataError(f'The bundled text {name} has no split "{stem}". Found: train, test.')
    return Documents(f"{name} {stem}", (file,), **{**how, "separator": FORM_FEED})


def _folder(path: str, stem: str, how: Mapping[str, Any]) -> Documents:
    folder = Path(path).expanduser()
    every = sorted(file for file in folder.rglob("*") if file.name.endswith(SUFFIXES) and file.is_file())
    files = tuple(file for file in every if stem == ALL or _stem(file, folder) == stem)
    if not files:
        known = ", ".join(sorted({_stem(file, folder) for file in every})) or f"no file with {' '.join(SUFFIXES)}"
        raise DataError(
            f'{folder} holds no text "{stem}": no {stem}.txt, .jsonl or .parquet, and no folder {stem} of such. Found: '
            f"{known}. Set data.train_split and data.eval_split, which may be parts, such as all[:90%]."
        )
    return Documents(f"{folder.resolve()} {stem}", files, **how)


KINDS = {
    "text": Kind("text:<folder>", _folder, "of .txt, .jsonl or .parquet, named by split"),
    "bundled": Kind("bundled:austen", _austen, "five novels by Jane Austen"),
}


def _stem(file: Path, folder: Path) -> str:
    """The split that a file belongs to: its folder under `folder`, or its own name without the number of a shard."""
    first, *inside = file.relative_to(folder).parts
    if inside:
        return first
    return SHARD.sub("", next(first.removesuffix(s) for s in SUFFIXES[::-1] if first.endswith(s)))


def _pieces(file: Path, separator: str | None) -> Iterator[str]:
    mark, left, done = (separator or "").encode(), b"", 0
    with (lzma.open if file.suffix == ".xz" else Path.open)(file, "rb") as content:
        try:
            while block := content.read(BLOCK):
                *whole, left = (left + block).split(mark) if mark else (left + block,)
                for piece in whole:
                    yield _text(file, piece, done)
                    done += len(piece) + len(mark)
        except (lzma.LZMAError, EOFError) as error:
            raise DataError(f"{file} is not a whole .xz file ({error}). Get it again.") from error
    yield _text(file, left, done)


def _text(file: Path, raw: bytes, start: int) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        raise DataError(
            f"{file} is not UTF-8: byte {start + error.start:,} is {raw[error.start]:#04x}. Convert it, or remove it."
        ) from error


def _lines(file: Path) -> Iterator[str]:
    with file.open("rb") as content:
        for number, line in enumerate(content, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line.decode("utf-8-sig"))
                text = row["text"]
            except (ValueError, LookupError, TypeError, RecursionError) as error:
                raise DataError(
                    f'{file}, line {number} is no JSON object in UTF-8 with a "text" ({error}). Mend or remove it.'
                ) from error
            if not isinstance(text, str):
                raise DataError(f'{file}, line {number}: "text" is {type(text).__name__} and no string. Mend it.')
            yield text


def _rows(file: Path) -> Iterator[str]:
    """Of a .parquet, a batch of its rows in memory at a time."""
    import pyarrow.parquet  # half a second, for whoever has such files

    number = 0
    try:
        with pyarrow.parquet.ParquetFile(file) as content:
            content.schema_arrow.field("text")  # where there are no rows, none of them is missed
            for batch in content.iter_batches(columns=["text"]):
                for text in batch.column("text").to_pylist():
                    number += 1
                    if not isinstance(text, str):
                        raise DataError(
                            f'{file}, row {number}: "text" is {type(text).__name__} and no string. Mend it.'
                        )
                    yield text
    except KeyError as error:
        raise DataError(f'{file} has no column "text". Rename the one with the texts.') from error
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        raise DataError(f"{file} is not a whole .parquet file ({first_line(error)}). Get it again.") from error
