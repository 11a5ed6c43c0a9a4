"""DaViT-L lean, Leaner Transformers, Table 5: depths 1, 1, 5, 1, and 48 heads of dimension 16 in the third stage.

Command:   python -m leanformer.train --config=configs/davit_l_lean.py --workdir=DIR
Data:      ImageNet-1k; `python -m leanformer.prepare check --config=configs/davit_l_lean.py` checks for it.
Hardware:  8 x A100 about 15 h, 8 x H100 about 5 h. By arithmetic at 40 % of the bfloat16 peak, not measured.
Expected:  top-1 83.6, top-5 96.6 as reported in Table 5, one run, no spread given. Not reproduced here.
Counts:    139,985,896 parameters; the paper reports 140.0 M.

The third stage's heads are twice as many and half as wide, so that they cost no parameters: the depth alone saves them.
"""

from leanformer import config


def get_config() -> config.ConfigDict:
    c = config.base()
    c.batch_size = 512
    c.data.update(mean=config.IMAGENET_MEAN, std=config.IMAGENET_STD, crop_fraction=0.95)
    c.model = config.model(
        "davit",
        attention="softmax",
        width=(192, 384, 768, 1536),
        depth=(1, 1, 5, 1),
        num_heads=(6, 12, 48, 48),
        head_dim=(32, 32, 16, 32),
        channel_head_dim=(32, 32, 16, 32),
        mlp_dim=(768, 1536, 3072, 6144),
        window_size=7,
        qkv_bias=True,
    )
    return c
