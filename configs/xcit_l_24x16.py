"""XCiT-Large-24/16, the original of Leaner Transformers, Table 5: 24 layers, 16 heads of dimension 48, MLP 3072.

Command:   python -m leanformer.train --config=configs/xcit_l_24x16.py --workdir=DIR
Data:      ImageNet-1k; `python -m leanformer.prepare check --config=configs/xcit_l_24x16.py` checks for it.
Hardware:  8 x A100 about 24 h, 8 x H100 about 8 h. By arithmetic at 40 % of the bfloat16 peak, not measured.
Expected:  top-1 82.1, top-5 95.9 as reported in Table 5, one run, no spread given. Not reproduced here.
Counts:    189,096,136 parameters; the paper reports 189.1 M.

timm's xcit_large_24_p16_224.
"""

from leanformer import config


def get_config() -> config.ConfigDict:
    c = config.load_sibling(__file__, "xcit_m_24x8")
    c.batch_size = 512
    c.model.update(width=768, num_heads=16, head_dim=48, mlp_dim=3072, class_heads=16, class_head_dim=48)
    return c
