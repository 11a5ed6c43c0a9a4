"""VOLO-d4 lean, Leaner Transformers, Table 5: depths 4, 4, 8, 2, 24 heads of dimension 16, then 32 of 24.

Command:   python -m leanformer.train --config=configs/volo_d4_lean.py --workdir=DIR
Data:      ImageNet-1k; `python -m leanformer.prepare check --config=configs/volo_d4_lean.py` checks for it.
Hardware:  8 x A100 about 15 h, 8 x H100 about 5 h. By arithmetic at 40 % of the bfloat16 peak, not measured.
Expected:  top-1 83.1, top-5 96.2 as reported in Table 5, one run, no spread given. Not reproduced here.
Counts:    105,556,976 parameters; the paper reports 105.6 M.

The table reports the MLPs of VOLO-d3, twice the width here, which give 85,489,136 parameters:
--config.model.mlp_dim="(768, 1536, 1536, 1536)". Three times the width, as in the original, gives the reported count.
Twice the heads have half the width; stages 2 to 4 with heads of dimension 48 as before are 138,587,120:
--config.model.head_dim="(16, 48, 48, 48)".
"""

from leanformer import config


def get_config() -> config.ConfigDict:
    c = config.load_sibling(__file__, "volo_d4_original")
    c.model.update(depth=(4, 4, 8, 2), num_heads=(24, 32, 32, 32), head_dim=(16, 24, 24, 24))
    c.model.update(class_heads=32, class_head_dim=24)
    return c
