"""What a training step holds at its most on a device: estimated for every shape of a plan, or compiled, minutes each.

The estimate is state and gradients, of which `fsdp` leaves a share and what is gathered of a layer or two; the batch;
what the forward pass of a micro-batch keeps for the backward pass, as tracing shows it; and what the backward pass of
one layer works with, taken as twice what "light" keeps of a layer: its activations, computed again or read, and their
gradients. All but the last are polynomials in the shape like the counts of `shapes`; the last is a rule that compiled
steps bear out (CHANGELOG.md says how far).
"""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
from ml_collections import ConfigDict

from leanformer.costs import count, hardware, plugin
from leanformer.errors import ConfigError
from leanformer.runtime import mesh as meshes
from leanformer.runtime.target import Gpu, seen_by
from leanformer.training import compiled, shapes, train_setup
from leanformer.training import state as states
from leanformer.training import step as steps
from leanformer.training.shapes import Costs, Shape
from leanformer.training.train_setup import TrainSetup


WORKED_ON = 2  # layers' worth: activations, and their gradients
GATHERED = 3  # of a layer's parameters, whole, where the state is split: its weights, the next one's, their gradients
UNEVEN = 0.02  # by which a device's share of the parameters may be over an even one
WITHIN = 1e-3  # that the polynomials are right of a shape: one layer alone has no draws of a drop path, say
NAMES = ("state_bytes", "batch_bytes", "params_bytes", "kept_bytes", "kept_light_bytes")


@dataclasses.dataclass(frozen=True)
class Estimate:
    """The memory of a config's shapes on one kind of device.

    Attributes:
        device: of `plugin.DEVICES`; None for those of this machine.
        build: a shape with a micro-batch on the device, to be traced.
        costs: the polynomials of NAMES.
        split: devices that share out the state.
    """

    config: ConfigDict
    device: str | None
    build: shapes.Build
    costs: Costs
    split: int = 1

    def of(self, shape: Shape) -> int:
        """Bytes of a shape."""
        state, batch, kept = (self.costs.of(name, shape) for name in ("state_bytes", "batch_bytes", "kept_bytes"))
        gathered = min(GATHERED, shape[0] + 1) if self.split > 1 else 0
        working = WORKED_ON * self._layer("kept_light_bytes", shape) + gathered * self._layer("params_bytes", shape)
        return state // self.split + batch + kept + working

    def _layer(self, name: str, shape: Shape) -> int:
        """What one layer has of a count."""
        return (self.costs.of(name, shape) - self.costs.of(name, (0, *shape[1:]))) // shape[0]

    def confirm(self, chosen: Sequence[Shape]) -> None:
        """Traces these shapes. Raises ConfigError where one keeps something else than by the polynomials: attention in
        another kernel, say; or where the state is not split evenly."""
        for shape in chosen:
            run = self.build(self.config, shape)
            for name, counted in _counts(self.config.accumulate).items():
                true = counted(run)
                if abs(true - self.costs.of(name, shape)) > WITHIN * true:
                    raise ConfigError(
                        f"{shapes.said(shape)} has other {name.replace('_', ' ')} than shapes beside it: its memory "
                        "cannot be estimated. Leave it out with --over, or ask for it: python -m leanformer.cost."
                    )
            held, even = _share(run, self.split), self.costs.of("params_bytes", shape) // self.split
            if held > (1 + UNEVEN) * even:
                raise ConfigError(
                    f"{shapes.said(shape)}: mesh.fsdp={self.split} leaves {held:,} bytes of parameters on a device, "
                    f"where an even share is {even:,}, so its memory cannot be estimated. Give sizes that it divides "
                    "with --over, or ask for one shape: python -m leanformer.cost --mesh."
                )

    def peak(self, shape: Shape) -> int:
        """Bytes of a shape by the step that XLA compiles. Raises as `compiled.peak`."""
        c = self.config.copy_and_resolve_references()
        with c.unlocked():
            c.model.update(dict(zip(shapes.AXES, shape, strict=True)))
            c.probe.every = 0  # no part of a step
        if self.device is not None:
            return compiled.peak(c, self.device)
        run = train_setup.build(c, examples=compiled.NOMINAL_EXAMPLES, mesh=meshes.make_mesh(**c.mesh))
        return count.peak_memory(run.compile_train_step())


def estimate(c: ConfigDict, device: str | None) -> Estimate:
    """The estimate for a family, by the config of one of its models, on `device` or on this machine.

    Raises:
        ConfigError: a mesh that splits activations, or that this machine has not; or as `shapes.settle`.
    """
    if c.mesh.tensor != 1:
        raise ConfigError(
            f"mesh.tensor={c.mesh.tensor}: memory is planned of devices that work on whole layers, mesh.tensor=1. Of "
            "split layers ask for one shape: python -m leanformer.cost --device --mesh."
        )
    if device:  # of which -1 is one
        devices, split = max(c.mesh.data, 1) * max(c.mesh.fsdp, 1), max(c.mesh.fsdp, 1)
    else:
        mesh = meshes.make_mesh(**c.mesh)
        devices, split = meshes.shares(mesh), mesh.shape["fsdp"]
    micro, rest = divmod(c.batch_size, devices * c.accumulate)
    if rest:
        raise ConfigError(f"batch_size={c.batch_size} is not shared out by {devices} devices x {c.accumulate} pieces.")
    build = functools.partial(shapes.built, examples=micro, device=device and _gpu(device))
    costs = shapes.settle(c, NAMES, _counts(c.accumulate), build, WITHIN)
    return Estimate(c, device, build, costs, split)


def fitting(held: Estimate, ranked: Sequence[Shape], budget: float, number: int) -> tuple[dict[Shape, int], str]:
    """So many shapes, the first ones whose compiled step fits, each with its bytes; and in words which do not.

    What was compiled also says by how much the estimate is off: a shape that would not fit with that is not compiled.

    Raises:
        ConfigError: none of twice as many fits; it names the nearest.
    """
    fit: dict[Shape, int] = {}
    over: dict[Shape, int] = {}
    ratio, skipped = 1.0, 0
    for shape in ranked:
        if held.of(shape) * ratio > budget:
            skipped += 1
            continue
        peak = held.peak(shape)
        (fit if peak <= budget else over)[shape] = peak
        compiled_all = fit | over
        ratio = sum(peak / held.of(shape) for shape, peak in compiled_all.items()) / len(compiled_all)
        if len(fit) == number or len(compiled_all) == 2 * number:
            break
    if not fit:
        nearest = min(over, key=over.__getitem__)
        raise ConfigError(
            f"Of {len(ranked)} shapes estimated to fit, the {len(over)} that were compiled need more; the nearest: "
            f"{shapes.said(nearest)} at {over[nearest]:,}, estimated {held.of(nearest):,}. Raise --slack, for smaller "
            "shapes, or --best, to try more."
        )
    passed = [f"{shapes.said(shape)} at {peak:,}, estimated {held.of(shape):,}" for shape, peak in over.items()]
    passed += [f"{skipped} ranked before the last, not compiled: too large by {ratio:.3f} estimates"] if skipped else []
    return fit, f"Passed over as too large: {'; '.join(passed)}." if passed else ""


def _share(run: TrainSetup, split: int) -> int:
    """Bytes of parameters that a device holds where so many share them out: small leaves are whole on each."""
    mesh = jax.sharding.AbstractMesh((split,), ("fsdp",))
    placed = states.placed(run.state.params, mesh, run.model.axes)
    return sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(placed))


def _light(run: TrainSetup) -> TrainSetup:
    c = run.config.copy_and_resolve_references()
    if c.model.remat == "light":
        return run
    with c.unlocked():
        c.model.remat = "light"
    return train_setup.build(c, examples=c.batch_size, mesh=None, device=run.model.device)


def _counts(accumulate: int) -> dict[str, shapes.Count]:
    sums = 1 if accumulate == 1 else 2  # gradients of a micro-batch, and those of all so far

    counts: list[shapes.Count] = [
        lambda run: _bytes(run.state) + sums * _bytes(run.state.params),
        lambda run: accumulate * _bytes(run.abstract_batch()),
        lambda run: _bytes(run.state.params),
        _kept_bytes,
        lambda run: _kept_bytes(_light(run)),
    ]
    return dict(zip(NAMES, counts, strict=True))


def _kept_bytes(setup: TrainSetup) -> int:
    """Return the bytes that the forward pass of the whole batch keeps for the backward pass."""
    objective, model = setup.task.objective, setup.model

    def back(weights: tuple[Any, Any], batch: Any, key: Any) -> Any:
        parts, batch_aux = objective.prepare_train_batch(batch, key, key)
        others = weights[1], parts, batch_aux, objective.loss_denominator(batch)
        loss_of = steps.make_loss(model.graphdef, objective, setup.rates.hold)
        return jax.vjp(lambda params: loss_of(params, *others)[0], weights[0])[1]

    with seen_by(model.device):
        shapes = states.unplaced((model.weights, setup.abstract_batch()))
        traced = jax.make_jaxpr(model.with_mesh(back))(*shapes, jax.random.key(0)).jaxpr
    return count.bytes_made(traced)


def _gpu(name: str) -> Gpu:
    """As programs are traced for it, whether or not the plugin is there."""
    kind = plugin.DEVICES[name]
    return Gpu(str(hardware.sheet(kind).capability), kind)


def _bytes(tree: Any) -> int:
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))
