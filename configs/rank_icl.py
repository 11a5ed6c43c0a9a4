"""Linear regression in context: the trunk of Garg et al. (2022), with heads and rank to trade off.

Arguments: heads, width, depth, as in --config=configs/rank_icl.py:heads=1,width=64,depth=3; without them the standard
model, 12 layers of 256 with 8 heads. Heads have rank width / heads, so all have the same parameters.

Command:   python -m leanformer.train --config=configs/rank_icl.py:heads=2,width=64,depth=3 --workdir=DIR
Task:      20 dimensions, 101 positions of pairs of which 41 are asked for; dimensions grow from 5 by one, pairs from 11
           by two, every 2,000 steps.
Sizes:     tiny width=64,depth=3,heads=2; small width=128,depth=6,heads=4; standard width=256,depth=12,heads=8.
Counts:    9,534,977 parameters of the standard model, the published 22,400,769 without their unused table of tokens.
Hardware:  not measured at full length, 500,001 steps of batch 64.
Expected:  the paper reports nothing for these heads; fewer heads of higher rank do better, by the ICLR paper. In
           5 dimensions, trained here for 5,000 steps, more heads did better (study/LOG.md).
"""

from leanformer import config


def get_config(arguments: str = "") -> config.ConfigDict:
    a = config.arguments(arguments, heads=8, width=256, depth=12)
    c = config.points()
    c.update(batch_size=64, total_steps=500_001)
    c.data.update(name="regression", points=41, dim=20)
    c.data.curriculum.every = 2000
    c.model.update(inputs=20, outputs=1, width=a["width"], depth=a["depth"], mlp_dim=4 * a["width"])
    c.model.update(config.heads_of_rank(a["width"], a["width"] // a["heads"]))
    c.model.update(norm="layernorm", post_norm=False, activation="gelu_tanh", causal=True, max_length=202)
    c.optim.update(lr=1e-4, schedule="constant", warmup_steps=0, b2=0.999)
    c.eval.update(every=5000, batch_size=64)
    c.probe.every = 0
    return c
