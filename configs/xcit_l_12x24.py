"""XCiT-Large lean, Leaner Transformers, Table 5: 12 layers, 24 heads of dimension 32, MLP 3072.

Command:   python -m leanformer.train --config=configs/xcit_l_12x24.py --workdir=DIR
Data:      ImageNet-1k; `python -m leanformer.prepare check --config=configs/xcit_l_12x24.py` checks for it.
Hardware:  8 x A100 about 13 h, 8 x H100 about 4 h. By arithmetic at 40 % of the bfloat16 peak, not measured.
Expected:  top-1 82.4, top-5 95.9 as reported in Table 5, one run, no spread given. Not reproduced here.
Counts:    103,792,744 parameters; the paper reports 103.8 M.

The heads are more and narrower and share the width 768, where XCiT-Medium's are widened. Of width 48 as before they
are 117,962,344 parameters, --config.model.head_dim=48, and of width 64 132,131,944, --config.model.head_dim=64, both
with class attention as here. The paper gives no start for the layer scale; this is the published one at 24 layers, and
published models of 12 layers have 1: --config.model.layer_scale=1.0.
"""

from leanformer import config


def get_config() -> config.ConfigDict:
    c = config.load_sibling(__file__, "xcit_l_24x16")
    c.model.update(depth=12, num_heads=24, head_dim=32, class_heads=24, class_head_dim=32)
    return c
