"""Parts of a self-contained HTML page with embedded plots, for light and dark screens and for print."""

import base64
import html
import io
from collections.abc import Iterable, Sequence

import matplotlib as mpl
from matplotlib.figure import Figure


# In dark mode plots are inverted: black becomes white, and hues stay.
STYLE = """
:root { color-scheme: light dark; --ink: #1d2730; --soft: #5b6770; --line: #d9dee2; --back: #ffffff; --lift: #f4f6f8;
  --accent: #1f6f8b; --warn: #9a3412; }
@media (prefers-color-scheme: dark) { :root { --ink: #e3e8ec; --soft: #9aa7b1; --line: #313a42; --back: #14181c;
  --lift: #1b2127; --accent: #6cb8d2; --warn: #f0a37a; } figure img { filter: invert(0.92) hue-rotate(180deg); } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 68rem; padding: 2.2rem 1.4rem 4rem; background: var(--back); color: var(--ink);
  font: 16px/1.5 system-ui, "Segoe UI", "DejaVu Sans", sans-serif; }
h1 { font-size: 1.7rem; line-height: 1.2; margin: 0 0 .3rem; }
h2 { font-size: 1.2rem; margin: 2.6rem 0 .6rem; padding-top: .8rem; border-top: 1px solid var(--line); }
p { max-width: 48rem; margin: .5rem 0; } .soft, figcaption { color: var(--soft); font-size: .88rem; }
.answer { font-size: 1.12rem; border-left: 4px solid var(--accent); padding: .3rem 0 .3rem 1rem; margin: 1.2rem 0; }
.warn { color: var(--warn); font-weight: 600; }
.scroll { overflow-x: auto; margin: .8rem 0; }
table { border-collapse: collapse; font-size: .86rem; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: .32rem .9rem .32rem 0; border-bottom: 1px solid var(--line); vertical-align: top; }
th { color: var(--soft); font-weight: 600; white-space: nowrap; }
td.number { text-align: right; white-space: nowrap; } th.number { text-align: right; }
tbody tr:hover { background: var(--lift); }
.row { display: flex; flex-wrap: wrap; gap: 0 1.6rem; } .row figure { flex: 1 1 26rem; max-width: 31rem; }
figure { margin: 1rem 0; break-inside: avoid; } figure img { max-width: 100%; height: auto; display: block; }
pre { background: var(--lift); padding: .8rem 1rem; overflow-x: auto; font-size: .84rem; border-radius: 4px; }
summary { cursor: pointer; color: var(--accent); margin: .6rem 0; }
@media print { :root { color-scheme: light; --ink: #000; --soft: #444; --line: #bbb; --back: #fff; --lift: #fff; }
  body { max-width: none; padding: 0; font-size: 11px; } h2 { break-after: avoid; } tr { break-inside: avoid; }
  .scroll { overflow: visible; } figure img { filter: none; max-height: 23cm; } details { display: none; } }
"""


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
    """Return preformatted text."""
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
