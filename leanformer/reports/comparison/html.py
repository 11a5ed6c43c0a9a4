"""Parts of a self-contained HTML page with embedded plots, for light and dark screens and for print."""

import base64
import html
import io
from collections.abc import Iterable, Sequence
from pathlib import Path

import matplotlib as mpl
from matplotlib.figure import Figure


# In dark mode plots are inverted: black becomes white, and hues stay.
STYLE = "\n" + Path(__file__).with_name("style.css").read_text()


def page(title: str, parts: Iterable[str]) -> str:
    """Return an HTML document with this title and these parts."""
    head = (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{html.escape(title)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n"
    )
    return head + "\n".join([f"<h1>{html.escape(title)}</h1>", *parts]) + "\n</body>\n</html>\n"


def heading(text: str) -> str:
    """Return a heading of a section."""
    return f"<h2>{html.escape(text)}</h2>"


def paragraph(text: str, kind: str = "") -> str:
    """Return a paragraph with a class of STYLE: answer, soft or warn; without a class if `kind` is empty."""
    return f"<p{f' class="{kind}"' if kind else ''}>{html.escape(text)}</p>"


def code(text: str) -> str:
    """Return HTML that shows a text as it is, in a fixed-width font; markup in the text is escaped."""
    return f"<pre>{html.escape(text)}</pre>"


def row(parts: Iterable[str]) -> str:
    """Return parts side by side, in as many rows as needed."""
    return f'<div class="row">{"".join(parts)}</div>'


def folded(summary: str, inside: str) -> str:
    """Return content that opens when its summary is clicked."""
    return f"<details><summary>{html.escape(summary)}</summary>\n{inside}</details>"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table; columns of numbers are aligned to the right."""
    right = [all(_is_numeric(row[i]) for row in rows) for i in range(len(head))]
    lines = [_row("th", head, right), *(_row("td", row, right) for row in rows)]
    return (
        f'<div class="scroll"><table>\n<thead>{lines[0]}</thead>\n<tbody>{"\n".join(lines[1:])}</tbody>\n</table></div>'
    )


def _row(kind: str, cells: Sequence[str], right: Sequence[bool]) -> str:
    scope = ' scope="col"' if kind == "th" else ""
    return (
        "<tr>"
        + "".join(
            f"<{kind}{scope}{' class="number"' if at_right else ''}>{html.escape(cell)}</{kind}>"
            for cell, at_right in zip(cells, right, strict=True)
        )
        + "</tr>"
    )


def _is_numeric(cell: str) -> bool:
    return cell in ("", "-") or (cell[0] in "+-.0123456789" and not cell[0].isalpha())


def figure(drawn: Figure, caption: str) -> str:
    """Return an embedded vector plot with its caption, which is also the alternative text."""
    buffer = io.StringIO()
    with mpl.rc_context({"svg.hashsalt": "leanformer"}):  # so that equal plots give equal files
        drawn.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    text = buffer.getvalue()
    data = base64.b64encode(text[text.index("<svg") :].encode()).decode()
    caption = html.escape(caption)
    image = f'<img alt="{caption}" src="data:image/svg+xml;base64,{data}">'
    return f"<figure>{image}\n<figcaption>{caption}</figcaption></figure>"
