"""ViT-L/16 lean, Leaner Transformers, Table 5: 8 layers, 30 heads of dimension 64, MLP 2048.

Command:   python -m leanformer.train --config=configs/vit_l_8x30.py --workdir=DIR
Data:      ImageNet-1k; `python -m leanformer.prepare check --config=configs/vit_l_8x30.py` checks for it.
Hardware:  8 x A100 about 13 h, 8 x H100 about 4 h. By arithmetic at 40 % of the bfloat16 peak, not measured.
Expected:  top-1 81.1, top-5 95.1 as reported in Table 5, one run, no spread given. Not reproduced here.
Counts:    98,597,864 parameters; the paper reports 98.6 M.

1024 is not a multiple of 30, so the head width is set apart from the model's: the attention is 1920 wide.
"""

from leanformer import config


def get_config() -> config.ConfigDict:
    c = config.base()
    c.batch_size = 512
    c.model.update(width=1024, depth=8, num_heads=30, mlp_dim=2048)
    return c
