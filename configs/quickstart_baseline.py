"""The quickstart's deeper counterpart: 6 layers, 4 heads of dimension 24 (4 x 24 = 96, the model's width), MLP 384.

Command:   python -m leanformer.train --config=configs/quickstart_baseline.py --workdir=runs/quickstart_baseline
Data:      10,000 training and 2,000 test images of Fashion-MNIST, in the package.
Hardware:  two CPU cores, about 6 minutes.
Expected:  top-1 85 to 87 % on the 2,000 test images (study/LOG.md).
Counts:    678,730 parameters.
"""

from leanformer import config


def get_config() -> config.ConfigDict:
    c = config.load_sibling(__file__, "quickstart")
    c.model.update(depth=6, num_heads=4, head_dim=24, mlp_dim=384)
    return c
