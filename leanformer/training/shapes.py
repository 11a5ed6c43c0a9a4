"""Parameters and FLOPs of many shapes of one family, exactly and at once.

In depth, width, heads, head width and MLP they are polynomials with whole coefficients. These are settled by counting a
few small models, checked on others, and then cost no tracing at all.
"""

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from ml_collections import ConfigDict

from leanformer.analysis.predictors import AXES
from leanformer.costs import count
from leanformer.errors import ConfigError
from leanformer.training import experiment
from leanformer.training.experiment import Experiment


Shape = tuple[int, ...]  # in the order of AXES
Count = Callable[[Experiment], int]
Build = Callable[[ConfigDict, Shape], Experiment]
SETTLING, CHECKING = 17, 3  # models counted
REFINED = 3  # times, since coefficients of bytes have more digits than one solution in float64 gets right
SCALES = (0.5, 0.625, 0.75, 0.875, 1, 1.25, 1.5, 2)  # of widths around those of the config
COUNTS: Mapping[str, Count] = {
    "params": lambda run: count.parameters(run.like.params),
    "forward_flops": lambda run: run.flops_per_example[0],
    "train_flops": lambda run: run.flops_per_example[1],
}


def terms(shape: Shape) -> list[int]:
    """What counts are made of: outside the layers, and in each of them."""
    depth, width, heads, head_dim, mlp = shape
    inner = heads * head_dim
    layer = [1, width, width**2, width * inner, width * mlp, inner, mlp, heads, head_dim]
    return [1, width, width**2, mlp, width * mlp, *(depth * term for term in layer)]


@dataclasses.dataclass(frozen=True)
class Costs:
    """The polynomial of each of COUNTS that was asked for."""

    coefficients: Mapping[str, Sequence[int]]

    def of(self, name: str, shape: Shape) -> int:
        """A count of a shape, exact."""
        return sum(c * term for c, term in zip(self.coefficients[name], terms(shape), strict=True))

    def confirm(self, c: ConfigDict, shapes: Sequence[Shape]) -> None:
        """Counts the parameters of these shapes by their models. Raises ConfigError where they are others."""
        for shape in shapes:
            true, said = COUNTS["params"](built(c, shape)), self.of("params", shape)
            if true != said:
                raise ConfigError(f"{shape} has {true:,} parameters, {said:,} by the polynomial: it cannot be planned.")


def settle(
    c: ConfigDict,
    names: Sequence[str],
    counts: Mapping[str, Count] = COUNTS,
    build: Build | None = None,
    within: float = 0.0,
) -> Costs:
    """The polynomials of a family, by the config of one of its models.

    Args:
        names: of those of `counts` that are settled.
        build: makes what is counted of the config with a shape; `built` if not given.
        within: a share of a count by which the polynomial may be off.

    Raises:
        ConfigError: a size of the model is not one number for all layers, or its counts are no such polynomials.
    """
    shapes = _sample(SETTLING + CHECKING)
    runs = [(build or built)(c, shape) for shape in shapes]
    design = np.array([terms(shape) for shape in shapes], float)
    found = {}
    for name in names:
        counted = [counts[name](run) for run in runs]
        found[name] = [0] * design.shape[1]
        for _ in range(REFINED):
            left = [true - Costs(found).of(name, shape) for shape, true in zip(shapes, counted, strict=True)]
            more = np.linalg.lstsq(design[:SETTLING], np.array(left[:SETTLING], float), rcond=None)[0]
            found[name] = [c + round(value) for c, value in zip(found[name], more, strict=True)]
        costs = Costs(found)
        if any(abs(costs.of(name, shape) - true) > within * true for shape, true in zip(shapes, counted, strict=True)):
            raise ConfigError(f"The {name} of {c.model.name} are no polynomial in its shape: it cannot be planned.")
    return Costs(found)


def built(c: ConfigDict, shape: Shape, *, examples: int | None = None, device: Any = None) -> Experiment:
    """The experiment of a config with another shape, to be counted: with a batch of so many, as programs are built for
    a device; one a device of this machine, for those, if not given."""
    c, batch = c.copy_and_resolve_references(), examples or jax.device_count()
    with c.unlocked():
        c.model.update(dict(zip(AXES, shape, strict=True)))
        c.update(batch_size=batch, accumulate=1)
        c.probe.every = 0
        c.optim.update(warmup_epochs=0.0, warmup_steps=0, warmup_share=0.0)
    return experiment.build(c, examples=batch, mesh=None, device=device)


def _sample(number: int) -> list[Shape]:
    """Small shapes in which no two axes go together; none of one layer, which a drop path may leave without draws."""
    rng = np.random.default_rng(0)
    axes = [rng.integers(2, 6, number), 8 * rng.integers(1, 9, number), rng.integers(1, 7, number)]
    axes += [8 * rng.integers(1, 9, number), 8 * rng.integers(1, 13, number)]
    return [tuple(map(int, shape)) for shape in zip(*axes, strict=True)]


def ranges(c: ConfigDict, over: Mapping[str, Sequence[int]]) -> dict[str, list[int]]:
    """What each axis takes in turn: what `over` says; else sizes around the config's that hardware likes, multiples of
    8, head widths up to 128, heads and MLPs that the mesh can share out.

    Raises:
        ConfigError: a key that is no axis.
    """
    unknown = over.keys() - set(AXES)
    if unknown:
        raise ConfigError(f"--over={min(unknown)}: the axes of a shape are {', '.join(f'model.{a}' for a in AXES)}.")
    m, tensor = c.model, max(1, c.mesh.tensor)
    eights = {axis: sorted({max(8, 8 * round(m[axis] * s / 8)) for s in SCALES}) for axis in ("width", "mlp_dim")}
    own: dict[str, Sequence[int]] = {
        "depth": range(1, 2 * m.depth + 1),
        "width": eights["width"],
        "num_heads": [n for n in range(1, 2 * m.num_heads + 1) if n % tensor == 0],
        "head_dim": [8, 16, 32, 64, 128],
        "mlp_dim": [f for f in eights["mlp_dim"] if f % tensor == 0],
    }
    return {axis: list(over.get(axis) or own[axis]) for axis in AXES}


def enumerate_within(
    axes: Mapping[str, Sequence[int]], price: Callable[[Shape], float], budget: float, slack: float
) -> list[Shape]:
    """Every shape that costs at most the budget, and at least what `slack` leaves of it.

    Raises:
        ConfigError: there is none; it names the nearest ones.
    """
    priced = [(price(shape), shape) for shape in itertools.product(*(axes[axis] for axis in AXES))]
    inside = [shape for cost, shape in priced if (1 - slack) * budget <= cost <= budget]
    if not inside:
        below = max((x for x in priced if x[0] < budget), default=None)
        above = min((x for x in priced if x[0] > budget), default=None)
        near = " and ".join(f"{said(x[1])} at {x[0]:,.6g}" for x in (below, above) if x)
        raise ConfigError(
            f"None of {len(priced):,} shapes costs {(1 - slack) * budget:,.6g} to {budget:,.6g}. The nearest: {near}. "
            "Change --budget, raise --slack, or give more sizes with --over."
        )
    return inside


def spread(found: Sequence[Shape], number: int) -> list[Shape]:
    """So many of them, or all: from the middle out, each as far as can be from those taken before it, in doublings of
    its sizes, of which every axis has the same range."""
    places = np.log2(np.array(found, float))
    places = (places - places.mean(axis=0)) / np.maximum(np.ptp(places, axis=0), 1e-9)
    chosen = [int(np.argmin(np.linalg.norm(places, axis=1)))]
    while len(chosen) < min(number, len(found)):
        near = np.linalg.norm(places[:, None] - places[chosen], axis=-1).min(axis=1)
        chosen.append(int(np.argmax(near)))
    return [found[i] for i in chosen]


def said(shape: Shape) -> str:
    """A shape in words, as a sweep names its members."""
    return ",".join(f"{axis}={size}" for axis, size in zip(AXES, shape, strict=True))
