"""Config defaults and validation of point-set tasks."""

from typing import Any

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder

from leanformer.config.common import blocks, common
from leanformer.config.per_layer import allow_per_layer
from leanformer.config.rules import nearest_divisors, require


def points() -> ConfigDict:
    """Return the locked config of point-set tasks.

    The defaults are the nearest-neighbour runs of Amsel et al. 2025, Figure 1: one layer, one head of full rank.

    >>> points().task
    'points'
    """
    c = common("points")
    c.dtype = "float32"

    # point-set task: "nearest", "nearest_query", "nearest_orthonormal", "nearest_biased", "regression" or "retrieval",
    # see leanformer/data/points.py
    c.data.name = "nearest"
    c.data.train_split = "train"  # training split: "train", endless examples
    c.data.eval_split = "held_out"  # evaluation split: any other name, a fixed set of data.examples
    c.data.points = 16  # number of points of a set; number of (x, y) pairs of "regression"
    c.data.dim = 64  # dimension of a point
    c.data.num_items = 4  # number of items of "retrieval"
    c.data.bias = 0.0  # distance by which the first point is nearer in "nearest_biased"
    c.data.examples = 2560  # number of evaluation examples; training data are infinite
    c.data.workers = 0  # worker processes per host that generate examples; 0 = one thread of the training process
    # curriculum of "regression" and "retrieval": training starts with small problems, which grow
    c.data.curriculum = ConfigDict()
    c.data.curriculum.every = 0  # steps between increases of the problem size; 0 = full size from the start
    c.data.curriculum.dim = 5  # initial number of nonzero coordinates of x in "regression"
    c.data.curriculum.dim_step = 1  # nonzero coordinates added per increase, up to data.dim
    c.data.curriculum.points = 11  # initial number of points of a set; of queried pairs in "regression"
    c.data.curriculum.points_step = 2  # points added per increase, up to data.points

    c.model = blocks("encoder", width=64, depth=1)
    # dimension of a point, read by a linear layer; points are the tokens themselves if unset
    c.model.inputs = placeholder(int)
    # dimension of a target, computed by a linear layer; tokens are the output if unset
    c.model.outputs = placeholder(int)
    c.model.num_heads = 1  # number of attention heads per attention module
    c.model.head_dim = 64  # head dimension of queries and keys (the rank of a head)
    # number of attention modules per layer, each with separate heads, whose outputs are averaged; 1 if unset
    c.model.modules = placeholder(int)
    c.model.mlp_dim = placeholder(int)  # hidden dimension of the MLP; no MLP if unset
    c.model.norm = "unit"  # norm type: "unit", "layernorm" or "rmsnorm"
    # True: norms follow each residual sum; False: they precede attention and MLP, with one at the end
    c.model.post_norm = True
    c.model.activation = "relu"  # activation function of the MLP: "relu", "gelu", "gelu_tanh", "relu2" or "silu"
    c.model.gated = False  # True: gated MLP, activation(gate) x up
    c.model.max_length = placeholder(int)  # number of learned positions; no positions if unset
    c.model.causal = False  # True: a token attends only to itself and the tokens before it
    c.model.pool = "none"  # output of the model: "none", one per token, or "token", one from a class token in front
    c.model.remat = "none"
    c.model.mlp_dim = 2048
    allow_per_layer(c.model)

    c.batch_size, c.total_epochs, c.total_steps = 256, 0.0, 100_000
    c.optim.update(lr=0.01, warmup_steps=5000, warmup_lr=0.0, weight_decay=0.0)
    c.optim.b2 = 0.95
    c.eval.update(every=5000, batch_size=256)
    c.checkpoint.every = 5000
    c.probe.update(every=0, measures=("attention_output", "attention_entropy", "largest_logit"))
    return c.lock()


def heads_of_rank(width: int, rank: int) -> dict[str, int]:
    """Return {config key: value} of width / rank heads of dimension `rank`. Raises ConfigError if that is no integer.

    >>> heads_of_rank(width=64, rank=16)
    {'num_heads': 4, 'head_dim': 16}
    """
    require(
        rank >= 1 and width % rank == 0,
        f"rank={rank}: not a divisor of width={width}. Nearest divisors: {nearest_divisors(width, rank)}.",
    )
    return {"num_heads": width // rank, "head_dim": rank}


def check(c: Any) -> None:
    """Raise ConfigError at the first invalid key of a point-set config."""
    for name in ("points", "dim", "num_items", "examples"):
        require(c.data[name] >= 1, f"data.{name}={c.data[name]} must be at least 1.")
    for name, value in c.data.curriculum.items():
        least = 0 if name == "every" else 1
        require(value >= least, f"data.curriculum.{name}={value} must be at least {least}.")
    m = c.model
    read = m.width if m.inputs is None else m.inputs
    name = "width" if m.inputs is None else "inputs"
    require(
        read == c.data.dim,
        f"model.{name}={read}: the model's input dimension differs from data.dim={c.data.dim}. Set them equal"
        + (", or set model.inputs to read points by a linear layer." if m.inputs is None else "."),
    )
