"""Nyströmformer on Retrieval of the Long Range Arena, pairs of papers byte by byte: 1 layer, 4 heads of dimension 32
(lean).

Command:   python -m leanformer.train --config=configs/nystromformer_retrieval_1x4.py --workdir=DIR
           then python -m leanformer.evaluate --workdir=DIR --best --split=test
Data:      as in configs/nystromformer_retrieval.py.
Hardware:  one GPU; 32 x 2 x 4,096 tokens a step. Not measured.
Expected:  79.5 % on the test split (Table 3).
Counts:    378,242 parameters; reported: 394.8 k. The reported count is that of 6 heads:
           configs/nystromformer_retrieval.py:depth=1,heads=6.
"""

from leanformer import config


def get_config() -> config.ConfigDict:
    return config.load_sibling(__file__, "nystromformer_retrieval", "depth=1,heads=4")
