"""Nearest neighbour on the sphere at a size for two CPU cores: 8 points of 16 dimensions, 2,000 steps.

Arguments: rank, modules, depth, as of rank_nn.py.

Command:   python -m leanformer.train --config=configs/rank_nn_small.py:rank=8 --workdir=DIR
           python -m leanformer.sweep --config=rank_nn_small:rank=1,rank_nn_small:rank=16 --seeds=3 --workdir=DIR
Counts:    9,554 parameters, whatever the rank.
Hardware:  two CPU cores; see study/LOG.md for what was measured.
Expected:  see study/LOG.md; the order of ranks is as at the full size.
"""

from leanformer import config


def get_config(arguments: str = "") -> config.ConfigDict:
    a = config.arguments(arguments, rank=16, modules=1, depth=1)
    c = config.points()
    c.update(batch_size=128, total_steps=2000)
    c.data.update(points=8, dim=16)
    c.model.update(width=16, depth=a["depth"], mlp_dim=256, modules=a["modules"], **config.heads_of_rank(16, a["rank"]))
    c.optim.warmup_steps = 100
    c.eval.every = c.checkpoint.every = 1000
    return c
