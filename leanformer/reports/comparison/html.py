"""Parts of a self-contained HTML page with embedded plots, for light and dark screens and for print."""

import html
import io
import re
import urllib.parse
import zlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import matplotlib as mpl
from matplotlib.figure import Figure

from leanformer.reports.plots import SERIES, TEXT_COLOR, TIP


STYLE = "\n" + Path(__file__).with_name("style.css").read_text(encoding="utf-8")
SCRIPT = "\n" + Path(__file__).with_name("sort.js").read_text(encoding="utf-8")
LEGIBLE = 0.7  # smallest scale of a plot; on a narrower screen it scrolls
# Colours of plots and their names in the style, which has a lighter one for dark screens.
COLORS = {color: f"series{i}" for i, color in enumerate(SERIES)}
COLORS |= {TEXT_COLOR: "ink", "#000000": "ink", "#767676": "soft", "#b0b0b0": "line", "#ffffff": "back"}


def page(title: str, parts: Iterable[str]) -> str:
    """Return an HTML document from a title, which is escaped, and the HTML of its parts."""
    head = (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{html.escape(title)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n"
    )
    return (
        head
        + "\n".join([f"<h1>{html.escape(title)}</h1>", *parts])
        + f"\n<script>{SCRIPT}</script>\n</body>\n</html>\n"
    )


def heading(text: str) -> str:
    """Return the HTML of a section's heading; markup in the text is escaped."""
    return f"<h2>{html.escape(text)}</h2>"


def paragraph(text: str, kind: str = "") -> str:
    """Return the HTML of a paragraph; markup in the text is escaped.

    Args:
        text: content.
        kind: class of STYLE: "answer", "soft", "warn", or "" for none.
    """
    return f"<p{f' class="{kind}"' if kind else ''}>{html.escape(text)}</p>"


def code(text: str) -> str:
    """Return HTML that shows a text as it is, in a fixed-width font; markup in the text is escaped."""
    return f"<pre>{html.escape(text)}</pre>"


def row(parts: Iterable[str]) -> str:
    """Return HTML that shows its parts, which are HTML, side by side in as many rows as needed."""
    return f'<div class="row">{"".join(parts)}</div>'


def folded(summary: str, inside: str) -> str:
    """Return HTML that shows a summary, whose text is escaped, and the HTML `inside` once the summary is clicked."""
    return f"<details><summary>{html.escape(summary)}</summary>\n{inside}</details>"


def table(head: Sequence[str], rows: Sequence[Sequence[str]], links: Mapping[str, str] | None = None) -> str:
    """Return an HTML table; columns of numbers are aligned to the right. A click on a title sorts by it (SCRIPT).

    Args:
        head: titles of the columns.
        rows: cells of each row as text, which is escaped.
        links: HTML that is added to the first cell of a row, by the text of that cell.
    """
    right = [all(_is_numeric(row[i]) for row in rows) for i in range(len(head))]
    lines = [_row("th", head, right), *(_row("td", row, right, (links or {}).get(row[0], "")) for row in rows)]
    return (
        f'<div class="scroll"><table>\n<thead>{lines[0]}</thead>\n<tbody>{"\n".join(lines[1:])}</tbody>\n</table></div>'
    )


def _row(kind: str, cells: Sequence[str], right: Sequence[bool], more: str = "") -> str:
    scope = ' scope="col"' if kind == "th" else ""
    return (
        "<tr>"
        + "".join(
            f"<{kind}{scope}{' class="number"' if at_right else ''}>{html.escape(cell)}{more * (i == 0)}</{kind}>"
            for i, (cell, at_right) in enumerate(zip(cells, right, strict=True))
        )
        + "</tr>"
    )


def link(address: str, text: str) -> str:
    """Return an HTML link with the given text to a file; `address` is its path relative to the page."""
    return f'<a href="{html.escape(urllib.parse.quote(address))}">{html.escape(text)}</a>'


def _is_numeric(cell: str) -> bool:
    return cell in ("", "-") or (cell[0] in "+-.0123456789" and not cell[0].isalpha())


def figures(drawn: Sequence[Figure], caption: str, *, paper: bool = False) -> str:
    """Return embedded vector plots with a common caption, side by side as far as the screen is wide.

    Colours become CSS variables, so that dark screens have their own; not with `paper`, for plots whose colours have
    values, which keep a white background. Artists whose group id begins with TIP show the rest of it on hover.
    """
    caption = html.escape(caption)
    images = "".join(_image(figure, caption, paper) for figure in drawn)
    if len(drawn) > 1:
        least = max(map(_least_width, drawn))  # so that no panel is cut while the screen has room for one
        columns = f"repeat(auto-fit, minmax(min({least}, 100%), 1fr))"
        images = f'<div class="panels" style="grid-template-columns: {columns}">{images}</div>'
    return f"<figure>{images}\n<figcaption>{caption}</figcaption></figure>"


def _least_width(drawn: Figure) -> str:
    """Return the CSS width below which a plot is not legible and scrolls."""
    return f"{LEGIBLE * drawn.get_figwidth():.3g}in"


def _image(drawn: Figure, caption: str, paper: bool) -> str:
    buffer = io.StringIO()
    with mpl.rc_context({"svg.hashsalt": "leanformer"}):  # so that equal plots give equal files
        drawn.savefig(buffer, format="svg", transparent=not paper, metadata={"Date": None})
    text = buffer.getvalue()
    text = re.sub(r"<metadata>.*?</metadata>", "", text[text.index("<svg") :], flags=re.DOTALL)
    text = re.sub(r' xmlns(:xlink)?="[^"]*"', "", text)  # HTML needs no namespaces
    prefix = f"f{zlib.crc32(text.encode()):08x}-"  # ids of all plots of a page differ
    text = re.sub(rf'<g id="{TIP}([^"]*)">', r'<g class="tip"><title>\1</title>', text)
    text = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{prefix}", text)
    for color, name in () if paper else COLORS.items():
        text = text.replace(color, f"var(--{name})")
    least = f"min-width:{_least_width(drawn)}"
    image = text.replace("<svg", f'<svg role="img" aria-label="{caption}" style="{least}"', 1)
    return f'<div class="scroll">{image}</div>'
