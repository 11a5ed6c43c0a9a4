"""Are they different? `python -m leanformer.compare RUN|SWEEP ... [--by=KEY] [--metric=NAME] [--out=DIR]`

Reads finished runs of any task, by their folders or by those of sweeps, groups those that differ in their seed alone,
and says which shapes differ: means with 95 % intervals over seeds, differences paired by seed (Welch's where seeds do
not match; --test=pooled takes one spread for all shapes, which needs fewer seeds), corrected for the number of pairs,
and an equivalence test, "within the margin": yes, no, or too few seeds, with how many would do. Also what each shape
costs and which ones nothing beats, learning curves, and condition numbers beside the score. Writes compare.html, which
needs nothing else to be read, compare.json and the charts as PNG; of one run, run.html.
"""

from pathlib import Path

from leanformer import cli
from leanformer.analysis import comparison, runs
from leanformer.errors import ConfigError
from leanformer.reports import comparison as reports
from leanformer.reports.comparison import run_page


TESTS = tuple(comparison.TESTS)
FOLDER = "compare"  # in the one that is compared, if no other is named


@cli.command(
    cli.Flag("by", "Config keys that make a shape; all that differ if not given.", list, default=()),
    cli.Flag("metric", "NAME[:higher|lower] of the last evaluation; the runs' own score if not given."),
    cli.Flag("margin", "Largest difference that does not matter, in the metric's unit.", float),
    cli.Flag("against", "Name of the shape that all others are compared with; every two if not given."),
    cli.Flag(
        "test", "Paired by seed where seeds match; each its own spread; one spread for all.", TESTS, default="paired"
    ),
    cli.Flag("out", "Folder of what is written; compare/ in the one folder that was named.", writes=True),
    words="folders of runs or of sweeps",
)
def main(f: cli.Values) -> None:
    if f.out is None and len(f.words) > 1:
        raise ConfigError(f"{len(f.words)} folders are compared: say where the page shall go, --out=DIR.")
    out = Path(f.out or Path(f.words[0]) / FOLDER).expanduser()
    found = runs.read(f.words, f.metric)
    if len(found.runs) == 1 and not found.left_out:
        print(run_page.text(found.runs[0]))
        print("Page:", run_page.write(found.runs[0], out))
        return
    compared = comparison.compare(found, by=f.by, margin=f.margin, against=f.against, test=f.test)
    reports.tell(compared, out)


if __name__ == "__main__":
    cli.run(main)
