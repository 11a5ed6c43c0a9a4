"""Which regime is a shape of attention in? It and its rivals of equal parameters, on tasks whose answers are known.

Theories disagree: what counts is the rank of heads (Amsel, Yehudai & Bruna, ICLR 2025), their number (Yu et al., ICLR
2026), or the width of all together, however it is cut (Bhojanapalli et al. 2020, BERT at 16 x 128 and 8 x 256).
Each has a pole here, a task on which it must show.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from ml_collections import ConfigDict

from leanformer import config, tasks
from leanformer.analysis import predictors, statistics
from leanformer.analysis.statistics import Difference, Interval
from leanformer.conditioning import digest, theory
from leanformer.config.rules import require
from leanformer.errors import TrainingError
from leanformer.runtime import files
from leanformer.runtime import mesh as meshes
from leanformer.training import experiment, probing, streams
from leanformer.training import step as steps


WIDTH = 48  # of the small models of the poles
POINTS = 8  # of a set, in "rank"
PAIRS, DIM = 10, 3  # of "control"
ITEMS = 8  # of "count", at most
RIVALS = (0.25, 0.5, 2, 4)  # times the heads
NEAR = 2**0.5  # a rival has so many times the heads that were wanted, at most
EXAMPLES = 4  # that the matrices at initialisation are measured on
MEASURES = ("attention_output", "relative_attention_entropy", "largest_logit")


@dataclasses.dataclass(frozen=True)
class Shape:
    """N heads of H channels of queries and keys, and H' of values."""

    heads: int
    head_dim: int
    value_dim: int

    def __str__(self) -> str:
        more = "" if self.value_dim == self.head_dim else f"/{self.value_dim}"
        return f"{self.heads}x{self.head_dim}{more}"

    @property
    def widths(self) -> tuple[int, int]:
        """N · H and N · H'."""
        return self.heads * self.head_dim, self.heads * self.value_dim

    def scaled(self, ratio: float) -> "Shape":
        """As many heads, their widths times `ratio`, 1 at least."""
        return Shape(self.heads, *(max(1, round(width * ratio)) for width in (self.head_dim, self.value_dim)))


def rivals(shape: Shape, ratio: float = 1.0) -> list[Shape]:
    """The shape among others of the same N · H and N · H', and so of the same parameters: about a quarter, half, twice
    and four times as many heads, where they can be cut so, `scaled` by that ratio too. Fewest heads first."""
    both = math.gcd(*shape.widths)
    able = [n for n in range(1, both + 1) if both % n == 0]
    found = {shape.heads}
    for times in RIVALS:
        wanted = shape.heads * times
        near = min(able, key=lambda n: abs(math.log(n / wanted)))
        if max(near / wanted, wanted / near) <= NEAR:
            found.add(near)
    cut = [Shape(n, *(width // n for width in shape.widths)) for n in sorted(found)]
    return [each for each in cut if each.scaled(ratio).widths == shape.scaled(ratio).widths]


@dataclasses.dataclass(frozen=True)
class Pole:
    """A task on which one theory must show.

    Attributes:
        what: is asked for; theory: says what must matter.
        metric: of an evaluation, lower being better, 1 for the best answer that looks at nothing.
        settings: (config of points, the shape) sets up the task and the model.
    """

    what: str
    theory: str
    metric: str
    settings: Callable[[ConfigDict, Shape], None]


def _rank(c: ConfigDict, shape: Shape) -> None:
    c.data.update(name="nearest", points=POINTS, dim=WIDTH)
    c.model.update(mlp_dim=4 * WIDTH)
    c.optim.lr = 3e-3  # at the 0.01 of longer runs some answer zero and never leave it


def _count(c: ConfigDict, shape: Shape) -> None:
    c.data.update(name="retrieval", points=2 * POINTS, dim=ITEMS, items=max(2, min(ITEMS, shape.heads)))
    c.model.update(inputs=ITEMS, outputs=1, mlp_dim=2 * WIDTH, pool="token")
    c.model.update(norm="layernorm", post_norm=False, activation="gelu")
    c.optim.lr = 2e-3


def _control(c: ConfigDict, shape: Shape) -> None:
    c.data.update(name="regression", points=PAIRS, dim=DIM)
    c.model.update(inputs=DIM, outputs=1, mlp_dim=4 * WIDTH, depth=2, causal=True, max_length=2 * PAIRS)
    c.model.update(norm="layernorm", post_norm=False, activation="gelu")
    c.optim.lr = 2e-3


POLES = {
    "rank": Pole("each point's farthest point of a set on the sphere", "rank of heads", "error", _rank),
    "count": Pole("the sum of the largest products with D vectors", "number of heads", "unexplained", _count),
    "control": Pole("linear regression in context", "width of all heads together", "error", _control),
}


@dataclasses.dataclass(frozen=True)
class Trained:
    """Final errors of the shapes on one pole: a row a shape, a column a seed."""

    pole: str
    shapes: Sequence[Shape]  # as asked for; each was trained `scaled`
    errors: np.ndarray

    def interval(self, row: int) -> Interval:
        """Of the mean of the errors' logarithms to base 10."""
        return statistics.mean_interval(np.log10(self.errors[row]))

    def against(self, row: int) -> list[tuple[int, Difference, float]]:
        """Every other shape's row, the difference of its log10 error to that of `row`, paired by seed, and its p by
        Holm's correction for all of them."""
        logs = np.log10(self.errors)
        others = [i for i in range(len(self.shapes)) if i != row]
        found = [statistics.paired(logs[i], logs[row]) for i in others]
        return list(zip(others, found, statistics.holm([each.p_differs() for each in found]), strict=True))


def trained(pole: str, shape: Shape, asked: Shape, width: int, *, total: int, seeds: int) -> np.ndarray:
    """Errors of a shape, one a seed, after training at WIDTH channels in place of `width`.

    Seed s of all shapes sees the same examples. How many items "count" wants is set by the shape that is asked about.

    Raises:
        TrainingError: an error that is not finite, or not above zero.
    """
    c = _config(shape.scaled(WIDTH / width), total)
    POLES[pole].settings(c, asked)
    config.check(c)
    run = experiment.build(c, examples=None, mesh=meshes.make_mesh(devices=jax.devices()[:1]))
    train_step, eval_step = run.compile_train_step(), jax.jit(run.eval_step)
    begin = jax.jit(lambda key: run.make_state(run.make_weights(key)))
    errors = []
    for seed in range(seeds):
        c.seed = seed
        again, key = dataclasses.replace(run, task=tasks.of(c)), jax.random.key(seed)
        state = begin(key)
        for host in streams.train(again, again.task.open("train"), 0):
            state, _ = train_step(state, streams.put(again, host), jax.random.fold_in(key, 1))
        batches = streams.evaluation(again, again.task.open(c.data.eval_split))
        error = steps.evaluate(eval_step, again.task.metrics, {"": state.weights}, batches)[POLES[pole].metric]
        if not (math.isfinite(error) and error > 0):  # its logarithm is what is compared
            raise TrainingError(f"{pole}: {shape}, seed {seed}, ended with an error of {error}. Try other --steps.")
        errors.append(error)
    return np.array(errors)


class Kept:
    """What was trained, in a file that grows by a shape at a time, so that a command that was killed goes on.

    Args:
        path: of the file; None keeps nothing.
        settings: what the errors depend on.

    Raises:
        ConfigError: the file holds what was trained with other settings.
    """

    def __init__(self, path: Path | None, settings: dict[str, Any]):
        self.path, self.content = path, {}
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            files.check_same(path, settings)
            self.content = files.read_json(path)

    def errors(self, pole: str, shape: Shape, train: Callable[[], np.ndarray]) -> np.ndarray:
        """Those in the file, or those that `train` returns, which then are in it."""
        known = self.content.setdefault("errors", {}).setdefault(pole, {})
        if str(shape) not in known:
            known[str(shape)] = train().tolist()
            if self.path is not None:
                files.write_json(self.path, self.content)
        return np.array(known[str(shape)])


def _config(shape: Shape, total: int) -> ConfigDict:
    c = config.points().unlock()
    c.update(batch_size=128, total_steps=total)
    c.model.update(width=WIDTH, num_heads=shape.heads, head_dim=shape.head_dim, value_dim=shape.value_dim)
    c.data.examples = 1024
    c.optim.warmup_steps = total // 20
    c.eval.update(every=0, batch_size=1024)
    return c


def at_start(shape: Shape, tokens: int, width: int, seeds: int) -> dict[str, Any]:
    """Medians over examples and seeds of attention at full size before training, its inputs LayerNorms of points on the
    sphere: condition number of its output with the Gaussian prediction beside it, and whether it is but a `bound` from
    below, most of the matrices being singular in float32; entropy; largest logit. And its spectral `capacity`."""
    c = config.points().unlock()
    c.data.update(points=tokens, dim=width)
    c.model.update(width=width, num_heads=shape.heads, head_dim=shape.head_dim, value_dim=shape.value_dim)
    c.model.update(norm="layernorm", post_norm=False, mlp_dim=None)
    c.probe.update(examples=EXAMPLES, every=1)
    mesh = meshes.make_mesh(devices=jax.devices()[:1])
    run = experiment.build(probing.bare(c), examples=None, mesh=mesh)
    read, batch = probing.make_reader(run, MEASURES), probing.batch(run)
    found = [jax.device_get(read(run.random_weights(seed), batch)) for seed in range(seeds)]
    result = {}
    for name in MEASURES:
        layers = [digest(each[name][1] if isinstance(each[name], tuple) else each[name])[0] for each in found]
        result[name] = float(np.median([layer["median"] for layer in layers]))
        if name == MEASURES[0]:
            result["bound"] = 2 * sum(layer["singular"] for layer in layers) >= sum(layer["count"] for layer in layers)
    gaussian = theory.gaussian(tokens, shape.heads * shape.value_dim).median
    return result | {"gaussian": gaussian, "capacity": capacity(shape, width)}


def capacity(shape: Shape, width: int) -> float | None:
    """Neural Spectral Capacity of a layer of that attention, without its MLP (`predictors.spectral_capacity`); None
    where values have another width than queries, of which it knows nothing."""
    if shape.value_dim != shape.head_dim:
        return None
    d = predictors.Dimensions(width, (shape.heads,), (shape.head_dim,), (1,), params=1)
    return predictors.spectral_capacity(d)


def check(shape: Shape, tokens: int, width: int, seeds: int, total: int) -> None:
    """Raises ConfigError for a size that cannot be, or too little training to say anything."""
    sizes = {"--heads": shape.heads, "--head_dim": shape.head_dim, "--value_dim": shape.value_dim}
    sizes |= {"--tokens": tokens, "--width": width}
    for name, size in sizes.items():
        require(size >= 1, f"{name}={size} must be at least 1.")
    require(
        shape.head_dim <= width,
        f"--head_dim={shape.head_dim} is over --width={width}: the product of queries and keys of a head has rank "
        f"{width} at most. Take --head_dim={width} or less.",
    )
    require(seeds >= 2, f"--seeds={seeds}: an interval wants 2 at least, and 3 to be of any use.")
    require(total >= 20, f"--steps={total}: take 20 at least, and 1,000 to learn anything.")
