"""Nyströmformer on ListOps of the Long Range Arena: 2 layers, 2 heads of dimension 32 (original).

Command:   python -m leanformer.train --config=configs/nystromformer_listops_2x2.py --workdir=DIR
           then python -m leanformer.evaluate --workdir=DIR --best --split=test
Data:      as in configs/nystromformer_listops.py.
Hardware:  one GPU; 32 x 2,048 tokens a step. Not measured.
Expected:  36.79 % on the test split (Table 3).
Counts:    209,802 parameters; reported: 209.8 k. The reported count is met to the digit, without the convolution.
"""

from leanformer import config


def get_config() -> config.ConfigDict:
    return config.load_sibling(__file__, "nystromformer_listops", "depth=2,heads=2")
