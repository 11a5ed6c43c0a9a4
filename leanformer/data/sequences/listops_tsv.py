"""The published ListOps files of the Long Range Arena, `basic_{train,val,test}.tsv` (96,000, 2,000 and 2,000 lines)."""

from pathlib import Path

import numpy as np

from leanformer.data.sequences.listops import CLOSER, OPENER, SYMBOLS, Expressions, ExpressionSource
from leanformer.errors import DataError


IDS = {symbol.encode(): i for i, symbol in enumerate(SYMBOLS, 1)}


class Published(ExpressionSource):
    """A split, train, val or test, read whole (train in about 20 s); the tokens are those of `listops.ListOps`.

    A file has the header Source, Target, then a line per expression: the symbols, spaces between them, in groups of
    parentheses that say nothing more and are dropped, a tab and the value, as in `( ( ( [MAX 4 ) 3 ) ] )\\t4`. Whether
    the value is right is not checked.

    Raises:
        DataError: the file is not there, or a line is not of that form.
    """

    def __init__(self, folder: str | Path, split: str):
        folder = Path(folder).expanduser()
        self.path = folder / f"basic_{split}.tsv"
        if not self.path.is_file():
            found = ", ".join(sorted(p.name for p in folder.glob("basic_*.tsv"))) or "no such file"
            raise DataError(f"{folder} has no basic_{split}.tsv; found {found}. Give the folder of the published set.")
        with self.path.open("rb") as file:
            header = file.readline().rstrip(b"\r\n")
            if header != b"Source\tTarget":
                raise self._error(1, f"is {_short(header)} instead of the header Source, tab, Target")
            examples = [self._parse(number, line) for number, line in enumerate(file, 2)]
        if not examples:
            raise DataError(f"{self.path} holds no expression at all. Get it again.")
        self._data = Expressions.join(examples)

    def name(self, index: int) -> str:
        return f"{self.path}, line {index + 2}"

    def _error(self, line: int, found: str) -> DataError:
        return DataError(f"{self.path}, line {line} {found}. Get the file again.")

    def _parse(self, number: int, line: bytes) -> tuple[bytes, int]:
        columns = line.rstrip(b"\r\n").split(b"\t")
        if len(columns) != 2:
            raise self._error(number, f"has {len(columns)} columns instead of 2")
        source, target = columns
        try:
            tokens = encode(source)
        except ValueError as error:
            raise self._error(number, str(error)) from error
        if len(target) != 1 or target not in b"0123456789":
            raise self._error(number, f"has the label {_short(target)} instead of a digit 0 to 9")
        return tokens.tobytes(), int(target)


def encode(source: bytes) -> np.ndarray:
    """The tokens, uint8, of an expression as it stands in a file. Raises ValueError, in words: "holds ..."."""
    try:
        tokens = np.array([IDS[word] for word in source.translate(None, b"()").split()], np.uint8)
    except KeyError as error:
        raise ValueError(f"holds {_short(error.args[0])}, which is no symbol of ListOps") from error
    if not _is_whole(tokens):
        raise ValueError(f"is no whole expression: {_short(source)} ... {_short(source[-20:])}")
    return tokens


def _is_whole(tokens: np.ndarray) -> bool:
    """Exactly one expression: brackets match, the first is closed by the last token, and no operator is empty."""
    opens, closes = (tokens >= OPENER) & (tokens < CLOSER), tokens == CLOSER
    depth = np.cumsum(opens.astype(np.int64) - closes)
    matched = len(depth) > 0 and depth[-1] == 0 and (depth[:-1] > 0).all()
    return bool(matched and not (opens[:-1] & closes[1:]).any())


def _short(text: bytes) -> str:
    shown = text[:40].decode("latin-1")
    return repr(shown + "..." if len(text) > 40 else shown)
