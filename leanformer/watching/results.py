"""Results of a watch: rows, verdict in words, table and pictures."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from leanformer.conditioning import ACTIVATIONS
from leanformer.conditioning.spectrum import FLOOR, QUANTILES, beyond_float32
from leanformer.errors import ConfigError
from leanformer.text import wrap
from leanformer.watching.measures import CAPACITY, Layer


Rows = Sequence[Mapping[str, Any]]  # as from `Results.rows`
WORST = 3  # layers that the verdict names
# Share of the head dimension that heads use in two trained models and in fresh ones of their shapes (docs/results.md).
USUAL = (
    "Two trained encoders: 32 % (MiniLM, 32 dimensions), 15 % (ViT-S/14, 64); fresh ones: 5 and 2 %. "
    "Decoders differ: compare such a model with its own initial weights (reference=)."
)
HEAD = (
    *("layer", "heads x dim", "measure", "matrix", "median [10 %, 90 %]", "Gaussian", "reference"),
    *("stable", "effective", "n"),
)
LEGEND = (
    "≥: a lower bound. Gaussian: median for a Gaussian matrix of this shape. stable, effective: median ranks. "
    "n: examples."
)


class Verdict(dict[str, Any]):
    """Findings on a watched model: a dictionary ready for JSON, which prints as its sentences.

    Keys: sentences; measure (by which the layers are judged); layers (how many); calls (most of a layer); worst
    (layer, condition_number, at_least, times_gaussian); median_times_gaussian, median_at_least; singular (number of
    layers); change (layers that are higher, lower, and the most changed) if there is a reference; heads (median, lowest
    and highest share of the head dimension that is used).
    """

    def __str__(self) -> str:
        return wrap("\n".join(self["sentences"]))

    __repr__ = __str__


class Results:
    """Results by layer: rows, verdict, table and picture.

    Attributes:
        layers: {name: `measures.Layer`}, the statistics of each attention layer, or of a matrix of a file.
        unmatched: {name: reason} for what is not measured.
        reference: rows or other results to compare with; None for nothing.
    """

    legend = (
        "Median [10 %, 90 %] of the condition number over examples (and heads: head_output), or of the entropy and the"
        f"\nlargest logit.\n{LEGEND}"
    )

    def __init__(self, reference: Any = None):
        self.layers: dict[str, Layer] = {}
        self.unmatched: dict[str, str] = {}
        self.reference: Any = reference
        self.wait: Callable[[], object] = lambda: None  # until results that JAX computes in the background have arrived

    @property
    def rows(self) -> list[dict[str, Any]]:
        """Dictionaries of plain values, one per layer, measure and head (None: all heads together).

        Keys:
            layer, heads, head_dim, calls, measure, head: what was measured.
            median, q10, q90: quantiles; None if no value is finite.
            interval: 95 % interval of the median over examples; None for fewer than six, or if it is a lower bound.
            bounds: names of the quantiles that are lower bounds.
            shape: [median number of rows, columns] of the matrices.
            tokens: [fewest, most rows].
            effective_rank, stable_rank: medians.
            gaussian: {quantile: value} for Gaussian matrices of this shape; None if not comparable.
            reference: {"median", "effective_rank", "bounds"} of the same layer, measure and head; None without one.
            singular, not_finite, count: numbers of such matrices, and of all.
            negligible: largest number of negligible singular values of one matrix.
            examples: number of examples.
            status: "ok", or sentences.

        Each dictionary has all keys. For a reading, such as an entropy, shape, tokens, both ranks and gaussian are
        None. A layer that was never measured has one row, with its status, and None for all that was not measured.
        """
        self.wait()
        rows = [row for layer in self.layers.values() for row in layer.rows()]
        others = getattr(self.reference, "rows", self.reference) or ()
        known = {(row["layer"], row["measure"], row["head"]): row for row in others}
        for row in rows:
            other = known.get((row["layer"], row["measure"], row["head"]))
            if other is not None and None not in (row["median"], other["median"]):
                row["reference"] = {key: other[key] for key in ("median", "effective_rank", "bounds")}
        return rows

    def verdict(self) -> Verdict:
        """Return what the rows say: it prints as two to four sentences, and is a dictionary ready for JSON."""
        return judge(self.rows)

    def table(self) -> str:
        """Return the `rows` of all heads together as a table of text, with statuses and what was not matched."""
        return format_table(self.rows, self.unmatched, self.legend)

    def __str__(self) -> str:
        return f"{self.verdict()}\n\n{self.table()}"

    def plot(self, path: str | Path | None = None, title: str = "") -> Any:
        """Return a Matplotlib figure: condition numbers by layer, and layers x heads, condition number and rank.

        Args:
            path: file to write it to, such as conditioning.png; None for none.
            title: title of the figure.

        Raises:
            ConfigError: nothing was measured, or Matplotlib is not installed.
        """
        figure = self.draw(title)
        if path is not None:
            figure.savefig(Path(path).expanduser())
        return figure

    def draw(self, title: str) -> Any:
        return draw(self.rows, title)


def judge(rows: Rows) -> Verdict:
    """Each judgement names its reference, and none is "good" or "bad"."""
    result = Verdict(sentences=[], layers=0)
    of_layers = [row for row in rows if row["head"] is None and row["median"] is not None and row["gaussian"]]
    if not of_layers:
        result["sentences"].append("No condition number was measured.")
        return result
    names = [row["measure"] for row in of_layers]
    measure = next((name for name in ("attention_output", "head_output", "tokens") if name in names), None)
    chosen = [row for row in of_layers if measure in (None, row["measure"])]
    result |= {"measure": measure, "layers": len(chosen), "calls": max(row["calls"] for row in chosen)}
    _judge_by_gaussian(result, chosen)
    _judge_by_reference(result, chosen)
    _judge_heads(result, [row for row in rows if row["measure"] == "head_output" and row["head"] is not None])
    if result["calls"] > 1:
        together = f"All {result['calls']} measured calls count together, of more than {CAPACITY} examples the last"
        result["sentences"].append(f"{together}; record() has the latest.")
    return result


def _name(row: Mapping[str, Any], result: Verdict) -> str:
    return row["layer"] if result["measure"] else f"{row['layer']}, {row['measure']}"


def _judge_by_gaussian(result: Verdict, rows: Rows) -> None:
    times = [row["median"] / row["gaussian"]["median"] for row in rows]
    result["worst"] = [
        {
            "layer": _name(row, result),
            "condition_number": row["median"],
            "at_least": "median" in row["bounds"],
            "times_gaussian": x,
        }
        for x, row in sorted(zip(times, rows, strict=True), key=lambda pair: -pair[0])[:WORST]
    ]
    result["median_times_gaussian"] = float(np.median(times))
    bounds = [x for x, row in zip(times, rows, strict=True) if "median" in row["bounds"]]
    # As in `measures.Tally.describe`: exact if every lower bound lies above the values that it is interpolated from.
    result["median_at_least"] = bool(np.quantile(times, 0.5, method="higher") >= min(bounds, default=np.inf))
    result["singular"] = sum(row["median"] >= 0.99 / FLOOR for row in rows)
    apart = [
        f"{x['layer']}, {least}{x['condition_number']:.3g} ({least}{x['times_gaussian']:,.3g} times)"
        for x in result["worst"]
        for least in ["≥" * x["at_least"]]
        if x["times_gaussian"] > 2 * result["median_times_gaussian"]
    ]
    what = f"κ of {result['measure']}" if result["measure"] else "κ"
    least, shown = "at least " * result["median_at_least"], "shown to be " * bool(bounds)
    result["sentences"].append(
        f"{what} is {least}{result['median_times_gaussian']:,.3g} times that of a Gaussian matrix of the same shape "
        f"(median of {len(rows)}), "
        f"{'highest in ' * bool(apart)}{'; '.join(apart) or f'in none {shown}more than twice as much'}."
    )
    if result["singular"]:
        result["sentences"].append(f"κ is {beyond_float32(result['singular'], len(rows))}.")


def _judge_by_reference(result: Verdict, rows: Rows) -> None:
    exact = [r for r in rows if r.get("reference") and "median" not in (*r["bounds"], *r["reference"]["bounds"])]
    changed = [(row["median"] / row["reference"]["median"], row) for row in exact]
    if not changed:
        return
    times, row = max(changed, key=lambda pair: abs(np.log(pair[0])))
    higher, lower = sum(x > 1 for x, _ in changed), sum(x < 1 for x, _ in changed)
    name, before, after = _name(row, result), row["reference"]["median"], row["median"]
    most = {"layer": name, "from": before, "to": after, "times": times}
    result["change"] = {"higher": higher, "lower": lower, "most": most}
    result["sentences"].append(
        f"Against the reference it is higher in {higher} and lower in {lower} of {len(changed)}, most changed in "
        f"{name}: {before:.3g} to {after:.3g}."
    )


def _judge_heads(result: Verdict, rows: Rows) -> None:
    used = sorted(
        ((row["effective_rank"] / row["shape"][1], row) for row in rows if row["effective_rank"]),
        key=lambda pair: pair[0],
    )
    if not used:
        return
    (lowest, first), (highest, last) = used[0], used[-1]
    middle = float(np.median([share for share, _ in used]))
    result["heads"] = {"median": middle, "lowest": lowest, "highest": highest}
    result["sentences"] += [
        f"Heads use a median of {middle:.0%} of their dimension (effective rank), from {lowest:.0%} (head "
        f"{first['head']} of {first['layer']}) to {highest:.0%} (head {last['head']} of {last['layer']}).",
        USUAL,
    ]


def format_table(rows: Rows, unmatched: Mapping[str, str], legend: str) -> str:
    """One line per row of all heads together, then statuses, and what was not matched."""
    lines: list[tuple[str, ...]] = [HEAD]
    statuses: dict[str, dict[str, list[str]]] = {}  # sentence: measure: layers
    for row in (row for row in rows if row["head"] is None):
        for sentence in row["status"].split("; ") if row["status"] != "ok" else ():
            statuses.setdefault(sentence, {}).setdefault(row["measure"] or "", []).append(row["layer"])
        if row["measure"] is not None:
            lines.append(_format_row(row))
    if not any(row["reference"] for row in rows):
        lines = [(*line[:6], *line[7:]) for line in lines]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    text = ["  ".join(f"{cell:<{w}}" for cell, w in zip(line, widths, strict=True)).rstrip() for line in lines]
    text += ["", legend] if len(lines) > 1 else []
    text += [f"{_format_places(places)}: {sentence}" for sentence, places in statuses.items()]
    text += [f"Not matched: {name}: {reason}" for name, reason in unmatched.items()]
    return "\n".join(text)


def _format_row(row: Mapping[str, Any]) -> tuple[str, ...]:
    def quantile(key: str) -> str:
        return "-" if row[key] is None else ("≥" if key in row["bounds"] else "") + f"{row[key]:.3g}"

    low, middle, high = map(quantile, ("q10", "median", "q90"))
    shape = "-"
    if row["shape"]:
        fewest, most = row["tokens"]
        shape = f"{fewest if fewest == most else f'{fewest}-{most}'} x {row['shape'][1]}"
    return (
        row["layer"],
        f"{row['heads'] or '?'} x {row['head_dim'] or '?'}" if row["measure"] in ACTIVATIONS or row["heads"] else "-",
        row["measure"],
        shape,
        middle if low == middle == high else f"{middle} [{low}, {high}]",
        *(f"{row[key]['median']:.3g}" if row[key] else "-" for key in ("gaussian", "reference")),
        *("-" if row[key] is None else f"{row[key]:.3g}" for key in ("stable_rank", "effective_rank")),
        str(row["examples"]),
    )


def _format_places(places: Mapping[str, Sequence[str]]) -> str:
    """Name the layers of a sentence, and the measure if it is about a single one."""
    layers = list(dict.fromkeys(layer for names in places.values() for layer in names))
    what = layers[0] if len(layers) == 1 else f"{layers[0]} and {len(layers) - 1} more"
    measures = [name for name in places if name]
    return what if len(measures) != 1 else f"{what}, {measures[0]}"


def draw(rows: Rows, title: str) -> Any:
    """Figure of κ by layer, a panel per measure and shape, and of `head_output` as maps of layers x heads."""
    entries = _entries(rows)
    if not entries:
        raise ConfigError("plot: no condition number was measured. See table() for the reason.")
    heads = [row for row in rows if row["measure"] == "head_output" and row["head"] is not None and row["shape"]]
    layers = list(dict.fromkeys(row["layer"] for row in heads))
    maps = {}
    if heads:
        kappa, rank = np.full((2, len(layers), 1 + max(row["head"] for row in heads)), np.nan)
        for row in heads:
            place = layers.index(row["layer"]), row["head"]
            kappa[place], rank[place] = row["median"], row["effective_rank"] / row["shape"][1]
        maps = {"one head: condition number": kappa, "one head: effective rank / head dimension": rank}
    return _charts().plot_by_layer(entries, title, maps)


def draw_checkpoints(names: Sequence[str], checkpoints: Sequence[Rows], title: str) -> Any:
    """Figure of medians over checkpoints: a panel per measure and shape, a line per layer."""
    snapshots = [_entries(rows) for rows in checkpoints]
    shared = [name for name in snapshots[0] if all(name in entries for entries in snapshots)]
    if not shared:
        raise ConfigError("plot: the checkpoints share no measure of matrices of one shape.")
    snapshots = [{name: entries[name] for name in shared} for entries in snapshots]
    figure = _charts().plot_over_steps(range(len(names)), snapshots, title)
    for axes in figure.axes:
        axes.set_xticks(range(len(names)), names, rotation=30, ha="right")
        axes.set_xlabel("")
    return figure


def _charts() -> Any:
    try:
        from leanformer.conditioning import charts
    except ImportError as error:
        raise ConfigError("A plot needs Matplotlib: pip install matplotlib.") from error
    return charts


def _entries(rows: Rows) -> dict[str, Any]:
    """Condition numbers of all heads together by measure and shape, in the format of `charts`."""
    entries: dict[Any, Any] = {}
    for row in rows:
        if row["head"] is None and row["shape"]:
            key = (row["measure"], *row["shape"])
            new = {"shape": row["shape"], "theory": row["gaussian"], "layers": [], "reference": []}
            entry = entries.setdefault(key, new)
            entry["layers"].append({name: row[name] for name in (*QUANTILES, "singular")})
            entry["reference"].append(row["reference"]["median"] if row["reference"] else np.nan)
    measures = [key[0] for key in entries]
    # A panel's title has name and shape: names only need to differ.
    return {key[0] + " " * measures[:i].count(key[0]): entry for i, (key, entry) in enumerate(entries.items())}
