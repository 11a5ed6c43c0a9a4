"""Sets of points: what differs from images, documented key by key, and the rules for them."""

from typing import Any

from ml_collections import ConfigDict
from ml_collections.config_dict import placeholder

from leanformer.config.common import blocks, common
from leanformer.config.rules import nearest_divisors, require


def points() -> ConfigDict:
    """Return the config of sets of points. Defaults: the nearest-neighbour runs of Amsel et al. 2025, Figure 1: one
    layer, one head of full rank."""
    c = common("points")
    c.dtype = "float32"

    # What is asked: "nearest", "nearest_query", "nearest_orthonormal", "nearest_biased", "regression", "retrieval"; see
    # leanformer/data/points.py
    c.data.name = "nearest"
    c.data.train_split, c.data.eval_split = "train", "held_out"
    c.data.points = 16  # of a set; pairs of "regression"
    c.data.dim = 64  # of a point
    c.data.items = 4  # of "retrieval"
    c.data.bias = 0.0  # of "nearest_biased": what the first point is nearer by
    c.data.examples = 2560  # of a split that is evaluated on; training has no end
    c.data.workers = 0
    c.data.curriculum = ConfigDict()  # of "regression" and "retrieval" in training: it starts small and grows
    c.data.curriculum.every = 0  # steps from one size to the next; 0 = all of it from the start
    c.data.curriculum.dim = 5  # of regression: coordinates of x that are not zero at the start
    c.data.curriculum.dim_step = 1  # how many more each time, up to data.dim
    c.data.curriculum.points = 11  # points of a set at the start; of regression the pairs that are asked for
    c.data.curriculum.points_step = 2  # how many more each time, up to data.points

    c.model = blocks("encoder", width=64, depth=1)
    c.model.inputs = placeholder(int)  # width of a point; read by a linear layer, or as it is if unset
    c.model.outputs = placeholder(int)  # width of a target; a linear layer gives it, or tokens are the output if unset
    c.model.num_heads = 1  # of each module
    c.model.head_dim = 64  # of queries and keys: a head's rank
    c.model.modules = placeholder(int)  # of attention in a layer, each with heads of its own, averaged; 1 if unset
    c.model.mlp_dim = placeholder(int)  # no MLP if unset
    c.model.norm = "unit"  # or "layernorm", "rmsnorm"
    c.model.post_norm = True  # after each sum with the skip; False: before attention and MLP, and at the end
    c.model.activation = "relu"  # of the MLP: or "gelu", "gelu_tanh", "relu2", "silu"
    c.model.gated = False  # whether the MLP has a gate
    c.model.max_length = placeholder(int)  # learned positions for so many tokens; none if unset
    c.model.causal = False  # whether a token sees only those before it
    c.model.pool = "none"  # an output a token; or "token", one of a class token in front
    c.model.remat = "none"
    c.model.mlp_dim = 2048

    c.batch_size, c.total_epochs, c.total_steps = 256, 0.0, 100_000
    c.optim.update(lr=0.01, warmup_steps=5000, warmup_lr=0.0, weight_decay=0.0)
    c.optim.b2 = 0.95
    c.eval.update(every=5000, batch_size=256)
    c.checkpoint.every = 5000
    c.probe.update(every=0, measures=("attention_output", "attention_entropy", "largest_logit"))
    return c.lock()


def heads_of_rank(width: int, rank: int) -> dict[str, int]:
    """The keys of as many heads of a rank as are together of a width. Raises ConfigError unless that is whole."""
    require(
        rank >= 1 and width % rank == 0,
        f"rank={rank}: heads of it cannot be {width} wide together. Nearest that can: {nearest_divisors(width, rank)}.",
    )
    return {"num_heads": width // rank, "head_dim": rank}


def check(c: Any) -> None:
    """Raises ConfigError on the first rule for sets of points that `c` breaks."""
    for name in ("points", "dim", "items", "examples"):
        require(c.data[name] >= 1, f"data.{name}={c.data[name]} must be at least 1.")
    for name, value in c.data.curriculum.items():
        least = 0 if name == "every" else 1
        require(value >= least, f"data.curriculum.{name}={value} must be at least {least}.")
    m = c.model
    read = m.width if m.inputs is None else m.inputs
    name = "width" if m.inputs is None else "inputs"
    require(
        read == c.data.dim,
        f"model.{name}={read} is what the model reads of a point, and points have data.dim={c.data.dim}. Set them equal"
        + (", or model.inputs to read them by a linear layer." if m.inputs is None else "."),
    )
