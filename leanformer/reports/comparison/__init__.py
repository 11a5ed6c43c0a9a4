"""Reports on a comparison: text for a terminal, plots, compare.json and an HTML page."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from leanformer.analysis import frontier
from leanformer.analysis.comparison import Comparison
from leanformer.analysis.frontier import ScoreCorrelation
from leanformer.costs.count import format_count
from leanformer.quantities import find
from leanformer.reports.comparison import charts, html, run_page, tables
from leanformer.reports.comparison.charts import Charts
from leanformer.runtime import files, text


MOST_PAGES = 24  # maximal number of runs with pages of their own
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
    print(f"Page: {page}")
    print(text.wrap(f"Also written: {', '.join(path.name for path in others)}"))


def write(result: Comparison, conditioning: Sequence[ScoreCorrelation], out: Path) -> list[Path]:
    """Write compare.html, compare.json and the plots as PNG to the folder `out`, and return their paths.

    Pages of the runs of the best configurations are written to out/runs.
    """
    out.mkdir(parents=True, exist_ok=True)
    files.write_json(out / "compare.json", tables.to_plain(result, conditioning))
    figures = charts.draw_all(result, conditioning)
    drawn = []
    for name, (figure, _) in figures.items():
        drawn.append(out / f"{name}.png")
        figure.savefig(drawn[-1])
    page = out / "compare.html"
    files.write_text(page, make_page(result, conditioning, figures, _write_run_pages(result, out)))
    return [page, out / "compare.json", *drawn]


def _write_run_pages(result: Comparison, out: Path) -> dict[str, str]:
    """Write the pages of the runs of the best configurations, and return links to them by configuration."""
    links, number = {}, 0
    for shape in result.shapes:
        addresses = [f"runs/{number + i}" for i in range(len(shape.runs))]  # names of folders may be the same
        number += len(shape.runs)
        if number > MOST_PAGES:
            break
        back = "../../compare.html"
        pages = [run_page.write(run, out / at, back).name for run, at in zip(shape.runs, addresses, strict=True)]
        show = tables.number(result)
        seeds = [f"seed {run.seed}: {show(run.value)}" for run in shape.runs]
        each = (html.link(f"{at}/{page}", seed) for at, page, seed in zip(addresses, pages, seeds, strict=True))
        links[shape.name] = f"<br><small>{' · '.join(each)}</small>"
    return links


def make_page(
    result: Comparison,
    conditioning: Sequence[ScoreCorrelation],
    figures: Charts,
    links: Mapping[str, str] | None = None,
) -> str:
    """Return a comparison as an HTML page: the result first, then plots, tables and methods.

    Args:
        result: comparison.
        conditioning: correlations of the score with condition numbers.
        figures: plots from `charts.draw_all`.
        links: HTML to add to the names of configurations, by name.
    """
    runs = [run for shape in result.shapes for run in shape.runs]
    configurations, keys = format_count(len(result.shapes), "configuration"), runs[0].keys
    models = " and ".join(sorted({str(run.keys.get("model.name")) for run in runs}))
    steps = [run.summary["steps"] for run in runs if "steps" in run.summary]
    length = f", {' to '.join(f'{n:,}' for n in sorted({min(steps), max(steps)}))} steps each" if steps else ""
    parts = [
        html.paragraph(
            f"{format_count(len(runs), 'run')} of {configurations} of {models} on "
            f"{keys.get('data.name')}, {keys.get('data.eval_split')}{length}. {tables.score_words(result).sentence}",
            "soft",
        ),
        html.paragraph(tables.headline(result), "answer"),
        *(html.paragraph(f"Not counted: {name}: {reason}.", "warn") for name, reason in result.left_out.items()),
        *(html.paragraph(note, "warn") for note in result.notes),
    ]
    priced = tables.fronts(result)
    fronts = [[find(name).label, find(name).what, ", ".join(on)] for name, on in priced.items()]
    below = {
        "scores": html.table(*tables.shapes(result), links=links),
        "differences": _differences(result),
        "fronts": html.table(["cost", "description", "Pareto-optimal, cheapest first"], fronts),
        "conditioning": html.table(*tables.correlations(conditioning)),
    }
    shown = [measure for measure in conditioning if len(measure.numbers) > 1]
    panels = {  # one plot per panel, so that a narrow screen shows them below each other
        "fronts": [charts.fronts(result, {name: on}, wide=len(priced) == 1) for name, on in priced.items()],
        "conditioning": [charts.conditioned(result, [measure], wide=len(shown) == 1) for measure in shown],
    }
    for name, (figure, caption) in figures.items():
        parts += [html.heading(TITLES[name]), html.figures(panels.get(name) or [figure], caption), below.get(name, "")]
    parts += [html.heading("Methods"), html.paragraph(tables.METHODS, "soft")]
    parts += [html.paragraph(source, "soft") for source in dict.fromkeys(run.made_by for run in runs)]
    parts += [html.folded("Folders of the runs", html.code("\n".join(str(run.workdir) for run in runs)))]
    return html.page(
        f"{find(result.score.name).label[0].upper()}{find(result.score.name).label[1:]} of {configurations}", parts
    )


def _differences(result: Comparison) -> str:
    head, rows = tables.pairs(result)
    margin = html.paragraph(
        f"Margin ±{tables.number(result)(result.margin)}{tables.points(result)}: {result.margin_by}.", "soft"
    )
    if len(rows) <= tables.SHOWN:
        return margin + html.table(head, rows)
    first, rest = rows[: tables.SHOWN], rows[tables.SHOWN : MOST]
    return margin + html.table(head, first) + html.folded(f"{len(rest)} more of {len(rows)}", html.table(head, rest))
