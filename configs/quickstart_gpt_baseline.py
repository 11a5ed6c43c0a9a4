"""The baseline of quickstart_gpt: 4 layers, 4 heads of dimension 32, all else equal.

Command:   python -m leanformer.train --config=configs/quickstart_gpt_baseline.py --workdir=runs/quickstart_gpt_baseline
Data:      as in configs/quickstart_gpt.py.
Hardware:  two CPU cores, about 3 minutes.
Expected:  2.83 to 2.86 nats/token, 1.81 to 1.83 bits/byte; three seeds. Not shown to differ from the lean one, with
           1.8 times its parameters.
Counts:    875,264 parameters.
"""

from leanformer import config


def get_config() -> config.ConfigDict:
    c = config.load_sibling(__file__, "quickstart_gpt")
    c.model.update(depth=4, num_heads=4, head_dim=32)
    return c
