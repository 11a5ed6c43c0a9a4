"""Config of point-set tasks."""

from typing import Any

from leanformer.config import common, declare
from leanformer.config.declare import ConfigDict, dataclass
from leanformer.config.rules import require


@dataclass(frozen=True)
class Curriculum:
    every: int = 0  # steps between increases of the problem size; 0 = full size from the start
    dim: int = 5  # initial number of nonzero coordinates of x in "regression"
    dim_step: int = 1  # nonzero coordinates added per increase, up to data.dim
    points: int = 11  # initial number of points of a set; of queried pairs in "regression"
    points_step: int = 2  # points added per increase, up to data.points


@dataclass(frozen=True)
class Data(common.Data):
    # point-set task: "nearest", "nearest_query", "nearest_orthonormal", "nearest_biased", "regression" or "retrieval",
    # see leanformer/data/points.py
    name: str = "nearest"
    train_split: str = "train"  # training split: "train", endless examples
    eval_split: str = "held_out"  # evaluation split: any other name, a fixed set of data.examples
    points: int = 16  # number of points of a set; number of (x, y) pairs of "regression"
    dim: int = 64  # dimension of a point
    num_items: int = 4  # number of items of "retrieval"
    bias: float = 0.0  # distance by which the first point is nearer in "nearest_biased"
    examples: int = 2560  # number of evaluation examples; training data are infinite
    workers: int = 0
    # curriculum of "regression" and "retrieval": training starts with small problems, which grow
    curriculum: Curriculum = Curriculum()


@dataclass(frozen=True)
class Points(common.Common):
    task: str = "points"
    dtype: common.Dtype = "float32"
    batch_size: int = 256
    total_epochs: float = 0.0
    total_steps: int = 100_000
    data: Data = Data()
    optim: common.Optim = common.Optim(lr=0.01, warmup_steps=5000, warmup_lr=0.0, weight_decay=0.0, b2=0.95)
    eval: common.Eval = common.Eval(every=5000, batch_size=256)
    checkpoint: common.Checkpoint = common.Checkpoint(every=5000)
    probe: common.Probe = common.Probe(every=0, measures=("attention_output", "attention_entropy", "largest_logit"))


def points() -> ConfigDict:
    """Return the locked config of point-set tasks.

    The defaults are the nearest-neighbour runs of Amsel et al. 2025, Figure 1: one layer, one head of full rank.

    >>> points().task
    'points'
    """
    c = declare.section(Points())
    c.model = common.model_section("encoder", mlp_dim=2048)
    return c.lock()


def heads_of_rank(width: int, rank: int) -> dict[str, int]:
    """Return the keys of config.model for width / rank heads of dimension `rank`.

    >>> heads_of_rank(width=64, rank=16)
    {'num_heads': 4, 'head_dim': 16}
    """
    require(rank >= 1 and width % rank == 0, f"rank={rank}: not a divisor of width={width}.")
    return {"num_heads": width // rank, "head_dim": rank}


def check_points(c: Any) -> None:
    name, read = ("width", c.model.width) if c.model.inputs is None else ("inputs", c.model.inputs)
    require(
        read == c.data.dim,
        f"model.{name}={read}: the model's input dimension differs from data.dim={c.data.dim}. Set them equal, or "
        "set model.inputs to read points by a linear layer.",
    )
