"""VOLO-d3 lean, Leaner Transformers, Table 4: depths 4, 4, 8, 2, and 16, 32, 32, 32 heads of dimension 16.

Command:   python -m leanformer.train --config=configs/volo_d3_lean.py --workdir=DIR
Data:      ImageNet-1k; `python -m leanformer.prepare check --config=configs/volo_d3_lean.py` checks for it.
Hardware:  8 x A100 about 7 h, 8 x H100 about 2 h. By arithmetic at 40 % of the bfloat16 peak, not measured.
Expected:  top-1 82.6, top-5 95.7 as reported in Table 4, one run, no spread given. Not reproduced here.
Counts:    47,454,032 parameters; the paper reports 47.5 M.

Twice the heads have half the width, so only the outlook's weights grow with them. Stages 2 to 4 with heads
of width 32 as before are 62,134,096: --config.model.head_dim="(16, 32, 32, 32)". Without the token-labelling head it
is 46,941,032, --config.model.token_head=False. The MLPs are as reported; the original has the same.
"""

from leanformer import config


def get_config() -> config.ConfigDict:
    c = config.load_sibling(__file__, "volo_d3_original")
    c.model.update(depth=(4, 4, 8, 2), num_heads=(16, 32, 32, 32), head_dim=(16, 16, 16, 16))
    c.model.update(class_heads=32, class_head_dim=16)
    return c
