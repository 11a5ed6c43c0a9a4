"""Nyströmformer on Pathfinder (32 x 32, contours of 14) of the Long Range Arena, pixel by pixel: 2 layers, 2 heads of
width 32 (original).

Command:   python -m leanformer.train --config=configs/nystromformer_pathfinder_2x2.py --workdir=DIR
           then python -m leanformer.evaluate --workdir=DIR --best --split=test
Data:      as in configs/nystromformer_pathfinder.py.
Hardware:  one GPU; 256 x 1,024 tokens a step. Not measured.
Expected:  69.8 % on the test split (Table 3).
Counts:    173,954 parameters; reported: 190.2 k. The reported count is that of 1 layer with 8 heads, and was probably
           copied here.
"""

from leanformer import config


def get_config() -> config.ConfigDict:
    return config.load_sibling(__file__, "nystromformer_pathfinder", "depth=2,heads=2")
