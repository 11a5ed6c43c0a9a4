"""Charts of condition numbers, for a report or a notebook: each function returns a figure to save, None without data.

`measures` is {name: entry} in the format of `probe.json`: `layers` is the result of `digest`, `shape` the shape of the
matrices, and `theory` the result of `gaussian`, or None; the latter two are lists by layer if shapes differ. Entries
without a shape are not condition numbers and are left out. None and values that are not positive leave a gap.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap, LogNorm, Normalize
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, LogLocator, MaxNLocator, NullFormatter, NullLocator, StrMethodFormatter

from leanformer.conditioning.spectrum import FLOOR
from leanformer.conditioning.theory import formula, gaussian
from leanformer.text import lookup


MEASURED, THEORY, FORMULA, SEEDS = "#1f6f8b", "#c2512f", "#767676", "#333333"
# Hues of similar luminance, with a contrast of at least 3:1 to white and to the background of dark pages, and none like
# THEORY, which is drawn beside them.
LAYERS = LinearSegmentedColormap.from_list("layers", ["#3b6fd0", "#0f8a94", "#5a8a1f", "#a97a00", "#b0507f"])
COLUMNS = 4
NAMED = 8  # approximate number of layers in a legend
DENSE = 64  # up to this many heads, the theory is drawn at every head count


def plot_by_layer(
    measures: Mapping[str, Any], title: str = "", maps: Mapping[str, np.ndarray] | None = None
) -> Figure | None:
    """Plot each measure by layer: median and 10-90 % band of the layer's matrices; dashed for Gaussian matrices.

    `maps` are values of layers x heads by title, each for a panel: up to 1 on a linear scale from 0, others on a
    logarithmic one.
    """
    shown, maps = _with_shape(measures), dict(maps or {})
    figure, panels = _panels(shown | maps if shown else shown, title)
    for axes, (name, entry) in panels:
        if name in maps:
            _draw_map(axes, entry)
            continue
        middle, low, high = (_values(entry["layers"], key) for key in ("median", "q10", "q90"))
        layers = np.arange(len(middle))
        axes.fill_between(layers, low, high, color=MEASURED, alpha=0.18, lw=0, label="10-90 %")
        axes.plot(layers, middle, color=MEASURED, marker="o", markersize=3.5, lw=1.6, label="median")
        if np.isfinite(entry.get("reference", np.nan)).any():
            axes.plot(layers, entry["reference"], color=SEEDS, lw=1.4, label="reference, median")
        if isinstance(entry["theory"], list):
            _theory_steps(axes, entry["theory"])
        else:
            _theory_line(axes, entry["theory"])
        _bound_line(axes, entry["layers"])
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        _finish(axes, "layer", lookup("condition").label)
    return _legend(figure)


def _draw_map(axes: Axes, values: np.ndarray) -> None:
    top = np.nanmax(values)
    image = axes.imshow(values, aspect="auto", cmap="viridis", norm=Normalize(0, top) if top <= 1 else LogNorm())
    axes.figure.colorbar(image, ax=axes)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("head")
    axes.set_ylabel("layer")


def plot_over_steps(steps: Sequence[int], snapshots: Sequence[Mapping[str, Any]], title: str = "") -> Figure | None:
    """Plot medians over training steps, one panel per measure and one line per layer, coloured by depth.

    `snapshots` are measures at each of the ascending `steps`.
    """
    figure, panels = _panels(_with_shape(snapshots[0]), title)
    for axes, (name, entry) in panels:
        middles = np.array([_values(snapshot[name]["layers"], "median") for snapshot in snapshots])  # steps x L
        for layer, (color, label) in enumerate(_layer_styles(middles.shape[1])):
            axes.plot(steps, middles[:, layer], color=color, marker="o", markersize=3, lw=1.4, label=label)
        theories = entry["theory"] if isinstance(entry["theory"], list) else [entry["theory"]]
        for theory in (x for i, x in enumerate(theories) if x not in theories[:i]):
            _theory_line(axes, theory)
        _bound_line(axes, [layer for snapshot in snapshots for layer in snapshot[name]["layers"]])
        _finish(axes, lookup("step").label, f"median {lookup('condition').label}")
    return _legend(figure)


def plot_over_heads(sweep: Mapping[str, Any]) -> Figure | None:
    """Plot the condition number against the number of heads, one panel per trade; dots are medians of single seeds.

    A trade says what stays equal as heads are added: the head dimension, or its product with the number of heads. With
    a fixed head dimension the panel is Figure 2 of Leaner Transformers (arXiv 2505.20802). `sweep` has the format of
    `probe.json`.
    """
    trades = {}
    for point in sorted(sweep["points"], key=lambda point: point["heads"]):
        trades.setdefault(point["trade"], []).append(point)
    figure, panels = _panels(trades, f"{sweep['measure'].replace('_', ' ')} at initialisation", share=True)
    for axes, (trade, points) in panels:
        heads = [point["heads"] for point in points]
        middle, low, high = (_values([point["pooled"] for point in points], key) for key in ("median", "q10", "q90"))
        axes.fill_between(heads, low, high, color=MEASURED, alpha=0.18, lw=0, label="measured, 10-90 %")
        axes.plot(heads, middle, color=MEASURED, lw=1.6, label="measured, median")
        dots = [(n, x) for n, point in zip(heads, points, strict=True) for x in point["by_seed"] if x is not None]
        if dots:
            axes.plot(*zip(*dots, strict=True), "o", color=SEEDS, markersize=3, label="median of one seed")
        _theory_curves(axes, points)
        _bound_line(axes, [point["pooled"] for point in points])
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_locator(FixedLocator(heads))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
        axes.set_title(f"{trade}: {format_shape([point['shape'] for point in points])}", fontsize=9)
    for axes, _ in panels:  # only after all panels are drawn, since they share an axis
        _finish(axes, "number of heads", lookup("condition").label)
    return _legend(figure)


def plot_spectra(values: Mapping[str, np.ndarray | Sequence[np.ndarray]], title: str = "") -> Figure | None:
    """Plot singular values over the largest, by index, one panel per measure and one line per layer, coloured by depth.

    `values` are {name: singular values L ... r}, or a list of them by layer; the median over a layer's matrices is
    drawn.
    """
    figure, panels = _panels(values, title)
    for axes, (_, layers) in panels:
        for s, (color, label) in zip(layers, _layer_styles(len(layers)), strict=True):
            row = _mask_non_positive(_median_relative(s))
            axes.plot(np.arange(1, len(row) + 1), row, color=color, lw=1.4, label=label)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        _finish(axes, "index of the singular value", "singular value / largest")
    return _legend(figure)


def _with_shape(measures: Mapping[str, Any]) -> dict[str, Any]:
    return {name: entry for name, entry in measures.items() if entry["shape"]}


def _panels(
    entries: Mapping[str, Any], title: str, share: bool = False
) -> tuple[Figure | None, list[tuple[Axes, tuple[str, Any]]]]:
    """Return a figure with one titled panel per entry, and the panels; (None, []) without entries."""
    if not entries:
        return None, []
    columns = min(range(min(2, len(entries)), COLUMNS + 1), key=lambda c: (-len(entries) % c, -c))
    rows = math.ceil(len(entries) / columns)
    figure = Figure(figsize=(2.0 + 3.2 * columns, 0.6 + 2.6 * rows), dpi=150, layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False, sharey=share).ravel()
    for axes in grid[len(entries) :]:
        axes.remove()
    for axes, (name, entry) in zip(grid, entries.items(), strict=False):
        shape = entry.get("shape") if isinstance(entry, Mapping) else None
        words = name.replace("_", " ")
        axes.set_title(f"{words}, {format_shape(shape)}" if shape else words, fontsize=9)
    if title:
        figure.suptitle(title, fontsize=10)
    return figure, list(zip(grid, entries.items(), strict=False))


def _theory_line(axes: Axes, theory: Mapping[str, Any] | None) -> None:
    if theory:
        axes.axhspan(theory["q10"], theory["q90"], color=THEORY, alpha=0.12, lw=0, label="Gaussian, 10-90 %")
        axes.axhline(theory["median"], color=THEORY, ls="--", lw=1.2, label="Gaussian of that shape, median")


def _theory_steps(axes: Axes, theories: Sequence[Mapping[str, Any] | None]) -> None:
    """Draw the prediction of each layer, for shapes that differ by layer."""
    if None not in theories:
        layers, low, high = np.arange(len(theories)), *([t[key] for t in theories if t] for key in ("q10", "q90"))
        axes.fill_between(layers, low, high, step="mid", color=THEORY, alpha=0.12, lw=0, label="Gaussian, 10-90 %")
        medians = [t["median"] for t in theories if t]
        axes.step(layers, medians, where="mid", color=THEORY, ls="--", lw=1.2, label="Gaussian of that shape, median")


def _bound_line(axes: Axes, digests: Sequence[Mapping[str, Any]]) -> None:
    """Plot the lower bound that stands for the condition number of matrices that are singular in float32."""
    if any(digest["singular"] and digest["q90"] > 0.9 / FLOOR for digest in digests):
        axes.axhline(1 / FLOOR, color=FORMULA, ls="-.", lw=1, label="singular in float32: at least this")


def _theory_curves(axes: Axes, points: Sequence[Mapping[str, Any]]) -> None:
    """Draw the exact median and the formula, also between the measured head counts if width grows with them."""
    tokens, widths = points[0]["shape"][0], {point["heads"]: point["shape"][1] for point in points}
    heads = [*widths]
    head_dims = {widths[n] / n for n in heads}
    if len(head_dims) == 1 and heads[-1] <= DENSE:
        widths = {n: round(n * min(head_dims)) for n in range(heads[0], heads[-1] + 1)}
    exact = [gaussian(tokens, width).median for width in widths.values()]
    paper = _mask_non_positive([formula(tokens, width) for width in widths.values()])
    axes.plot([*widths], exact, color=THEORY, ls="--", lw=1.3, label="Gaussian, exact median")
    axes.plot([*widths], paper, color=FORMULA, ls=":", lw=1.3, label="formula (√D + √N) / |√D - √N|")


def format_shape(shape: Sequence[Any]) -> str:
    """Return "17 x 96" of a shape (tokens, width), or "17 x 64 to 17 x 128" of a list of them by layer."""
    shapes = sorted(shape) if isinstance(shape[0], list | tuple) else [shape]
    first, last = (f"{tokens} x {width}" for tokens, width in (shapes[0], shapes[-1]))
    return first if first == last else f"{first} to {last}"


def _finish(axes: Axes, across: str, up: str) -> None:
    siblings = axes.get_shared_y_axes().get_siblings(axes)
    low, high = (f(a.dataLim.intervaly[i] for a in siblings) for i, f in enumerate((min, max)))  # bands count too
    axes.set_yscale("log")
    if not low <= high:
        axes.text(0.5, 0.5, "no finite value", ha="center", va="center", transform=axes.transAxes)
    elif high < 10 * low:  # show at least a decade, or noise would fill the panel
        middle = math.sqrt(low * high)
        axes.set_ylim(middle / math.sqrt(10), middle * math.sqrt(10))
    if high < 100 * low:  # powers of ten alone would be too few tick labels
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
        axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel(across)
    axes.set_ylabel(up, fontsize=9)  # the longest one is as high as a panel
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25, lw=0.6)


def _legend(figure: Figure | None) -> Figure | None:
    """Add one legend for all panels, to their right; below a single panel."""
    if figure is not None:
        named = {}
        for axes in figure.axes:
            handles, labels = axes.get_legend_handles_labels()
            named |= {label: handle for handle, label in zip(handles, labels, strict=True) if label not in named}
        place: dict[str, Any] = {"loc": "outside right upper"}
        if len(figure.axes) == 1:
            place = {"loc": "outside lower center", "ncols": 2}
        figure.legend(named.values(), named.keys(), **place, frameon=False, fontsize=8)
    return figure


def _layer_styles(count: int) -> list[tuple[Any, str]]:
    """Return a colour per layer, from blue (first) to pink (last), and a label; "_" hides some of many layers."""
    colors, every = LAYERS(np.linspace(0, 1, count)), math.ceil(count / NAMED)
    named = {*range(0, count, every), count - 1}
    return [(color, f"layer {i}" if i in named else "_") for i, color in enumerate(colors)]


def _values(digests: Sequence[Mapping[str, Any]], key: str) -> np.ndarray:
    return _mask_non_positive([math.nan if digest[key] is None else digest[key] for digest in digests])


def _mask_non_positive(values: Sequence[float] | np.ndarray) -> np.ndarray:
    """Return the values with NaN where a logarithmic axis cannot show them."""
    values = np.asarray(values, float)
    return np.where(np.isfinite(values) & (values > 0), values, math.nan)


def _median_relative(s: np.ndarray) -> np.ndarray:
    """Return the median of σ_i / σ_1 over the finite, non-zero matrices, ... r to r; NaN if there are none."""
    s = np.reshape(s, (-1, np.shape(s)[-1]))
    s = s[np.isfinite(s).all(axis=-1) & (s[:, 0] > 0)]
    return np.median(s / s[:, :1], axis=0) if len(s) else np.full(s.shape[-1], math.nan)
