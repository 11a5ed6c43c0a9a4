"""Statistics of the measures of `leanformer.conditioning` over the calls of a watched model, in bounded memory.

Each call of a layer is reduced, where its arrays are, to a few numbers per example and head. The numbers of the last
CAPACITY examples are kept, for quantiles; counts are over all examples.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from array_api_compat import array_namespace

from leanformer.conditioning import ACTIVATIONS, Reading, Summary
from leanformer.conditioning.attention_matrix import Padding
from leanformer.conditioning.measures import apply
from leanformer.conditioning.spectrum import QUANTILES, precision, quantiles
from leanformer.conditioning.tables import gaussian_prediction


DEFAULT = ("attention_output", "head_output", "tokens", "attention_entropy", "largest_logit")
SOURCES = {"out", "tokens", "q", "k"}  # arrays that every framework can provide
AVAILABLE = {name: spec for name, spec in ACTIVATIONS.items() if SOURCES.issuperset(spec.needs)}
ROWS = {"out", "tokens"}  # arrays with a row per token
OF_LOGITS = {name for name, spec in AVAILABLE.items() if spec.logits}
OF_QUERIES = {name for name, spec in AVAILABLE.items() if spec.needs == ("q", "k")} - OF_LOGITS
UNSEEN: dict[tuple[str, ...], str] = {  # why arrays may be missing
    ("out",): "the heads' outputs were not seen",
    ("tokens",): "no block around the layer was found that tokens enter",
    ("q", "k"): "its queries and keys were not seen",
}
WINDOWS = "windows or patches count as examples, those of the first images"
ALL_PADDING = "examples without a token that is not padding are left out"
CAPACITY = 1024
# What is kept of a matrix or a reading. Columns are 0 for a reading.
FIELDS = ("value", "effective_rank", "stable_rank", "negligible", "usable", "columns", "rows")
VALUE, EFFECTIVE, STABLE, NEGLIGIBLE, USABLE, COLUMNS, TOKENS = range(len(FIELDS))
MEASURED = (  # keys of a row, besides those about the layer, in order
    *("measure", "head", *QUANTILES, "interval", "bounds", "shape", "tokens", "effective_rank", "stable_rank"),
    *("not_finite", "singular", "negligible", "examples", "count", "gaussian", "reference", "status"),
)


def reduce(arrays: Mapping[str, Any], valid: Any, names: Sequence[str]) -> dict[str, Any]:
    """Return {measure: numbers} of one call of a layer, as from `pack`: arrays of the same library, B (N) x fields.

    `arrays` are some of out (B T N H), tokens (B T D), q (B T N H), k (B S N H), and logits (B N T S) with masks and
    biases. A measure whose arrays are missing is left out. Rows that are not `valid` (bool B T) count neither as rows
    nor as singular values.
    """
    arrays = dict(arrays)
    if valid is not None:
        for name in ROWS & arrays.keys():
            xp = array_namespace(arrays[name])
            keep = xp.reshape(valid, (*valid.shape, *(1,) * (arrays[name].ndim - 2)))
            arrays[name] = xp.where(keep, arrays[name], 0)
        arrays["mask"] = Padding(valid)
    return {name: pack(x) for name, x in apply({name: AVAILABLE[name] for name in names}, arrays).items()}


def pack(measured: Summary | Reading) -> Any:
    """Return a summary or reading as one array, ... x FIELDS."""
    if isinstance(measured, Summary):
        rows = measured.shape[0] if measured.rows is None else measured.rows
        fields = (measured.condition_number, measured.effective_rank, measured.stable_rank, measured.negligible)
        fields = (*fields, measured.finite, measured.shape[1], rows)
    else:
        fields = (measured.value, 0, 0, 0, measured.valid, 0, 0)
    value, xp = fields[0], array_namespace(fields[0])
    return xp.stack(
        [xp.astype(x, value.dtype) if hasattr(x, "dtype") else xp.full_like(value, x) for x in fields], axis=-1
    )


class Tally:
    """Numbers of the last examples, and counts over all, of one measure of one layer."""

    def __init__(self, heads: int | None):
        self.per_head = heads is not None  # otherwise one value of all heads together
        heads = heads or 1
        self.values = np.zeros((0, heads, len(FIELDS)), np.float32)  # at most CAPACITY examples
        self.examples = 0
        self.not_finite = np.zeros(heads, int)  # matrices with a NaN or an infinity, or invalid readings
        self.singular = np.zeros(heads, int)  # matrices with a negligible singular value
        self.negligible = np.zeros(heads, int)  # most negligible singular values of one matrix
        self.bound = np.full(heads, np.inf)  # smallest value of a matrix with a negligible singular value

    @property
    def columns(self) -> int:
        """Number of columns of the matrices; 0 for a reading, such as an entropy."""
        return int(self.values[0, 0, COLUMNS])

    def add(self, values: np.ndarray) -> None:
        """Add examples x heads x FIELDS."""
        usable = values[..., USABLE] > 0
        self.examples += len(values)
        self.not_finite += (~usable).sum(axis=0)
        singular = values[..., NEGLIGIBLE] > 0
        self.singular += singular.sum(axis=0)
        self.bound = np.minimum(self.bound, values[..., VALUE].min(axis=0, initial=np.inf, where=singular))
        self.negligible = np.maximum(self.negligible, values[..., NEGLIGIBLE].max(axis=0, initial=0).astype(int))
        values = np.where(usable[..., None] | (np.arange(len(FIELDS)) != VALUE), values, np.nan)
        self.values = np.concatenate([self.values, values.astype(np.float32)])[-CAPACITY:]

    def describe(self, head: int | None, last: int = CAPACITY) -> dict[str, Any]:
        """Return quantiles of the last examples, and all counts, of one head, or all (None), as in `Watch.rows`."""
        chosen = slice(None) if head is None else slice(head, head + 1)
        values = self.values[-last:, chosen]
        kept = values.reshape(-1, len(FIELDS))
        kept = kept[np.isfinite(kept[:, VALUE])]
        value = kept[:, VALUE]
        result: dict[str, Any] = {**quantiles(value), "interval": _interval(values[..., VALUE])}
        # A quantile is exact if every lower bound lies above the values that it is interpolated from.
        lowest = value[kept[:, NEGLIGIBLE] > 0].min(initial=np.inf)
        above = {name: np.quantile(value, q, method="higher") if value.size else 0 for name, q in QUANTILES.items()}
        result["bounds"] = [name for name, x in above.items() if x >= lowest]
        if result["interval"] and result["interval"][1] >= lowest:
            result["interval"] = None
        result |= dict.fromkeys(("shape", "tokens", "effective_rank", "stable_rank"))
        if value.size and self.columns:
            tokens = kept[:, TOKENS]
            result["shape"] = [int(np.median(tokens)), self.columns]
            result["tokens"] = [int(tokens.min()), int(tokens.max())]
            result["effective_rank"] = float(np.median(kept[:, EFFECTIVE]))
            result["stable_rank"] = float(np.median(kept[:, STABLE]))
        return result | {
            "not_finite": int(self.not_finite[chosen].sum()),
            "singular": int(self.singular[chosen].sum()),
            "negligible": int(self.negligible[chosen].max()),
            "examples": self.examples,
            "count": self.examples * values.shape[1],
        }


def _interval(values: np.ndarray) -> list[float] | None:
    """Return a 95 % interval of the median over examples, of values examples x heads; None for fewer than six.

    Heads of one example are not independent, so their median counts. The ends are order statistics, which need no
    assumption on the distribution (David and Nagaraja 2003, section 7.1).
    """
    medians = np.sort(np.median(values, axis=1)[np.isfinite(values).all(axis=1)])
    n, k, tail = len(medians), 0, 0.5 ** len(medians)  # P(at most k of n lie below the median)
    while tail <= 0.025:
        k += 1
        tail += math.exp(math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1) - n * math.log(2))
    return [float(medians[k - 1]), float(medians[n - k])] if k else None


class Layer:
    """Statistics of one attention layer over its calls."""

    def __init__(self, name: str, names: Sequence[str], heads: int | None = None):
        self.name, self.names = name, tuple(names)  # path in the model, measures to collect
        self.heads, self.head_dim = heads, None  # None: unknown
        self.calls, self.single = 0, 0  # measured calls, and calls left out because they had one token
        self.notes: dict[str, None] = {}  # sentences about the layer
        self.unseen = dict(UNSEEN)
        self.total: dict[str, Tally] = {}  # by measure, over all calls
        self.recorded: dict[str, int] = {}  # by measure, examples at the last `record`

    def note(self, sentence: str) -> None:
        self.notes[sentence] = None

    def add_call(self, measured: Mapping[str, np.ndarray], rows: np.ndarray) -> None:
        """Add the results of one call, of whose examples `rows` tokens are not padding, as by `add`.

        Results of windows, or of the images that are cut into windows, are of another number of examples.
        """
        kept = rows > 0
        if not kept.all():
            self.note(ALL_PADDING)
        if any(len(x) != len(kept) for x in measured.values()):
            self.note(WINDOWS)
        if rows.max(initial=0) == 1:
            self.single += 1
        elif kept.any():
            self.calls += 1
            self.add({name: x[kept] if len(x) == len(kept) else x for name, x in measured.items()})

    def add(self, measured: Mapping[str, np.ndarray]) -> None:
        """Add the results of one call, as from `reduce`, but in host memory.

        Results whose matrices have another number of columns or heads than before are left out, with a note.
        """
        for name, numbers in measured.items():
            values = np.asarray(numbers, np.float64)
            heads = values.shape[1] if values.ndim > 2 else None
            values = values.reshape(len(values), -1, len(FIELDS))
            columns, tally = int(values[0, 0, COLUMNS]), self.total.setdefault(name, Tally(heads))
            if len(tally.values) and (tally.columns, *tally.values.shape[1:]) != (columns, *values.shape[1:]):
                self.note(f"{name} has {columns} columns after {tally.columns}: only the first are counted")
            else:
                tally.add(values)

    def status(self) -> str:
        """Return "ok", or sentences about what is missing or unusual in the layer, separated by "; "."""
        notes = list(self.notes)
        if self.single:
            notes.insert(0, f"calls with a single token, whose condition number is 1, left out: {self.single}")
        elif not self.calls:
            notes.insert(0, "never called")
        for needs, reason in self.unseen.items() if self.calls else ():
            wanted = [name for name in self.names if name in AVAILABLE and AVAILABLE[name].needs == needs]
            if missing := [name for name in wanted if name not in self.total]:
                if all(AVAILABLE[name].whole for name in missing):
                    reason = f"{reason}, or there is padding"
                notes.append(f"{', '.join(missing)} not measured: {reason}")
        return "; ".join(notes) or "ok"

    def rows(self) -> list[dict[str, Any]]:
        """Return the rows of `Watch.rows`: per measure one with head None, and one per head for values per head."""
        about = {"layer": self.name, "heads": self.heads, "head_dim": self.head_dim, "calls": self.calls}
        if not self.total:
            return [about | dict.fromkeys(MEASURED) | {"bounds": [], "status": self.status()}]
        result = []
        for name in (name for name in self.names if name in self.total):
            tally = self.total[name]
            for head in (None, *(range(len(tally.singular)) if tally.per_head else ())):
                row: dict[str, Any] = about | dict.fromkeys(MEASURED) | {"measure": name, "head": head}
                row |= tally.describe(head)
                prediction = row["shape"] and gaussian_prediction(name, row["shape"])
                row["gaussian"] = prediction and {key: prediction[key] for key in QUANTILES}
                sentences = _flags(row, float(np.min(tally.bound if head is None else tally.bound[head])))
                sentences += [] if self.status() == "ok" else [self.status()]
                row["status"] = "; ".join(sentences) or "ok"
                result.append(row)
        return result

    def record(self) -> dict[str, float]:
        """Return `Watch.record` of this layer."""
        result = {}
        for name, tally in self.total.items():
            recent = tally.examples - self.recorded.get(name, 0)
            values = tally.describe(None, recent)
            if recent and values["median"] is not None:
                suffix = "_at_least" if "median" in values["bounds"] else ""
                result[f"{self.name}/{name}{suffix}"] = values["median"]
            self.recorded[name] = tally.examples
        return result


def _flags(row: Mapping[str, Any], bound: float) -> list[str]:
    """Return sentences about what makes the values of a row unusual; `bound` is the smallest lower bound of its κ."""
    flags, shape = [], row["shape"]
    if row["not_finite"]:
        flags.append(f"{row['not_finite']} of {row['count']} hold a NaN or an infinity and are left out")
    if row["singular"]:
        flags.append(f"{row['singular']} of {row['count']} singular in {precision(bound)}: at least {bound:.1e}")
    if shape and min(shape) == 1:
        flags.append("a single row or column: its condition number is always 1")
    if shape and row["measure"] == "head_output" and shape[0] < shape[1]:
        flags.append(f"fewer tokens than the head dimension: rank at most {shape[0]}")
    if row["examples"] == 1 and row["measure"] in ACTIVATIONS:
        flags.append("one example: no spread over examples")
    return flags
