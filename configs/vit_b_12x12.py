"""ViT-B/16, the original of Leaner Transformers, Table 4: 12 layers, 12 heads of dimension 64, MLP 3072.

Command:   python -m leanformer.train --config=configs/vit_b_12x12.py --workdir=DIR
Data:      ImageNet-1k; `python -m leanformer.prepare check --config=configs/vit_b_12x12.py` checks for it.
Hardware:  8 x A100 about 11 h, 8 x H100 about 4 h. By arithmetic at 40 % of the bfloat16 peak, not measured.
Expected:  top-1 80.1, top-5 94.2 as reported in Table 4, one run, no spread given. Not reproduced here.
Counts:    86,567,656 parameters; the paper reports 86.6 M.

The recipe, Table 6, is the base config's default: batch 1024, 300 epochs, AdamW 3e-3, decay 0.3, and so on.
"""

from leanformer import config


def get_config() -> config.ConfigDict:
    return config.base()
