"""Statistics of the measures of `leanformer.conditioning` over the calls of a watched model, in bounded memory.

Each call of a layer is reduced to a few numbers per example and head: condition number, effective rank, stable rank,
or a reading such as an entropy. Quantiles are exact up to CAPACITY examples. From then on they are those of a uniform
random sample of CAPACITY examples (reservoir sampling); counts stay exact.
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jaxtyping import Array, Bool

from leanformer.conditioning import ACTIVATIONS, Reading, Summary, tap
from leanformer.conditioning.spectrum import FLOOR, QUANTILES
from leanformer.conditioning.tables import gaussian_prediction
from leanformer.errors import ConfigError
from leanformer.layers.masks import ALL, Mask


DEFAULT = ("attention_output", "head_output", "tokens", "attention_entropy", "largest_logit")
SOURCES = {"out", "tokens", "q", "k"}  # arrays that every framework can provide
AVAILABLE = tuple(name for name, spec in ACTIVATIONS.items() if SOURCES.issuperset(spec.needs))
ROWS = {"out", "tokens"}  # arrays with a row per token
OF_LOGITS = {name for name in AVAILABLE if ACTIVATIONS[name].needs == ("q", "k")}
UNSEEN: dict[tuple[str, ...], str] = {  # why arrays may be missing
    ("out",): "the heads' outputs were not seen",
    ("tokens",): "no block around the layer was found that tokens enter",
    ("q", "k"): "its queries and keys were not seen",
}
CAPACITY = 1024
RESOLVED = 0.1  # largest relative error of a condition number that counts as a value
FIELDS = ("value", "bound", "effective_rank", "stable_rank", "tokens")
MEASURED = (  # keys of a row, besides those about the layer, in order
    *("measure", "head", *QUANTILES, "bounds", "shape", "tokens", "effective_rank", "stable_rank"),
    *("not_finite", "singular", "negligible", "examples", "count", "gaussian", "status"),
)


def check_names(names: Sequence[str]) -> tuple[str, ...]:
    """Return the names of measures as a tuple.

    Args:
        names: names in AVAILABLE, or a single name.

    Raises:
        ConfigError: a name is not in AVAILABLE, or there is none.
    """
    names = (names,) if isinstance(names, str) else tuple(names)
    if wrong := [name for name in names if name not in AVAILABLE]:
        raise ConfigError(f"measures={', '.join(wrong)}: cannot be watched. Choose from {', '.join(AVAILABLE)}.")
    if not names:
        raise ConfigError(f"measures=(): nothing to measure. Choose from {', '.join(AVAILABLE)}.")
    return names


@functools.partial(jax.jit, static_argnames="names")
def reduce(arrays: Mapping[str, Array], valid: Bool[Array, "b t"] | None, names: tuple[str, ...]) -> dict[str, Any]:
    """Return {measure: Summary or Reading} of one call of a layer, with axes B and, for values per head, N.

    Args:
        arrays: some of out (B T N H), tokens (B T D), q (B T N H), k (B S N H), and logits (B N T S), which include
            masks and biases.
        valid: tokens that are not padding. Rows of padding do not count: neither as rows nor as singular values.
        names: names of measures. One whose arrays are missing is left out.
    """
    if valid is not None:
        rows = {name: valid.reshape(*valid.shape, *(1,) * (arrays[name].ndim - 2)) for name in ROWS & arrays.keys()}
        arrays = dict(arrays) | {name: jnp.where(keep, arrays[name], 0) for name, keep in rows.items()}
    return tap(names)(dict(arrays) | {"mask": ALL if valid is None else Mask(keep=valid)})


def unit_roundoff(dtype: Any) -> float:
    """Return the unit roundoff of a float type narrower than float32, by dtype or name; 0 for float32 and wider.

    >>> unit_roundoff("bfloat16"), unit_roundoff("float32")
    (0.00390625, 0.0)
    """
    name = str(dtype).removeprefix("torch.")
    eps = float(ml_dtypes.finfo(getattr(ml_dtypes, name, None) or np.dtype(name)).eps)
    return eps / 2 if eps > np.finfo(np.float32).eps else 0.0


def find_roundoffs(names: Sequence[str], out: Any, tokens: Any = None) -> dict[str, float]:
    """Return the `unit_roundoff` behind each measure: under mixed precision, tokens may be stored in another type.

    Args:
        names: names of measures.
        out: type of the heads' outputs.
        tokens: type of the tokens entering the block; None for that of the outputs.
    """
    types = {name: out if tokens is None or ACTIVATIONS[name].needs != ("tokens",) else tokens for name in names}
    return {name: unit_roundoff(dtype) for name, dtype in types.items()}


def bound_unresolved(summary: Summary, tokens: np.ndarray, roundoff: float) -> tuple[np.ndarray, np.ndarray]:
    """Return condition numbers (B or B N), and a mask of those that are only lower bounds.

    Float32 resolves all but numerically singular matrices (`Summary`). A narrower type stores A + E, with independent
    relative errors of at most u per entry, whose spectral norm is about u / √3 · ‖A‖_F · (1 / √m + 1 / √n) (Vershynin
    2012, theorem 5.31). By Weyl's inequality the smallest singular value is known to within ‖E‖. If that exceeds
    RESOLVED of it, the result is the bound (σ_1 - ‖E‖) / (σ_r + ‖E‖).

    Args:
        summary: summary of the matrices, arrays of shape B or B N.
        tokens: number of rows of each example, B.
        roundoff: u; 0 for float32.
    """
    kappa, singular = np.asarray(summary.condition_number, np.float64), np.asarray(summary.negligible) > 0
    if not roundoff:
        return kappa, singular
    tokens = tokens.reshape(-1, *(1,) * (kappa.ndim - 1))
    noise = roundoff / np.sqrt(3) * np.sqrt(summary.stable_rank) * (tokens**-0.5 + summary.shape[1] ** -0.5)
    inverse = np.where(np.isfinite(kappa), 1 / kappa, 0)
    unresolved = noise > RESOLVED * inverse
    bound = np.maximum(1, (1 - noise) / (inverse + noise))
    return np.where(unresolved, np.minimum(bound, kappa), kappa), unresolved | singular


class Sample:
    """Uniform random sample of at most CAPACITY of the examples that were added (reservoir sampling).

    Attributes:
        values: float32 array of the sampled examples x heads x FIELDS, the names of the numbers of one matrix.
        seen: number of examples that were added.

    Args:
        heads: number of heads; 1 for values of all heads together.
    """

    def __init__(self, heads: int):
        self.values = np.zeros((0, heads, len(FIELDS)), np.float32)
        self.seen = 0
        self._rng = np.random.default_rng(0)

    def add(self, values: np.ndarray) -> None:
        """Add examples to the sample; `values` are an array of examples x heads x FIELDS."""
        space = CAPACITY - len(self.values)
        if space > 0:
            self.values = np.concatenate([self.values, values[:space].astype(np.float32)])
        self.seen += min(space, len(values)) if space > 0 else 0
        for example in values[max(space, 0) :]:
            self.seen += 1
            place = self._rng.integers(self.seen)
            if place < CAPACITY:
                self.values[place] = example


@dataclasses.dataclass
class Tally:
    """Sample and exact counts of one measure of one layer.

    Attributes:
        columns: number of columns of the matrices; None for a reading, such as an entropy.
        sample: random sample of the values.
        per_head: True if there is one value per head; False for one value of all heads together.
        examples: number of examples that were added.
        not_finite: per head (heads,), number of matrices with a NaN or an infinity, or of invalid readings.
        singular: per head, number of matrices with a negligible singular value.
        negligible: per head, largest number of negligible singular values of one matrix.
    """

    columns: int | None
    sample: Sample
    per_head: bool
    examples: int = 0
    not_finite: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(0, int))
    singular: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(0, int))
    negligible: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(0, int))

    @classmethod
    def like(cls, measured: Summary | Reading) -> "Tally":
        """Return an empty tally for results of the type, number of columns and number of heads of `measured`."""
        summary = isinstance(measured, Summary)
        shape = np.shape(measured.condition_number if summary else measured.value)
        heads = shape[1] if len(shape) > 1 else 1
        zeros = [np.zeros(heads, int) for _ in range(3)]
        return cls(measured.shape[1] if summary else None, Sample(heads), len(shape) > 1, 0, *zeros)

    def add(self, measured: Summary | Reading, tokens: np.ndarray, roundoff: float) -> None:
        """Add the results of the examples of one call.

        Args:
            measured: results with axes B and, for values per head, N, in host memory.
            tokens: number of rows of the matrix of each example, (B,).
            roundoff: unit roundoff of the type in which the arrays were stored; 0 for float32.
        """
        if isinstance(measured, Summary):
            kappa, bound = bound_unresolved(measured, tokens, roundoff)
            usable = np.asarray(measured.finite)
            fields = [kappa, bound, measured.effective_rank, measured.stable_rank]
            negligible = np.asarray(measured.negligible)
        else:
            usable = np.asarray(measured.valid)
            fields, negligible = [measured.value, *[np.zeros(usable.shape)] * 3], np.zeros(usable.shape, int)
        count = len(usable)
        rows = np.broadcast_to(tokens.reshape(-1, *(1,) * (usable.ndim - 1)), usable.shape)
        values = np.stack([np.asarray(x, np.float32).reshape(count, -1) for x in (*fields, rows)], axis=-1)
        usable, negligible = usable.reshape(count, -1), negligible.reshape(count, -1)
        values[~usable] = np.nan
        self.sample.add(values)
        self.examples += count
        self.not_finite += (~usable).sum(axis=0)
        self.singular += (negligible > 0).sum(axis=0)
        self.negligible = np.maximum(self.negligible, negligible.max(axis=0, initial=0))

    def describe(self, head: int | None) -> dict[str, Any]:
        """Return quantiles and counts of head number `head`, or of all heads together if None, by name.

        The names are median, q10, q90, bounds, shape, tokens, effective_rank, stable_rank, not_finite, singular,
        negligible, examples and count, with the meanings of `Watch.rows`.
        """
        chosen = slice(None) if head is None else slice(head, head + 1)
        values = self.sample.values[:, chosen].reshape(-1, len(FIELDS))
        value, bound, effective, stable, tokens = values[np.isfinite(values[:, 0])].T
        result: dict[str, Any] = {
            name: float(np.quantile(value, q)) if value.size else None for name, q in QUANTILES.items()
        }
        # A quantile is exact if every lower bound lies above the values that it is interpolated from.
        lowest = value[bound > 0].min(initial=np.inf)
        above = {name: np.quantile(value, q, method="higher") if value.size else 0 for name, q in QUANTILES.items()}
        result["bounds"] = [name for name, x in above.items() if x >= lowest]
        result |= dict.fromkeys(("shape", "tokens", "effective_rank", "stable_rank"))
        if self.columns is not None and value.size:
            result["shape"] = [int(np.median(tokens)), self.columns]
            result["tokens"] = [int(tokens.min()), int(tokens.max())]
            result |= {"effective_rank": float(np.median(effective)), "stable_rank": float(np.median(stable))}
        counts = {"not_finite": self.not_finite, "singular": self.singular}
        result |= {name: int(count[chosen].sum()) for name, count in counts.items()}
        heads = self.not_finite.size if head is None else 1
        return result | {
            "negligible": int(self.negligible[chosen].max()),
            "examples": self.examples,
            "count": self.examples * heads,
        }


class Layer:
    """Statistics of one attention layer over its calls.

    The arguments are attributes too.

    Attributes:
        calls: number of measured calls.
        single: number of calls that were left out because they had one token.
        notes: sentences about the layer, as the keys of a dictionary in order.
        unseen: {names of arrays that a measure needs: reason to report if they were not seen}.
        total: {measure: `Tally`} over all calls.
        recent: {measure: `Tally`} over the calls since the last `record`.

    Args:
        name: path of the layer in the model.
        names: names of the measures to collect.
        heads: number of heads; None if unknown.
        head_dim: head dimension; None if unknown.
    """

    def __init__(self, name: str, names: Sequence[str], heads: int | None = None, head_dim: int | None = None):
        self.name, self.names, self.heads, self.head_dim = name, tuple(names), heads, head_dim
        self.calls, self.single = 0, 0
        self.notes: dict[str, None] = {}
        self.unseen = dict(UNSEEN)
        self.total: dict[str, Tally] = {}
        self.recent: dict[str, Tally] = {}

    def note(self, sentence: str) -> None:
        """Add a sentence to the status of the layer, unless it already has it."""
        self.notes[sentence] = None

    def add(self, measured: Mapping[str, Any], tokens: np.ndarray, roundoffs: Mapping[str, float]) -> None:
        """Add the results of one call to the tallies of their measures.

        Results whose matrices have another number of columns than before are left out, with a note.

        Args:
            measured: results by measure, in host memory, as returned by `reduce`.
            tokens: number of rows of each example, (B,).
            roundoffs: unit roundoff of the type in which the array was stored, by measure; missing for float32.
        """
        for name, values in measured.items():
            for tallies in (self.total, self.recent):
                tally = tallies.get(name)
                columns = values.shape[1] if isinstance(values, Summary) else None
                if tally is not None and tally.columns != columns:
                    self.note(f"{name} has {columns} columns after {tally.columns}: only the first are counted")
                    continue
                tallies.setdefault(name, Tally.like(values)).add(values, tokens, roundoffs.get(name, 0.0))

    def status(self) -> str:
        """Return "ok", or sentences about what is missing or unusual in the layer, separated by "; "."""
        notes = list(self.notes)
        single = f"{self.single} call{'s' * (self.single > 1)} with a single token left out"
        if not self.calls:
            return "; ".join([single if self.single else "never called", *notes])
        if self.single:
            notes.append(f"{single}: the condition number would be 1")
        activations = {name: ACTIVATIONS[name] for name in self.names if name in ACTIVATIONS}  # none, of weights
        for needs, reason in self.unseen.items():
            wanted = [name for name, spec in activations.items() if spec.needs == needs]
            missing = [name for name in wanted if name not in self.total]
            if len(missing) < len(wanted):
                reason = "only for sequences without padding"
            elif all(activations[name].whole for name in missing):
                reason = f"{reason}, or there is padding"
            if missing:
                notes.append(f"{', '.join(missing)} not measured: {reason}")
        return "; ".join(notes) or "ok"

    def rows(self) -> list[dict[str, Any]]:
        """Return the statistics as dictionaries: one per measure, with head None, and one per head for values per head.

        Keys are those of `Watch.rows`, in each dictionary all of them. A layer that was never measured has one
        dictionary, with its status, and None for all that was not measured.
        """
        about = {"layer": self.name, "heads": self.heads, "head_dim": self.head_dim, "calls": self.calls}
        if not self.total:
            return [about | dict.fromkeys(MEASURED) | {"bounds": [], "status": self.status()}]
        result = []
        for name in (name for name in self.names if name in self.total):
            tally = self.total[name]
            for head in (None, *(range(tally.not_finite.size) if tally.per_head else ())):
                row: dict[str, Any] = about | {"measure": name, "head": head} | tally.describe(head)
                row["gaussian"] = row["shape"] and _reference(name, row["shape"])
                sentences = [*_flags(row), *([] if self.status() == "ok" else [self.status()])]
                row["status"] = "; ".join(sentences) or "ok"
                result.append(row)
        return result

    def record(self) -> dict[str, float]:
        """Return {"layer/measure": median} of the calls since the last call of this method.

        The name ends in "_at_least" if the median is a lower bound. Measures without a finite value are left out.
        """
        result = {}
        for name, tally in self.recent.items():
            values = tally.describe(None)
            if values["median"] is not None:
                suffix = "_at_least" if "median" in values["bounds"] else ""
                result[f"{self.name}/{name}{suffix}"] = values["median"]
        self.recent = {}
        return result


def _reference(name: str, shape: Sequence[int]) -> dict[str, float] | None:
    """Return median and quantiles of the condition number of Gaussian matrices of a shape, None if not comparable."""
    prediction = gaussian_prediction(name, shape)
    return prediction and {key: prediction[key] for key in QUANTILES}


def _flags(row: Mapping[str, Any]) -> list[str]:
    """Return sentences about what makes the values of a row unusual."""
    flags, shape = [], row["shape"]
    if row["not_finite"]:
        flags.append(f"{row['not_finite']} of {row['count']} hold a NaN or an infinity and are left out")
    if row["singular"]:
        flags.append(f"{row['singular']} of {row['count']} singular in float32: at least {1 / FLOOR:.1e}")
    elif row["bounds"]:
        flags.append("stored in a type that resolves only a lower bound")
    if shape and min(shape) == 1:
        flags.append("a single row or column: its condition number is always 1")
    if shape and row["measure"] == "head_output" and shape[0] < shape[1]:
        flags.append(f"fewer tokens than the head dimension: rank at most {shape[0]}")
    if row["examples"] == 1 and row["measure"] in ACTIVATIONS:
        flags.append("one example: no spread over examples")
    return flags
