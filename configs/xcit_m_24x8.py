"""XCiT-Medium-24/16, the original of Leaner Transformers, Table 4: 24 layers, 8 heads of dimension 64, MLP 2048.

Command:   python -m leanformer.train --config=configs/xcit_m_24x8.py --workdir=DIR
Data:      ImageNet-1k; `python -m leanformer.prepare check --config=configs/xcit_m_24x8.py` checks for it.
Hardware:  8 x A100 about 11 h, 8 x H100 about 3 h. By arithmetic at 40 % of the bfloat16 peak, not measured.
Expected:  top-1 81.4, top-5 95.5 as reported in Table 4, one run, no spread given. Not reproduced here.
Counts:    84,395,752 parameters; the paper reports 84.4 M.

timm's xcit_medium_24_p16_224. Measures of attention between tokens do not apply to its blocks.
"""

from leanformer import config


def get_config() -> config.ConfigDict:
    c = config.base()
    c.data.update(mean=config.IMAGENET_MEAN, std=config.IMAGENET_STD, crop_fraction=1.0)
    c.model = config.model(
        "xcit",
        attention="cross_covariance",
        patch_size=16,
        width=512,
        depth=24,
        num_heads=8,  # of attention between channels
        head_dim=64,
        mlp_dim=2048,
        class_depth=2,  # blocks of class attention, with heads of their own
        class_heads=8,
        class_head_dim=64,
        layer_scale=1e-5,  # start of the vectors that scale each branch
        tokens_norm=True,  # class blocks' second norm acts on patches too
    )
    c.probe.measures = ("attention_output", "tokens", "attention_branch", "head_correlation")
    return c
