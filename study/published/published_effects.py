"""Effect of heads in published models, for the step from one architecture to another.

    python -m study.published.published_effects BEFORE AFTER

prints what published models lost or gained by the change of heads from the config BEFORE to the config AFTER.

published_effects.csv has the effect of a doubling of heads at fixed total width in public tables of trained models, by
range of the head dimension after it. `python -m study.published.atlas --write` writes it; docs/published_models.md says
how the effects were estimated. A step is covered by a source only if both architectures lie within all its ranges.
"""

import argparse
import csv
import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from leanformer import config
from leanformer.analysis.design import Dimensions, model_dimensions
from leanformer.analysis.shapes import set_up_without_data
from leanformer.config.architectures import listed_per_layer
from leanformer.costs import count
from leanformer.errors import ConfigError


PATH = Path(__file__).parents[1] / "data" / "published_effects.csv"
KINDS = {"gpt": "decoder", "bert": "text encoder", "vit": "image encoder"}  # by model.name
NATS = "nats"  # unit of a loss; other units are percent of an error


@dataclasses.dataclass(frozen=True)
class Effect:
    """Row of published_effects.csv: effect of a doubling of heads at fixed total width.

    Attributes:
        kind: kind of model, a value of KINDS: "decoder", "text encoder" or "image encoder".
        source: table and data set.
        unit: "nats" (NATS) for a change of the loss, or "% of error" for a relative change of the error.
        value: change of loss or error by the doubling; below 0 if more heads are better.
        low, high: ends of the 95 % interval of the change.
        models: number of models or of pairs of models from which it was estimated.
        units: number of independent ones among them.
        dims: smallest and largest head dimension after the doubling; for an exact step the value before and after it.
        exact: True for the effect of this step of the head dimension, between otherwise equal models.
        measured: smallest and largest embedding dimension from which the effect was estimated.
        width, depth, params: smallest and largest value in the whole table; parameters include embeddings.
    """

    kind: str
    source: str
    unit: str
    value: float
    low: float
    high: float
    models: int
    units: int
    dims: tuple[int, int]
    exact: bool
    measured: tuple[int, int]
    width: tuple[int, int]
    depth: tuple[int, int]
    params: tuple[int, int]


@dataclasses.dataclass(frozen=True)
class Change:
    """Change of loss or error in one source from one architecture to another with different heads.

    Attributes:
        source: table of published models and data set.
        unit: NATS for a loss; otherwise the change is relative, in percent of an error.
        value: estimated change; below 0 if the second architecture is better.
        low, high: ends of the interval of the change: 95 % for a single effect, wider for a sum of effects.
        models: number of models or pairs from which it was estimated, the smallest of the summed effects.
        dims: smallest and largest head dimension of the effects; for an exact step its larger and its smaller one.
        exact: True if the effect of exactly this step was estimated, between otherwise equal models.
        widths: smallest and largest embedding dimension from which the effects were estimated.
    """

    source: str
    unit: str
    value: float
    low: float
    high: float
    models: int
    dims: tuple[int, int]
    exact: bool
    widths: tuple[int, int]

    def __str__(self) -> str:
        digits, unit = (3, "nats") if self.unit == NATS else (1, "%")
        values = (f"{x:+.{digits}f}" for x in (self.value, self.low, self.high))
        text = "{} ({} to {})".format(*values)
        dims = f"head dimensions {_join(self.dims)}" if self.exact else f"head dimension {_join(self.dims, ' to ')}"
        return f"{text} {unit} in {self.source} ({dims}, width {_join(self.widths, ' to ')}, n = {self.models})"


@dataclasses.dataclass(frozen=True)
class Step:
    """Step from one architecture to another, and the effect of its change of heads in published models.

    `str(step)` is a sentence for a report.

    Attributes:
        kind: kind of model, a value of KINDS; empty if no table has such models, or if the two are of different kinds.
        before, after: number of heads and head dimension as text, such as "8 x 64".
        changes: change in each source that covers the step; empty if none does.
        reason: why no source covers it; empty if one does.
    """

    kind: str
    before: str
    after: str
    changes: tuple[Change, ...] = ()
    reason: str = ""

    def __str__(self) -> str:
        heads = f"{self.before} to {self.after}"
        if not self.changes:
            return f"Published models: no table covers heads {heads}: {self.reason}."
        clear = [change for change in self.changes if change.low > 0 or change.high < 0]
        unclear = [change.source for change in self.changes if change not in clear]
        text = "; ".join(map(str, clear or self.changes))
        if clear and unclear:
            text += f"; no clear effect in {', '.join(unclear)}"
        if len({change.low > 0 for change in clear}) > 1:
            text += ". The sources disagree"
        score = "loss" if self.changes[0].unit == NATS else "error"
        return f"Published {self.kind}s, heads {heads}, {score}: {text}."


@functools.cache
def read() -> tuple[Effect, ...]:
    """Return the rows of published_effects.csv, which is read once per process."""
    with PATH.open(newline="", encoding="utf-8") as file:
        return tuple(_parse(row) for row in csv.DictReader(file))


def _parse(row: Mapping[str, str]) -> Effect:
    kinds: dict[str, Callable[[str], Any]] = {"value": float, "low": float, "high": float, "models": int, "units": int}
    kinds["exact"] = "True".__eq__
    kinds |= dict.fromkeys(("dims", "measured", "width", "depth", "params"), _parse_range)
    return Effect(**{name: kinds.get(name, str)(text) for name, text in row.items()})


def _parse_range(text: str) -> tuple[int, int]:
    low, high = map(int, text.split())
    return low, high


def compare(before: Mapping[str, Any], after: Mapping[str, Any], params: tuple[int, int]) -> Step | None:
    """Return the change that published models show for the step from `before` to `after`; None if heads are the same.

    Heads are the same if num_heads and head_dim are equal. A step that no table covers has no changes, but a reason.

    Args:
        before, after: `model` sections of two configs.
        params: numbers of parameters of both, embeddings included.
    """
    if all(before.get(key) == after.get(key) for key in ("num_heads", "head_dim")):
        return None
    was, now = (f"{model.get('num_heads')} x {model.get('head_dim')}" for model in (before, after))
    kinds = {KINDS.get(model.get("name", ""), "") for model in (before, after)}
    kind = kinds.pop() if len(kinds) == 1 else ""
    change = Step(kind, was, now)
    if any(map(listed_per_layer, (before, after))):
        return dataclasses.replace(change, reason="layers have different sizes")
    try:
        shapes = [model_dimensions(model, number) for model, number in zip((before, after), params, strict=True)]
    except ConfigError:
        return dataclasses.replace(change, reason="layers have different sizes")
    if reason := _explain(kind, before, after, shapes):
        return dataclasses.replace(change, reason=reason)
    changes = tuple(_changes(kind, *shapes))
    reason = ""
    if not changes:
        names = {"width": "width", "depth": "depth", "params": "parameters"}
        sizes = (f"{name} {_join(getattr(shape, axis) for shape in shapes)}" for axis, name in names.items())
        dims = _join(shape.head_dim[0] for shape in shapes)
        reason = f"no table of {kind}s has {', '.join(sizes)}, head dimension {dims}"
    return dataclasses.replace(change, changes=changes, reason=reason)


def _explain(kind: str, before: Mapping[str, Any], after: Mapping[str, Any], shapes: list[Dimensions]) -> str:
    """Return why no table of this kind can cover a step, an empty string if one can."""
    if not kind:
        return f"no table has model.name={_join(model.get('name') for model in (before, after))}"
    for model, shape in zip((before, after), shapes, strict=True):
        plain = {"attention": ("softmax",), "num_kv_heads": (None, shape.heads[0])}
        plain["value_dim"] = (None, shape.head_dim[0])
        for key, allowed in plain.items():
            if model.get(key) not in allowed:
                return f"model.{key}={model.get(key)} is in no table"
    totals = [shape.heads[0] * shape.head_dim[0] for shape in shapes]
    same = before["width"] == after["width"] and shapes[0].head_dim != shapes[1].head_dim
    if same and all(s.head_dim[0] == s.width // s.heads[0] for s in shapes):
        return ""
    if totals[0] != totals[1]:
        return f"their total width changes from {totals[0]:,} to {totals[1]:,}"
    return f"their total width is {totals[0]:,}, and in all tables it is the embedding dimension"


def _join(values: Iterable[Any], word: str = " and ") -> str:
    """Join different values."""
    texts = dict.fromkeys(f"{value:,}" if isinstance(value, int) else str(value) for value in values)
    return word.join(texts)


def _changes(kind: str, before: Dimensions, after: Dimensions) -> Iterator[Change]:
    """Yield the change over the step in each source that covers it."""
    ends = before.head_dim[0], after.head_dim[0]
    high, low, sign = max(ends), min(ends), 1 if ends[1] < ends[0] else -1
    for source in dict.fromkeys(effect.source for effect in read() if effect.kind == kind):
        rows = [effect for effect in read() if effect.source == source and _contains(effect, before, after)]
        exact = [row for row in rows if row.exact and row.dims == (high, low)]
        ranges = [row for row in rows if not row.exact]
        parts = [(math.log2(high / low), exact)] if exact else [*_split(high, low, ranges)]
        if all(covering for _, covering in parts):
            yield _sum([covering[0] for _, covering in parts], [sign * doublings for doublings, _ in parts])


def _contains(effect: Effect, *shapes: Dimensions) -> bool:
    """Return whether the sizes of all shapes lie in the ranges of the effect's table."""
    pairs = ((getattr(effect, axis), getattr(shape, axis)) for shape in shapes for axis in ("width", "depth", "params"))
    return all(low <= size <= high for (low, high), size in pairs)


def _split(high: int, low: int, rows: list[Effect]) -> Iterator[tuple[float, list[Effect]]]:
    """Yield the doublings of heads from head dimension `high` down to `low`, with the rows whose range has the result.

    The last is a part of a doubling.
    """
    dim = float(high)
    while dim > low:
        after = max(dim / 2, float(low))
        yield math.log2(dim / after), [row for row in rows if row.dims[0] <= math.ceil(after) <= row.dims[1]]
        dim = after


def _sum(rows: list[Effect], doublings: list[float]) -> Change:
    """Return the sum of effects times doublings. Ends of intervals are added, which is wider than for independent ones.

    Effects in percent are added as logarithms.
    """
    nats = rows[0].unit == NATS

    def total(*names: str) -> float:
        values = [getattr(row, names[n < 0]) for row, n in zip(rows, doublings, strict=True)]
        if nats:
            return sum(n * value for n, value in zip(doublings, values, strict=True))
        return 100 * math.expm1(sum(n * math.log1p(v / 100) for n, v in zip(doublings, values, strict=True)))

    exact = rows[0].exact
    dims = rows[0].dims if exact else (min(row.dims[0] for row in rows), max(row.dims[1] for row in rows))
    widths = min(row.measured[0] for row in rows), max(row.measured[1] for row in rows)
    models = min(row.models for row in rows)
    ends = total("value", "value"), total("low", "high"), total("high", "low")
    return Change(rows[0].source, rows[0].unit, *ends, models, dims, exact, widths)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("configs", nargs=2, metavar="CONFIG", help="config before and after the change of heads")
    before, after = (config.load(name) for name in parser.parse_args().configs)
    before_params, after_params = (count.parameters(set_up_without_data(c).state.params) for c in (before, after))
    print(
        compare(before.model.to_dict(), after.model.to_dict(), (before_params, after_params))
        or "The heads are the same."
    )


if __name__ == "__main__":
    main()
