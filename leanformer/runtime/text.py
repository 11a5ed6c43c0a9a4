"""Text for a terminal: paragraphs and tables that fit its columns. Plain characters, without colours."""

import shutil
import textwrap
from collections.abc import Iterable, Sequence


UNKNOWN = 80  # columns if the output is no terminal and COLUMNS is not set
LEAST = 30  # columns that text is wrapped to at least
GAP = "  "


def columns() -> int:
    """Return the number of columns of the terminal, by COLUMNS if it is set; at least LEAST, UNKNOWN if no terminal."""
    return max(LEAST, shutil.get_terminal_size((UNKNOWN, 0)).columns)


def wrap(lines: str, indent: str = "") -> str:
    """Return lines wrapped between words to the columns of the terminal; continued lines begin with `indent`."""
    fill = textwrap.TextWrapper(
        columns(), subsequent_indent=indent, break_long_words=False, break_on_hyphens=False, drop_whitespace=True
    )
    return "\n".join(fill.fill(line) if len(line) > columns() else line for line in lines.splitlines())


def page(title: str, rows: Iterable[tuple[str, object]]) -> str:
    """Format a title and rows of a name and a value, aligned in two columns, for the width of the terminal."""
    rows = [*rows]
    margin = max((len(name) for name, _ in rows), default=0)
    margin = margin if margin <= columns() // 2 else 2  # long names have their values on the next line
    lines = []
    for name, value in rows:
        line = wrap(f"{GAP}{name:<{margin}}{GAP}{value}", indent=" " * (margin + 2 * len(GAP)))
        lines.append(line.rstrip())
    return "\n".join([wrap(title), *lines, ""])


def table(head: Sequence[str], rows: Sequence[Sequence[str]], indent: str = GAP) -> str:
    """Format a table for the width of the terminal, whose first column names the rows.

    A table that is wider than the terminal is split into several with the same first column. If a name fills more
    than half of a line, or a cell does not fit beside it, every row becomes a list of its cells.

    Args:
        head: titles of the columns.
        rows: cells of each row.
        indent: text before each line.
    """
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    free = columns() - len(indent) - widths[0] - len(GAP)
    whole = sum(widths[1:]) + len(GAP) * (len(widths) - 2) <= free
    if not whole and (widths[0] > columns() // 2 or max(widths[1:]) > free):
        return "\n\n".join(_list_cells(head, row, indent) for row in rows)
    blocks: list[list[int]] = [[]]
    for i, width in enumerate(widths[1:], 1):
        if blocks[-1] and sum(widths[k] + len(GAP) for k in blocks[-1]) + width > free:
            blocks.append([])
        blocks[-1].append(i)
    return "\n\n".join(
        "\n".join((indent + GAP.join(row[i].ljust(widths[i]) for i in (0, *block))).rstrip() for row in (head, *rows))
        for block in blocks
    )


def _list_cells(head: Sequence[str], row: Sequence[str], indent: str) -> str:
    """Format one row with a cell per line below its name."""
    cells = [
        wrap(f"{indent}{GAP}{name}: {cell}", indent + 2 * GAP)
        for name, cell in zip(head[1:], row[1:], strict=True)
        if cell
    ]
    return "\n".join([wrap(f"{indent}{head[0]}: {row[0]}".rstrip(), indent + GAP), *cells])
