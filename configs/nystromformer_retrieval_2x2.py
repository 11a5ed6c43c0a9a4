"""Nyströmformer on Retrieval of the Long Range Arena, pairs of papers byte by byte: 2 layers, 2 heads of dimension 32
(original).

Command:   python -m leanformer.train --config=configs/nystromformer_retrieval_2x2.py --workdir=DIR
           then python -m leanformer.evaluate --workdir=DIR --best --split=test
Data:      as in configs/nystromformer_retrieval.py.
Hardware:  one GPU; 32 x 2 x 4,096 tokens a step. Not measured.
Expected:  79.3 % on the test split (Table 3).
Counts:    395,138 parameters; reported: 394.8 k. The reported count is that of 1 layer with 6 heads, and was probably
           copied here.
"""

from leanformer import config


def get_config() -> config.ConfigDict:
    return config.load_sibling(__file__, "nystromformer_retrieval", "depth=2,heads=2")
