"""Reports on a comparison: text for a terminal, plots, compare.json and an HTML page."""

from collections.abc import Sequence
from pathlib import Path

from leanformer.analysis import frontier
from leanformer.analysis.comparison import Comparison
from leanformer.analysis.frontier import ScoreCorrelation
from leanformer.reports.comparison import charts, pages, tables
from leanformer.runtime import files


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
    files.write_text(page, pages.comparison(result, conditioning, figures))
    return [page, out / "compare.json", *drawn]
