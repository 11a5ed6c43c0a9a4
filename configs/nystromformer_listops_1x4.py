"""Nyströmformer on ListOps of the Long Range Arena: 1 layer, 4 heads of dimension 32 (lean).

Command:   python -m leanformer.train --config=configs/nystromformer_listops_1x4.py --workdir=DIR
           then python -m leanformer.evaluate --workdir=DIR --best --split=test
Data:      as in configs/nystromformer_listops.py.
Hardware:  one GPU; 32 x 2,048 tokens a step. Not measured.
Expected:  37.13 % on the test split (Table 3).
Counts:    192,906 parameters; reported: 192.9 k. The reported count is met to the digit, without the convolution.
"""

from leanformer import config


def get_config() -> config.ConfigDict:
    return config.load_sibling(__file__, "nystromformer_listops", "depth=1,heads=4")
