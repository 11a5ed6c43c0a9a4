"""DaViT-B, the original of Leaner Transformers, Table 4: depths 1, 1, 9, 1, heads 4 to 32, all of dimension 32.

Command:   python -m leanformer.train --config=configs/davit_b_original.py --workdir=DIR
Data:      ImageNet-1k; `python -m leanformer.prepare check --config=configs/davit_b_original.py` checks for it.
Hardware:  8 x A100 about 10 h, 8 x H100 about 3 h. By arithmetic at 40 % of the bfloat16 peak, not measured.
Expected:  top-1 83.3, top-5 96.0 as reported in Table 4, one run, no spread given. Not reproduced here.
Counts:    87,954,408 parameters; the paper reports 88.0 M.

A depth of 1 is a spatial and a channel block. timm's davit_base.
"""

from leanformer import config


def get_config() -> config.ConfigDict:
    c = config.base()
    c.data.update(mean=config.IMAGENET_MEAN, std=config.IMAGENET_STD, crop_fraction=0.95)
    c.model = config.model(
        "davit",
        attention="softmax",
        width=(128, 256, 512, 1024),
        depth=(1, 1, 9, 1),
        num_heads=(4, 8, 16, 32),
        head_dim=(32, 32, 32, 32),
        channel_head_dim=(32, 32, 32, 32),
        mlp_dim=(512, 1024, 2048, 4096),
        window_size=7,
        qkv_bias=True,
    )
    return c
