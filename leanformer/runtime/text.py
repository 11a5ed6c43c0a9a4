"""Text for a terminal: paragraphs, tables and recorded values. Plain characters, without colours."""

import shutil
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from leanformer.quantities import find


GAP = "  "


def columns() -> int:
    """Return the number of columns of the terminal, by COLUMNS if it is set; at least 30, and 80 without a terminal."""
    return max(30, shutil.get_terminal_size((80, 0)).columns)


def wrap(lines: str, indent: str = "") -> str:
    """Return lines wrapped between words to the columns of the terminal; continued lines begin with `indent`."""
    fill = textwrap.TextWrapper(
        columns(), subsequent_indent=indent, break_long_words=False, break_on_hyphens=False, drop_whitespace=True
    )
    return "\n".join(fill.fill(line) if len(line) > columns() else line for line in lines.splitlines())


def page(title: str, rows: Mapping[str, object]) -> str:
    """Format a title and rows of a name and a value, aligned in two columns, for the width of the terminal."""
    margin = max(map(len, rows), default=0)
    margin = margin if margin <= columns() // 2 else 2  # long names have their values on the next line
    lines = []
    for name, value in rows.items():
        line = wrap(f"{GAP}{name:<{margin}}{GAP}{value}", indent=" " * (margin + 2 * len(GAP)))
        lines.append(line.rstrip())
    return "\n".join([wrap(title), *lines, ""])


def table(head: Sequence[str], rows: Sequence[Sequence[str]], indent: str = GAP) -> str:
    """Format a table, whose first column names the rows; one wider than the terminal is split into several."""
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    free = columns() - len(indent) - widths[0] - len(GAP)
    blocks: list[list[int]] = [[]]
    for i, width in enumerate(widths[1:], 1):
        if blocks[-1] and sum(widths[k] + len(GAP) for k in blocks[-1]) + width > free:
            blocks.append([])
        blocks[-1].append(i)
    return "\n\n".join(
        "\n".join((indent + GAP.join(row[i].ljust(widths[i]) for i in (0, *block))).rstrip() for row in (head, *rows))
        for block in blocks
    )


def format_duration(seconds: int | float) -> str:
    """Format a duration in seconds below 2 minutes, in minutes below 2 hours, else in hours, such as "5 min"."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.0f} h"


def format_value(name: str, value: Any) -> str:
    """Return the recorded value of a quantity as text, a float with its unit and four significant digits."""
    if not isinstance(value, float):
        return str(value)
    unit = find(name).unit
    return f"{find(name).scale * value:.4g}{unit and f' {unit}'}"


def format_scores(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return {name in words, with its unit: value}; floats become text of four digits, or whole from 10,000 on."""
    scaled = {find(name).axis: find(name).scale * x if isinstance(x, float) else x for name, x in values.items()}
    return {name: format_float(x) if isinstance(x, float) else x for name, x in scaled.items()}


def format_float(x: float) -> str:
    """Format a float with four significant digits, or as a whole number from 10,000 on."""
    return f"{x:.4g}" if abs(x) < 1e4 else f"{x:,.0f}"
