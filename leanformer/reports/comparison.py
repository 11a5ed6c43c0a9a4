"""Report on a comparison: tables and sentences for a terminal, compare.json, PNG plots and one HTML page."""

import dataclasses
import html
import io
import math
import re
import statistics as middles
import string
import zlib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure

from leanformer import text
from leanformer.analysis import frontier
from leanformer.analysis.comparison import COST_METRICS, SAME, Comparison, Configuration, Pair, Trend, median_cost
from leanformer.analysis.frontier import Conditioning
from leanformer.analysis.statistics import LEVEL, POWER, Interval
from leanformer.costs.count import format_count, format_number
from leanformer.reports import charts
from leanformer.reports.charts import Charts
from leanformer.reports.plots import SERIES, TEXT_COLOR
from leanformer.runtime import files
from leanformer.text import EMA, lookup
from leanformer.training.run_files import to_json


ROWS = 20  # most rows of a table; compare.json has all
SHOWN = 6  # most keys that a sentence names
METHODS = (
    "Confidence intervals are Student's, over the runs of a configuration. Differences are the first configuration "
    "minus the second: paired by seed and by other differing keys, of independent runs (Welch), or with one variance "
    "for all configurations (pooled), as in the column test. Different: p below 0.05 after Holm's correction for all "
    "pairs; intervals are not corrected. Equivalent: two one-sided tests (TOST) at 5 %, with the same correction. "
    f"Runs needed: for {POWER:.0%} power, with the observed variance, to show the observed difference or, if there is "
    "none, equivalence. Slopes: least squares on the logarithm, with a level for each seed and for all other keys. "
    "The mean of the best of many configurations is optimistic, because it was selected."
)
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
Number = Callable[[float], str]
Table = tuple[list[str], list[list[str]]]  # head and rows


def write_and_print(result: Comparison, out: Path) -> None:
    """Print a comparison, and write compare.html, compare.json and the plots as PNG to the folder `out`."""
    measures = frontier.list_conditioning(result)
    files.write_json(out / "compare.json", to_plain(result, measures))
    drawn, names = charts.draw_all(result, measures), ["compare.json"]
    for name, (figures, _) in drawn.items():
        for i, figure in enumerate(figures, 1):
            names.append(f"{name}_{i}.png" if len(figures) > 1 else f"{name}.png")
            figure.savefig(out / names[-1])
    files.write_text(out / "compare.html", make_page(result, measures, drawn))
    print(format_text(result, measures))
    print(f"Page: {out / 'compare.html'}")
    print(text.wrap(f"Also written: {', '.join(names)}"))


def number(result: Comparison) -> Number:
    """Return a function that formats the metric, in its unit, with enough digits to distinguish the configurations."""
    scale = lookup(result.score.name).scale
    halves = [half for one in result.configurations if math.isfinite(half := one.interval.high - one.mean)]
    smallest = scale * min(result.margin, *([middles.median(halves)] if halves else []), math.inf) or 1.0
    decimals = min(8, max(0, 1 - math.floor(math.log10(smallest))))
    return lambda value: f"{scale * value:.{decimals}f}"


def with_interval(configuration: Configuration, show: Number) -> str:
    """Format the mean score with the half-width of its confidence interval, as "MEAN ± HALF"."""
    half = (configuration.interval.high - configuration.interval.low) / 2
    return f"{show(configuration.mean)} ± {show(half)}" if math.isfinite(half) else show(configuration.mean)


def between(interval: Interval, show: Number) -> str:
    """Format an interval as "LOW to HIGH", or as "unknown" if it is infinite."""
    return f"{show(interval.low)} to {show(interval.high)}" if math.isfinite(interval.high) else "unknown"


def configurations(result: Comparison) -> Table:
    """Return the table of configurations: name, runs, mean with interval, costs, costs for which it is on the front."""
    fronts, show, rows = frontier.pareto_fronts(result), number(result), []
    for one in result.configurations:
        costs = [format_number(median_cost(one, name)) for name in COST_METRICS]
        best_in = [lookup(name).label for name, names in fronts.items() if one.name in names]
        front = "all costs" if len(best_in) == len(fronts) else ", ".join(best_in)
        rows.append([one.name, str(len(one.runs)), with_interval(one, show), *costs, front])
    costs = [lookup(name).axis for name in COST_METRICS]
    return ["configuration", "runs", lookup(result.score.name).axis, *costs, "Pareto-optimal in"], rows


def pairs(result: Comparison) -> Table:
    """Return the table of pairs: difference, interval, p value, test, verdict, and the runs that would decide."""
    show, unit = number(result), lookup(result.score.name).points
    rows = [
        [
            f"{pair.first} - {pair.second}",
            f"{'+' if pair.difference.value > 0 else ''}{show(pair.difference.value)}",
            between(pair.interval, show),
            f"{pair.p_holm:.3g}" if math.isfinite(pair.interval.high) else "unknown",
            pair.difference.method,
            pair.verdict,
            f"{pair.runs_to_differ or '-'} / {pair.runs_to_equate or '-'}",
        ]
        for pair in result.pairs
    ]
    difference = f"difference,{unit}" if unit else "difference"
    head = ["pair", difference, f"{LEVEL:.0%} interval", "p (Holm)", "test", "verdict", "runs to differ / equal"]
    return head, rows


def conditioning(measures: Sequence[Conditioning]) -> Table:
    """Return the table of condition numbers with their rank correlation with the score, a row per matrix."""
    rows = []
    for measure in measures:
        unbounded = measure.interval.high - measure.interval.low >= 2
        interval = "too few" if unbounded else between(measure.interval, lambda value: f"{value:+.2f}")
        rho = "-" if math.isnan(measure.rho) else f"{measure.rho:+.2f}"
        bounds = f"{len(measure.singular)} of {len(measure.numbers)}" if measure.singular else ""
        rows.append([measure.measure.replace("_", " "), str(len(measure.numbers)), rho, interval, bounds])
    return ["condition number of", "configurations", "Spearman's ρ", f"{LEVEL:.0%} interval", "lower bounds"], rows


def headline(result: Comparison) -> list[str]:
    """Return the result in a few sentences: trends, the best configuration, and its difference from the cheapest."""
    show, best, quantity = number(result), result.configurations[0], lookup(result.score.name)
    better = "higher" if result.score.higher else "lower"
    lines = [_describe_trend(result, trend) for trend in result.trends]
    unit = f" {quantity.unit}" * bool(quantity.unit)
    lines.append(f"Best {quantity.label} ({better} is better): {best.name}, {with_interval(best, show)}{unit}.")
    if result.pairs:
        cheapest = min(result.configurations, key=lambda one: (one is best, median_cost(one, "params")))
        names = {best.name, cheapest.name}
        told = next((pair for pair in result.pairs if {pair.first, pair.second} == names), result.pairs[0])
        lines.append(describe_pair(result, told))
    if len(result.pairs) > 1:
        differ = sum(pair.better is not None for pair in result.pairs)
        same = sum(pair.same == SAME for pair in result.pairs)
        undecided = sum(pair.undecided for pair in result.pairs)
        lines.append(
            f"Of {len(result.pairs)} pairs {differ} differ, {same} are equivalent within "
            f"±{show(result.margin)}{quantity.points}, {undecided} are undecided."
        )
    return lines


def _describe_trend(result: Comparison, trend: Trend) -> str:
    show, name, quantity = number(result), trend.key.rpartition(".")[2], lookup(result.score.name)
    interval = trend.slope.interval()
    known = f"{LEVEL:.0%} interval {between(interval, show)}, assuming one variance for all runs"
    known = known if math.isfinite(interval.high) else "no interval"
    changes = [f"{key.rpartition('.')[2]} goes from {low} to {high}" for key, (low, high) in trend.moving.items()]
    while_ = f", while {' and '.join(changes)}" if changes else ""
    sign = "+" if trend.slope.value > 0 else ""
    return (
        f"Per doubling of {name} ({trend.low:g} to {trend.high:g}) the {quantity.label} changes by "
        f"{sign}{show(trend.slope.value)}{quantity.points} ({known}){while_}. "
        f"Compared to {name}={trend.low:g}, {name}={trend.high:g} has {_costs(trend.params, trend.seconds)}."
    )


def describe_pair(result: Comparison, pair: Pair) -> str:
    """Return the difference of two configurations in one sentence, with its interval and its costs."""
    show, unit = number(result), lookup(result.score.name).points
    gain = (pair.difference.value > 0) == result.score.higher
    better, other = (pair.first, pair.second) if gain else (pair.second, pair.first)
    ends = pair.interval.low, pair.interval.high
    low, high = sorted(ends if pair.difference.value > 0 else [-end for end in ends])
    interval = f"{LEVEL:.0%} interval {show(low)} to {show(high)}" if math.isfinite(high) else "no interval"
    found = {one.name: one for one in result.configurations}
    params, seconds = (
        median_cost(found[better], cost) / median_cost(found[other], cost) for cost in ("params", "seconds")
    )
    amount = f"{show(abs(pair.difference.value))}{unit} ({interval}), with {_costs(params, seconds)}"
    if pair.better:
        return f"{better} beats {other} by {amount}."
    if pair.same == SAME:
        return (
            f"{better} and {other} are equivalent within ±{show(result.margin)}{unit}: the first is ahead by {amount}."
        )
    number_of = pair.runs_to_differ
    needed = f" About {number_of} runs of each would show a difference of this size." if number_of else ""
    if pair.interval.contains(0):
        return f"No difference is shown between {better} and {other}: the first is ahead by {amount}.{needed}"
    correction = f"significant, but not after correction for {len(result.pairs)} pairs"
    return f"{better} is ahead of {other} by {amount}: {correction}.{needed}"


def _costs(params: float, seconds: float) -> str:
    times = "the same number of" if abs(params - 1) < 0.005 else f"{round(params, 2):g} times the"
    return f"{times} parameters and {round(seconds, 2):g} times the training time"


def describe_runs(result: Comparison) -> str:
    """Return what was compared: number of runs, models, data and length."""
    runs = [run for one in result.configurations for run in one.runs]
    keys, steps = runs[0].keys, sorted({run.summary["steps"] for run in runs})
    models = " and ".join(sorted({str(run.keys.get("model.name")) for run in runs}))
    length = " to ".join(f"{end:,}" for end in dict.fromkeys((steps[0], steps[-1])))
    examples = {run.summary["final"].get("examples") for run in runs} - {None}
    scored = f" Scored by the last evaluation, on {format_count(min(examples), 'example')}" if examples else ""
    if examples and result.score.name.removeprefix(EMA) == "top1":  # others are not means over examples
        scored += f": one is {100 / min(examples):.2g} points"
    return (
        f"{format_count(len(runs), 'run')} of {format_count(len(result.configurations), 'configuration')} of {models} "
        f"on {keys.get('data.name')}, {keys.get('data.eval_split')}, {length} steps each.{scored}.{_differing(result)}"
    )


def _differing(result: Comparison) -> str:
    """Name the keys by which configurations differ, since they may be named after folders."""
    found = [one.keys for one in result.configurations]
    names = [key for key in found[0] if len({repr(keys[key]) for keys in found}) > 1]
    more = f" and {len(names) - SHOWN} more, see compare.json" if len(names) > SHOWN else ""
    return f" Configurations differ in {', '.join(names[:SHOWN])}{more}." if names else ""


def _describe_margin(result: Comparison) -> str:
    return f"Margin ±{number(result)(result.margin)}{lookup(result.score.name).points}: {result.margin_by}."


def list_warnings(result: Comparison) -> list[str]:
    """Return the runs that are not counted, and other limits of the conclusions."""
    return [*(f"Not counted: {name}: {reason}." for name, reason in result.left_out.items()), *result.notes]


def format_text(result: Comparison, measures: Sequence[Conditioning]) -> str:
    """Return a comparison as text for a terminal: result, tables, and warnings."""
    blocks = [text.wrap("\n".join([describe_runs(result), *headline(result)])), align_columns(*configurations(result))]
    blocks += [f"{text.wrap(_describe_margin(result))}\n{align_columns(*pairs(result))}"] if result.pairs else []
    blocks += [align_columns(*conditioning(measures))] if measures and len(result.configurations) > 1 else []
    blocks += [text.wrap(f"WARNING: {note}") for note in list_warnings(result)]
    return "\n\n".join(blocks) + "\n"


def align_columns(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Format a table for a terminal, with at most ROWS rows and a line about the others."""
    more = [f"  ... and {len(rows) - ROWS} more in compare.json"] if len(rows) > ROWS else []
    return "\n".join([text.table(head, rows[:ROWS]), *more])


def to_plain(result: Comparison, measures: Sequence[Conditioning]) -> dict[str, Any]:
    """Return the content of compare.json: a comparison as plain values; unknown and infinite ones are None."""
    return to_json(
        {
            "metric": result.score.name,
            "higher_is_better": result.score.higher,
            "level": LEVEL,
            "margin": result.margin,
            "correction": "Holm",
            "configurations": [
                {
                    "name": one.name,
                    "keys": dict(one.keys),
                    "mean": one.mean,
                    "interval": dataclasses.astuple(one.interval),
                    "seeds": [run.seed for run in one.runs],
                    "scores": [run.value for run in one.runs],
                    "costs": {name: median_cost(one, name) for name in COST_METRICS},
                    "runs": [str(run.workdir) for run in one.runs],
                }
                for one in result.configurations
            ],
            "pairs": [dataclasses.asdict(pair) | {"verdict": pair.verdict} for pair in result.pairs],
            "trends": [
                dataclasses.asdict(trend) | {"interval": dataclasses.astuple(trend.slope.interval())}
                for trend in result.trends
            ],
            "fronts": frontier.pareto_fronts(result),
            "conditioning": [dataclasses.asdict(measure) for measure in measures],
            "warnings": list_warnings(result),
        }
    )


def make_page(result: Comparison, measures: Sequence[Conditioning], drawn: Charts) -> str:
    """Return a comparison as one HTML page without scripts: the result first, then plots, tables and methods."""
    label = lookup(result.score.name).label
    title = f"{label[0].upper()}{label[1:]} of {format_count(len(result.configurations), 'configuration')}"
    below = {"scores": table(*configurations(result))}
    if result.pairs:
        below |= {"differences": _paragraph(_describe_margin(result), "soft") + table(*pairs(result))}
        below |= {"conditioning": table(*conditioning(measures))}
    answer = "\n".join(_paragraph(line) for line in headline(result))
    parts = [_paragraph(describe_runs(result), "soft"), f'<div class="answer">{answer}</div>']
    parts += [_paragraph(note, "warn") for note in list_warnings(result)]
    for name, (figures, caption) in drawn.items():
        parts += [f"<h2>{TITLES[name]}</h2>", _figure(figures, caption), below.get(name, "")]
    runs = [run for one in result.configurations for run in one.runs]
    parts += ["<h2>Methods</h2>", _paragraph(METHODS, "soft")]
    parts += [_paragraph(source, "soft") for source in dict.fromkeys(run.made_by for run in runs)]
    folders = html.escape("\n".join(str(run.workdir) for run in runs))
    parts.append(f"<details><summary>Folders of the runs</summary><pre>{folders}</pre></details>")
    template = Path(__file__).with_name("page.html").read_text(encoding="utf-8")
    return string.Template(template).substitute(title=html.escape(title), body="\n".join(parts))


def _paragraph(content: str, kind: str = "") -> str:
    return f'<p class="{kind}">{html.escape(content)}</p>'


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table of texts as HTML, with at most ROWS rows."""
    lines = [_row("th", head), *(_row("td", row) for row in rows[:ROWS])]
    more = f"{len(rows) - ROWS} more in compare.json" if len(rows) > ROWS else ""
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
