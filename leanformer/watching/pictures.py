"""Rows of a watch as pictures: by layer, layers x heads, and over checkpoints. Matplotlib is imported when needed."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from leanformer.conditioning.spectrum import QUANTILES
from leanformer.errors import ConfigError


def _charts() -> ModuleType:
    try:
        from leanformer.conditioning import charts
    except ImportError as error:
        raise ConfigError("A plot needs Matplotlib: pip install matplotlib.") from error
    return charts


def draw(rows: Sequence[Mapping[str, Any]], title: str = "") -> Any:
    """Return a figure of condition numbers by layer, a panel per measure and shape, and of layers x heads.

    The panels of heads are maps of `head_output`: condition number, and effective rank over head dimension.

    Args:
        rows: rows of `Watch.rows`.
        title: title of the figure.

    Raises:
        ConfigError: no condition number was measured, or Matplotlib is not installed.
    """
    entries = _entries(rows)
    if not entries:
        raise ConfigError("plot: no condition number was measured. See table() for the reason.")
    heads = [row for row in rows if row["measure"] == "head_output" and row["head"] is not None and row["shape"]]
    layers = list(dict.fromkeys(row["layer"] for row in heads))
    maps = {}
    for name in ("condition number", "effective rank / head dimension") if heads else ():
        values = np.full((len(layers), 1 + max(row["head"] for row in heads)), np.nan)
        for row in heads:
            value = row["median"] if name == "condition number" else row["effective_rank"] / row["shape"][1]
            values[layers.index(row["layer"]), row["head"]] = value
        maps[f"one head: {name}"] = values
    return _charts().plot_by_layer(entries, title, maps)


def draw_checkpoints(names: Sequence[str], checkpoints: Sequence[Sequence[Mapping[str, Any]]], title: str = "") -> Any:
    """Return a figure of medians over checkpoints: a panel per measure and shape, a line per layer.

    Args:
        names: names of the checkpoints, in order.
        checkpoints: rows of each.
        title: title of the figure.

    Raises:
        ConfigError: there is no condition number that all checkpoints have, or Matplotlib is not installed.
    """
    snapshots = [_entries(rows) for rows in checkpoints]
    shared = {name for name in snapshots[0] if all(name in entries for entries in snapshots)}
    if not shared:
        raise ConfigError("plot: the checkpoints share no measure of matrices of one shape.")
    snapshots = [{name: entries[name] for name in entries if name in shared} for entries in snapshots]
    figure = _charts().plot_over_steps(range(len(names)), snapshots, title)
    for axes in figure.axes:
        axes.set_xticks(range(len(names)), names, rotation=30, ha="right")
        axes.set_xlabel("")
    return figure


def save(figure: Any, path: str | Path | None) -> Any:
    """Return a figure, after writing it to a file if there is a path."""
    if path is not None:
        figure.savefig(Path(path).expanduser())
    return figure


def _entries(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the condition numbers of all heads together in the format of `charts`, by measure and shape."""
    entries: dict[Any, Any] = {}
    for row in rows:
        if row["head"] is None and row["shape"]:
            key = (row["measure"], *row["shape"])
            entry = entries.setdefault(key, {"shape": row["shape"], "theory": row["gaussian"], "layers": []})
            entry["layers"].append({name: row[name] for name in (*QUANTILES, "singular")})
    measures = [key[0] for key in entries]
    # A panel's title has name and shape: names only need to differ.
    return {key[0] + " " * measures[:i].count(key[0]): entry for i, (key, entry) in enumerate(entries.items())}
