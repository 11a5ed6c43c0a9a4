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

from leanformer.analysis.design import AXES
from leanformer.costs import count
from leanformer.costs.devices import peak_memory
from leanformer.errors import ConfigError
from leanformer.runtime.mesh import make_mesh
from leanformer.training import train_setup
from leanformer.training.train_setup import Setup


Shape = tuple[int, ...]  # depth, width, heads, head dimension, MLP width: the order of AXES
NOMINAL_EXAMPLES = 1_281_167  # the epoch length changes no cost, but the schedule needs one
FITTED, CHECKED = 17, 3  # numbers of traced models for the fit and for its verification
REFINED = 3  # refinements of the fit: large coefficients have more digits than one float64 solution gets right
SCALES = (0.5, 0.625, 0.75, 0.875, 1, 1.25, 1.5, 2)  # factors of the config's width and MLP
COUNTS: Mapping[str, Callable[[Setup], int]] = {  # flops: of training, per example
    "params": lambda setup: count.parameters(setup.state.params),
    "flops": lambda setup: setup.flops_per_example[1],
}


def set_up_without_data(config: ConfigDict) -> Setup:
    """Return the training setup of a config on this machine's devices, to count and to compile."""
    return train_setup.set_up_training(config, examples=NOMINAL_EXAMPLES, mesh=make_mesh(**config.mesh))


def peak_bytes(config: ConfigDict) -> int:
    """Compile a config's training step, and return its peak bytes per device."""
    return peak_memory(set_up_without_data(config).compile_train_step())


def polynomial_terms(shape: Shape) -> list[int]:
    """Return the 14 terms of the polynomials: 5 for the parts outside the layers, then depth x the 9 of a layer."""
    depth, width, heads, head_dim, mlp = shape
    inner = heads * head_dim
    layer = [1, width, width**2, width * inner, width * mlp, inner, mlp, heads, head_dim]
    return [1, width, width**2, mlp, width * mlp, *(depth * term for term in layer)]


@dataclasses.dataclass(frozen=True)
class Costs:
    """Exact counts of architectures: coefficients of the `polynomial_terms` by name of the count (COUNTS)."""

    coefficients: Mapping[str, Sequence[int]]

    @classmethod
    def fit(cls, config: ConfigDict, names: Sequence[str]) -> "Costs":
        """Return the polynomials of a config's model, whose own sizes do not matter.

        Raises ConfigError if the model cannot be built with other sizes, or a count is not such a polynomial.
        """
        shapes = _sample(FITTED + CHECKED)
        setups = [build_shape(config, shape) for shape in shapes]
        design = np.array([polynomial_terms(shape) for shape in shapes], float)
        fitted = {}
        for name in names:
            counts = [COUNTS[name](setup) for setup in setups]
            fitted[name] = [0] * design.shape[1]
            for _ in range(REFINED):
                rest = [true - cls(fitted).of(name, shape) for shape, true in zip(shapes, counts, strict=True)]
                more = np.linalg.lstsq(design[:FITTED], np.array(rest[:FITTED], float), rcond=None)[0]
                fitted[name] = [c + round(value) for c, value in zip(fitted[name], more, strict=True)]
            if any(cls(fitted).of(name, shape) != true for shape, true in zip(shapes, counts, strict=True)):
                raise ConfigError(f"plan does not support model.name={config.model.name}: no polynomial of its {name}.")
        return cls(fitted)

    def of(self, name: str, shape: Shape) -> int:
        return sum(c * term for c, term in zip(self.coefficients[name], polynomial_terms(shape), strict=True))


def with_shape(config: ConfigDict, shape: Shape) -> ConfigDict:
    """Copy a config with other sizes and with the probe off."""
    config = config.copy_and_resolve_references()
    with config.unlocked():
        config.model.update(dict(zip(AXES, shape, strict=True)))
        config.probe.update(every=0, every_epochs=0.0)
    return config


def build_shape(config: ConfigDict, shape: Shape) -> Setup:
    """Return the setup of a config with other sizes, for counting only: no mesh, no warm-up, one example a device."""
    config = with_shape(config, shape)
    with config.unlocked():
        config.update(batch_size=jax.device_count(), accumulate=1)
        config.optim.update(warmup_epochs=0.0, warmup_steps=0, warmup_share=0.0)
    return train_setup.set_up_training(config, examples=config.batch_size, mesh=None)


def _sample(number: int) -> list[Shape]:
    """Return small architectures with uncorrelated sizes and at least two layers (drop path does nothing in one)."""
    rng = np.random.default_rng(0)
    axes = [rng.integers(2, 6, number), 8 * rng.integers(1, 9, number), rng.integers(1, 7, number)]
    axes += [8 * rng.integers(1, 9, number), 8 * rng.integers(1, 13, number)]
    return [tuple(map(int, shape)) for shape in zip(*axes, strict=True)]


def axis_values(config: ConfigDict, over: Mapping[str, Sequence[int]]) -> dict[str, list[int]]:
    """Return the values of each size to combine: `over`'s, or multiples of `mesh.tensor` around the config's."""
    if unknown := over.keys() - set(AXES):
        known = ", ".join(f"model.{axis}" for axis in AXES)
        raise ConfigError(f"--over={min(unknown)}: unknown size. Choose from {known}.")
    model, tensor = config.model, max(1, config.mesh.tensor)
    eights = {axis: sorted({max(8, 8 * round(model[axis] * s / 8)) for s in SCALES}) for axis in ("width", "mlp_dim")}
    default: dict[str, Sequence[int]] = {
        "depth": range(1, 2 * model.depth + 1),
        "width": eights["width"],
        "num_heads": [n for n in range(1, 2 * model.num_heads + 1) if n % tensor == 0],
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
    """Return every combination of sizes that costs at most the budget, and at least (1 - slack) of it."""
    priced = [(price(shape), shape) for shape in itertools.product(*(axes[axis] for axis in AXES))]
    inside = [shape for cost, shape in priced if (1 - slack) * budget <= cost <= budget]
    if not inside:
        cost, nearest = min(priced, key=lambda one: abs(one[0] - budget))
        raise ConfigError(
            f"{flag}: none of {len(priced):,} architectures costs this much. The nearest, {describe(nearest)}, costs "
            f"{cost:,.6g}. Change --budget, raise --slack, or add sizes with --over."
        )
    return inside


def select_spread(shapes: Sequence[Shape], number: int) -> list[Shape]:
    """Return up to `number` architectures that cover the given ones, beginning in the middle.

    Each is as far as possible from those chosen before, in doublings of the sizes, with the same range on every axis.
    """
    places = np.log2(np.array(shapes, float))
    places = (places - places.mean(axis=0)) / np.maximum(np.ptp(places, axis=0), 1e-9)
    chosen = [int(np.argmin(np.linalg.norm(places, axis=1)))]
    while len(chosen) < min(number, len(shapes)):
        near = np.linalg.norm(places[:, None] - places[chosen], axis=-1).min(axis=1)
        chosen.append(int(np.argmax(near)))
    return [shapes[i] for i in chosen]


def describe(shape: Shape) -> str:
    """Format an architecture as AXIS=SIZE,AXIS=SIZE,..."""
    return ",".join(f"{axis}={size}" for axis, size in zip(AXES, shape, strict=True))
