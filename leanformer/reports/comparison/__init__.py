"""What is told of a comparison: in the terminal, as charts, as compare.json, and as one page for a browser."""

from collections.abc import Sequence
from pathlib import Path

from leanformer.analysis import frontier
from leanformer.analysis.comparison import Comparison
from leanformer.analysis.frontier import Conditioning
from leanformer.reports.comparison import charts, pages, tables
from leanformer.runtime import files


def tell(found: Comparison, out: Path) -> None:
    """Prints a comparison, writes it into `out`, and says where it is."""
    conditioning = frontier.conditioning(found)
    print(tables.text(found, conditioning))
    page, *others = write(found, conditioning, out)
    print(f"Page: {page}   Beside it: {', '.join(path.name for path in others)}")


def write(found: Comparison, conditioning: Sequence[Conditioning], out: Path) -> list[Path]:
    """Writes compare.html, compare.json and the charts as PNG into `out`, which is made; returns their paths."""
    out.mkdir(parents=True, exist_ok=True)
    files.write_json(out / "compare.json", tables.plain(found, conditioning))
    figures = charts.all_of(found, conditioning)
    drawn = []
    for name, (figure, _) in figures.items():
        drawn.append(out / f"{name}.png")
        figure.savefig(drawn[-1])
    page = out / "compare.html"
    files.write_text(page, pages.comparison(found, conditioning, figures))
    return [page, out / "compare.json", *drawn]
