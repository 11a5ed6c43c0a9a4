"""Comparison of finished runs: `python -m leanformer.compare RUN|SWEEP ... [--by=KEY] [--metric=NAME] [--out=DIR]`
      ... [--against=NAME] [--margin=X] [--test=paired|welch|pooled]

Reads finished runs of any task from their folders or from the folders of sweeps. Runs that differ only in their seed
form a configuration. The report contains:

- the mean of each configuration, with a 95 % confidence interval over seeds;
- the differences between configurations, paired by seed, or by Welch's test if seeds do not match; --test=pooled
  assumes one variance for all configurations and needs fewer seeds. p values are corrected for the number of pairs;
- an equivalence test with a margin: yes, no or inconclusive, with the number of seeds needed;
- costs and Pareto fronts, learning curves, and the correlation of the score with condition numbers.

Writes compare.html (self-contained), compare.json and the plots as PNG; for a single run, run.html.
"""

if __name__ == "__main__":
    from leanformer.__main__ import run

    run("compare")  # imports this module again, once the command line is parsed


from pathlib import Path

from leanformer import cli
from leanformer.analysis import comparison, runs
from leanformer.errors import ConfigError
from leanformer.reports import comparison as reports
from leanformer.reports.comparison import run_page


TESTS = tuple(comparison.TESTS)
FOLDER = "compare"  # default output folder, inside the compared folder


@cli.body("compare")
def main(f: cli.Values) -> None:
    if f.out is None and len(f.words) > 1:
        raise ConfigError(f"{len(f.words)} folders are compared, so there is no default for --out. Pass --out=DIR.")
    out = Path(f.out or Path(f.words[0]) / FOLDER).expanduser()
    data = runs.read(f.words, f.metric)
    compared = comparison.compare(data, by=f.by, margin=f.margin, against=f.against, test=f.test)
    if len(data.runs) == 1 and not data.left_out:
        print(run_page.summary(data.runs[0]))
        print("Page:", run_page.write(data.runs[0], out))
        return
    reports.write_and_print(compared, out)
