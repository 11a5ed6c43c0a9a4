"""Published ListOps files of the Long Range Arena, `basic_{train,val,test}.tsv` (96,000, 2,000 and 2,000 lines)."""

from pathlib import Path

import numpy as np

from leanformer.data import delimited
from leanformer.data.sequences.listops import CLOSER, OPENER, SYMBOLS, Expressions, ExpressionSource
from leanformer.errors import DataError


IDS = {symbol.encode(): i for i, symbol in enumerate(SYMBOLS, 1)}


class Published(ExpressionSource):
    """Published split in memory (train takes about 20 s to read), with the tokens of `listops.ListOps`.

    A file has the header Source, Target, then one line per expression: symbols with spaces between them, in redundant
    parentheses that are dropped, then a tab and the value, as in `( ( ( [MAX 4 ) 3 ) ] )\\t4`. The value is not
    checked.

    Raises:
        DataError: the file is missing, or a line is malformed.
    """

    def __init__(self, folder: str | Path, split: str):
        folder = Path(folder).expanduser()
        self.path = folder / f"basic_{split}.tsv"
        if not self.path.is_file():
            present = ", ".join(sorted(p.name for p in folder.glob("basic_*.tsv"))) or "no such file"
            raise DataError(
                f"{folder} has no basic_{split}.tsv; found {present}. Use the folder of the published files."
            )
        rows = delimited.lines(self.path)
        _, header = next(rows, (1, b""))
        if header != b"Source\tTarget":
            raise delimited.error_at(
                self.path, 1, f"is {delimited.quote(header)} instead of the header Source, tab, Target"
            )
        self._data = Expressions.join([parsed for _, parsed in delimited.read(self.path, rows, _parse)])

    def name(self, index: int) -> str:
        return f"{self.path}, line {index + 2}"


def _parse(line: bytes) -> tuple[bytes, int]:
    source, target = delimited.split(line, 2)
    if len(target) != 1 or target not in b"0123456789":
        raise ValueError(f"has the label {delimited.quote(target)} instead of a digit 0 to 9")
    return encode(source).tobytes(), int(target)


def encode(source: bytes) -> np.ndarray:
    """Return the tokens, uint8, of an expression in a file, without its round brackets.

    Raises:
        ValueError: unknown symbol, or incomplete expression; the message continues "line N ".
    """
    try:
        tokens = np.array([IDS[word] for word in source.translate(None, b"()").split()], np.uint8)
    except KeyError as error:
        raise ValueError(f"holds {delimited.quote(error.args[0])}, not a symbol of ListOps") from error
    if not _is_complete(tokens):
        raise ValueError(f"is not a complete expression: {delimited.quote(source)} ... {delimited.quote(source[-20:])}")
    return tokens


def _is_complete(tokens: np.ndarray) -> bool:
    """Return True for exactly one expression: matching brackets around all tokens, and no empty operator."""
    opens, closes = (tokens >= OPENER) & (tokens < CLOSER), tokens == CLOSER
    depth = np.cumsum(opens.astype(np.int64) - closes)
    matched = len(depth) > 0 and depth[-1] == 0 and (depth[:-1] > 0).all()
    return bool(matched and not (opens[:-1] & closes[1:]).any())
