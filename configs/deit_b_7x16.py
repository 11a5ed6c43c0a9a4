"""DeiT-B/16 lean with one token, Leaner Transformers, Table 4: 7 layers, 16 heads of dimension 64, MLP 1536.

Command:   python -m leanformer.train --config=configs/deit_b_7x16.py --workdir=DIR
Data:      ImageNet-1k; `python -m leanformer.prepare check --config=configs/deit_b_7x16.py` checks for it.
Hardware:  8 x A100 about 5 h, 8 x H100 about 2 h. By arithmetic at 40 % of the bfloat16 peak, not measured.
Expected:  top-1 80.8, top-5 95.3 as reported in Table 4, one run, no spread given. Not reproduced here.
Counts:    40,112,872 parameters; the paper reports 40.1 M.

The MLP is halved with the depth, as in ViT-B lean; with 3072 kept it is 56,638,696: --config.model.mlp_dim=3072.
"""

from leanformer import config


def get_config() -> config.ConfigDict:
    c = config.base()
    c.data.update(mean=config.IMAGENET_MEAN, std=config.IMAGENET_STD)
    c.model.update(depth=7, num_heads=16, mlp_dim=1536)
    return c
