"""TNT-B/16, the original of Leaner Transformers, Table 4: 12 layers, 10 heads of dimension 64, MLP 2560.

Command:   python -m leanformer.train --config=configs/tnt_b_12x10.py --workdir=DIR
Data:      ImageNet-1k; `python -m leanformer.prepare check --config=configs/tnt_b_12x10.py` checks for it.
Hardware:  8 x A100 about 9 h, 8 x H100 about 3 h. By arithmetic at 40 % of the bfloat16 peak, not measured; the
           pixels' products, 40 wide, may fall well short of it.
Expected:  top-1 82.3, top-5 95.7 as reported in Table 4, one run, no spread given. Not reproduced here.
Counts:    65,406,600 parameters; the paper reports 65.4 M.

Heads, depth and MLP describe the outer transformer; inside, 4 heads of dimension 10 and MLP 160, d_model 40, as in
timm. The layout is timm's up to 1.0.15, which the paper's runs almost surely used: timm changed its block in the
month that the paper appeared. The later one, --config.model.layout=patchwise, is 65,428,680 and rounds to the same.
"""

from leanformer import config


def get_config() -> config.ConfigDict:
    c = config.base()
    c.model = config.model(
        "tnt",
        attention="softmax",
        patch_size=16,
        pixel_stride=4,
        layout="original",
        width=640,
        depth=12,
        num_heads=10,
        head_dim=64,
        mlp_dim=2560,
        inner_width=40,
        inner_heads=4,
        inner_head_dim=10,
        inner_mlp_dim=160,
    )
    return c
