"""Reports on a comparison: text for a terminal, plots, compare.json and one HTML page."""

import html
import io
import re
import string
import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path

import matplotlib as mpl
from matplotlib.figure import Figure

from leanformer.analysis import frontier
from leanformer.analysis.comparison import Comparison
from leanformer.analysis.frontier import Conditioning
from leanformer.costs.count import format_count
from leanformer.quantities import find
from leanformer.reports.comparison import charts, tables
from leanformer.reports.comparison.charts import Charts
from leanformer.reports.plots import SERIES, TEXT_COLOR
from leanformer.runtime import files, text


WIDE_INCHES = 8.0  # a plot of at least this width has no other beside it
TITLES = {
    "scores": "Scores",
    "differences": "Differences",
    "fronts": "Score against cost",
    "curves": "Learning curves",
    "conditioning": "Conditioning",
}
# Colours of plots and their names in the style of the page, which has others for dark screens.
COLORS = {color: f"series{i}" for i, color in enumerate(SERIES)}
COLORS |= {TEXT_COLOR: "ink", "#000000": "ink", charts.GREY: "soft", "#b0b0b0": "line", "#ffffff": "back"}


def write_and_print(result: Comparison, out: Path) -> None:
    """Print a comparison, write it to the folder `out`, and print the path of the page."""
    measures = frontier.list_conditioning(result)
    print(tables.format_text(result, measures))
    page, *others = write(result, measures, out)
    print(f"Page: {page}")
    print(text.wrap(f"Also written: {', '.join(path.name for path in others)}"))


def write(result: Comparison, measures: Sequence[Conditioning], out: Path) -> list[Path]:
    """Write compare.html, compare.json and the plots as PNG to the folder `out`, and return their paths."""
    out.mkdir(parents=True, exist_ok=True)
    files.write_json(out / "compare.json", tables.to_plain(result, measures))
    drawn, paths = charts.draw_all(result, measures), [out / "compare.html", out / "compare.json"]
    for name, (figures, _) in drawn.items():
        for i, figure in enumerate(figures, 1):
            paths.append(out / (f"{name}_{i}.png" if len(figures) > 1 else f"{name}.png"))
            figure.savefig(paths[-1])
    files.write_text(paths[0], make_page(result, measures, drawn))
    return paths


def make_page(result: Comparison, measures: Sequence[Conditioning], drawn: Charts) -> str:
    """Return a comparison as one HTML page without scripts: the result first, then plots, tables and methods.

    Args:
        result: comparison.
        measures: condition numbers of the runs.
        drawn: plots from `charts.draw_all`.
    """
    label = find(result.score.name).label
    title = f"{label[0].upper()}{label[1:]} of {format_count(len(result.configurations), 'configuration')}"
    margin = f"Margin ±{tables.number(result)(result.margin)}{tables.points(result)}: {result.margin_by}."
    below = {"scores": table(*tables.configurations(result))}
    if result.pairs:
        below |= {"differences": _paragraph(margin, "soft") + table(*tables.pairs(result))}
        below |= {"conditioning": table(*tables.conditioning(measures))}
    parts = [_paragraph(tables.describe_runs(result), "soft")]
    answer = "\n".join(_paragraph(line) for line in tables.headline(result))
    parts += [f'<div class="answer">{answer}</div>']
    parts += [_paragraph(note, "warn") for note in tables.list_warnings(result)]
    for name, (figures, caption) in drawn.items():
        parts += [f"<h2>{TITLES[name]}</h2>", _figure(figures, caption), below.get(name, "")]
    runs = [run for one in result.configurations for run in one.runs]
    parts += ["<h2>Methods</h2>", _paragraph(tables.METHODS, "soft")]
    parts += [_paragraph(source, "soft") for source in dict.fromkeys(run.made_by for run in runs)]
    folders = html.escape("\n".join(str(run.workdir) for run in runs))
    parts.append(f"<details><summary>Folders of the runs</summary><pre>{folders}</pre></details>")
    template = Path(__file__).with_name("page.html").read_text(encoding="utf-8")
    return string.Template(template).substitute(title=html.escape(title), body="\n".join(parts))


def _paragraph(content: str, kind: str = "") -> str:
    return f'<p class="{kind}">{html.escape(content)}</p>'


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table of texts as HTML, with at most `tables.ROWS` rows."""
    lines = [_row("th", head), *(_row("td", row) for row in rows[: tables.ROWS])]
    more = f"{len(rows) - tables.ROWS} more in compare.json" if len(rows) > tables.ROWS else ""
    return f'<div class="scroll"><table>\n{"\n".join(lines)}\n</table>{more}</div>'


def _row(kind: str, cells: Iterable[str]) -> str:
    return f"<tr>{''.join(f'<{kind}>{html.escape(cell)}</{kind}>' for cell in cells)}</tr>"


def _figure(figures: Sequence[Figure], caption: str) -> str:
    images = "".join(_svg(figure, caption) for figure in figures)
    panels = f'<div class="panels">{images}</div>' if figures[0].get_figwidth() < WIDE_INCHES else images
    return f"<figure>{panels}\n<figcaption>{html.escape(caption)}</figcaption></figure>"


def _svg(figure: Figure, caption: str) -> str:
    """Return a plot as SVG inside a page, with the page's colours. It scrolls where it would be too small to read."""
    buffer = io.StringIO()
    with mpl.rc_context({"svg.hashsalt": "leanformer"}):  # so that equal plots give equal files
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    image = buffer.getvalue()
    image = re.sub(r"<metadata>.*?</metadata>", "", image[image.index("<svg") :], flags=re.DOTALL)
    image = re.sub(r' xmlns(:xlink)?="[^"]*"', "", image)  # HTML needs no namespaces
    prefix = f"f{zlib.crc32(image.encode()):08x}-"  # ids of all plots of a page differ
    image = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{prefix}", image)
    for color, name in COLORS.items():
        image = image.replace(color, f"var(--{name})")
    least = f"min-width:{0.7 * figure.get_figwidth():.3g}in"
    opening = f'<svg role="img" aria-label="{html.escape(caption)}" style="{least}"'
    return f'<div class="scroll">{image.replace("<svg", opening, 1)}</div>'
