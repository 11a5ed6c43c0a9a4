"""Reports on a comparison: text for a terminal, plots, compare.json and an HTML page."""

from collections.abc import Sequence
from pathlib import Path

from leanformer.analysis import frontier
from leanformer.analysis.comparison import Comparison
from leanformer.analysis.frontier import COST_METRICS, ScoreCorrelation
from leanformer.costs.count import format_count
from leanformer.reports.comparison import charts, html, tables
from leanformer.reports.comparison.charts import Charts
from leanformer.runtime import files


MOST = 200  # maximal number of pairs on a page; compare.json lists all
TITLES = {
    "scores": "Scores",
    "differences": "Differences",
    "fronts": "Score against cost",
    "curves": "Learning curves",
    "conditioning": "Conditioning",
}


def write_and_print(result: Comparison, out: Path) -> None:
    """Print a comparison, write it to the folder `out`, and print the paths of the files."""
    conditioning = frontier.score_correlations(result)
    print(tables.format_text(result, conditioning))
    page, *others = write(result, conditioning, out)
    print(f"Page: {page}   Also written: {', '.join(path.name for path in others)}")


def write(result: Comparison, conditioning: Sequence[ScoreCorrelation], out: Path) -> list[Path]:
    """Write compare.html, compare.json and the plots as PNG to the folder `out`, and return their paths."""
    out.mkdir(parents=True, exist_ok=True)
    files.write_json(out / "compare.json", tables.to_plain(result, conditioning))
    figures = charts.draw_all(result, conditioning)
    drawn = []
    for name, (figure, _) in figures.items():
        drawn.append(out / f"{name}.png")
        figure.savefig(drawn[-1])
    page = out / "compare.html"
    files.write_text(page, make_page(result, conditioning, figures))
    return [page, out / "compare.json", *drawn]


def make_page(result: Comparison, conditioning: Sequence[ScoreCorrelation], figures: Charts) -> str:
    """Return the HTML page: the result first, then plots, tables and methods."""
    runs = [run for shape in result.shapes for run in shape.runs]
    direction = "higher" if result.score.higher else "lower"
    configurations, keys = format_count(len(result.shapes), "configuration"), runs[0].keys
    parts = [
        html.paragraph(
            f"{format_count(len(runs), 'run')} of {configurations} on {keys.get('data.name')}, "
            f"{keys.get('data.eval_split')}. {direction.capitalize()} {result.score.name} is better.",
            "soft",
        ),
        html.paragraph(tables.headline(result), "answer"),
        *(html.paragraph(f"Not counted: {name}: {reason}.", "warn") for name, reason in result.left_out.items()),
        *(html.paragraph(note, "warn") for note in result.notes),
    ]
    fronts = [[name, COST_METRICS[name].what, ", ".join(on)] for name, on in tables.fronts(result).items()]
    below = {
        "scores": html.table(*tables.shapes(result)),
        "differences": _differences(result),
        "fronts": html.table(["cost metric", "description", "Pareto-optimal, cheapest first"], fronts),
        "conditioning": html.table(*tables.correlations(conditioning)),
    }
    for name, (figure, caption) in figures.items():
        parts += [html.heading(TITLES[name]), html.figure(figure, caption), below.get(name, "")]
    parts += [html.heading("Methods"), html.paragraph(tables.METHODS, "soft")]
    parts += [html.paragraph(text, "soft") for text in dict.fromkeys(run.made_by for run in runs)]
    parts += [html.folded("Folders of the runs", html.code("\n".join(str(run.workdir) for run in runs)))]
    return html.page(f"{result.score.name} of {configurations}", parts)


def _differences(result: Comparison) -> str:
    head, rows = tables.pairs(result)
    margin = html.paragraph(f"Margin ±{tables.number(result)(result.margin)}: {result.margin_by}.", "soft")
    if len(rows) <= tables.SHOWN:
        return margin + html.table(head, rows)
    first, rest = rows[: tables.SHOWN], rows[tables.SHOWN : MOST]
    return margin + html.table(head, first) + html.folded(f"{len(rest)} more of {len(rows)}", html.table(head, rest))
