"""Nyströmformer on ListOps with expressions of 100 to 200 symbols: what a CPU can learn, with any depth and heads.

Arguments: depth, heads, landmarks, as in --config=configs/nystromformer_listops_short.py:depth=1,heads=4,landmarks=32.
Attention is exact without landmarks: under some 500 tokens that is the faster one (tools/speed/nystrom.py).

Command:   python -m leanformer.prepare build --config=configs/nystromformer_listops_short.py
           python -m leanformer.train --config=configs/nystromformer_listops_short.py --workdir=DIR
Data:      300,000 + 2,000 + 10,000 expressions, made by `prepare build` in a minute; each is seen once.
Hardware:  two CPU cores.
Expected:  test accuracy 38.0 % with 2x2 in 12 minutes, 40.8 % with 1x4 in 9, 42.7 % with 1x2, three seeds each, which
           differ by up to 4 points (study/LOG.md); guessing the commonest value gives 17 %.
Counts:    91,530 parameters; 1x4 has 74,634.
"""

from leanformer import config


def get_config(arguments: str = "") -> config.ConfigDict:
    a = config.arguments(arguments, depth=2, heads=2, landmarks=0)
    c = config.load_sibling(__file__, "nystromformer_listops", ",".join(f"{name}={value}" for name, value in a.items()))
    c.dtype = "float32"  # CPUs have no fast bfloat16
    c.total_steps = 9000
    c.data.update(name="listops:data/listops_short", max_length=199, workers=0)
    c.data.recipe.update(train=300_000, test=10_000, min_length=100, max_length=200)
    c.model.update(max_length=200, dropout=0.0)
    c.optim.update(lr=1e-3, warmup_lr=4e-5, final_lr=4e-9, warmup_steps=900)
    c.eval.update(every=1000, batch_size=500)
    c.checkpoint.every = 3000
    return c
