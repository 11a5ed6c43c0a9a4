"""Enumeration of the architectures of a model within a budget, with exact counts of parameters and FLOPs.

Both counts are polynomials with integer coefficients in depth, width, heads, head dimension and MLP. They are fitted to
a few small models and verified on others; no further architecture needs to be traced.
"""

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence

import jax
import numpy as np
from ml_collections import ConfigDict

from leanformer.analysis.dimensions import AXES
from leanformer.costs import count
from leanformer.errors import ConfigError
from leanformer.training import train_setup
from leanformer.training.train_setup import Setup


Shape = tuple[int, ...]  # in the order of AXES
FITTED, CHECKED = 17, 3  # numbers of traced models for the fit and for its verification
REFINED = 3  # refinements of the fit: large coefficients have more digits than one float64 solution gets right
SCALES = (0.5, 0.625, 0.75, 0.875, 1, 1.25, 1.5, 2)  # factors of the config's width and MLP
COUNTS: Mapping[str, Callable[[Setup], int]] = {
    "params": lambda run: count.parameters(run.state.params),
    "flops": lambda run: run.flops_per_example[1],
}


def polynomial_terms(shape: Shape) -> list[int]:
    """Return the 14 terms of the polynomials of parameters and FLOPs for an architecture: products of its sizes.

    First come 5 terms for the parts outside the layers, then the 9 terms of a layer times the depth. The sizes of
    `shape` are in the order of AXES: depth, width, heads, head dimension, MLP width.
    """
    depth, width, heads, head_dim, mlp = shape
    inner = heads * head_dim
    layer = [1, width, width**2, width * inner, width * mlp, inner, mlp, heads, head_dim]
    return [1, width, width**2, mlp, width * mlp, *(depth * term for term in layer)]


@dataclasses.dataclass(frozen=True)
class Costs:
    """Exact counts of parameters and FLOPs as polynomials in depth, width, heads, head dimension and MLP.

    Attributes:
        coefficients: coefficient of each of the `polynomial_terms`, by name of the count: "params" or "flops" (COUNTS).
    """

    coefficients: Mapping[str, Sequence[int]]

    @classmethod
    def fit(cls, c: ConfigDict, names: Sequence[str]) -> "Costs":
        """Return the polynomials of a config's model, fitted to small models and verified on others.

        The models are traced, not run.

        Args:
            c: config, whose own sizes of the model do not matter.
            names: counts to fit: "params", "flops" (training FLOPs per example), or both.

        Raises:
            ConfigError: the model cannot be built with other sizes, or a count is not such a polynomial.
        """
        shapes = _sample(FITTED + CHECKED)
        runs = [build(c, shape) for shape in shapes]
        design = np.array([polynomial_terms(shape) for shape in shapes], float)
        fitted = {}
        for name in names:
            counts = [COUNTS[name](run) for run in runs]
            fitted[name] = [0] * design.shape[1]
            for _ in range(REFINED):
                rest = [true - cls(fitted).of(name, shape) for shape, true in zip(shapes, counts, strict=True)]
                more = np.linalg.lstsq(design[:FITTED], np.array(rest[:FITTED], float), rcond=None)[0]
                fitted[name] = [c + round(value) for c, value in zip(fitted[name], more, strict=True)]
            if any(cls(fitted).of(name, shape) != true for shape, true in zip(shapes, counts, strict=True)):
                raise ConfigError(
                    f"model.name={c.model.name}: its {name} are not a polynomial in its sizes. plan supports only "
                    "models for which they are."
                )
        return cls(fitted)

    def of(self, name: str, shape: Shape) -> int:
        """Return a count of an architecture.

        Args:
            name: "params", or "flops" for training FLOPs per example; it must have been fitted.
            shape: depth, width, heads, head dimension and MLP width, in this order.
        """
        return sum(c * term for c, term in zip(self.coefficients[name], polynomial_terms(shape), strict=True))

    def confirm(self, c: ConfigDict, shapes: Sequence[Shape]) -> None:
        """Raise ConfigError if the polynomial of the parameters is wrong for one of these architectures.

        Each is traced with the other keys of the config `c`, and counted.
        """
        for shape in shapes:
            true, fitted = COUNTS["params"](build(c, shape)), self.of("params", shape)
            if true != fitted:
                raise ConfigError(
                    f"{shape} has {true:,} parameters, but the polynomial gives {fitted:,}. plan does not support "
                    "this model."
                )


def with_shape(c: ConfigDict, shape: Shape) -> ConfigDict:
    """Return a copy of a config with other sizes of the model, and without probes.

    Args:
        c: config.
        shape: depth, width, heads, head dimension and MLP width, in this order.
    """
    c = c.copy_and_resolve_references()
    with c.unlocked():
        c.model.update(dict(zip(AXES, shape, strict=True)))
        c.probe.update(every=0, every_epochs=0.0)  # the probe is not part of a training step
    return c


def build(c: ConfigDict, shape: Shape) -> Setup:
    """Return the training setup of a config with other sizes of the model, for counting only.

    It has no mesh and no warm-up, and a batch of one example per device.

    Args:
        c: config.
        shape: depth, width, heads, head dimension and MLP width, in this order.

    Raises:
        ConfigError: the model cannot have these sizes.
    """
    c = with_shape(c, shape)
    with c.unlocked():
        c.update(batch_size=jax.device_count(), accumulate=1)
        c.optim.update(warmup_epochs=0.0, warmup_steps=0, warmup_share=0.0)
    return train_setup.build(c, examples=c.batch_size, mesh=None)


def _sample(number: int) -> list[Shape]:
    """Return small architectures with uncorrelated sizes and at least two layers (drop path does nothing in one)."""
    rng = np.random.default_rng(0)
    axes = [rng.integers(2, 6, number), 8 * rng.integers(1, 9, number), rng.integers(1, 7, number)]
    axes += [8 * rng.integers(1, 9, number), 8 * rng.integers(1, 13, number)]
    return [tuple(map(int, shape)) for shape in zip(*axes, strict=True)]


def axis_values(c: ConfigDict, over: Mapping[str, Sequence[int]]) -> dict[str, list[int]]:
    """Return the values to combine for each size in AXES: those of `over`, or defaults if it does not have the size.

    By default the depth and the number of heads go from 1 to twice the config's, width and MLP width are multiples of 8
    near 0.5 to 2 times the config's, and the head dimension is a power of 2 from 8 to 128. Default numbers of heads and
    MLP widths are multiples of `mesh.tensor`.

    Args:
        c: config.
        over: values by name in AXES: depth, width, num_heads, head_dim, mlp_dim.

    Raises:
        ConfigError: a key of `over` is not in AXES.
    """
    unknown = over.keys() - set(AXES)
    if unknown:
        raise ConfigError(
            f"--over={min(unknown)}: unknown size. Choose from {', '.join(f'model.{axis}' for axis in AXES)}."
        )
    m, tensor = c.model, max(1, c.mesh.tensor)
    eights = {axis: sorted({max(8, 8 * round(m[axis] * s / 8)) for s in SCALES}) for axis in ("width", "mlp_dim")}
    default: dict[str, Sequence[int]] = {
        "depth": range(1, 2 * m.depth + 1),
        "width": eights["width"],
        "num_heads": [n for n in range(1, 2 * m.num_heads + 1) if n % tensor == 0],
        "head_dim": [8, 16, 32, 64, 128],
        "mlp_dim": [f for f in eights["mlp_dim"] if f % tensor == 0],
    }
    return {axis: list(over.get(axis) or default[axis]) for axis in AXES}


def enumerate_within(
    axes: Mapping[str, Sequence[int]],
    price: Callable[[Shape], float],
    budget: float,
    slack: float,
    flag: str = "--budget",
) -> list[Shape]:
    """Return every architecture that costs at most the budget, and at least (1 - slack) of it.

    Architectures are tuples of sizes in the order of AXES.

    Args:
        axes: values of each size to combine, by name in AXES.
        price: function from an architecture to its cost.
        budget: largest cost.
        slack: fraction of the budget that may be unused.
        flag: flag that set the budget, for the message.

    Raises:
        ConfigError: there is no such architecture; the message names the nearest ones.
    """
    priced = [(price(shape), shape) for shape in itertools.product(*(axes[axis] for axis in AXES))]
    inside = [shape for cost, shape in priced if (1 - slack) * budget <= cost <= budget]
    if not inside:
        below = max((x for x in priced if x[0] < budget), default=None)
        above = min((x for x in priced if x[0] > budget), default=None)
        near = " and ".join(f"{describe(x[1])} at {x[0]:,.6g}" for x in (below, above) if x)
        raise ConfigError(
            f"{flag}: none of {len(priced):,} architectures costs {(1 - slack) * budget:,.6g} to "
            f"{budget:,.6g}. Nearest: {near}. Change --budget, raise --slack, or add sizes with --over."
        )
    return inside


def select_spread(shapes: Sequence[Shape], number: int) -> list[Shape]:
    """Return up to `number` architectures that cover the given ones, beginning in the middle.

    Each is as far as possible from those chosen before. The distance is in doublings of the sizes, scaled so that
    every axis has the same range.
    """
    places = np.log2(np.array(shapes, float))
    places = (places - places.mean(axis=0)) / np.maximum(np.ptp(places, axis=0), 1e-9)
    chosen = [int(np.argmin(np.linalg.norm(places, axis=1)))]
    while len(chosen) < min(number, len(shapes)):
        near = np.linalg.norm(places[:, None] - places[chosen], axis=-1).min(axis=1)
        chosen.append(int(np.argmax(near)))
    return [shapes[i] for i in chosen]


def describe(shape: Shape) -> str:
    """Format an architecture as AXIS=SIZE,AXIS=SIZE,...; `shape` has the sizes in the order of AXES."""
    return ",".join(f"{axis}={size}" for axis, size in zip(AXES, shape, strict=True))
