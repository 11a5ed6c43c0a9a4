"""Regression from sets of points: squared error of vectors, summed over their dimensions."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Key

from leanformer import data
from leanformer.config.arrays import Curriculum
from leanformer.data.points import KINDS, FixedSplit, Points, Sizes
from leanformer.data.points import find as find_task
from leanformer.errors import ConfigError
from leanformer.tasks import Batch, DataModule, Objective, Score, Spec, Task


def sizes_at(step: int, curriculum: Curriculum, sizes: Sizes) -> tuple[int, int]:
    """Return the numbers of coordinates and points at a training step, at most those in `sizes`."""
    if not curriculum.every:
        return sizes.dim, sizes.points
    times = step // curriculum.every
    dim, points = curriculum.dim + times * curriculum.dim_step, curriculum.points + times * curriculum.points_step
    return min(dim, sizes.dim), min(points, sizes.points)


class DrawnBatches(data.Batches):
    """Batches of consecutive examples drawn at once: one by one takes longer than a step of small models.

    `batches[step]` has the arrays that `prepare` makes of `source.get_batch(first, number)` and, in training, the step.
    In evaluation, examples after the last one are drawn, and masked.
    """

    def __getitem__(self, step: int) -> dict[str, np.ndarray]:
        places = self.positions(step)
        positions = np.arange(places.start, places.stop)
        source, prepare = cast("Any", self.source), cast("Any", self.prepare)
        batch = prepare(source.get_batch(places.start, len(places)), step if self.train else None)
        present = positions < (np.inf if self.train else len(source))
        return batch | {"index": positions, "corrupt": np.full(len(places), -1), "mask": present}


@dataclasses.dataclass(frozen=True, kw_only=True)
class PointData(DataModule):
    """Float32 batches of `points` (B T D), `targets` (B S V), and `scored` (B S), 1 for each target that counts."""

    name: str  # a key of `data.points.KINDS`
    sizes: Sizes
    examples: int  # of an evaluation split, which does not depend on the seed
    seed: int  # of the training split
    curriculum: Curriculum

    batches = DrawnBatches

    def open(self, split: str, classes: Sequence[str] | None = None) -> data.Source:
        if split == "train":
            return Points(self.name, self.sizes, split, self.seed)
        return FixedSplit(self.name, self.sizes, split, 0, examples=self.examples)

    def make_prepare(self, source: data.Source, *, train: bool) -> Callable[..., Any]:
        return self._fed

    def _fed(self, examples: Mapping[str, np.ndarray], step: int | None) -> dict[str, np.ndarray]:
        """Return the arrays of a batch, shrunk by the curriculum at a step of training."""
        shrink = find_task(self.name).shrink
        if step is not None and self.curriculum.every and shrink is not None:
            examples = shrink(dict(examples), self.sizes, *sizes_at(step, self.curriculum, self.sizes))
        fed = {"points": examples["points"], "targets": examples["targets"]}
        fed["scored"] = np.broadcast_to(examples.get("scored", True), examples["targets"].shape[:2])
        return {name: np.asarray(array, np.float32) for name, array in fed.items()}

    def input_specs(self) -> dict[str, Spec]:
        return {"points": _input_spec(self.name, self.sizes)}

    def target_specs(self, *, train: bool) -> dict[str, Spec]:
        targets = _target_spec(self.name, self.sizes)
        return {"targets": targets, "scored": (targets[0][:1], np.float32)}

    def prepare(self, example: Mapping[str, Any]) -> dict[str, np.ndarray]:
        return {"points": np.asarray(example["points"], np.float32)}


@dataclasses.dataclass(frozen=True, kw_only=True)
class PointRegression(Objective):
    """Objective of point-set tasks: squared error of vectors."""

    name: str  # a key of `data.points.KINDS`
    sizes: Sizes

    score = Score("error", higher=False)

    def check_model(self, graphdef: Any, weights: Any) -> None:
        shape, dtype = _input_spec(self.name, self.sizes)
        batch = {"points": jax.ShapeDtypeStruct((1, *shape), dtype)}

        def outputs(weights: Any, batch: Batch) -> Array:
            return self._outputs(nnx.merge(graphdef, *weights), batch)

        output, target = jax.eval_shape(outputs, weights, batch).shape[1:], _target_spec(self.name, self.sizes)[0]
        if output != target:
            pool = ', and model.pool="token"' if target[0] == 1 != output[0] else ""
            raise ConfigError(
                f'data.name="{self.name}" requires {target[0]} vectors of {target[1]}, model returns {output[0]} of '
                f"{output[1]}. Set model.outputs={target[1]}{pool}."
            )

    def inputs(self, batch: Batch) -> tuple[Array, ...]:
        return (batch["points"],)

    def loss_denominator(self, batch: Batch) -> Float[Array, ""]:
        return batch["scored"].sum()

    def loss(self, model: Any, part: dict[str, Array], batch_aux: Any, key: Key[Array, "b"] | None) -> Float[Array, ""]:
        return (self._errors(self._outputs(model, part, key), part["targets"]) * part["scored"]).sum()

    def statistics(self, model: Any, batch: Batch, *, detail: bool = False) -> dict[str, Array]:
        """Return sums by position of the target: squared `errors`, squared `lengths`, and the number of `targets` (S).

        Also `sums` of the targets (V) and the number of `examples`. Targets that are not scored do not count.
        """
        outputs, targets = self._outputs(model, batch), batch["targets"]
        counted = batch["scored"] * batch["mask"][:, None]
        return {
            "errors": (self._errors(outputs, targets) * counted).sum(axis=0),
            "lengths": (self._errors(0, targets) * counted).sum(axis=0),
            "sums": (targets * counted[..., None]).sum(axis=(0, 1)),
            "targets": counted.sum(axis=0),
            "examples": jnp.sum(batch["mask"]),
        }

    def metrics(self, totals: Mapping[str, Any]) -> dict[str, Any]:
        """Return the errors of a split.

        They are `loss`, the mean squared error of a target; `error`, its ratio to the error of predicting zero;
        `unexplained`, its ratio to the error of predicting the mean of the targets; and, if the order of targets has a
        meaning, `error` by position, `error_by_place` (S).
        """
        errors, lengths, number = (totals[name].sum() for name in ("errors", "lengths", "targets"))
        around = lengths - np.square(totals["sums"]).sum() / number
        values = {"loss": errors / number, "error": errors / lengths, "unexplained": errors / around}
        values = {name: float(value) for name, value in values.items()}
        if find_task(self.name).ordered:
            values["error_by_place"] = (totals["errors"] / totals["lengths"]).tolist()
        return values

    def _outputs(self, model: Any, batch: Batch, key: Key[Array, "b"] | None = None) -> Float[Array, "b s v"]:
        outputs, _ = model(*self.inputs(batch), key=key)
        return outputs[:, find_task(self.name).read]

    @staticmethod
    def _errors(outputs: Any, targets: Float[Array, "b s v"]) -> Float[Array, "b s"]:
        return jnp.square(jnp.asarray(outputs, jnp.float32) - targets).sum(axis=-1)


def _input_spec(name: str, sizes: Sizes) -> Spec:
    """Return the spec (T D) of the points of one example."""
    return (find_task(name).tokens(sizes), sizes.dim), np.float32


def _target_spec(name: str, sizes: Sizes) -> Spec:
    """Return the spec (S V) of the targets of one example."""
    kind = find_task(name)
    return (kind.targets(sizes), kind.outputs(sizes)), np.float32


def from_config(c: Any) -> Task:
    sizes = Sizes(**{name: c.data[name] for name in ("points", "dim", "num_items", "bias")})
    if reason := find_task(c.data.name).validate(sizes):
        raise ConfigError(f'data.name="{c.data.name}": {reason}')
    curriculum = Curriculum(**c.data.curriculum)
    if curriculum.every and not find_task(c.data.name).curriculum_axes:
        have = ", ".join(name for name, kind in KINDS.items() if kind.curriculum_axes)
        raise ConfigError(
            f'data.curriculum.every={curriculum.every}: data.name="{c.data.name}" has no curriculum, only: '
            f"{have}. Set data.curriculum.every=0."
        )
    about = {"name": c.data.name, "sizes": sizes}
    points = PointData(**about, curriculum=curriculum, examples=c.data.examples, seed=c.seed)
    return Task(points, PointRegression(**about))
