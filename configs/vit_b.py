"""ViT-B/16 with depth, heads, head dimension, MLP ratio as arguments: the grids of Leaner Transformers, Figures 3 to 5.

Command:   python -m leanformer.train --config=configs/vit_b.py:depth=8,heads=14 --workdir=DIR
Arguments: depth (12), heads (12), head_dim (64), mlp_ratio (4), each optional.
Figure 3:  depth 12 or 8, heads 2 to 18.   Figure 4: mlp_ratio 1 to 8.   Figure 5: depth 4 to 8, heads 12 to 24,
           mlp_ratio 2 or 4.
Hardware:  at depth 12 and 12 heads 8 x A100 about 11 h, 8 x H100 about 4 h; less with fewer FLOPs (see cost).
Expected:  the figures print curves, no numbers. The text gives 61.2 to 67.4 M for 8 layers and more than 12 heads;
           14, 16 and 18 heads have 61,364,968, 64,513,768 and 67,662,568 parameters, 12 heads 58,216,168.
"""

from leanformer import config


def get_config(arguments: str = "") -> config.ConfigDict:
    c = config.base()
    choice = config.arguments(arguments, depth=12, heads=12, head_dim=64, mlp_ratio=4.0)
    c.model.update(depth=choice["depth"], num_heads=choice["heads"], head_dim=choice["head_dim"])
    c.model.mlp_dim = int(c.model.width * choice["mlp_ratio"])
    return c
