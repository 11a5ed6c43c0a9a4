"""Nyströmformer on Pathfinder (32 x 32, contours of 14) of the Long Range Arena, pixel by pixel: 1 layer, 4 heads of
width 32 (lean).

Command:   python -m leanformer.train --config=configs/nystromformer_pathfinder_1x4.py --workdir=DIR
           then python -m leanformer.evaluate --workdir=DIR --best --split=test
Data:      as in configs/nystromformer_pathfinder.py.
Hardware:  one GPU; 256 x 1,024 tokens a step. Not measured.
Expected:  69.9 % on the test split (Table 3).
Counts:    157,058 parameters; reported: 190.2 k. The reported count is that of 8 heads, more than the original's:
           configs/nystromformer_pathfinder.py:depth=1,heads=8.
"""

from leanformer import config


def get_config() -> config.ConfigDict:
    return config.load_sibling(__file__, "nystromformer_pathfinder", "depth=1,heads=4")
