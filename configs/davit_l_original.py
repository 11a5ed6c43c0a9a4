"""DaViT-L, the original of Leaner Transformers, Table 5: depths 1, 1, 9, 1, heads 6 to 48, all of dimension 32.

Command:   python -m leanformer.train --config=configs/davit_l_original.py --workdir=DIR
Data:      ImageNet-1k; `python -m leanformer.prepare check --config=configs/davit_l_original.py` checks for it.
Hardware:  8 x A100 about 22 h, 8 x H100 about 7 h. By arithmetic at 40 % of the bfloat16 peak, not measured.
Expected:  top-1 83.6, top-5 96.5 as reported in Table 5, one run, no spread given. Not reproduced here.
Counts:    196,811,752 parameters; the paper reports 196.8 M.

A depth of 1 is a spatial and a channel block. timm's davit_large.
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
        depth=(1, 1, 9, 1),
        num_heads=(6, 12, 24, 48),
        head_dim=(32, 32, 32, 32),
        channel_head_dim=(32, 32, 32, 32),
        mlp_dim=(768, 1536, 3072, 6144),
        window_size=7,
        qkv_bias=True,
    )
    return c
