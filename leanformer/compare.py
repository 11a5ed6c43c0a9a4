"""Comparison of finished runs: `python -m leanformer.compare RUN|SWEEP ... [--by=KEY] [--metric=NAME] [--out=DIR]`
      ... [--against=NAME] [--margin=X] [--test=paired|welch|pooled]

Reads finished runs of any task from their folders or from the folders of sweeps. Runs that differ only in their seed
form a configuration. The report contains:

- if a config key has three or more positive numbers as values, the change of the score per doubling, with its 95 %
  interval;
- the mean of each configuration, with a 95 % confidence interval over seeds;
- the differences between configurations, paired by seed, or by Welch's test if seeds do not match; --test=pooled
  assumes one variance for all configurations and needs fewer seeds. p values are corrected for the number of pairs;
- an equivalence test with a margin: yes, no or inconclusive; runs needed to show equivalence, or the difference;
- costs and Pareto fronts, learning curves, and condition numbers with their correlation with the score.

Writes compare.html (self-contained), compare.json and the plots as PNG, for several runs or for one.
"""

from pathlib import Path

from leanformer import cli
from leanformer.errors import ConfigError


@cli.command(
    cli.Flag("by", "Config keys that define a configuration; by default all keys that differ.", list, default=()),
    cli.Flag("metric", "NAME[:higher|lower] of the last evaluation; by default the score of the runs."),
    cli.Flag("margin", "Equivalence margin: largest difference to ignore, in units of the metric.", float),
    cli.Flag("against", "Name of a configuration to compare all others with; by default all pairs are compared."),
    cli.Flag(
        "test",
        "Test of a difference: paired by seed, Welch's (separate variances), or pooled (one variance).",
        ("paired", "welch", "pooled"),
        default="paired",
    ),
    cli.Flag("out", "Folder to write to; by default compare/ in the compared folder."),
    words="folders of runs or of sweeps",
)
def main(flags: cli.Values) -> None:
    from leanformer.analysis import comparison, runs
    from leanformer.reports import comparison as report

    if flags.out is None and len(flags.words) > 1:  # the first folder's own comparison would be lost
        raise ConfigError(f"{len(flags.words)} folders are compared, so there is no default for --out. Pass --out=DIR.")
    compared = comparison.compare(
        runs.read(flags.words, flags.metric), by=flags.by, margin=flags.margin, against=flags.against, test=flags.test
    )
    report.write_and_print(compared, Path(flags.out or Path(flags.words[0]) / "compare").expanduser())


if __name__ == "__main__":
    cli.run(main)
