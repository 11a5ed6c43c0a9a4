"""DeiT-B/16 with one token, original of Leaner Transformers, Table 4: 12 layers, 12 heads of dimension 64, MLP 3072.

Command:   python -m leanformer.train --config=configs/deit_b_12x12.py --workdir=DIR
Data:      ImageNet-1k; `python -m leanformer.prepare check --config=configs/deit_b_12x12.py` checks for it.
Hardware:  8 x A100 about 11 h, 8 x H100 about 4 h. By arithmetic at 40 % of the bfloat16 peak, not measured.
Expected:  top-1 80.4, top-5 95.1 as reported in Table 4, one run, no spread given. Not reproduced here.
Counts:    86,567,656 parameters; the paper reports 86.6 M. With two tokens and two heads: 87,338,192.

The module is ViT-B's. What differs here is the normalisation, ImageNet's mean and deviation as in timm's DeiT.
The paper gives one recipe, Table 6, for both.
"""

from leanformer import config


def get_config() -> config.ConfigDict:
    c = config.base()
    c.data.update(mean=config.IMAGENET_MEAN, std=config.IMAGENET_STD)
    return c
