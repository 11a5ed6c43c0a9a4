"""Nearest neighbour on the sphere: the runs of Amsel, Yehudai & Bruna (2025), Figure 1 and those over N and d.

Arguments: rank, modules, depth, points, dim, as in --config=configs/rank_nn.py:rank=32,modules=8; without them one
layer, one module of one head of full rank, 16 points of 64 dimensions. Each module has dim / rank heads of that rank,
so the parameters of attention depend on the number of modules (the paper's w) alone.

Command:   python -m leanformer.train --config=configs/rank_nn.py:rank=32 --workdir=DIR
Figure 1:  depth 1, 3, 5; rank 1 to 64; modules 1, 8, 64; optim.lr 0.01, 100,000 steps, five seeds, the best of them.
Over N:    depth 2, modules 64, points 4, 16, 64, 256. Over d: depth 2, modules 8, dim 16 to 256. Both: optim.lr 0.005,
           200,000 steps.
Counts:    280,898 parameters; with 8 modules 397,378, with 64 1,329,218, as those in use of the released code.
Hardware:  not measured at full length; the reduced runs are in rank_nn_small.py. A batch takes 13 ms of a CPU core
           (2026-11-27), for which a GPU may wait: then raise data.workers.
Expected:  squared error summed over dimensions, 1 for predicting zero, as read off the paper's plots: depth 1, one
           module: rank 1 0.87, 8 0.84, 16 0.80, 32 0.69, 64 0.015; 8 modules: 0.83, 0.73, 0.62, 0.43, 0.0069.
"""

from leanformer import config


def get_config(arguments: str = "") -> config.ConfigDict:
    a = config.arguments(arguments, rank=64, modules=1, depth=1, points=16, dim=64)
    c = config.points()
    c.data.update(points=a["points"], dim=a["dim"])
    c.model.update(width=a["dim"], depth=a["depth"], **config.heads_of_rank(a["dim"], a["rank"]))
    c.model.modules = a["modules"]
    return c
