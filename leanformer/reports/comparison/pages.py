"""The page of a comparison: the answer first, then what it rests on."""

from collections.abc import Sequence

from leanformer.analysis.comparison import Comparison
from leanformer.analysis.frontier import CURRENCIES, Conditioning
from leanformer.reports.comparison import html, tables
from leanformer.reports.comparison.charts import Charts


MOST = 200  # pairs on a page; all are in compare.json
TITLES = {
    "scores": "Scores",
    "differences": "Differences",
    "fronts": "What it costs",
    "curves": "Learning curves",
    "conditioning": "Conditioning",
}


def comparison(found: Comparison, conditioning: Sequence[Conditioning], figures: Charts) -> str:
    """The whole document."""
    runs = [run for shape in found.shapes for run in shape.runs]
    direction = "higher" if found.score.higher else "lower"
    keys = runs[0].keys
    parts = [
        html.paragraph(
            f"{len(runs)} runs of {len(found.shapes)} shapes on {keys.get('data.name')}, "
            f"{keys.get('data.eval_split')}. {direction.capitalize()} {found.score.name} is better.",
            "soft",
        ),
        html.paragraph(tables.headline(found), "answer"),
        *(html.paragraph(f"Not counted: {name}: {reason}.", "warn") for name, reason in found.left_out.items()),
        *(html.paragraph(note, "warn") for note in found.notes),
    ]
    below = {
        "scores": html.table(*tables.shapes(found)),
        "differences": _differences(found),
        "fronts": html.table(["currency", "what", "on its front, cheapest first"], _fronts(found)),
        "conditioning": html.table(*tables.correlations(conditioning)),
    }
    for name, (figure, caption) in figures.items():
        parts += [html.heading(TITLES[name]), html.figure(figure, caption), below.get(name, "")]
    parts += [html.heading("How it was made"), html.paragraph(tables.METHODS, "soft")]
    parts += [html.paragraph(text, "soft") for text in dict.fromkeys(run.made_by for run in runs)]
    parts += [html.folded("Folders of the runs", html.code("\n".join(str(run.workdir) for run in runs)))]
    return html.page(f"{found.score.name} of {len(found.shapes)} shapes", parts)


def _differences(found: Comparison) -> str:
    head, rows = tables.pairs(found)
    said = html.paragraph(f"Margin ±{tables.number(found)(found.margin)}: {found.margin_by}.", "soft")
    if len(rows) <= tables.SHOWN:
        return said + html.table(head, rows)
    first, rest = rows[: tables.SHOWN], rows[tables.SHOWN : MOST]
    return said + html.table(head, first) + html.folded(f"{len(rest)} more of {len(rows)}", html.table(head, rest))


def _fronts(found: Comparison) -> list[list[str]]:
    return [[name, CURRENCIES[name].what, ", ".join(on)] for name, on in tables.fronts(found).items()]
